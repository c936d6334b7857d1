"""The fixed point of a gradient step, differentiated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar, final

import torch
from torch import Tensor
from typing_extensions import override

from nhgd._validation import counted, not_negative, positive
from nhgd.inverse._krylov.pcg import first_iterate
from nhgd.inverse._krylov.richardson import richardson, safe_step
from nhgd.inverse.base import POOR, Iterative, SolveStats, vector_bytes
from nhgd.oracle import Oracle
from nhgd.variable import Variable


@final
@dataclass(frozen=True)
class FixedPoint(Iterative):
    """The fixed-point iteration of a gradient step of size lr, stopped by its residual.

        x <- x + lr (u - H x)

    From zero it gives the Neumann series; unlike the series it can start from the last outer step's solution, and stops
    by itself.

    Args:
        steps: products at most.
        lr: the step. None: 1 / lambda_max from a power iteration.
        tol: relative residual at which to stop.
        power_steps: products of that power iteration.
        damping: added to the diagonal of H.

    >>> FixedPoint(steps=20, lr=0.1).products
    21

    References: R. Grazzi, L. Franceschi, M. Pontil, S. Salzo, On the iteration complexity of hypergradient computation,
    2020, equation 10 with the map theta - lr grad.
    """

    name: ClassVar[str] = "fixed_point"
    steps_field: ClassVar[str | None] = "steps"
    steps: int = 40
    lr: float | None = None
    tol: float = 1e-8
    power_steps: int = 10
    damping: float = 0.0

    def __post_init__(self) -> None:
        counted("FixedPoint", steps=self.steps, power_steps=self.power_steps)
        not_negative("FixedPoint", tol=self.tol, damping=self.damping)
        if self.lr is not None:
            positive("FixedPoint", lr=self.lr)

    @override
    def solve(self, u: Tensor, oracle: Oracle, start: Tensor | None = None) -> tuple[Tensor, SolveStats]:
        """Iterate from `start` if it is better than zero, else from zero."""
        before = oracle.calls.hvps
        lr = safe_step(oracle, u, self.power_steps, self.damping) if self.lr is None else self.lr
        size = max(float(u.norm()), torch.finfo(u.dtype).tiny)
        x, r = first_iterate(u, lambda x: oracle.hvp(x) + self.damping * x, start)
        last, residual, worst, bent = r, math.inf, math.inf, 1.0
        iterates = richardson(x, r, lr, lambda x, r: u - oracle.hvp(x) - self.damping * x)
        for taken, (iterate, r) in enumerate(islice(iterates, self.steps + 1)):
            x, residual = iterate, float(r.norm()) / size
            if taken:
                bent = float(last.dot(last - r) / last.dot(last))  # lr times the curvature along it
            else:
                worst = 10 * max(residual, 1.0)
            if residual <= self.tol or not residual <= worst:
                break
            last = r
        # A step along negative curvature makes the residual longer. Close to the solution rounding errors may do so
        # too.
        notes = {
            "lr": lr,
            "diverged": not residual <= worst,
            "negative_curvature": residual > POOR and bent < -100 * torch.finfo(u.dtype).eps,
        }
        return x, SolveStats(residual, oracle.calls.hvps - before, residual <= self.tol, notes)

    @override
    def memory(self, theta: Variable) -> int:
        """x, the residual, its product."""
        return vector_bytes(theta, 3)

    @property
    def products(self) -> int | None:
        """The iteration, the residual of a given start, the power iteration."""
        return self.steps + 1 + (self.power_steps if self.lr is None else 0)
