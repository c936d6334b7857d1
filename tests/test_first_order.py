"""BOME, F2SA and PZOBO against their papers' updates, written out with dense gradients, and the ends these lead to."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import nhgd
from nhgd.algorithm import BOME, F2SA, PZOBO, resolve
from nhgd.loop.companion import Companion
from nhgd.objective import OracleCalls
from nhgd.oracle import Oracle
from nhgd.schedule import Constant, Power
from nhgd.task import Quadratic
from tests import catalogue, oracles

CPU = torch.device("cpu")
MAKES = [catalogue.weighted_logistic, catalogue.mlp_module, catalogue.dict_v, catalogue.ridge_scalar]


def stepped(make, method, steps=1, batches=None, **settings):
    problem, inner, outer = make()
    settings = {"inner_steps": 3, "inner_lr": 0.3, "outer_lr": 0.2} | settings
    running = nhgd.Solver(problem, batches or [inner], [outer], method=method, **settings)
    for _ in range(steps):
        running.step()
    return running


def gradients(function, theta: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """In theta and in v."""
    theta, v = theta.detach().requires_grad_(), v.detach().requires_grad_()
    return torch.autograd.grad(function(theta, v), (theta, v), materialize_grads=True, allow_unused=True)


def levels(problem, inner, outer):
    """Both levels' gradients as functions of (theta, v)."""
    return (
        lambda theta, v: gradients(lambda t, w: oracles.objective(problem, inner, t, w), theta, v),
        lambda theta, v: gradients(lambda t, w: oracles.outer(problem, outer, t, w), theta, v),
    )


# The oracle that first-order methods need.


@pytest.mark.parametrize("make", catalogue.PROBLEMS, ids=lambda make: make.__name__)
def test_inner_gradients_in_theta_and_v(make):
    problem, inner, outer = make()
    calls = OracleCalls()
    with oracles.undisturbed(problem):
        found = Oracle(problem, [inner], outer, calls=calls).inner_gradients()
    in_theta, in_v = levels(problem, inner, outer)[0](oracles.theta_of(problem), oracles.v_of(problem))
    torch.testing.assert_close(found.theta, in_theta, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(oracles.join(found.v), in_v, rtol=1e-11, atol=1e-13)
    assert float(found.value) == pytest.approx(float(oracles.objective(problem, inner)))
    assert (calls.inner_gradients, calls.hvps, calls.cross) == (1, 0, 0)


def test_inner_gradients_are_means_over_batches():
    """Weighted by size: two uneven batches are the full one, whose ridge counts once."""
    problem, inner, outer = catalogue.weighted_logistic()
    parts = [tuple(t[:4] for t in inner), tuple(t[4:] for t in inner)]
    whole, split = Oracle(problem, [inner], outer).inner_gradients(), Oracle(problem, parts, outer).inner_gradients()
    torch.testing.assert_close(split.theta, whole.theta, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(oracles.join(split.v), oracles.join(whole.v), rtol=1e-12, atol=1e-14)
    short = Oracle(problem, [inner], outer).inner_gradients(in_v=False)
    torch.testing.assert_close(short.theta, whole.theta, rtol=0, atol=0)
    assert all(bool((g == 0).all()) for g in short.v)


def test_theta_can_stand_elsewhere_for_a_while():
    running = stepped(catalogue.mlp_module, "t1t2")
    loop, here = running.loop, running.problem.theta.flat()
    other = torch.ones_like(here)
    with loop.temporarily_at(other):
        assert torch.equal(running.problem.theta.flat(), other)
    assert torch.equal(running.problem.theta.flat(), here)
    assert torch.equal(loop.projected(other), other)
    inside = stepped(catalogue.mlp_module, "t1t2", project=0.1)
    torch.testing.assert_close(inside.loop.projected(other), 0.1 * other / other.norm())
    assert float(inside.problem.theta.flat().norm()) <= 0.1 * (1 + 1e-12)


# BOME.


def descended(inner, steps, lr):
    """(theta, v) -> theta after gradient steps."""

    def train(theta: Tensor, v: Tensor) -> Tensor:
        for _ in range(steps):
            theta = theta - lr * inner(theta, v)[0]
        return theta

    return train


def bome_by_hand(inner, outer, train, pulled, v, steps, outer_lr, strength=0.5, gap=None):
    """Algorithm 1 from two gradient functions; returns v, the pulled variable, the trained one and the last multiplier."""
    for _ in range(steps):
        theta = train(pulled, v)
        f, q, trained = outer(pulled, v), inner(pulled, v), inner(theta, v)
        q = (q[0], q[1] - trained[1])
        size = q[0] @ q[0] + q[1] @ q[1]
        barrier = strength * (size if gap is None else gap(pulled, v) - gap(theta, v))
        multiplier = max(float((barrier - f[0] @ q[0] - f[1] @ q[1]) / size), 0.0)
        pulled, v = pulled - outer_lr * (f[0] + multiplier * q[0]), v - outer_lr * (f[1] + multiplier * q[1])
    return v, pulled, theta, multiplier


@pytest.mark.parametrize("barrier", ["gradient", "gap"])
@pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)
def test_bome_by_hand(make, barrier):
    running = stepped(make, BOME(strength=0.3, barrier=barrier, halved_after=None), 4)
    problem, inner, outer = make()

    def objective(theta: Tensor, v: Tensor) -> Tensor:
        return oracles.objective(problem, inner, theta, v)

    both = levels(problem, inner, outer)
    v, pulled, theta, multiplier = bome_by_hand(
        *both,
        descended(both[0], 3, 0.3),
        oracles.theta_of(problem),
        oracles.v_of(problem),
        4,
        0.2,
        0.3,
        None if barrier == "gradient" else objective,
    )
    torch.testing.assert_close(oracles.v_of(running.problem), v, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(running._progress.state.pulled.theta, pulled, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(oracles.theta_of(running.problem), theta, rtol=1e-9, atol=1e-11)
    assert running.history[-1]["multiplier"] == pytest.approx(multiplier, rel=1e-8)


def test_bome_lowers_the_gap_at_the_rate_of_its_barrier():
    """With a positive multiplier, <direction, grad q> is the barrier: a small step lowers q by that much."""
    problem, inner, outer = catalogue.weighted_logistic()
    strength, step, found = 0.5, 1e-5, []

    def q(pulled: Tensor, v: Tensor, trained: Tensor) -> Tensor:
        return oracles.objective(problem, inner, pulled, v) - oracles.objective(problem, inner, trained, v)

    # From the inner optimum pushed to where the outer loss rises: there its descent closes the gap no faster than asked.
    settings = {"inner_steps": 5, "inner_lr": 0.3, "outer_lr": step}
    for seed in range(5):
        running = nhgd.Solver(problem, [inner], [outer], method=BOME(strength=strength), **settings)
        oracles.assign(problem.theta.given, oracles.solve_inner(problem, inner))
        push = torch.randn(4, generator=torch.Generator().manual_seed(seed)).double()
        running._progress.state.pulled = Companion(oracles.theta_of(problem) + push)
        before, v = running._progress.state.pulled.theta, oracles.v_of(problem)
        row = running.step()
        trained = oracles.theta_of(problem)
        if row["multiplier"] == 0:
            continue
        in_theta, in_v = gradients(lambda p, w, trained=trained: q(p, w, trained), before, v)
        expected = strength * float(in_theta @ in_theta + in_v @ in_v)
        fell = q(before, v, trained) - q(running._progress.state.pulled.theta, oracles.v_of(problem), trained)
        found.append(float(fell) / (step * expected))
    assert len(found) >= 2
    assert found == pytest.approx([1.0] * len(found), rel=1e-3)


@dataclass
class Dense:
    """The small quadratic as gradient functions of (theta, v)."""

    answers: object
    inner_lr: float

    def inner(self, theta: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        a = self.answers
        return a.hessian @ (theta - a.theta_star(v)), a.cross.T @ theta  # in v up to what does not depend on theta

    def outer(self, theta: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        a = self.answers
        return a.B.T @ (a.B @ theta - a.target) / len(a.B), a.rho * v

    def train(self, steps: int):
        """(theta, v) -> theta after gradient steps, at once: what is left of the distance to theta*(v) is a matrix power."""
        left = torch.linalg.matrix_power(
            torch.eye(6, dtype=torch.float64) - self.inner_lr * self.answers.hessian, steps
        )
        return lambda theta, v: self.answers.theta_star(v) + left @ (theta - self.answers.theta_star(v))


def quadratic() -> tuple[Quadratic, Dense]:
    instance = Quadratic.preset("quick").build(0, CPU)
    return instance, Dense(instance.answers, instance.solver_settings()["inner_lr"])


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_bome_on_the_quadratic_is_these_recursions():
    """So that what follows, which is too long for the solver, is about BOME."""
    instance, dense = quadratic()
    settings = {"inner_steps": 5, "inner_lr": dense.inner_lr, "outer_lr": 0.3}
    method = BOME(halved_after=None)
    running = nhgd.Solver(instance.problem, instance.inner_data, instance.outer_data, method=method, **settings)
    running.run(steps=30)
    zero = torch.zeros(6, dtype=torch.float64)
    v, *_ = bome_by_hand(dense.inner, dense.outer, dense.train(5), zero, zero[:3], 30, 0.3)
    torch.testing.assert_close(instance.problem.v.given, v, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("outer_lr", [0.3, 30.0], ids=["below the inner step", "above it"])
def test_the_steps_of_bome_fall_and_pulled_keeps_to_the_inner_one(outer_lr):
    """A number h / (k + h) times itself, for v and for pulled each; of the two pulled takes the shorter."""
    instance, dense = quadratic()
    settings = {"inner_steps": 5, "inner_lr": dense.inner_lr, "outer_lr": outer_lr}
    method = BOME(halved_after=7)
    running = nhgd.Solver(instance.problem, instance.inner_data, instance.outer_data, method=method, **settings)
    pulled, v = torch.zeros(6, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for k in range(6):
        running.step()
        fallen = 7 / (k + 7)
        after, moved, *_ = bome_by_hand(dense.inner, dense.outer, dense.train(5), pulled, v, 1, 1.0)
        pulled = pulled + min(outer_lr, dense.inner_lr) * fallen * (moved - pulled)
        v = v + outer_lr * fallen * (after - v)
        torch.testing.assert_close(instance.problem.v.given, v, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(running._progress.state.pulled.theta, pulled, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    "outer_lr", [Constant(0.1), lambda k: 0.1, Power(0.1, 0.0)], ids=["constant", "function", "power"]
)
def test_bome_takes_a_schedule_of_the_user_as_it_is(outer_lr):
    running = stepped(
        catalogue.ridge_scalar, BOME(halved_after=1), 3, outer_lr=outer_lr, outer_optimizer=torch.optim.SGD
    )
    assert running.loop.v.rate(running.loop.clock) == 0.1


def of_weights(seed: int = 0):
    """200 samples of three classes, 40 % with a wrong label, a weight for each; and a stable inner step."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    truth, x, x_outer = 2 * draw(5, 3), draw(200, 5), draw(200, 5)
    y, y_outer = (x @ truth).argmax(1), (x_outer @ truth).argmax(1)
    wrong = torch.rand(200, generator=generator) < 0.4
    y = torch.where(wrong, (y + 1 + torch.randint(2, (200,), generator=generator)) % 3, y)
    theta = {"W": torch.zeros(5, 3, dtype=torch.float64), "b": torch.zeros(3, dtype=torch.float64)}

    def inner(theta, v, batch):
        losses = F.cross_entropy(batch[0] @ theta["W"] + theta["b"], batch[1], reduction="none")
        return nhgd.Losses(losses, weights=v.sigmoid())

    def outer(theta, v, batch):
        return F.cross_entropy(batch[0] @ theta["W"] + theta["b"], batch[1])

    problem = nhgd.Bilevel(inner, outer, theta, torch.zeros(200, dtype=torch.float64), l2=0.01)
    curvature = 0.5 * float(torch.linalg.matrix_norm(F.pad(x, (0, 1), value=1.0), 2)) ** 2 / 200 + 0.02

    return problem, (x, y), (x_outer, y_outer), 1 / curvature


@pytest.mark.parametrize("outer_lr", [100.0, 1000.0])
def test_bome_settles_on_label_cleaning_as_implicit_differentiation_does(outer_lr):
    """At the same steps, which are long because the hypergradient in one weight of many is short."""

    def end(method: str) -> tuple[float, float]:
        problem, inner, outer, inner_lr = of_weights()
        first = oracles.phi(problem, inner, outer)
        settings = {"inner_steps": 10, "inner_lr": inner_lr, "outer_lr": outer_lr}
        nhgd.Solver(problem, [inner], [outer], method=method, **settings).run(steps=80)
        return first, oracles.phi(problem, inner, outer)

    (first, reached), (_, exact) = end("bome"), end("aid-cg")
    assert first - reached > 0.85 * (first - exact)


@pytest.mark.parametrize("seed", range(2))
def test_bome_settles_on_the_quadratic_at_the_step_of_the_task(seed):
    """After four times the steps it is nearer to where unrolling ends, as with a constant step it is not."""
    instance = Quadratic.preset("quick").build(seed, CPU)
    end = catalogue.ends_with(catalogue.unrolled_matrix(5))(instance)
    running = instance.start("bome", inner_steps=5)
    errors = [relative_error(running.run(steps=steps).v, end) for steps in (50, 150)]
    assert errors[1] < 0.2
    assert errors[1] < 0.6 * errors[0]


def test_bome_ends_where_unrolling_ends():
    """The recursions, with steps that fall like 1 / k, approach the predicted end at that rate.

    Where pulled comes near theta*(v), e = pulled - theta*(v): grad_theta q = H e and, after T inner steps from pulled,
    grad_v q = X^T (I - (I - eta H)^T) e, so that both parts of grad f + multiplier grad q vanish together only where
    grad_v f = X^T (I - (I - eta H)^T) H^{-1} grad_theta f.
    """
    instance, dense = quadratic()
    end = catalogue.ends_with(catalogue.unrolled_matrix(5))(instance)
    pulled, v, errors = torch.zeros(6, dtype=torch.float64), torch.zeros(3, dtype=torch.float64), []
    train = dense.train(5)
    for k in range(12800):
        v, pulled, _, _ = bome_by_hand(dense.inner, dense.outer, train, pulled, v, 1, 20 / (k + 40))
        if k + 1 in (800, 3200, 12800):
            errors.append(relative_error(v, end))
    assert errors[-1] < 2e-3
    assert errors[0] > 3 * errors[1] > 9 * errors[2]
    assert relative_error(end, instance.answers.v_star()) > 0.1


def test_bome_with_a_constant_step_is_a_penalty_with_a_bounded_multiplier():
    """It cannot settle: it swings about the end of a penalty whose multiplier makes the top curvature 2 / alpha."""
    instance, dense = quadratic()
    a, alpha = instance.answers, 0.02
    pulled, v, recent, multipliers = torch.zeros(6, dtype=torch.float64), torch.zeros(3, dtype=torch.float64), [], []
    train = dense.train(100)
    for k in range(4000):
        v, pulled, _, multiplier = bome_by_hand(dense.inner, dense.outer, train, pulled, v, 1, alpha)
        if k >= 3000:
            recent.append(v)
            multipliers.append(multiplier)
    mean = torch.stack(recent).mean(0)
    # d2 f and d2 q in (v, pulled), with the inner problem solved (T = 100).
    eye = torch.eye(3, dtype=torch.float64)
    f = torch.block_diag(a.rho * eye, a.B.T @ a.B / len(a.B))
    along = torch.cat([-a.S, torch.eye(6, dtype=torch.float64)], dim=1)  # e = pulled - theta_0 - S v
    q = along.T @ a.hessian @ along
    multiplier = sum(multipliers) / len(multipliers)
    assert float(torch.linalg.eigvalsh(f + multiplier * q)[-1]) == pytest.approx(2 / alpha, rel=0.02)
    penalty = catalogue.ends_with(catalogue.penalty_matrix(multiplier))(instance)
    assert relative_error(mean, penalty) < 0.2 * relative_error(penalty, a.v_star())


def test_bome_stands_still_in_the_gap_when_there_is_none():
    """At a common optimum of both levels every gradient vanishes, and so must the multiplier, not 0 / 0."""
    problem = nhgd.Bilevel(
        lambda theta, v, x: (theta - v).square().expand(len(x)),
        lambda theta, v, x: (theta - 3).square(),
        torch.tensor(3.0, dtype=torch.float64),
        torch.tensor(3.0, dtype=torch.float64),
    )
    running = nhgd.Solver(problem, [torch.zeros(4)], [torch.zeros(4)], method=BOME(), inner_lr=0.1)
    row = running.step()
    assert row["multiplier"] == 0
    assert float(problem.v.given) == 3.0


# F2SA.


def f2sa_by_hand(inner, outer, theta, v, steps, inner_steps, inner_lr, outer_lr, method: F2SA):
    """Algorithm 1 with its own symbols: y is pulled, z is theta, alpha_k = pace gamma / lambda_k."""
    y = z = theta
    for k in range(steps):
        lam = method.first * (k + 1) ** method.growth
        alpha = method.pace * inner_lr / lam
        for _ in range(inner_steps):
            z = z - inner_lr * inner(z, v)[0]
            y = y - alpha * (outer(y, v)[0] + lam * inner(y, v)[0])
        v = v - outer_lr * (outer(y, v)[1] + lam * (inner(y, v)[1] - inner(z, v)[1]))
    return v, y, z


@pytest.mark.parametrize(
    "method", [F2SA(), F2SA(first=2.0, growth=1.0, pace=0.5), F2SA(growth=0.0, shared=True)], ids=repr
)
@pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)
def test_f2sa_by_hand(make, method):
    running = stepped(make, method, 3)
    problem, inner, outer = make()
    start = oracles.theta_of(problem), oracles.v_of(problem)
    v, y, z = f2sa_by_hand(*levels(problem, inner, outer), *start, 3, 3, 0.3, 0.2, method)
    torch.testing.assert_close(oracles.v_of(running.problem), v, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(running._progress.state.pulled.theta, y, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(oracles.theta_of(running.problem), z, rtol=1e-9, atol=1e-11)
    row = running.history[-1]
    assert row["multiplier"] == method.multiplier(2)
    assert row["distance"] == pytest.approx(float((y - z).norm()))


def test_the_penalised_end_whatever_the_number_of_inner_steps():
    """Both variables go on from step to step, so that their number has no part in where they end."""
    instance, dense = quadratic()
    end = catalogue.ends_with(catalogue.penalty_matrix(5.0))(instance)
    zero = torch.zeros(6, dtype=torch.float64)
    for inner_steps in (1, 3, 20):
        v, y, z = f2sa_by_hand(
            dense.inner, dense.outer, zero, zero[:3], 600, inner_steps, dense.inner_lr, 0.3, F2SA(first=5.0, growth=0.0)
        )
        assert relative_error(v, end) < 1e-9
        a = instance.answers
        assert relative_error(z, a.theta_star(v)) < 1e-9
        pull = torch.linalg.solve(a.hessian + a.B.T @ a.B / (5 * len(a.B)), dense.outer(z, v)[0]) / 5
        assert relative_error(y, z - pull) < 1e-9


def test_the_penalised_end_comes_nearer_like_one_over_the_multiplier():
    instance, _ = quadratic()
    best = instance.answers.v_star()
    errors = [relative_error(catalogue.ends_with(catalogue.penalty_matrix(m))(instance), best) for m in (100, 1e3, 1e4)]
    assert errors[0] / errors[1] == pytest.approx(10, rel=0.1)
    assert errors[1] / errors[2] == pytest.approx(10, rel=0.02)


def test_one_pace_for_both_variables_cancels_the_lag():
    """On the quadratic, with a large multiplier: at one pace it works, at half the pace the lag is magnified."""
    instance, dense = quadratic()
    zero, method = torch.zeros(6, dtype=torch.float64), F2SA(first=1e6, growth=0.0)
    same, *_ = f2sa_by_hand(dense.inner, dense.outer, zero, zero[:3], 400, 5, dense.inner_lr, 0.5, method)
    assert relative_error(same, instance.answers.v_star()) < 1e-5
    half, *_ = f2sa_by_hand(
        dense.inner, dense.outer, zero, zero[:3], 40, 5, dense.inner_lr, 0.5, F2SA(first=1e6, growth=0.0, pace=0.5)
    )
    assert relative_error(half, instance.answers.v_star()) > 1e3


def test_a_shared_batch_takes_the_noise_out_of_the_difference():
    """With both inner variables at one place the two gradients in v differ by noise alone, and on one batch by nothing."""

    def moved(shared: bool) -> float:
        instance = Quadratic.preset("quick").with_settings({"batch": 20, "rho": 0.0}).build(0, CPU)
        instance.solve_inner()
        method = F2SA(first=1e8, growth=0.0, shared=shared)
        settings = {"inner_steps": 1, "inner_lr": 1e-12, "outer_lr": 1e-8}
        nhgd.Solver(instance.problem, instance.inner_data, instance.outer_data, method=method, **settings).step()
        return float(instance.problem.v.given.norm())

    assert moved(shared=True) < 1e-6 * moved(shared=False)


def test_what_is_drawn_and_counted():
    """Independent batches for each gradient, as the paper draws them; none of second order."""
    _, inner, _ = catalogue.weighted_logistic()
    single = [tuple(t[i : i + 1] for t in inner) for i in range(12)]
    for method, drawn in ((F2SA(), 8), (F2SA(shared=True), 4), (BOME(), 4)):
        running = stepped(catalogue.weighted_logistic, method, 1, single)
        calls = running.loop.calls
        assert len(running.loop.recent) == drawn
        assert (calls.hvps, calls.cross) == (0, 0)
        expected = (5, 1) if isinstance(method, BOME) else (8, 4)
        assert (calls.inner_gradients, calls.outer_gradients) == expected


def test_what_a_run_hands_back_has_not_seen_the_outer_loss():
    """theta of F2SA is trained on the inner problem alone, and its outer loss is the one reported."""
    instance = Quadratic.preset("quick").build(0, CPU)
    settings = instance.solver_settings() | {"inner_steps": 50}
    running = nhgd.Solver(
        instance.problem, instance.inner_data, instance.outer_data, method=F2SA(first=2.0, growth=0.0), **settings
    )
    v = instance.problem.v.flat()
    row = running.step()
    torch.testing.assert_close(instance.problem.theta.flat(), instance.answers.theta_star(v), rtol=1e-2, atol=1e-2)
    outer = oracles.outer(instance.problem, instance.full_outer, v=v)
    assert row["outer_loss"] == pytest.approx(float(outer), rel=1e-12)


@pytest.mark.parametrize("method", [BOME(), F2SA()], ids=lambda method: method.name)
def test_both_inner_variables_stay_in_the_ball(method):
    running = stepped(catalogue.mlp_module, method, 3, project=0.7)
    assert float(running._progress.state.pulled.theta.norm()) <= 0.7 * (1 + 1e-12)
    assert float(running.problem.theta.flat().norm()) <= 0.7 * (1 + 1e-12)


def test_pzobo_perturbs_to_the_inside_of_a_box_and_finds_what_unrolling_does():
    def after_a_step(method):
        seen = []

        def inner(theta, v, batch):
            seen.append((float(v.detach().min()), float(v.detach().max())))
            return (theta - v).square()

        v = torch.tensor([0.0, 1.0, 0.5, 0.0], dtype=torch.float64)
        problem = nhgd.Bilevel(
            inner, lambda theta, v, batch: (theta - 0.5).square().sum(), theta=torch.zeros_like(v), v=v
        )
        nhgd.Solver(
            problem, [None], [None], method=method, inner_steps=4, outer_lr=0.1, inner_lr=0.8, project_v=(0, 1)
        ).step()
        return v, seen

    found, seen = after_a_step(PZOBO(directions="all"))
    expected, _ = after_a_step("itd")
    assert (expected[:2] != torch.tensor([0.0, 1.0])).all()  # entries at both bounds had somewhere to go
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert min(low for low, _ in seen) >= 0
    assert max(high for _, high in seen) <= 1


@pytest.mark.parametrize("method", [BOME(), F2SA()], ids=lambda method: method.name)
def test_buffers_follow_the_inner_steps_alone(method):
    running = stepped(catalogue.batchnorm_train, method, 2)
    assert int(running.problem.theta.given[0].num_batches_tracked) == 6


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda: BOME(strength=0.0), "strength must be above 0"),
        (lambda: BOME(barrier="none"), "barrier of BOME"),
        (lambda: BOME(pulled_lr=-1.0), "pulled_lr must be above 0"),
        (lambda: BOME(halved_after=0.0), "halved_after must be above 0"),
        (lambda: F2SA(first=0.0), "first must be above 0"),
        (lambda: F2SA(growth=-1.0), "growth must be 0 or more"),
        (lambda: F2SA(pace=0.0), "pace must be above 0"),
        (lambda: stepped(catalogue.mlp_module, F2SA(), inner_optimizer=torch.optim.LBFGS), "LBFGS asks for the loss"),
    ],
)
def test_refusals(bad, message):
    with pytest.raises(nhgd.InputError, match=message):
        bad()


def test_names_and_schedules():
    assert resolve("f2sa-shared") == F2SA(shared=True)
    assert resolve("bome") == BOME()
    running = stepped(catalogue.weighted_logistic, BOME(pulled_lr=Power(0.2, 1.0, offset=40)), 3)
    same = stepped(catalogue.weighted_logistic, BOME(), 3)
    torch.testing.assert_close(running._progress.state.pulled.theta, same._progress.state.pulled.theta, rtol=0, atol=0)
