"""FSLA: a step of theta, a step of the adjoint, a step of v with momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from typing_extensions import override

from nhgd import _tape as tape
from nhgd.algorithm.base import AbstractAlgorithm
from nhgd.algorithm.soba import adjoint_rate, check_rate
from nhgd.data.batch import Batch
from nhgd.loop.loop import Loop, StepInfo
from nhgd.loop.storm import check_momentum, momentum_at
from nhgd.schedule import Schedule


@dataclass
class FSLAState:
    """The adjoint x, (D,), the v before the last move, (P,), and the direction of that move, (P,)."""

    adjoint: Tensor
    v: Tensor
    in_v: Tensor


@final
@dataclass(frozen=True)
class FSLA(AbstractAlgorithm):
    """Fully single loop: one step each of theta, of the adjoint and of v, the last with recursive momentum.

        theta <- Pi( theta - tau grad_theta l(v, theta, batch_1) )
        x     <- x - rho ( H(batch_2) x - grad_theta f(outer batch_1) ),                     at the new theta
        p(theta, x, v) = grad_v f(outer batch_2) - (d2_{theta,v} l(batch_3))^T x
        d     <- p(theta, x, v) + (1 - eta) ( d - p(theta_last, x_last, v_last) )
        v     <- Pi( v - alpha d )

    The last point is the one where p was taken in the iteration before: theta and x before their steps above, v before
    its last move. All batches are fresh; both evaluations of p use the same ones. x begins at zero, and the first step
    has no momentum. One outer step is one such iteration: `inner_steps` is not used. tau is the solver's inner_lr and
    alpha its outer_lr; Power(lr, 0.5) for both, from `nhgd.schedule`, suits noisy batches.

    Args:
        momentum: eta, above 0 and at most 1, a number or a schedule. 1: no momentum.
        adjoint_lr: rho, a number or a schedule. None: the step size of theta.

    >>> FSLA(momentum=0.3).name
    'fsla'

    References: J. Li, B. Gu, H. Huang, A fully single loop algorithm for bilevel optimization without Hessian inverse,
    2022, algorithm 1.
    Deviations: 1. rho may differ from tau. 2. theta and v may be moved by any optimiser and projected; x takes plain
    steps.
    """

    name: ClassVar[str] = "fsla"
    momentum: float | Schedule = 0.5
    adjoint_lr: float | Schedule | None = None

    def __post_init__(self) -> None:
        check_momentum("FSLA", momentum=self.momentum)
        check_rate(self.adjoint_lr)

    @property
    @override
    def not_repeatable(self) -> str | None:
        return "its momentum follows a schedule" if isinstance(self.momentum, Schedule) else None

    @override
    def init(self, loop: Loop) -> FSLAState:
        """The adjoint and the momenta start at zero."""
        v = loop.problem.v.flat()
        return FSLAState(torch.zeros_like(loop.problem.theta.flat()), v, torch.zeros_like(v))

    @override
    def step(self, loop: Loop, state: FSLAState) -> tuple[FSLAState, StepInfo]:
        v = loop.problem.v
        eta = momentum_at(self.momentum, loop.clock)
        rate = tape.on_device(adjoint_rate(loop, self.adjoint_lr))
        last = loop.problem.theta.flat()
        loss = loop.inner_step()
        at = loop.oracle([loop.inner_batch()], loop.outer.next())
        adjoint = state.adjoint - rate * (at.hvp(state.adjoint) - at.outer().theta)
        batch, outer_batch, seed = loop.inner_batch(), loop.outer.next(), loop.seed()
        value, in_v = _direction(loop, adjoint, batch, outer_batch, seed)
        if eta < 1:
            with loop.temporarily_at(last, state.v):
                _, there = _direction(loop, state.adjoint, batch, outer_batch, seed)
            in_v = in_v + (1 - eta) * (state.in_v - there)
        here = v.flat()
        norm = loop.move_v(v.unflatten(in_v))
        return FSLAState(adjoint, here, in_v), StepInfo(tape.reading(value), tape.reading(loss), norm)


def _direction(loop: Loop, x: Tensor, batch: Batch, outer_batch: Batch, seed: int) -> tuple[Tensor, Tensor]:
    """The outer loss and grad_v f - (d2_{theta,v} l)^T x, (P,), at the current theta and v."""
    at = loop.oracle([batch], outer_batch, seed)
    outer = at.outer()
    return outer.value, loop.problem.v.flatten([f - c for f, c in zip(outer.v, at.cross(x), strict=True)])
