"""An inner step size that is a function of v, learnt by differentiating through the steps."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import nhgd
from nhgd.algorithm import ITD, names
from nhgd.hypergradients import Unrolled
from nhgd.schedule import Decay, Learnt

RATE = Learnt(lambda v: v["log_lr"].exp())
STEPS = 4


def data():
    """Inner batches (x, y, index), two of them, and an outer batch; regression by a small network."""
    generator = torch.Generator().manual_seed(0)
    x, a = (torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in (12, 8))
    y, b = torch.sin(x.sum(1)), torch.sin(a.sum(1))
    index = torch.arange(12)
    return [(x[:6], y[:6], index[:6]), (x[6:], y[6:], index[6:])], (a, b)


def network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def values(log_lr=-1.0):
    return {"w": torch.linspace(-1, 1, 12, dtype=torch.float64), "log_lr": torch.tensor(log_lr, dtype=torch.float64)}


def inner(net, v, batch):
    x, y, i = batch
    return nhgd.Losses((net(x)[:, 0] - y).square(), v["w"][i].sigmoid())


def outer(net, v, batch):
    return (net(batch[0])[:, 0] - batch[1]).square().mean()


def problem(v=None):
    return nhgd.Bilevel(inner, outer, network(), values() if v is None else v, l2=1e-3)


def solver(method="itd", made=None, inner_lr=RATE, **settings):
    batches, test = data()
    return nhgd.Solver(
        problem() if made is None else made,
        batches,
        [test],
        method=method,
        inner_lr=inner_lr,
        **{"inner_steps": STEPS, "outer_lr": 0.1} | settings,
    )


def net(p, x):
    """The network, written out."""
    return (torch.tanh(x @ p[0].T + p[1]) @ p[2].T + p[3])[:, 0]


def projected(theta, radius):
    norm = torch.cat([p.flatten() for p in theta]).norm()
    return [p * (radius / norm).clamp_max(1.0) for p in theta]


def by_hand(v, truncate=STEPS, radius=1e9):
    """The outer loss after plain gradient steps, with its graph in v, and where they end."""
    batches, (a, b) = data()
    theta = [p.detach().requires_grad_() for p in projected(list(network().parameters()), radius)]
    for t in range(STEPS):
        x, y, i = batches[t % 2]
        loss = (v["w"][i].sigmoid() * (net(theta, x) - y).square()).mean() + 1e-3 * sum(p.square().sum() for p in theta)
        gradient = torch.autograd.grad(loss, theta, create_graph=True)
        theta = projected([p - v["log_lr"].exp() * g for p, g in zip(theta, gradient, strict=True)], radius)
        if t < STEPS - truncate:
            theta = [p.detach().requires_grad_() for p in theta]
    return (net(theta, a) - b).square().mean(), theta


def slopes_by_hand(v, **how):
    v = {name: tensor.clone().requires_grad_() for name, tensor in v.items()}
    loss, theta = by_hand(v, **how)
    return dict(zip(v, torch.autograd.grad(loss, list(v.values())), strict=True)), loss.item(), theta


@pytest.mark.parametrize("truncate", [STEPS, 2])
@pytest.mark.parametrize("radius", [None, 1.0])  # the second holds theta back at every step
def test_an_outer_step_is_that_of_the_loop_written_out(truncate, radius):
    made = problem()
    row = solver(ITD(truncate=truncate), made, project=radius).step()
    slopes, loss, theta = slopes_by_hand(values(), truncate=truncate, **({} if radius is None else {"radius": radius}))
    assert row["outer_loss"] == pytest.approx(loss, rel=1e-12)
    assert row["inner_lr"] == pytest.approx(float(values()["log_lr"].exp()), rel=1e-15)
    assert float(slopes["log_lr"].abs()) > 1e-3
    for name, start in values().items():
        torch.testing.assert_close(made.v.given[name].detach(), start - 0.1 * slopes[name], rtol=1e-10, atol=1e-14)
    for leaf, expected in zip(made.theta.leaves, theta, strict=True):
        torch.testing.assert_close(leaf.detach(), expected.detach(), rtol=1e-11, atol=1e-14)


def test_the_estimator_agrees_with_finite_differences():
    made, (batches, test) = problem(), data()
    found = nhgd.hypergradient(made, batches[0], test, estimator=Unrolled(steps=STEPS, lr=RATE), inner_data=batches)
    h = 1e-5
    ends = [float(by_hand(values(-1.0 + shift))[0].detach()) for shift in (-h, h)]
    assert float(found.grad["log_lr"]) == pytest.approx((ends[1] - ends[0]) / (2 * h), rel=1e-7)
    slopes, loss, _ = slopes_by_hand(values())
    assert found.value == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(found.grad["w"], slopes["w"], rtol=1e-10, atol=1e-14)
    assert found.stats.notes["lr"] == pytest.approx(float(torch.tensor(-1.0).double().exp()), rel=1e-15)


def test_a_number_takes_the_same_steps_bit_for_bit():
    """The derivative in w and theta itself do not see whether the step size is learnt."""
    learnt, fixed = problem(), problem({"w": values()["w"]})
    solver(made=learnt).step()
    solver(made=fixed, inner_lr=float(values()["log_lr"].exp())).step()
    assert torch.equal(learnt.v.given["w"], fixed.v.given["w"])
    assert torch.equal(learnt.theta.flat(), fixed.theta.flat())


def test_a_step_size_far_too_small_grows_until_training_pays():
    """With a cold start each outer step tries another step size on the same training run."""
    made = problem(values(-6.0))
    optimizer = {"outer_optimizer": torch.optim.Adam, "outer_lr": 0.2}
    history = solver(ITD(warm_start=False), made, **optimizer).run(steps=40).history
    rates = [row["inner_lr"] for row in history]
    best = min(float(by_hand(values(log_lr))[0].detach()) for log_lr in torch.linspace(-6, 1, 71).tolist())
    assert rates[-1] > 20 * rates[0]
    assert history[-1]["outer_loss"] < 0.6 * history[0]["outer_loss"]
    assert history[-1]["outer_loss"] < best + 0.02  # w is learnt too


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    whole, part, again = problem(), problem(), problem()
    wanted = solver(made=whole).run(steps=6)
    solver(made=part, checkpoint=tmp_path).run(steps=2)
    batches, test = data()
    with pytest.raises(nhgd.InputError, match="cannot hold inner_lr"):
        nhgd.Solver.resume(tmp_path, again, batches, [test])
    with pytest.raises(nhgd.InputError, match="inner_lr was"):
        nhgd.Solver.resume(tmp_path, again, batches, [test], inner_lr=0.3)
    found = nhgd.Solver.resume(tmp_path, again, batches, [test], inner_lr=RATE).run(steps=6)
    assert torch.equal(again.v.flat(), whole.v.flat())
    assert torch.equal(again.theta.flat(), whole.theta.flat())
    assert [row["inner_lr"] for row in found.history] == [row["inner_lr"] for row in wanted.history]


def test_v_may_be_a_module():
    """As with any function of v, it is handed the module itself."""

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.log_lr = nn.Parameter(torch.tensor(-1.0, dtype=torch.float64))

    made = nhgd.Bilevel(lambda n, v, b: inner(n, values(), b).values, outer, network(), Outer(), l2=1e-3)
    solver(made=made, inner_lr=Learnt(lambda v: v.log_lr.exp())).step()
    assert float(made.v.given.log_lr.detach()) != -1.0


@pytest.mark.parametrize("method", sorted(set(names()) - {"itd", "truncated"}))
def test_every_other_method_says_why_it_cannot(method):
    with pytest.raises(nhgd.InputError, match=r"depends on no step size.*method='itd' or 'truncated'"):
        solver(method)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda v: 0.1, "one element, not type float"),
        (lambda v: v["w"], r"one element, not shape \(12,\)"),
        (lambda v: v["log_lr"].detach().exp(), "does not depend on v"),
        (lambda v: v["log_lr"], "is -1 at the current v; it must be above 0"),
        (lambda v: v["log_lr"] / 0, "is -inf at the current v"),
    ],
)
def test_functions_that_are_no_step_size_are_refused(function, words):
    made = problem()
    with pytest.raises(nhgd.InputError, match=words):
        solver(made=made, inner_lr=Learnt(function))


def test_a_step_size_that_leaves_its_range_ends_the_run_before_theta_moves():
    made = problem()
    running = solver(made=made, inner_lr=Learnt(lambda v: 1.0 + v["log_lr"] + 0.01), outer_lr=1e3)
    running.step()
    theta = made.theta.flat()
    if float(made.v.given["log_lr"]) > -1.01:
        made.v.given["log_lr"].data.fill_(-2.0)
    with pytest.raises(nhgd.InputError, match=re.escape("or lower outer_lr")):
        running.step()
    assert torch.equal(made.theta.flat(), theta)


def test_where_a_learnt_step_size_has_no_meaning_it_is_refused():
    with pytest.raises(nhgd.InputError, match="outer_lr must be a number or a Schedule"):
        solver(inner_lr=0.1, outer_lr=RATE)
    with pytest.raises(nhgd.InputError, match="or a Learnt or None, got a tensor"):
        solver(inner_lr=torch.tensor(0.1, requires_grad=True))
    with pytest.raises(nhgd.InputError, match=r"whole number, and failed on 0: TypeError.*Learnt\(function\)"):
        solver(inner_lr=lambda v: v["log_lr"].exp())


def test_schedules_of_the_step_are_as_before():
    for rate in (Decay(0.1), lambda k: 0.1 / (k + 1)):
        assert "inner_lr" not in solver(made=problem({"w": values()["w"]}), inner_lr=rate).step()
