"""The dense Hessian, for small problems and as the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor
from typing_extensions import override

from nhgd._validation import counted, not_negative
from nhgd.errors import InputError, NonFiniteError
from nhgd.inverse.base import Iterative, SolveStats
from nhgd.oracle import Oracle
from nhgd.variable import Variable


@final
@dataclass(frozen=True)
class Exact(Iterative):
    """The dense Hessian, formed by D products and solved directly.

        x = (H + damping I)^+ u

    Rows and columns are scaled first, so that a badly scaled parameter is no small eigenvalue (`Factorised`). A
    positive definite H is then solved by Cholesky, any other by its eigenvalues, where those of rounding size, below
    max(10, sqrt(D)) eps times the largest, count as zero: x is the shortest of those with the least residual. eps is
    that of theta's dtype, whose products these are; the solve itself is in float64. `notes` say whether H is
    `positive_definite`, whether it has `negative_curvature`, which part of u lies `outside` of its range, and how much
    longer than x what was `cut` could have been.

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

    @override
    def solve(self, u: Tensor, oracle: Oracle, start: Tensor | None = None) -> tuple[Tensor, SolveStats]:
        before = oracle.calls.hvps
        found = self._factorised(oracle)
        x, residual, outside = found.solve(u)
        notes: dict[str, Any] = {"positive_definite": found.definite, "negative_curvature": found.negative}
        if found.null:
            notes |= {"outside": outside, "null": found.null, "cut": found.cut(u)}
        return x, SolveStats(residual, oracle.calls.hvps - before, residual < 1e-6, notes)

    def operator(self, oracle: Oracle) -> Callable[[Tensor], Tensor]:
        """H is formed and factorised once."""
        found = self._factorised(oracle)
        return lambda u: found.solve(u)[0]

    def _factorised(self, oracle: Oracle) -> Factorised:
        if oracle.numel > self.max_dim:
            raise InputError(
                f"Exact would form a {oracle.numel} x {oracle.numel} matrix by {oracle.numel} Hessian products. Use"
                f" cg, or raise max_dim (now {self.max_dim}) if that is intended."
            )
        hessian = dense(oracle)
        hessian.diagonal().add_(self.damping)
        return Factorised(hessian, oracle.problem.theta.dtype)

    @override
    def memory(self, theta: Variable) -> int:
        """Four times H in float64, which its eigenvalues need."""
        return theta.numel**2 * 32

    @property
    def products(self) -> int | None:
        """D of them."""
        return None

    def warnings_for(self, theta: Variable) -> list[str]:
        """Whether theta is too large."""
        return [f"refused above max_dim = {self.max_dim}"] if theta.numel > self.max_dim else []


def dense(oracle: Oracle, tick: Callable[[float], None] = lambda done: None, chunk: int = 8) -> Tensor:
    """The inner Hessian as an array (D, D) in float64: D products, some of them in one vectorised pass.

    It is symmetric but for the rounding errors of its products.

    Args:
        tick: called with the fraction done after each pass.
        chunk: products in one pass; fewer need less memory.
    """
    theta = oracle.problem.theta
    rows = []
    for first in range(0, oracle.numel, chunk):
        unit = torch.zeros(min(chunk, oracle.numel - first), oracle.numel, dtype=theta.dtype, device=theta.device)
        unit.diagonal(first).fill_(1.0)
        rows.append(oracle.hvps(unit).double())
        tick((first + len(unit)) / oracle.numel)
    return torch.cat(rows)


class Factorised:
    """A symmetric matrix, factorised: by Cholesky if it is clearly positive definite, else by eigenvalues.

    Both are of the scaled matrix S, H = D S D with a diagonal D, in which the largest entry of every row is 1; for a
    positive semidefinite H, D^2 is its diagonal. An entry is a sum of products of two derivatives, and its rounding
    error is a share of their sizes: S, not H, has the same error everywhere, and a direction is lost in rounding only
    where its eigenvalue is small in S. What a sum was before it cancelled shows in how far H is from symmetric, and
    counts as the size of an entry.

    Where eigenvalues of S are of rounding size, their vectors N count as its null space, and D^{-1} N spans that of H.

    Args:
        matrix: (D, D), float64, symmetric but for rounding errors.
        dtype: that its entries were computed in, whose rounding errors they carry.

    Attributes:
        definite: whether every eigenvalue is above rounding size.
        negative: whether one is below zero by more than that.
        null: how many are of rounding size.
        smallest, largest: eigenvalues where one is negative; else None, and a bound on the largest.
    """

    def __init__(self, matrix: Tensor, dtype: torch.dtype) -> None:
        if not bool(torch.isfinite(matrix).all()):
            raise NonFiniteError("Exact: the Hessian contains nan or inf.")
        self.matrix = (matrix + matrix.T) / 2
        self._eps = eps = torch.finfo(dtype).eps
        self._scale = _equilibrating((matrix - matrix.T).abs_().div_(2 * eps).maximum(self.matrix.abs()))
        scaled = self.matrix / self._scale / self._scale[:, None]
        self.definite, self.negative, self.null = True, False, 0
        self.smallest: float | None = None
        self.largest = float(self.matrix.norm())
        self._values = self._vectors = None
        self._open = self.matrix.new_zeros(len(matrix), 0)
        share = max(10.0, len(matrix) ** 0.5) * eps
        self._factor, info = torch.linalg.cholesky_ex(scaled)
        if int(info) == 0 and _least_eigenvalue(self._factor) > share * float(scaled.norm()):
            return
        del self._factor
        # On the CPU: a GPU's solver can fail on many equal eigenvalues.
        values, vectors = (part.to(matrix.device) for part in torch.linalg.eigh(scaled.cpu()))
        self._rounding = share * float(values.abs().max())
        kept = values.abs() > self._rounding
        self.null = int((~kept).sum())
        self.negative = bool((values[kept] < 0).any())
        self.definite = not self.null and not self.negative
        if self.negative:
            spectrum = torch.linalg.eigvalsh(self.matrix.cpu())
            self.smallest, self.largest = float(spectrum[0]), float(spectrum.abs().max())
        self._values, self._vectors = values[kept], vectors[:, kept]
        if self.null:
            self._open = torch.linalg.qr(vectors[:, ~kept] / self._scale[:, None])[0]

    def solve(self, u: Tensor) -> tuple[Tensor, float, float]:
        """x in u's dtype, its relative residual, and the share of u that is outside of the range."""
        b = u.double()
        size = b.norm().clamp_min(torch.finfo(torch.float64).tiny)
        left = self._open @ (self._open.T @ b)
        x = self._one(b - left)
        if self.null:
            shortest = x - self._open @ (self._open.T @ x)
            # In low precision the part cut off need not be zero; then the shortest solution solves nothing.
            if float((self.matrix @ shortest - b + left).norm() / size) <= self._eps**0.5:
                x = shortest
        residual = float((self.matrix @ x - b).norm() / size)
        return x.to(u.dtype), residual, float(left.norm() / size)

    def cut(self, u: Tensor) -> float:
        """How long the part of x that was left out with the null space could be, of x's length; both scaled."""
        if self._vectors is None:
            return 0.0
        b = u.double() / self._scale
        inside = self._vectors.T @ b
        x = float((inside / self._values).norm())
        lost = float((b - self._vectors @ inside).norm()) / max(self._rounding, torch.finfo(torch.float64).tiny)
        return lost / x if x > 0 else float(lost > 0)

    def _one(self, b: Tensor) -> Tensor:
        """An x for a b within the range."""
        b = b / self._scale
        if self._values is None or self._vectors is None:
            return torch.cholesky_solve(b[:, None], self._factor)[:, 0] / self._scale
        found: Tensor = self._vectors @ ((self._vectors.T @ b) / self._values)
        return found / self._scale


def _equilibrating(sizes: Tensor, rounds: int = 12) -> Tensor:
    """d with max_j sizes_ij / (d_i d_j) = 1 in every row i; 1 for a row of zeros.

    References: D. Ruiz, A scaling algorithm to equilibrate both rows and columns norms in matrices, 2001.
    """
    d = torch.ones(len(sizes), dtype=sizes.dtype, device=sizes.device)
    for _ in range(rounds):
        most = (sizes / d).amax(1) / d
        d = torch.where(most > 0, d * most.sqrt(), 1.0)
    return d


def _least_eigenvalue(factor: Tensor, steps: int = 4) -> float:
    """An upper bound on that of L L^T, by a few steps of inverse iteration from a fixed random start."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(len(factor), 1, generator=generator, dtype=torch.float64).to(factor.device)
    size = 0.0
    for _ in range(steps):
        x = torch.cholesky_solve(x / x.norm(), factor)
        size = float(x.norm())
    return 1.0 / size if size > 0 else float("inf")
