"""SOBA: inner variable, adjoint and outer variable move at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from typing_extensions import override

from nhgd import _tape as tape
from nhgd.algorithm.base import AbstractAlgorithm
from nhgd.loop.loop import Loop, StepInfo
from nhgd.schedule import Schedule, as_schedule


@dataclass
class SOBAState:
    """The adjoint x, (D,)."""

    adjoint: Tensor


@final
@dataclass(frozen=True)
class SOBA(AbstractAlgorithm):
    """Single loop: theta, the adjoint x and v take one stochastic step each, all at once.

        D_theta = grad_theta l(batch)
        D_x     = H(batch) x - grad_theta f(outer batch)
        D_v     = grad_v f(outer batch) - (d2_{theta,v} l(batch))^T x
        theta <- Pi( theta - rho D_theta ),    x <- x - rho D_x,    v <- Pi( v - gamma D_v )

    All three are taken at the same (theta, x, v) on the same inner batch and the same outer batch, which are drawn
    independently of each other. x begins at zero. One outer step is one such iteration: `inner_steps` is not used. It
    costs one inner gradient, one outer gradient, one Hessian product and one cross product, of which the inner three
    share a forward pass.

    rho is the solver's inner_lr and gamma its outer_lr. The paper's rates need rho ~ gamma ~ 1 / sqrt(K) over K steps
    or `nhgd.schedule.Power(lr, 0.5)` for both.

    Args:
        adjoint_lr: the step size of x, a number or a schedule. None: that of theta.

    >>> SOBA().name
    'soba'

    References: M. Dagréou, P. Ablin, S. Vaiter, T. Moreau, A framework for bilevel optimization that enables stochastic
    and global variance reduction algorithms, 2022, algorithm 1 with the directions of SOBA.
    Deviations: 1. x has the opposite sign: it tends to H^{-1} grad_theta f. 2. x may have a step size of its own. 3.
    theta and v may be moved by any optimiser and projected; x always takes plain steps.
    """

    name: ClassVar[str] = "soba"
    adjoint_lr: float | Schedule | None = None

    def __post_init__(self) -> None:
        check_rate(self.adjoint_lr)

    @property
    @override
    def not_repeatable(self) -> str | None:
        return None

    @override
    def init(self, loop: Loop) -> SOBAState:
        return SOBAState(torch.zeros_like(loop.problem.theta.flat()))

    @override
    def step(self, loop: Loop, state: SOBAState) -> tuple[SOBAState, StepInfo]:
        at = loop.oracle([loop.inner_batch()], loop.outer.next())
        value, gradient = at.live_gradient()
        outer = at.outer()
        product, cross = at.products(state.adjoint)
        adjoint = state.adjoint - tape.on_device(adjoint_rate(loop, self.adjoint_lr)) * (product - outer.theta)
        loop.move_theta(gradient)
        norm = loop.move_v([f - c for f, c in zip(outer.v, cross, strict=True)])
        return SOBAState(adjoint), StepInfo(tape.reading(outer.value), tape.reading(value), norm)


def check_rate(rate: float | Schedule | None) -> None:
    """Refuse a step size of the adjoint that is none."""
    if rate is not None:
        as_schedule(rate, "adjoint_lr")


def adjoint_rate(loop: Loop, rate: float | Schedule | None) -> float:
    """The current step size of the adjoint; None: that of theta."""
    if tape.tape() is None:
        return loop.theta.rate(loop.clock) if rate is None else as_schedule(rate, "adjoint_lr").rate(loop.clock)
    if rate is None:
        return loop.theta.scheduled_rate(loop.clock)
    schedule = as_schedule(rate, "adjoint_lr")
    return tape.number(lambda: schedule.rate(loop.clock))
