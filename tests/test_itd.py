"""Differentiating through the inner loop, against forward-mode recursions written out with dense matrices."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nhgd
from nhgd.algorithm import AID, ITD, resolve
from nhgd.inverse import Identity, Neumann
from nhgd.schedule import Power, Strong
from nhgd.task import Quadratic
from tests import catalogue, oracles

CPU = torch.device("cpu")
MAKES = [catalogue.weighted_logistic, catalogue.mlp_module, catalogue.dict_v]


def halves(batch):
    n = len(batch[0]) // 2
    return [tuple(t[:n] for t in batch), tuple(t[n:] for t in batch)]


def stepped(make, method, steps=1, batches=None, **settings):
    """v, theta and the solver after some outer steps, over given batches in turn."""
    problem, inner, outer = make()
    settings = {"inner_steps": 5, "inner_lr": 0.3, "outer_lr": 0.2} | settings
    running = nhgd.Solver(problem, batches or [inner], [outer], method=method, **settings)
    for _ in range(steps):
        running.step()
    return oracles.v_of(problem), oracles.theta_of(problem), running


def by_hand(make, steps, batches=None, truncate=None, inner_steps=5, inner_lr=0.3, outer_lr=0.2):
    """Z = d theta_t / dv is carried forward: Z <- (I - eta H_t) Z - eta X_t, from zero where differentiation begins."""
    problem, inner, outer = make()
    batches = batches or [inner]
    theta, v, drawn = oracles.theta_of(problem), oracles.v_of(problem), 0
    for _ in range(steps):
        z = torch.zeros(len(theta), len(v), dtype=torch.float64)
        for t in range(inner_steps):
            batch = batches[drawn % len(batches)]
            drawn += 1
            if truncate is None or t >= inner_steps - truncate:
                h, x = oracles.hessian(problem, batch, theta, v), oracles.cross(problem, batch, theta, v)
                z = z - inner_lr * (h @ z + x)
            theta = theta - inner_lr * oracles.gradient(problem, batch, theta, v)
        in_theta, in_v = torch.func.grad(lambda t, w: oracles.outer(problem, outer, t, w), argnums=(0, 1))(theta, v)
        v = v - outer_lr * (in_v + z.T @ in_theta)
    return v, theta


@pytest.mark.parametrize("truncate", [None, 2, 50])
@pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)
def test_outer_steps_by_hand(make, truncate):
    """Over two batches in turn; truncating at more steps than there are is not truncating."""
    _, inner, _ = make()
    two = halves(inner)
    v, theta, _ = stepped(make, ITD(truncate=truncate), 3, two)
    expected = by_hand(make, 3, two, None if truncate == 50 else truncate)
    torch.testing.assert_close(v, expected[0], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(theta, expected[1], rtol=1e-10, atol=1e-12)


def test_theta_takes_the_steps_every_method_takes():
    _, theta, _ = stepped(catalogue.mlp_module, ITD())
    _, other, _ = stepped(catalogue.mlp_module, AID(Identity()))
    torch.testing.assert_close(theta, other, rtol=1e-13, atol=1e-15)


def test_a_cold_start_begins_where_the_first_loop_did():
    v, theta, running = stepped(catalogue.weighted_logistic, ITD(warm_start=False), 2)
    assert not torch.equal(v, oracles.v_of(catalogue.weighted_logistic()[0]))
    problem, inner, _ = catalogue.weighted_logistic()
    start = oracles.theta_of(problem)
    oracles.assign(problem.v.given, oracles.v_of(running.problem))
    running.step()
    for _ in range(5):
        start = start - 0.3 * oracles.gradient(problem, inner, start)
    torch.testing.assert_close(oracles.theta_of(running.problem), start, rtol=1e-12, atol=1e-14)
    assert not torch.allclose(theta, start)


def test_each_step_has_its_own_size():
    """A schedule over inner steps, against finite differences of the map it makes."""
    problem, inner, outer = catalogue.weighted_logistic()
    theta, v = oracles.theta_of(problem), oracles.v_of(problem)
    rule = Strong(mu=1.0, smoothness=3.0)

    def end(at: Tensor) -> float:
        moved = theta
        for t in range(4):
            moved = moved - 4 / (t + 72) * oracles.gradient(problem, inner, moved, at)
        return float(oracles.outer(problem, outer, moved, at))

    expected = v - 0.2 * oracles.finite_differences(end, v)
    found, _, _ = stepped(catalogue.weighted_logistic, ITD(), inner_steps=4, inner_lr=rule)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("binds", [True, False])
def test_the_ball_is_differentiated_too(binds):
    """From near zero gradient steps lead outwards: beyond a small ball at each of them, within a large one at none."""

    def near_zero() -> catalogue.Made:
        made = catalogue.weighted_logistic()
        made[0].theta.assign(0.01 * oracles.theta_of(made[0]))
        return made

    problem, inner, outer = near_zero()
    theta, v = oracles.theta_of(problem), oracles.v_of(problem)
    radius = 0.01 if binds else 50.0
    reached = []

    def end(at: Tensor) -> float:
        moved = theta * min(1.0, radius / float(theta.norm()))  # the start is projected too
        for _ in range(4):
            moved = moved - 0.3 * oracles.gradient(problem, inner, moved, at)
            reached.append(float(moved.norm()))
            moved = moved * min(1.0, radius / float(moved.norm()))
        return float(oracles.outer(problem, outer, moved, at))

    expected = v - 0.2 * oracles.finite_differences(end, v)
    assert all((norm > 1.2 * radius) == binds for norm in reached)
    found, moved, _ = stepped(near_zero, ITD(), inner_steps=4, project=radius)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)
    assert float(moved.norm()) == pytest.approx(radius if binds else reached[3], rel=1e-3)


@pytest.mark.filterwarnings("ignore::nhgd.InverseWarning")  # a short series leaves a large residual
def test_at_the_optimum_it_is_a_neumann_series():
    """With theta settled, n differentiated steps are the sum of n terms with phi = eta."""
    outer_lr = 0.1
    for truncate, terms in ((None, 4), (3, 2)):
        made = [catalogue.settled(catalogue.weighted_logistic) for _ in range(2)]
        found = []
        for (problem, inner, outer), method in zip(
            made, (ITD(truncate=truncate), AID(Neumann(terms=terms, phi=0.3))), strict=True
        ):
            nhgd.Solver(problem, [inner], [outer], method=method, inner_steps=5, inner_lr=0.3, outer_lr=outer_lr).step()
            found.append(oracles.v_of(problem))
        torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-11)


def test_the_longer_it_differentiates_the_nearer_it_ends():
    """The closed form: the distance of its end from v* falls with the number of steps, to nothing."""
    instance = Quadratic.preset("quick").build(0, CPU)
    best = instance.answers.v_star()
    ends = [catalogue.ends_with(catalogue.unrolled_matrix(n))(instance) for n in (1, 5, 25, 125, 625)]
    errors = [float((end - best).norm() / best.norm()) for end in ends]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.1
    assert errors[-1] < 1e-12


def test_the_derivatives_are_counted():
    _, _, running = stepped(catalogue.weighted_logistic, ITD(truncate=2), 3)
    calls = running.loop.calls
    assert (calls.inner_gradients, calls.outer_gradients, calls.hvps, calls.cross) == (15, 3, 3, 6)
    assert calls.samples == 15 * 12
    assert running.history[-1]["differentiated"] == 2


def graphs() -> int:
    gc.collect()
    return sum(t.grad_fn is not None for t in gc.get_objects() if issubclass(type(t), Tensor))


def test_the_graph_is_gone_after_the_step():
    before = graphs()
    _, _, running = stepped(catalogue.mlp_module, ITD(), 2)
    assert all(t.grad_fn is None and t.grad is None for t in (*running.problem.theta.leaves, *running.problem.v.leaves))
    assert graphs() == before


def test_buffers_follow_the_steps_and_not_the_outer_pass():
    """BatchNorm in training mode counts the inner batches, as it does when any other method trains."""
    _, _, running = stepped(catalogue.batchnorm_train, ITD(), 2)
    _, _, other = stepped(catalogue.batchnorm_train, AID(Identity()), 2)
    norm, same = running.problem.theta.given[0], other.problem.theta.given[0]
    assert int(norm.num_batches_tracked) == int(same.num_batches_tracked) == 10


def test_dropout_is_part_of_the_map():
    """The masks drawn forwards are those differentiated: with one step, v moves as by hand with that mask."""
    net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2)).double()
    x, y = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)).double(), torch.arange(12) % 2
    masks: list[Tensor] = []
    net[1].register_forward_hook(lambda m, i, o: masks.append((o != 0).double() * 2))
    problem = nhgd.Bilevel(
        lambda m, v, b: (F.cross_entropy(m(b[0]), b[1], reduction="none"), v[b[2]]),
        lambda m, v, b: m[2](m[0](b[0])).square().mean(),
        net,
        torch.full((12,), 0.5).double(),
    )
    running = nhgd.Solver(
        problem, [(x, y, torch.arange(12))], [(x, y)], method=ITD(), inner_steps=1, inner_lr=0.3, outer_lr=1.0
    )
    before = [p.detach().clone().requires_grad_() for p in net.parameters()]
    masks.clear()
    running.step()
    v = torch.full((12,), 0.5).double().requires_grad_()

    def scores(p, mask):
        return ((x @ p[0].T + p[1]) * mask) @ p[2].T + p[3]

    loss = (v * F.cross_entropy(scores(before, masks[0]), y, reduction="none")).mean()
    moved = [p - 0.3 * g for p, g in zip(before, torch.autograd.grad(loss, before, create_graph=True), strict=True)]
    expected = v - torch.autograd.grad(scores(moved, 1.0).square().mean(), v)[0]
    torch.testing.assert_close(problem.v.given, expected.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["itd", "truncated", "t1t2"])
def test_names(name):
    running = stepped(catalogue.weighted_logistic, name, 2)[2]
    assert running.algorithm == resolve(name)
    assert resolve("truncated") == ITD(truncate=5)
    assert resolve("t1t2") == AID(Identity())


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda: ITD(truncate=0), "truncate must be a whole number"),
        (lambda: ITD(truncate=1.5), "truncate must be a whole number"),
        (
            lambda: stepped(catalogue.mlp_module, ITD(), inner_optimizer=torch.optim.RMSprop),
            "known for SGD, Adam and AdamW",
        ),
        (lambda: stepped(catalogue.mlp_module, ITD(), project=lambda theta: None), "Pass a radius as project"),
    ],
)
def test_refusals(bad, message):
    with pytest.raises(nhgd.InputError, match=message):
        bad()


def test_plain_sgd_of_the_users_own_is_taken():
    v, _, _ = stepped(
        catalogue.weighted_logistic, ITD(), inner_lr=None, inner_optimizer=lambda p: torch.optim.SGD(p, 0.3)
    )
    expected, _, _ = stepped(catalogue.weighted_logistic, ITD())
    torch.testing.assert_close(v, expected, rtol=0, atol=0)


def test_outer_schedules_and_optimisers_are_free():
    _, _, running = stepped(
        catalogue.weighted_logistic, ITD(), 5, outer_lr=Power(0.3, 0.5), outer_optimizer=torch.optim.Adam
    )
    losses = [row["outer_loss"] for row in running.history]
    assert losses[-1] < losses[0]
