"""The dense Hessian, for small problems and as the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from nhgd.errors import InputError, NonFiniteError, counted, not_negative
from nhgd.inverse.base import AbstractInverse, SolveStats
from nhgd.point import Point
from nhgd.variable import Variable


@final
@dataclass(frozen=True)
class Exact(AbstractInverse):
    """The dense Hessian, formed by D products and solved directly.

        x = (H + damping I)^+ u

    A positive definite H is solved by Cholesky, any other by its eigenvalues, where those of rounding size, below
    max(10, sqrt(D)) eps times the largest, count as zero: x is then the shortest of those with the least residual. eps is
    that of theta's dtype, whose products these are; the solve itself is in float64. `notes` say whether H is
    `positive_definite`, whether it has `negative_curvature`, and which part of u lies `outside` of its range.

    Args:
        damping: added to the diagonal.
        max_dim: D above which the call is refused, because it needs D^2 numbers and D products.

    >>> Exact().max_dim
    5000
    """

    name: ClassVar[str] = "exact"
    damping: float = 0.0
    max_dim: int = 5000

    def __post_init__(self) -> None:
        not_negative("Exact", damping=self.damping)
        counted("Exact", max_dim=self.max_dim)

    def solve(self, state: Any, u: Tensor, at: Point, start: Tensor | None = None) -> tuple[Tensor, SolveStats]:
        """Form H and solve."""
        before = at.calls.hvps
        found = self._factorised(at)
        x, residual, outside = found.solve(u)
        notes: dict[str, Any] = {"positive_definite": found.definite, "negative_curvature": found.negative}
        if found.null:
            notes |= {"outside": outside, "null": found.null}
        return x, SolveStats(residual, at.calls.hvps - before, residual < 1e-6, notes)

    def operator(self, state: Any, at: Point) -> Callable[[Tensor], Tensor]:
        """H is formed and factorised once."""
        found = self._factorised(at)
        return lambda u: found.solve(u)[0]

    def _factorised(self, at: Point) -> Factorised:
        if at.numel > self.max_dim:
            raise InputError(
                f"Exact would form a {at.numel} x {at.numel} matrix by {at.numel} Hessian products. Use cg, or raise"
                f" max_dim (now {self.max_dim}) if you mean it."
            )
        hessian = dense(at)
        hessian.diagonal().add_(self.damping)
        return Factorised(hessian, at.problem.theta.dtype)

    def memory(self, theta: Variable) -> int:
        """Three times H in float64, which its eigenvalues need."""
        return theta.numel**2 * 24

    @property
    def products(self) -> int | None:
        """D of them."""
        return None


def dense(at: Point, tick: Callable[[float], None] = lambda done: None, chunk: int = 8) -> Tensor:
    """The inner Hessian as an array (D, D), symmetrised, in float64: D products, some of them in one vectorised pass.

    Args:
        tick: told the fraction done after each pass.
        chunk: products in one pass; fewer need less memory.
    """
    theta = at.problem.theta
    rows = []
    for first in range(0, at.numel, chunk):
        unit = torch.zeros(min(chunk, at.numel - first), at.numel, dtype=theta.dtype, device=theta.device)
        unit.diagonal(first).fill_(1.0)
        rows.append(at.hvps(unit).double())
        tick((first + len(unit)) / at.numel)
    hessian = torch.cat(rows)
    return (hessian + hessian.T) / 2


class Factorised:
    """A symmetric matrix, factorised: by Cholesky where it is clearly positive definite, else by its eigenvalues.

    Args:
        matrix: (D, D), float64.
        dtype: that its entries were computed in, whose rounding errors they carry.

    Attributes:
        definite: whether every eigenvalue is above rounding size.
        negative: whether one is below zero by more than that.
        null: how many are of rounding size.
        smallest, largest: the least eigenvalue, None where it was not needed, and a bound on the largest.
    """

    def __init__(self, matrix: Tensor, dtype: torch.dtype) -> None:
        if not bool(torch.isfinite(matrix).all()):
            raise NonFiniteError("Exact: the Hessian holds nan or inf.")
        self.matrix = matrix
        share = max(10.0, len(matrix) ** 0.5) * torch.finfo(dtype).eps
        self.definite, self.negative, self.null = True, False, 0
        self.smallest: float | None = None
        self.largest = float(matrix.norm())
        self._factor, info = torch.linalg.cholesky_ex(matrix)
        self._values = self._vectors = None
        if int(info) == 0 and _least_eigenvalue(self._factor) > share * self.largest:
            return
        del self._factor
        # On the CPU: a GPU's solver can fail on many equal eigenvalues.
        values, vectors = (part.to(matrix.device) for part in torch.linalg.eigh(matrix.cpu()))
        self.smallest, self.largest = float(values[0]), float(values.abs().max())
        kept = values.abs() > share * self.largest
        self.null = int((~kept).sum())
        self.negative = bool((values[kept] < 0).any())
        self.definite = not self.null and not self.negative
        self._values, self._vectors = values[kept], vectors[:, kept]

    def solve(self, u: Tensor) -> tuple[Tensor, float, float]:
        """x in u's dtype, its relative residual, and the part of u that lies outside of the range, of u's length."""
        b = u.double()
        size = b.norm().clamp_min(torch.finfo(torch.float64).tiny)
        outside = 0.0
        if self._values is None or self._vectors is None:
            x = torch.cholesky_solve(b[:, None], self._factor)[:, 0]
        else:
            seen = self._vectors.T @ b
            x = self._vectors @ (seen / self._values)
            if self.null:
                outside = float((b - self._vectors @ seen).norm() / size)
        residual = float((self.matrix @ x - b).norm() / size)
        return x.to(u.dtype), residual, outside


def _least_eigenvalue(factor: Tensor, steps: int = 4) -> float:
    """That of L L^T, from above, by a few steps of inverse iteration from a fixed random start."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(len(factor), 1, generator=generator, dtype=torch.float64).to(factor.device)
    size = 0.0
    for _ in range(steps):
        x = torch.cholesky_solve(x / x.norm(), factor)
        size = float(x.norm())
    return 1.0 / size if size > 0 else float("inf")
