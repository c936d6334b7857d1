"""MA-SOBA: SOBA whose outer variable moves along a moving average."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from typing_extensions import override

from nhgd import _tape as tape
from nhgd.algorithm.base import AbstractAlgorithm
from nhgd.algorithm.soba import adjoint_rate, check_rate
from nhgd.loop.loop import Loop, StepInfo
from nhgd.loop.storm import check_momentum, momentum_at
from nhgd.schedule import Schedule


@dataclass
class MASOBAState:
    """The adjoint x, (D,), and the average h of the directions in v, (P,)."""

    adjoint: Tensor
    average: Tensor


@final
@dataclass(frozen=True)
class MASOBA(AbstractAlgorithm):
    """Single loop: theta and the adjoint x as in SOBA, v along a moving average of its stochastic directions.

        D_v   = grad_v f(outer batch) - (d2_{theta,v} l(batch))^T x
        theta <- Pi( theta - rho grad_theta l(batch) ),    x <- x - rho ( H(batch) x - grad_theta f(outer batch) )
        h     <- (1 - tau) h + tau D_v,      h = D_v at the first step
        v     <- Pi( v - gamma h )

    All directions are taken at the same (theta, x, v), on one inner and one outer batch. SOBA's direction in v is
    biased for as long as x and theta lag behind; the average is what lets all three step sizes stay of one order
    without SOBA's assumptions on higher derivatives. One outer step is one such iteration: `inner_steps` is not used.
    It costs what a step of SOBA does: no product is taken twice.

    The paper's rates need rho, gamma and tau of the order 1 / sqrt(K) over K steps.

    Args:
        momentum: tau, above 0 and at most 1, a number or a schedule. 1: no memory, which is SOBA.
        adjoint_lr: the step size of x, a number or a schedule. None: that of theta.

    >>> MASOBA(momentum=0.1).name
    'ma_soba'

    References: X. Chen, T. Xiao, K. Balasubramanian, Optimal algorithms for stochastic bilevel optimization under
    relaxed smoothness conditions, 2024, algorithm 1.
    Deviations: 1. v moves along the average that has just been updated, the paper's along that of the step before, so
    that tau = 1 is SOBA exactly. 2. the average begins with the first direction, the paper's with zero. 3. x may have a
    step size of its own. 4. theta and v may be moved by any optimiser and projected; x always takes plain steps.
    """

    name: ClassVar[str] = "ma_soba"
    momentum: float | Schedule = 0.2
    adjoint_lr: float | Schedule | None = None

    def __post_init__(self) -> None:
        check_momentum("MASOBA", momentum=self.momentum)
        check_rate(self.adjoint_lr)

    @property
    @override
    def not_repeatable(self) -> str | None:
        return None

    @override
    def init(self, loop: Loop) -> MASOBAState:
        return MASOBAState(torch.zeros_like(loop.problem.theta.flat()), torch.zeros_like(loop.problem.v.flat()))

    @override
    def step(self, loop: Loop, state: MASOBAState) -> tuple[MASOBAState, StepInfo]:
        v, tau = loop.problem.v, tape.on_device(momentum_at(self.momentum, loop.clock))
        at = loop.oracle([loop.inner_batch()], loop.outer.next())
        value, gradient = at.live_gradient()
        outer = at.outer()
        product, cross = at.products(state.adjoint)
        adjoint = state.adjoint - tape.on_device(adjoint_rate(loop, self.adjoint_lr)) * (product - outer.theta)
        average = (1 - tau) * state.average + tau * (v.flatten(outer.v) - v.flatten(cross))
        loop.move_theta(gradient)
        norm = loop.move_v(v.unflatten(average))
        return MASOBAState(adjoint, average), StepInfo(tape.reading(outer.value), tape.reading(value), norm)
