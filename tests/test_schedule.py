"""Step sizes against the formulas of the papers that use them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import nhgd
from nhgd.schedule import Clock, Power, Strong, as_schedule
from nhgd.task import Quadratic

CPU = torch.device("cpu")


@pytest.mark.parametrize("t", [0, 1, 7, 1000])
def test_the_inner_step_of_the_theory(t):
    """eta_t = 4 / (mu (t + q)) with q = 8 L^2 / mu^2: at most 1 / (2 L), and the same again in every outer step."""
    mu, smoothness = 0.3, 2.0
    q = 8 * smoothness**2 / mu**2
    rate = Strong(mu, smoothness).rate(Clock(t=t, k=5, total=9999))
    assert rate == pytest.approx(4 / (mu * (t + q)), rel=1e-14)
    assert rate <= 1 / (2 * smoothness)


def test_the_inner_step_restarts_with_the_inner_loop():
    instance = Quadratic.preset("quick").build(0, CPU)
    seen = []
    rule = Strong(mu=1.0, smoothness=2.0)
    settings = instance.solver_settings() | {"inner_steps": 3, "inner_lr": rule}
    running = nhgd.Solver(instance.problem, instance.inner_data, instance.outer_data, method="t1t2", **settings)
    move = running.loop.theta.move

    def watched(gradient, clock, closure=None):
        seen.append(rule.rate(clock))
        move(gradient, clock, closure)

    running.loop.theta.move = watched
    running.run(steps=2)
    assert seen == [4 / (t + 32) for t in (0, 1, 2)] * 2


def test_powers_of_the_outer_step():
    """c / (k + 1)^p by default, c k_0^p / (k + k_0)^p with an offset, and nothing at all for p = 0."""
    for k in (0, 3, 99):
        assert Power(0.5, 0.4).rate(Clock(k=k)) == pytest.approx(0.5 / (k + 1) ** 0.4)
        assert Power(0.5, 1.0, offset=40).rate(Clock(k=k)) == pytest.approx(20 / (k + 40))
        assert Power(0.5, 0.0, offset=7).rate(Clock(k=k)) == 0.5


def test_two_time_scales_part():
    """TTSA's powers 3/5 outside and 2/5 inside: the outer step vanishes against the inner one like k^(-1/5)."""
    inner, outer = Power(1.0, 2 / 5), Power(1.0, 3 / 5)
    ratios = [outer.rate(Clock(k=k)) / inner.rate(Clock(k=k)) for k in (0, 31, 1023)]
    assert ratios == pytest.approx([1.0, 0.5, 0.25])


def test_refusals():
    for bad, message in (
        (lambda: Power(0.5, 0.5, offset=0), "offset must be above 0"),
        (lambda: Power(0.5, -0.5), "power must be 0 or more"),
        (lambda: as_schedule(0.0, "inner_lr"), "inner_lr must be above 0"),
        (lambda: as_schedule("fast", "inner_lr"), "inner_lr must be a number above 0"),
    ):
        with pytest.raises(nhgd.InputError, match=message):
            bad()


@pytest.mark.parametrize(
    "number",
    [torch.tensor(0.05, dtype=torch.float64), np.float64(0.05), np.array(0.05)[()]],
    ids=["tensor", "NumPy", "0d"],
)
def test_a_number_in_a_tensor_or_of_numpy_is_a_number(number):
    """As a user has it who computed it."""

    def end(inner_lr, outer_lr):
        data, zero = [torch.zeros(4)], torch.zeros((), dtype=torch.float64)
        problem = nhgd.Bilevel(
            lambda theta, v, x: (theta - v).square().expand(len(x)),
            lambda theta, v, x: (theta - 3).square(),
            zero.clone(),
            zero,
        )
        settings = {"inner_lr": inner_lr, "outer_lr": outer_lr}
        return nhgd.Solver(problem, data, data, method="aid-cg", **settings).run(steps=3).v

    assert torch.equal(end(number, number), end(0.05, 0.05))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.tensor(0.1, requires_grad=True), "(carries|requires) a gradient"),
        (torch.tensor(0.1, requires_grad=True).exp(), "(carries|requires) a gradient"),
        (torch.tensor([0.1, 0.2]), r"inner_lr must be .*, got a tensor of shape \(2,\)"),
        ("0.1", "inner_lr must be .*, got '0.1'"),
        (True, "inner_lr must be .*, got True"),
        (torch.tensor(-0.1), "inner_lr must be above 0, got -0.1"),
        (float("nan"), "inner_lr must be above 0, got nan"),
    ],
)
def test_what_is_no_step_size_is_refused_with_the_true_reason(bad, message):
    instance = Quadratic.preset("quick").build(0, CPU)
    with pytest.raises(nhgd.InputError, match=message):
        instance.start("t1t2", inner_lr=bad)
