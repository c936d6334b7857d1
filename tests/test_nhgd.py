"""Natural hypergradient descent against its definition, written out with dense matrices."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nhgd
from nhgd.algorithm import AID, NHGD, names, resolve
from nhgd.inverse import CG, EKFAC, KFAC, FisherDense, FisherDiagonal, FisherWindow, Identity, Refined, refined
from nhgd.inverse.base import Iterative, SolveStats
from nhgd.oracle import Oracle
from nhgd.task import Quadratic
from tests import catalogue, oracles


def stepped(make, method, steps=1, inner_steps=3, inner_lr=0.2, outer_lr=0.1, batches=1, **settings):
    """v and theta after some outer steps on the full batch, which a pass over the data has this often."""
    problem, inner, outer = make()
    running = nhgd.Solver(
        problem,
        [inner] * batches,
        [outer],
        method=method,
        inner_steps=inner_steps,
        inner_lr=inner_lr,
        outer_lr=outer_lr,
        **settings,
    )
    for _ in range(steps):
        running.step()
    return oracles.v_of(problem), oracles.theta_of(problem), running


def outer_gradients(problem, batch, theta, v):
    f = torch.func.grad(lambda t, w: oracles.outer(problem, batch, t, w), argnums=(0, 1))
    return f(theta, v)


def by_hand(make, cross, outer_steps=1, inner_steps=3, inner_lr=0.2, outer_lr=0.1):
    """Algorithm 1 with the matrix form of the Fisher matrix, averaged over the steps of each inner loop and the last."""
    problem, inner, outer = make()
    theta, v = oracles.theta_of(problem), oracles.v_of(problem)
    observed = []
    for _ in range(outer_steps):
        along = []
        for _ in range(inner_steps):
            oracles.assign(problem.theta.given, theta)
            oracles.assign(problem.v.given, v)
            observed.append(oracles.fisher(problem, inner))
            along.append(oracles.cross(problem, inner, theta, v))
            theta = theta - inner_lr * oracles.gradient(problem, inner, theta, v)
        matrix = torch.stack(observed).mean(0) + oracles.ridge_hessian(problem)
        in_theta, in_v = outer_gradients(problem, outer, theta, v)
        x = torch.linalg.solve(matrix, in_theta)
        L = torch.stack(along).mean(0) if cross == "trajectory" else oracles.cross(problem, inner, theta, v)
        pulled = L.T @ x if L.shape[0] == len(x) else L @ x
        v = v - outer_lr * (in_v - pulled)
    return v, theta


@dataclass(frozen=True)
class Asked(Iterative):
    """The identity, which notes what each solve was to begin from and what it found."""

    name: ClassVar[str] = "asked"
    noted: list[Any] = field(default_factory=list, hash=False)

    def solve(self, u: Tensor, oracle: Any, start: Tensor | None = None) -> tuple[Tensor, SolveStats]:
        self.noted.append((None if start is None else start.clone(), u.clone()))
        return u, SolveStats(None, 0, True)


def test_a_solve_begins_from_the_adjoint_of_the_outer_step_before():
    inverse = Asked()
    problem, inner, outer = catalogue.mlp_module()
    nhgd.Solver(problem, [inner], [outer], method=NHGD(inverse, batches=1), inner_steps=2).run(steps=3)
    (first, x), (second, y), (third, _) = inverse.noted
    assert first is None
    assert torch.equal(second, x)
    assert torch.equal(third, y)
    assert not torch.equal(x, y)


def test_nhgd_refined_begins_from_the_adjoint_of_the_outer_step_before():
    """Where nothing moves, the second outer step has the solution already, and a product or two show it."""
    problem, inner, outer = catalogue.settled(catalogue.weighted_logistic)
    refined = Refined(FisherWindow(window=64), steps=60, tol=1e-10)
    solver = nhgd.Solver(problem, [inner], [outer], method=NHGD(refined, batches=1), inner_steps=1, outer_lr=1e-300)
    hvps = [solver.step()["hvps"] for _ in range(2)]
    assert hvps[0] > 3
    assert hvps[1] - hvps[0] <= 2


@pytest.mark.parametrize("cross", ["final", "trajectory"])
@pytest.mark.parametrize("make", [catalogue.weighted_logistic, catalogue.mlp_module, catalogue.plain_tensor])
def test_one_and_two_outer_steps_by_hand(make, cross):
    for steps in (1, 2):
        inverse = FisherDense(form="matrix", update="average", warm="accumulate", damping=None)
        v, theta, _ = stepped(make, NHGD(inverse, cross=cross), steps)
        expected_v, expected_theta = by_hand(make, cross, steps)
        torch.testing.assert_close(v, expected_v, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(theta, expected_theta, rtol=1e-10, atol=1e-12)


def test_the_literal_method_by_hand():
    """A^0 = I, the smoothed rank-one update from raw mean gradients, the cross derivative at the end."""
    make, beta, inner_lr, outer_lr = catalogue.weighted_logistic, 0.8, 0.2, 0.1
    problem, inner, outer = make()
    theta, v = oracles.theta_of(problem), oracles.v_of(problem)
    for _ in range(2):
        A = torch.eye(len(theta), dtype=torch.float64)
        for _ in range(4):
            g = oracles.gradient(problem, inner, theta, v)
            Ag = A @ g
            A = A / beta - (1 - beta) / beta**2 * torch.outer(Ag, Ag) / (1 + (1 - beta) / beta * g @ Ag)
            theta = theta - inner_lr * g
        in_theta, in_v = outer_gradients(problem, outer, theta, v)
        L = oracles.cross(problem, inner, theta, v)
        x = A @ in_theta
        v = v - outer_lr * (in_v - (L.T @ x if L.shape[0] == len(x) else L @ x))
    found, _, _ = stepped(make, "nhgd-paper", 2, inner_steps=4)
    torch.testing.assert_close(found, v, rtol=1e-10, atol=1e-12)


def test_the_trajectory_keeps_no_graphs_and_leaves_theta_where_it_was():
    _, theta, _ = stepped(catalogue.mlp_module, NHGD(cross="trajectory"))
    _, plain, running = stepped(catalogue.mlp_module, NHGD(cross="final"))
    torch.testing.assert_close(theta, plain, rtol=0, atol=0)
    assert all(leaf.grad_fn is None and leaf.grad is None for leaf in running.problem.theta.leaves)


def test_the_trajectory_replays_dropout():
    """With the last inner step of size zero, both estimators see the same theta; with dropout replayed, the same mask."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2)).double()
    x, y = torch.randn(12, 3).double(), torch.arange(12) % 2
    masks = []
    net[1].register_forward_hook(lambda m, i, o: masks.append((o == 0).clone()))
    problem = nhgd.Bilevel(
        lambda m, v, b: (F.cross_entropy(m(b[0]), b[1], reduction="none"), v[b[2]]),
        lambda m, v, b: m(b[0]).square().mean(),
        net,
        torch.full((12,), 0.5).double(),
        l2=0.1,
    )
    running = nhgd.Solver(
        problem,
        [(x, y, torch.arange(12))],
        [(x, y)],
        method=NHGD(Identity(), cross="trajectory"),
        inner_steps=3,
        inner_lr=1e-3,
    )
    masks.clear()
    running.step()
    steps, visits = masks[:3], masks[-3:]
    assert all(torch.equal(a, b) for a, b in zip(steps, visits, strict=True))
    assert not torch.equal(steps[0], steps[1])


@pytest.mark.filterwarnings("ignore::nhgd.InverseWarning")  # these nets are not convex
@pytest.mark.parametrize("name", ["nhgd", "nhgd-window", "nhgd-refined", "nhgd-paper"])
@pytest.mark.parametrize("make", [catalogue.mlp_module, catalogue.dict_theta, catalogue.conv_net])
def test_presets_lower_the_outer_loss(name, make):
    *_, running = stepped(make, name, steps=12, inner_steps=8, inner_lr=0.3, outer_lr=0.02)
    losses = [row["outer_loss"] for row in running.history]
    assert losses[-1] < losses[0]
    assert all(row["lag"] == 0 for row in running.history)


def test_the_default_inverse_suits_the_model_and_is_told():
    layered, _, _ = catalogue.mlp_module()
    plain, _, _ = catalogue.plain_tensor()
    assert isinstance(NHGD().prepared(layered).inverse, KFAC)
    assert isinstance(NHGD().prepared(plain).inverse, FisherWindow)
    assert NHGD(refine=3).prepared(layered).inverse == Refined(KFAC(fisher="auto"), steps=3)
    *_, running = stepped(catalogue.plain_tensor, "nhgd")
    assert "FisherWindow" in running.solution().stats["inverse"]
    assert running.history[0]["inverse"] == "fisher_window"


def test_curvature_carried_or_fresh():
    """Fresh curvature forgets the earlier outer steps; with inner and outer steps near zero, both agree."""
    make = catalogue.weighted_logistic
    inverse = FisherDense(form="matrix", warm="accumulate")
    carried, _, _ = stepped(make, NHGD(inverse), 3)
    fresh, _, _ = stepped(make, NHGD(inverse, curvature="fresh"), 3)
    reset, _, _ = stepped(make, NHGD(FisherDense(form="matrix", warm="reset")), 3)
    assert not torch.allclose(carried, fresh)
    torch.testing.assert_close(fresh, reset, rtol=1e-12, atol=1e-14)


def test_refined_nhgd_reaches_the_optimum_of_the_quadratic():
    instance = Quadratic(dim=6, outer_dim=3, samples=60).build(0, torch.device("cpu"))
    method = NHGD(refined("kfac", steps=6), inner="optimizer")
    nhgd.Solver(
        instance.problem, instance.inner_data, instance.outer_data, method=method, **instance.solver_settings()
    ).run(steps=150)
    torch.testing.assert_close(instance.problem.v.given, instance.answers.v_star(), rtol=1e-4, atol=1e-6)


def test_natural_inner_steps_solve_a_quadratic_at_once():
    """With the exact Fisher matrix in the window, F is the Hessian: damping falls and theta lands on the optimum."""
    instance = Quadratic(dim=6, outer_dim=3, samples=40, condition=1e4).build(0, torch.device("cpu"))
    method = NHGD(FisherWindow(window=40, fisher="exact"), inner="natural")
    running = nhgd.Solver(
        instance.problem, instance.inner_data, instance.outer_data, method=method, inner_steps=12, outer_lr=1e-12
    )
    running.run(steps=2)
    optimum = instance.answers.theta_star(instance.problem.v.given)
    torch.testing.assert_close(instance.problem.theta.flat(), optimum, rtol=1e-6, atol=1e-8)
    assert running.history[-1]["damping"] < 1e-3 * float(instance.answers.hessian.diagonal().mean())


def test_natural_steps_beat_gradient_steps_where_the_curvature_is_uneven():
    def gradient_left(method):
        torch.manual_seed(0)
        instance = Quadratic(dim=8, outer_dim=2, samples=60, condition=1e4).build(0, torch.device("cpu"))
        settings = {"inner_steps": 15, "inner_lr": instance.solver_settings()["inner_lr"], "outer_lr": 1e-12}
        nhgd.Solver(instance.problem, instance.inner_data, instance.outer_data, method=method, **settings).run(steps=2)
        return float(Oracle(instance.problem, [instance.full_inner]).gradient().norm())

    assert gradient_left(NHGD(inner="natural")) < 0.1 * gradient_left(NHGD())


def test_a_natural_step_that_raises_the_loss_is_taken_back():
    """The curvature was learnt where the loss is flat, so the first full step overshoots."""
    problem = nhgd.Bilevel(
        lambda m, v, b: (m(b).squeeze(1) - v).pow(4),
        lambda m, v, b: m(b).mean(),
        nn.Linear(1, 1, bias=False).double(),
        torch.zeros(()).double(),
        l2=1e-6,
    )
    with torch.no_grad():
        problem.theta.given.weight.fill_(1.0)
    x = torch.ones(5, 1).double()
    running = nhgd.Solver(
        problem,
        [x],
        [x],
        method=NHGD(FisherDense(prior=1e-9, damping=None), inner="natural"),
        inner_steps=20,
        outer_lr=1e-9,
    )
    row = running.step()
    losses = float(problem.objective(x).detach())
    assert losses < 1.0
    assert row["taken_back"] >= 0
    assert bool(torch.isfinite(problem.theta.flat()).all())


def test_a_natural_step_tries_again_from_the_curvature_at_hand():
    """At z = 4 the empirical Fisher matrix of 0.01 z^2 asks for a step of 12.5, damped to 11.4, 8.9 and 4.8: the third helps."""
    theta = torch.tensor([4.0]).double()
    problem = nhgd.Bilevel(
        lambda theta, v, b: 0.01 * (theta - v).square().expand(len(b)),
        lambda theta, v, b: theta.sum(),
        theta,
        0 * theta,
    )
    x = torch.ones(1, 1).double()
    method = NHGD(FisherWindow(window=1, records="sample", damping=1e-9), inner="natural", natural_steps=1)
    running = nhgd.Solver(problem, [x], [x], method=method, inner_steps=50, outer_lr=1e-12)
    row = running.step()
    assert row["taken_back"] == 2
    torch.testing.assert_close(problem.theta.flat(), torch.tensor([4 - 12.5 / 2.6]).double(), rtol=1e-5, atol=0)
    # One natural step, the rows of its record and the cross derivative, whatever the solver's inner_steps.
    assert row["inner_gradients"] == 3


def test_the_damping_of_natural_steps_stays_above_its_floor():
    instance = Quadratic(dim=6, outer_dim=3, samples=40).build(0, torch.device("cpu"))
    method = NHGD(FisherWindow(window=40, fisher="exact"), inner="natural", natural_floor=0.02)
    running = nhgd.Solver(
        instance.problem, instance.inner_data, instance.outer_data, method=method, inner_steps=12, outer_lr=1e-12
    )
    assert running.step()["damping"] == 0.02


@pytest.mark.parametrize("make", [catalogue.weighted_logistic, catalogue.mlp_module])
def test_observing_the_end_takes_the_curvature_of_the_very_point(make):
    inverse = FisherWindow(window=len(make()[1][0]), records="sample", damping=None)
    v, theta, running = stepped(make, NHGD(inverse, observe="end"))
    problem, inner, outer = make()
    before = oracles.v_of(problem)
    oracles.assign(problem.theta.given, theta)
    matrix = oracles.fisher(problem, inner) + oracles.ridge_hessian(problem)
    in_theta, in_v = outer_gradients(problem, outer, theta, before)
    L = oracles.cross(problem, inner, theta, before)
    x = torch.linalg.solve(matrix, in_theta)
    torch.testing.assert_close(v, before - 0.1 * (in_v - (L.T @ x if L.shape[0] == len(x) else L @ x)))
    assert running.loop.executor.state()[0].observed == 1


def test_natural_steps_begin_with_the_curvature_of_the_last_end():
    """Where curvature is constant, it does not matter when it was observed; one record an outer step is enough."""
    ends = {}
    for observe in ("all", "end"):
        instance = Quadratic(dim=6, outer_dim=3, samples=40).build(0, torch.device("cpu"))
        method = NHGD(FisherWindow(window=40, fisher="exact"), inner="natural", observe=observe)
        running = nhgd.Solver(
            instance.problem, instance.inner_data, instance.outer_data, method=method, inner_steps=1, outer_lr=0.1
        )
        running.run(steps=5)
        ends[observe] = instance.problem.v.given
        assert running.loop.executor.state()[0].observed == {"all": 5, "end": 6}[observe]
    torch.testing.assert_close(ends["all"], ends["end"])


def test_a_long_hypergradient_is_clipped():
    make = catalogue.weighted_logistic
    v, _, running = stepped(make, AID(CG()), outer_clip=1e-3)
    free, _, _ = stepped(make, AID(CG()))
    start = oracles.v_of(make()[0])
    norm = running.history[0]["hypergradient_norm"]
    torch.testing.assert_close(v - start, (free - start) * (1e-3 / norm))
    unclipped, _, _ = stepped(make, AID(CG()), outer_clip=2 * norm)
    torch.testing.assert_close(unclipped, free, rtol=0, atol=0)


@pytest.mark.parametrize("algorithm", [NHGD, AID])
@pytest.mark.parametrize(
    "inverse",
    [KFAC(overhead=0.2), EKFAC(overhead=0.2), FisherDiagonal(overhead=0.2), refined(KFAC(overhead=0.2), steps=2)],
    ids=lambda inverse: inverse.name,
)
@pytest.mark.filterwarnings("ignore::nhgd.InverseWarning")  # a few steps of refinement are not enough
def test_a_budget_decides_by_shapes_and_the_decision_repeats_the_run(algorithm, inverse, monkeypatch):
    """On batches in random order, so that counting must not draw one."""
    monkeypatch.setattr("nhgd._budget.BRIEF", 0.0)  # what is brief would be taken in full at first

    def run(chosen):
        problem, (x, y, _), outer = catalogue.frozen_layer()
        data = nhgd.Data(x, y, batch=4)
        running = nhgd.Solver(
            problem, data, [outer], method=algorithm(chosen), inner_steps=3, inner_lr=0.2, outer_lr=0.1
        )
        running.run(steps=4)
        return oracles.v_of(problem), running

    v, running = run(inverse)
    chosen = running.loop.inverse
    learner = chosen.learner
    assert learner.effort is not None
    assert repr(learner.effort) in running.solution().stats["inverse"]
    for given in (chosen, inverse):
        again, second = run(given)
        assert second.loop.inverse == chosen
        torch.testing.assert_close(v, again, rtol=0, atol=0)


def test_curvature_observed_at_the_end_needs_no_period():
    *_, running = stepped(catalogue.frozen_layer, NHGD(KFAC(factor_every=3), observe="end"), 2, inner_steps=4)
    state, _ = running.executor.state()
    assert state.observed == 2


def test_factors_are_recorded_only_when_they_are_due(monkeypatch):
    asked = []
    observe = KFAC.observe
    monkeypatch.setattr(KFAC, "observe", lambda self, state, record: asked.append(1) or observe(self, state, record))
    stepped(catalogue.mlp_module, NHGD(KFAC(factor_every=3)), 3, inner_steps=4)
    assert len(asked) == 4  # inner steps 0, 3, 6, 9 of 12


def test_noisy_batches_approach_the_exact_hypergradient():
    """On its model (noise 1), more samples bring the learnt inverse nearer to the Hessian's.

    The relative error is about sqrt(d / n) ~ 0.1 at n = 2000; the seed is fixed, and over seeds 0 to 19 it stayed below
    0.25, so a failure says that the scale is wrong.
    """
    instance = Quadratic(dim=10, outer_dim=3, samples=2000, batch=100).build(0, torch.device("cpu"))
    instance.solve_inner()
    batches = list(nhgd.Data(*instance.full_inner, batch=100))
    for inverse in (FisherWindow(window=2000), FisherDense(), KFAC(beta=None)):
        found = nhgd.hypergradient(
            instance.problem, instance.full_inner, instance.full_outer, inverse=inverse, inner_data=batches
        )
        exact = instance.answers.hypergradient(instance.problem.v.given)
        assert float((found.grad - exact).norm() / exact.norm()) < 0.25


def test_names():
    assert {"nhgd", "nhgd-paper", "nhgd-window", "nhgd-refined", "aid", "aid-cg", "aid-identity"} <= set(names())
    assert resolve("aid-cg-7") == AID(CG(steps=7))
    assert resolve("nhgd-refined").refine == 5


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda: NHGD(cross="end"), "cross of NHGD"),
        (lambda: NHGD(inner="newton"), "inner of NHGD"),
        (lambda: NHGD(curvature="old"), "curvature of NHGD"),
        (lambda: NHGD(batches=0), "batches must be"),
        (lambda: NHGD(natural_lr=2.0), "natural_lr"),
        (lambda: NHGD(natural_steps=0), "natural_steps must be a whole number"),
        (lambda: NHGD(natural_floor=-1.0), "natural_floor must be 0 or more"),
        (lambda: NHGD(observe="last"), "observe of NHGD"),
        (lambda: stepped(catalogue.plain_tensor, AID(), outer_clip=0.0), "outer_clip must be above 0"),
        (lambda: NHGD(refine=-1), "refine must be 0 or more"),
        (lambda: stepped(catalogue.plain_tensor, NHGD(KFAC())), "fisher_window"),
        (lambda: stepped(catalogue.mlp_module, NHGD(Identity(), inner="natural")), "identity learns none"),
        (lambda: stepped(catalogue.ridge_scalar, NHGD(CG(), inner="natural")), "cg learns none"),
    ],
)
def test_refusals(bad, message):
    with pytest.raises(nhgd.InputError, match=message):
        bad()


def test_more_batches_than_anyone_means_are_refused_before_they_are_drawn():
    problem, inner, outer = catalogue.mlp_module()
    solver = nhgd.Solver(problem, [inner], [outer], method=NHGD(KFAC(), cross="final", batches=2**31), inner_steps=1)
    with pytest.raises(nhgd.InputError, match="would keep more than 1,000,000 inner batches at once"):
        solver.step()
