"""PZOBO: the response of theta to v from a few perturbed inner loops, without a second derivative."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from typing_extensions import override

from nhgd._validation import positive
from nhgd.algorithm.aid import check_batches
from nhgd.algorithm.base import AbstractAlgorithm
from nhgd.errors import InputError
from nhgd.loop.loop import Loop, StepInfo


@dataclass
class PZOBOState:
    """The directions of the last outer step, (Q, P)."""

    directions: Tensor


@final
@dataclass(frozen=True)
class PZOBO(AbstractAlgorithm):
    """Double loop: d theta_T / dv along random directions, from inner loops at perturbed v.

        theta_T(v) = T inner steps from theta_0, on the batches and with the dropout of this outer step
        delta_j    = ( theta_T(v + mu u_j) - theta_T(v) ) / mu,      u_j ~ N(0, I),  j = 1 .. Q
        v <- Pi( v - alpha ( grad_v f + (1/Q) sum_j <delta_j, grad_theta f> u_j ) )

    As mu tends to 0 the expectation of this direction is the hypergradient of `ITD` with the same T: the bias is that
    of unrolling, and no graph is kept and no Hessian product taken. With fewer directions than v has entries the
    variance is about (P + 1) / Q times the squared length, so v should be of low dimension, or alpha small.
    `directions="all"` differentiates along every entry of v in turn: P perturbed loops, no randomness, and their sum in
    place of a mean.

    Args:
        directions: Q, how many random ones an outer step takes, or "all" for the P coordinates.
        mu: the length of a perturbation in units of v. It must be small against the scale on which theta_T(v) bends,
            and large against the rounding of theta.

    >>> PZOBO(directions=4).name
    'pzobo'

    References: D. Sow, K. Ji, Y. Liang, On the convergence theory for Hessian-free bilevel algorithms, 2022, algorithm
    1 (PZOBO) and, with batches, algorithm 2 (PZOBO-S).
    Deviations: 1. directions="all" is ours. 2. plain gradient steps only; other inner optimisers are refused, because
    each perturbed loop would need moments of its own. 3. perturbed v are projected as v is, so that a weight stays a
    weight: a coordinate is perturbed to the side with more room, and of a random direction an entry at its bound counts
    half.
    """

    name: ClassVar[str] = "pzobo"
    plain: ClassVar[bool] = True
    directions: int | str = 1
    mu: float = 1e-3

    def __post_init__(self) -> None:
        check_batches("PZOBO", self.directions, "directions")
        positive("PZOBO", mu=self.mu)

    @override
    def init(self, loop: Loop) -> PZOBOState:
        loop.plain_rate("PZOBO")
        if loop.division.workers > 1:
            raise InputError(
                "PZOBO repeats its inner loop at other v, which the workers of one batch cannot divide. Run it on one"
                " worker, or use another method without second derivatives, such as f2sa or bome."
            )
        v = loop.problem.v.flat()
        return PZOBOState(v.new_zeros(len(v) if self.directions == "all" else int(self.directions), len(v)))

    @override
    def step(self, loop: Loop, state: PZOBOState) -> tuple[PZOBOState, StepInfo]:
        problem = loop.problem
        start, v, steps = problem.theta.flat(), problem.v.flat(), loop.settings.inner_steps
        objectives = [loop.objective(loop.inner_batch(), loop.seed()) for _ in range(steps)]
        rates, losses = [], []
        for objective in objectives:
            rates.append(loop.plain_rate("PZOBO"))
            losses.append(loop.inner_step(objective))
        end = problem.theta.flat()
        outer = loop.oracle([None], loop.outer.next()).outer()
        u = _directions(v, self.directions)
        total = torch.zeros_like(v)
        for row in u:
            theta = start
            moved, length = self._perturbed(loop, v, row)
            for objective, rate in zip(objectives, rates, strict=True):
                with loop.temporarily_at(theta, moved):
                    theta = loop.projected(theta - rate * loop.replay(objective).inner_gradients(in_v=False).theta)
            total += outer.theta.dot(theta - end).to(v.dtype) / length * row
        total /= 1 if self.directions == "all" else len(u)
        norm = loop.move_v([f + g for f, g in zip(outer.v, problem.v.unflatten(total), strict=True)])
        info = StepInfo(float(outer.value), float(torch.stack(losses).mean()), norm, 0, {"directions": len(u)})
        return PZOBOState(u), info

    def _perturbed(self, loop: Loop, v: Tensor, row: Tensor) -> tuple[Tensor, float]:
        """v + mu u within the constraints, and mu; along a coordinate to the side with more room, and how far."""
        moved = loop.projected_v(v + self.mu * row)
        if self.directions != "all" or loop.settings.project_v is None:
            return moved, self.mu
        other = loop.projected_v(v - self.mu * row)
        along, back = float(row.dot(moved - v)), float(row.dot(other - v))
        moved, length = (moved, along) if abs(along) >= abs(back) else (other, back)
        return moved, length if length else self.mu  # where v cannot move at all, theta does not either


def _directions(v: Tensor, count: int | str) -> Tensor:
    """Standard normal vectors from the run's generator, or the coordinates, one a row."""
    if count == "all":
        return torch.eye(len(v), dtype=v.dtype, device=v.device)
    return torch.randn(int(count), len(v), dtype=v.dtype).to(v.device)
