"""SRBA: SOBA with the recursive variance reduction of SARAH."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from typing_extensions import override

from nhgd._validation import counted
from nhgd.algorithm.aid import check_batches
from nhgd.algorithm.base import AbstractAlgorithm
from nhgd.algorithm.soba import adjoint_rate, check_rate
from nhgd.algorithm.vrbo import outer_mean
from nhgd.loop.loop import Loop, StepInfo
from nhgd.oracle import Oracle
from nhgd.schedule import Schedule


@dataclass
class Directions:
    """In theta, (D,), in x, (D,), and in v, (P,)."""

    theta: Tensor
    adjoint: Tensor
    v: Tensor


@dataclass
class SRBAState:
    """The adjoint x, (D,); the point before, (D,), (D,) and (P,), and the directions that were taken there."""

    adjoint: Tensor
    last: tuple[Tensor, Tensor, Tensor] | None = None
    directions: Directions | None = None


@final
@dataclass(frozen=True)
class SRBA(AbstractAlgorithm):
    """SOBA whose three directions are corrected by how the same samples saw the last point.

    With z = (theta, x, v) and SOBA's directions on a pair of batches,

        D(z; i, j) = ( grad_theta l_i,    H_i x - grad_theta f_j,    grad_v f_j - (d2_{theta,v} l_i)^T x )

    a step is

        every q steps:   h = D(z)  over all data
        else:            h <- h + D(z; i, j) - D(z_last; i, j)
        theta <- Pi( theta - rho h_theta ),    x <- x - rho h_x,    v <- Pi( v - gamma h_v )

    with z_last the point one step ago. Constant step sizes converge. Between two passes over all data a step costs
    twice as much as SOBA's; the memory is three vectors in place of SABA's tables. One outer step is one such
    iteration: `inner_steps` is not used.

    Args:
        q: steps from one pass over all data to the next. The paper takes it of the order of the number of batches.
        large: how many batches such a pass takes, at either level, or "all" for one pass over the data.
        adjoint_lr: the step size of x, a number or a schedule. None: that of theta.

    >>> SRBA(q=8).name
    'srba'

    References: M. Dagréou, T. Moreau, S. Vaiter, P. Ablin, A lower bound and a near-optimal algorithm for bilevel
    empirical risk minimization, 2024, algorithm 1.
    Deviations: 1. batches in place of single samples. 2. x has the opposite sign, as in `SOBA`. 3. x may have a step
    size of its own, and is not projected onto a ball. 4. theta and v may be moved by any optimiser.
    """

    name: ClassVar[str] = "srba"
    q: int = 16
    large: int | str = "all"
    adjoint_lr: float | Schedule | None = None

    def __post_init__(self) -> None:
        counted("SRBA", q=self.q)
        check_batches("SRBA", self.large, "large")
        check_rate(self.adjoint_lr)

    @override
    def init(self, loop: Loop) -> SRBAState:
        return SRBAState(torch.zeros_like(loop.problem.theta.flat()))

    @override
    def step(self, loop: Loop, state: SRBAState) -> tuple[SRBAState, StepInfo]:
        theta, v, x = loop.problem.theta, loop.problem.v, state.adjoint
        here = theta.flat(), x, v.flat()
        if loop.clock.k % self.q == 0 or state.directions is None or state.last is None:
            at = loop.oracle(loop.inner_batches(self.large), None)
            loss, leaves = at.live_gradient()
            value, in_theta, in_v = outer_mean(loop, self.large)
            h = _directions(at, theta.flatten(leaves), in_theta, in_v, x)
        else:
            inner, outer, seed = loop.inner_batch(), loop.outer.next(), loop.seed()
            at = loop.oracle([inner], outer, seed)
            loss, leaves = at.live_gradient()
            found = at.outer()
            value, new = found.value, _directions(at, theta.flatten(leaves), found.theta, v.flatten(found.v), x)
            with loop.temporarily_at(state.last[0], state.last[2]):
                at = loop.oracle([inner], outer, seed)
                found = at.outer()
                old = _directions(at, at.gradient(), found.theta, v.flatten(found.v), state.last[1])
            before = state.directions
            h = Directions(
                before.theta + new.theta - old.theta,
                before.adjoint + new.adjoint - old.adjoint,
                before.v + new.v - old.v,
            )
        adjoint = x - adjoint_rate(loop, self.adjoint_lr) * h.adjoint
        loop.move_theta(theta.unflatten(h.theta))
        norm = loop.move_v(v.unflatten(h.v))
        loop.recent.clear()  # its batches may hold shuffled copies of the data
        return SRBAState(adjoint, here, h), StepInfo(float(value), float(loss), norm)


def _directions(at: Oracle, gradient: Tensor, outer_in_theta: Tensor, outer_in_v: Tensor, x: Tensor) -> Directions:
    """SOBA's three directions, from the gradients in theta and v that are known."""
    product, cross = at.products(x)
    return Directions(gradient, product - outer_in_theta, outer_in_v - at.problem.v.flatten(cross))
