"""Methods with any optimiser inside: torch's own optimisers by hand, and finite differences of whole inner loops."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

import nhgd
from nhgd.algorithm import BOME, F2SA, ITD, SAMA
from nhgd.hypergradients.update_rules import UpdateRule
from nhgd.schedule import Power
from tests import catalogue, oracles

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "momentum": lambda p: SGD(p, 0.2, momentum=0.8),
    "nesterov": lambda p: SGD(p, 0.2, momentum=0.8, nesterov=True),
    "dampening": lambda p: SGD(p, 0.2, momentum=0.8, dampening=0.3),
    "adam": lambda p: Adam(p, 0.05, betas=(0.7, 0.9), eps=1e-3),
    "adamw": lambda p: AdamW(p, 0.05, betas=(0.7, 0.9), eps=1e-3, weight_decay=0.1),
    "decayed": lambda p: Adam(p, 0.05, weight_decay=0.1),
    "ascent": lambda p: Adam(p, 0.05, maximize=True),
}
MAKES = [catalogue.weighted_logistic, catalogue.mlp_module]
pytestmark = pytest.mark.filterwarnings("ignore:The inner optimiser has weight_decay")


class ByHand:
    """theta with an optimiser of torch's on it, apart from the library."""

    def __init__(self, make: Callable[[Any], Optimizer], theta: Tensor) -> None:
        self.theta = theta.clone().requires_grad_()
        self.optimizer = make([self.theta])

    def move(self, direction: Tensor, lr: float | None = None) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] if lr is None else lr
        self.theta.grad = direction.detach().clone()
        self.optimizer.step()

    @property
    def now(self) -> Tensor:
        return self.theta.detach()


def outer_gradients(problem: nhgd.Bilevel, batch: Any, theta: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    theta, v = theta.detach().requires_grad_(), v.detach().requires_grad_()
    value = oracles.outer(problem, batch, theta, v)
    return torch.autograd.grad(value, (theta, v), allow_unused=True, materialize_grads=True)


def in_v(problem: nhgd.Bilevel, batch: Any, theta: Tensor, v: Tensor) -> Tensor:
    v = v.detach().requires_grad_()
    return torch.autograd.grad(oracles.objective(problem, batch, theta.detach(), v), v)[0]


def started(make: catalogue.Make, method: Any, optimizer: Any, **settings: Any) -> tuple[nhgd.Solver, Any, Any]:
    problem, inner, outer = make()
    settings = {"inner_steps": 3, "outer_lr": 0.1} | settings
    solver = nhgd.Solver(problem, [inner], [outer], method=method, inner_optimizer=optimizer, **settings)
    return solver, inner, outer


# Differentiating the steps.


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)
def test_itd_is_the_derivative_of_the_whole_inner_loop(make: catalogue.Make, name: str) -> None:
    """Against finite differences of torch's own optimiser; the second outer step starts with moments."""
    running, inner, outer = started(make, ITD(), OPTIMIZERS[name])
    problem = make()[0]
    theta, v = oracles.theta_of(problem), oracles.v_of(problem)
    start, moments = theta, None
    for _ in range(2):

        def end(at: Tensor, start: Tensor = start, moments: Any = moments) -> ByHand:
            hand = ByHand(OPTIMIZERS[name], start)
            if moments is not None:
                hand.optimizer.load_state_dict(deepcopy(moments))
            for _ in range(3):
                hand.move(oracles.gradient(problem, inner, hand.now, at))
            return hand

        expected = v - 0.1 * oracles.finite_differences(
            lambda at, end=end: float(oracles.outer(problem, outer, end(at).now, at)), v
        )
        reached = end(v)
        running.step()
        torch.testing.assert_close(oracles.theta_of(running.problem), reached.now, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(oracles.v_of(running.problem), expected, rtol=1e-6, atol=1e-8)
        start, moments, v = reached.now, reached.optimizer.state_dict(), oracles.v_of(running.problem)


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_truncation_holds_the_moments_before_it_constant(name: str) -> None:
    running, inner, outer = started(catalogue.weighted_logistic, ITD(truncate=2), OPTIMIZERS[name], inner_steps=5)
    problem = catalogue.weighted_logistic()[0]
    theta, v = oracles.theta_of(problem), oracles.v_of(problem)

    def end(at: Tensor) -> float:
        hand = ByHand(OPTIMIZERS[name], theta)
        for t in range(5):
            hand.move(oracles.gradient(problem, inner, hand.now, v if t < 3 else at))
        return float(oracles.outer(problem, outer, hand.now, at))

    running.step()
    torch.testing.assert_close(
        oracles.v_of(running.problem), v - 0.1 * oracles.finite_differences(end, v), rtol=1e-6, atol=1e-8
    )


def test_schedules_and_learnt_step_sizes_reach_the_rule() -> None:
    """With a factory and inner_lr, the schedule sets the step; a learnt one is differentiated through Adam."""
    problem, inner, outer = catalogue.weighted_logistic()
    problem = nhgd.Bilevel(problem.inner, problem.outer, problem.theta.given, problem.v.given, problem.l2)
    theta, v = oracles.theta_of(problem), oracles.v_of(problem)

    def end(at: Tensor) -> float:
        hand = ByHand(lambda p: Adam(p, 1.0), theta)
        for _ in range(3):
            hand.move(oracles.gradient(problem, inner, hand.now, at), float(0.1 * at[0].exp()))
        return float(oracles.outer(problem, outer, hand.now, at))

    expected = v - 0.1 * oracles.finite_differences(end, v)
    learnt = nhgd.schedule.Learnt(lambda v: 0.1 * v[0].exp())
    nhgd.Solver(
        problem, [inner], [outer], ITD(), inner_steps=3, inner_lr=learnt, inner_optimizer=Adam, outer_lr=0.1
    ).step()
    torch.testing.assert_close(oracles.v_of(problem), expected, rtol=1e-6, atol=1e-8)


def test_theta_takes_the_optimisers_own_steps_and_leaves_its_moments() -> None:
    """So that methods can follow each other, and a checkpoint holds what it should."""
    found = []
    for method in (ITD(), "t1t2"):
        running, _, _ = started(catalogue.mlp_module, method, OPTIMIZERS["adam"], outer_lr=1e-30)
        running.run(steps=2)
        state = running.loop.theta.optimizer.state_dict()["state"]
        found.append([oracles.theta_of(running.problem), *(t for held in state.values() for t in held.values())])
    for mine, own in zip(*found, strict=True):
        torch.testing.assert_close(mine, own, rtol=1e-9, atol=1e-11)


def test_a_cold_start_forgets_the_moments() -> None:
    running, inner, _ = started(catalogue.weighted_logistic, ITD(warm_start=False), OPTIMIZERS["momentum"])
    theta = oracles.theta_of(running.problem)
    running.step()
    hand, v = ByHand(OPTIMIZERS["momentum"], theta), oracles.v_of(running.problem)
    for _ in range(3):
        hand.move(oracles.gradient(running.problem, inner, hand.now, v))
    running.step()
    torch.testing.assert_close(oracles.theta_of(running.problem), hand.now, rtol=1e-9, atol=1e-11)


# Two inner variables.


@pytest.mark.parametrize("optimizer", [OPTIMIZERS["nesterov"], OPTIMIZERS["adam"], lambda p: RMSprop(p, 0.02)])
@pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)
def test_f2sa_by_hand_with_two_optimisers(make: catalogue.Make, optimizer: Any) -> None:
    running, inner, outer = started(make, F2SA(first=3.0, growth=0.5, shared=True), optimizer)
    problem = make()[0]
    start, v = oracles.theta_of(problem), oracles.v_of(problem)
    theta, pulled = ByHand(optimizer, start), ByHand(optimizer, start)
    for k in range(3):
        multiplier = 3.0 * (k + 1) ** 0.5
        for _ in range(3):
            theta.move(oracles.gradient(problem, inner, theta.now, v))
            along = outer_gradients(problem, outer, pulled.now, v)[0] / multiplier
            pulled.move(oracles.gradient(problem, inner, pulled.now, v) + along)
        apart = in_v(problem, inner, pulled.now, v) - in_v(problem, inner, theta.now, v)
        v = v - 0.1 * (outer_gradients(problem, outer, pulled.now, v)[1] + multiplier * apart)
        running.step()
        torch.testing.assert_close(oracles.v_of(running.problem), v, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(oracles.theta_of(running.problem), theta.now, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(running.state.pulled.theta, pulled.now, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)
def test_bome_by_hand_with_two_optimisers(make: catalogue.Make) -> None:
    optimizer = OPTIMIZERS["adam"]
    running, inner, outer = started(make, BOME(strength=0.3, halved_after=10.0), optimizer, outer_lr=Power(0.1, 0.0))
    problem = make()[0]
    v = oracles.v_of(problem)
    pulled = ByHand(optimizer, oracles.theta_of(problem))
    theta = ByHand(optimizer, pulled.now)
    for k in range(3):
        with torch.no_grad():
            theta.theta.copy_(pulled.now)
        for _ in range(3):
            theta.move(oracles.gradient(problem, inner, theta.now, v))
        f = outer_gradients(problem, outer, pulled.now, v)
        q = oracles.gradient(problem, inner, pulled.now, v)
        q_v = in_v(problem, inner, pulled.now, v) - in_v(problem, inner, theta.now, v)
        size, along = q @ q + q_v @ q_v, f[0] @ q + f[1] @ q_v
        multiplier = max(float((0.3 * size - along) / size), 0.0)
        pulled.move(f[0] + multiplier * q, 0.05 * 10 / (k + 10))
        v = v - 0.1 * (f[1] + multiplier * q_v)
        running.step()
        torch.testing.assert_close(oracles.v_of(running.problem), v, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(running.state.pulled.theta, pulled.now, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("method", [F2SA(), BOME(), SAMA(), ITD()], ids=lambda method: method.name)
def test_a_resumed_run_goes_on_bit_for_bit_with_both_moments(method: Any, tmp_path: Any) -> None:
    settings: dict[str, Any] = {"inner_optimizer": Adam, "inner_lr": 0.05, "inner_steps": 2, "outer_lr": 0.1}

    def ends(steps: list[int]) -> Tensor:
        folder = tmp_path / f"{len(steps)}"
        for i, count in enumerate(steps):
            problem, inner, outer = catalogue.mlp_module()
            if i == 0:
                solver = nhgd.Solver(problem, [inner], [outer], method, checkpoint=folder, **settings)
            else:
                solver = nhgd.Solver.resume(folder, problem, [inner], [outer], method=method, **settings)
            with solver:
                solver.run(steps=count)
        return torch.cat([problem.v.flat(), problem.theta.flat()])

    assert torch.equal(ends([4]), ends([2, 4]))


# SAMA.


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "decayed"])
def test_slopes_are_the_derivative_of_the_step(name: str) -> None:
    """Against automatic differentiation of the rule; the rule itself is torch's step."""
    start = catalogue.normal(5)
    hand = ByHand(OPTIMIZERS[name], start)
    for _ in range(3):
        before, held = hand.now.clone(), deepcopy(dict(hand.optimizer.state.get(hand.theta, {})))
        g = catalogue.normal(5).requires_grad_()
        rule = UpdateRule(hand.optimizer, [hand.theta], "test")
        rule.moments = [held]
        (moved,) = rule.step([before], [g], None)
        hand.move(g)
        torch.testing.assert_close(moved.detach(), hand.now, rtol=1e-12, atol=1e-14)
    expected = -torch.autograd.grad(moved.sum(), g)[0]
    (found,) = UpdateRule(hand.optimizer, [hand.theta], "test").slopes([g.detach()], None)
    torch.testing.assert_close(torch.as_tensor(found, dtype=torch.float64).expand(5), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)
def test_sama_by_hand(make: catalogue.Make) -> None:
    """With a small radius the difference is the cross derivative."""
    method = SAMA(radius=1e-4, nudge=0.5)
    running, inner, outer = started(make, method, lambda p: Adam(p, 0.05, betas=(0.7, 0.9)))
    problem = make()[0]
    v, hand = oracles.v_of(problem), ByHand(lambda p: Adam(p, 0.05, betas=(0.7, 0.9)), oracles.theta_of(problem))
    for _ in range(2):
        for _ in range(3):
            g = oracles.gradient(problem, inner, hand.now, v)
            hand.move(g)
        (slope,) = UpdateRule(hand.optimizer, [hand.theta], "test").slopes([g], None)
        f, f_v = outer_gradients(problem, outer, hand.now, v)
        x = slope * f
        moved = v - 0.1 * (f_v - oracles.cross(problem, inner, hand.now, v).T @ x)
        with torch.no_grad():
            hand.theta -= 0.5 * 1e-4 / x.norm() * x
        v = moved
        running.step()
        torch.testing.assert_close(oracles.v_of(running.problem), v, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(oracles.theta_of(running.problem), hand.now, rtol=1e-7, atol=1e-9)


def test_sama_with_sgd_has_the_direction_of_t1t2() -> None:
    """And no derivative beyond the first."""
    running, _, _ = started(catalogue.weighted_logistic, SAMA(radius=1e-4), lambda p: SGD(p, 0.3))
    other, _, _ = started(catalogue.weighted_logistic, "t1t2", lambda p: SGD(p, 0.3))
    v = oracles.v_of(running.problem)
    for solver in (running, other):
        solver.step()
    mine, whole = (oracles.v_of(solver.problem) - v for solver in (running, other))
    torch.testing.assert_close(mine, 0.3 * whole, rtol=1e-6, atol=1e-10)  # v does not enter the outer loss
    calls = running.loop.calls
    assert (calls.inner_gradients, calls.outer_gradients, calls.hvps, calls.cross) == (5, 1, 0, 0)


def test_other_optimisers_are_refused() -> None:
    with pytest.raises(nhgd.InputError, match="SAMA needs the derivative of the inner optimiser's steps"):
        started(catalogue.weighted_logistic, SAMA(), RMSprop)[0].step()
    with pytest.raises(nhgd.InputError, match="not for amsgrad"):
        started(catalogue.weighted_logistic, ITD(), lambda p: Adam(p, amsgrad=True))[0].step()
