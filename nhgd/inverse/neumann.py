"""The truncated Neumann series."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import ClassVar, final

import torch
from torch import Tensor
from typing_extensions import override

from nhgd._validation import counted, not_negative, positive
from nhgd.inverse._krylov.curvature import DirectionalCurvature
from nhgd.inverse._krylov.richardson import richardson, safe_step
from nhgd.inverse.base import POOR, Iterative, SolveStats, vector_bytes
from nhgd.oracle import Oracle
from nhgd.variable import Variable


@final
@dataclass(frozen=True)
class Neumann(Iterative):
    """The truncated Neumann series, scaled by phi.

        x = phi * sum_{k=0}^{terms} (I - phi H)^k u,      0 < phi < 2 / lambda_max(H)

    so `terms` counts the products; the sum has terms + 1 summands. The residual u - Hx is the next summand over phi,
    which costs one more product and shows how far the sum is from the solution.

    Args:
        terms: products of the series.
        phi: its scale. None: 1 / lambda_max from a power iteration; should the series grow all the same (a power
            iteration comes from below), phi is halved and the series begun again.
        power_steps: products of that power iteration.
        tol: stop early when the residual is below tol |u|.
        damping: added to the diagonal of H.

    >>> Neumann(terms=10, phi=0.1).products
    11

    References: J. Lorraine, P. Vicol, D. Duvenaud, Optimizing millions of hyperparameters by implicit differentiation,
    2020, algorithm 3; K. Ji, J. Yang, Y. Liang, Bilevel optimization: convergence analysis and enhanced design, 2021.
    Deviations: 1. phi has a default. 2. the residual is measured.
    """

    name: ClassVar[str] = "neumann"
    steps_field: ClassVar[str | None] = "terms"
    terms: int = 40
    phi: float | None = None
    power_steps: int = 10
    tol: float = 0.0
    damping: float = 0.0

    def __post_init__(self) -> None:
        counted("Neumann", terms=self.terms, power_steps=self.power_steps)
        not_negative("Neumann", tol=self.tol, damping=self.damping)
        if self.phi is not None:
            positive("Neumann", phi=self.phi)

    @override
    def solve(self, u: Tensor, oracle: Oracle, start: Tensor | None = None) -> tuple[Tensor, SolveStats]:
        before = oracle.calls.hvps
        phi = safe_step(oracle, u, self.power_steps, self.damping) if self.phi is None else self.phi
        seen = DirectionalCurvature("Neumann", u.dtype)
        x, residual, grew = self._sum(u, oracle, phi, seen)
        halved = 0
        while grew and self.phi is None and halved < 8:
            phi, halved = phi / 2, halved + 1
            x, residual, grew = self._sum(u, oracle, phi, seen)
        notes = {"phi": phi, "diverged": grew, "negative_curvature": seen.negative}
        # The next summand is the residual itself, so a series that has stalled is detected too.
        converged = residual <= (self.tol or POOR) and not grew
        return x, SolveStats(residual, oracle.calls.hvps - before, converged, notes)

    def _sum(self, u: Tensor, oracle: Oracle, phi: float, seen: DirectionalCurvature) -> tuple[Tensor, float, bool]:
        size = max(float(u.norm()), torch.finfo(u.dtype).tiny)
        taken = 0

        def following(x: Tensor, term: Tensor) -> Tensor:
            nonlocal taken
            taken += 1
            product = oracle.hvp(term) + self.damping * term
            seen.positive(term, product, taken)
            return term - phi * product

        # The terms are the residuals of Richardson's iteration on phi H, of step 1, from zero.
        iterates = richardson(torch.zeros_like(u), u, 1.0, following)
        next(iterates)
        x, residual = u, 1.0
        for x, term in islice(iterates, self.terms + 1):
            residual = float(term.norm()) / size
            # (I - phi H)^k never lengthens a vector when 0 <= H < 2 / phi.
            if not residual <= 1.0 + 1e-3:
                return phi * x, residual, True
            if residual <= self.tol:
                break
        return phi * x, residual, False

    @override
    def memory(self, theta: Variable) -> int:
        """The sum, the term, its product."""
        return vector_bytes(theta, 3)

    @property
    def products(self) -> int | None:
        """The series, the residual, the power iteration; a series that had to be begun again comes on top."""
        return self.terms + 1 + (self.power_steps if self.phi is None else 0)
