"""The Nystrom approximation of the inner Hessian."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from typing_extensions import override

from nhgd._validation import counted, not_negative
from nhgd.errors import NonFiniteError
from nhgd.inverse._learned.damping import SHARE
from nhgd.inverse.base import POOR, Iterative, SolveStats, vector_bytes
from nhgd.oracle import Oracle
from nhgd.variable import Variable


@final
@dataclass(frozen=True)
class Nystrom(Iterative):
    """The Hessian approximated by some of its columns, and inverted by the Woodbury identity.

    The ridge R = diag(2 l2) is known, so only the rest H - R is approximated. With C = (H - R)[:, K], W = (H - R)[K, K]
    and `rank` columns K drawn at random without replacement,

        x = (C W^+ C^T + R + rho I)^{-1} u

    It is exact, but for rho, when `rank` columns span H - R: at full rank always. With more columns, drawn in the same
    order, C W^+ C^T never falls and u . x never grows.

    Args:
        rank: columns, one Hessian product each; one more measures the residual.
        rho: added to the diagonal. None: 0 where the ridge is above 0 for every parameter or the rank is full, else
            1e-3 of the mean diagonal of W.
        chunk: columns taken in one vectorised pass; fewer need less memory.

    >>> Nystrom(rank=10, rho=0.01).products
    11

    References: R. Hataya, M. Yamada, Nystrom method for accurate and scalable implicit differentiation, 2023, section
    3. Deviations: 1. the ridge is added exactly instead of being approximated, so rho, which biases the answer, can be
      0.
    2. Woodbury's identity is applied in the eigenbasis of the approximation, because C^T C / rho loses half of the
      digits.
    3. the columns follow from the seed of the point, so that one outer step repeats itself and the next has others.
    """

    name: ClassVar[str] = "nystrom"
    steps_field: ClassVar[str | None] = "rank"
    rank: int = 20
    rho: float | None = None
    chunk: int = 8

    def __post_init__(self) -> None:
        counted("Nystrom", rank=self.rank, chunk=self.chunk)
        if self.rho is not None:
            not_negative("Nystrom", rho=self.rho)

    @override
    def solve(self, u: Tensor, oracle: Oracle, start: Tensor | None = None) -> tuple[Tensor, SolveStats]:
        before = oracle.calls.hvps
        approximation = self._approximate(oracle, u)
        x = approximation.inverse(u)
        # The columns cannot show what they miss: checking that x solves the system takes another product.
        size = max(float(u.norm()), torch.finfo(u.dtype).tiny)
        left = oracle.hvp(x) - u
        if self.rho:  # the requested system is then the damped one
            left.add_(x, alpha=self.rho)
        residual = float(left.norm()) / size
        notes = {
            "rank": len(approximation.values),
            "rho": approximation.rho,
            "negative_curvature": approximation.indefinite,
        }
        converged = residual <= POOR and not approximation.indefinite
        return x, SolveStats(residual, oracle.calls.hvps - before, converged, notes)

    def operator(self, oracle: Oracle) -> Callable[[Tensor], Tensor]:
        """The columns are drawn once."""
        return self._approximate(oracle, oracle.problem.theta.flat()).inverse

    def _approximate(self, oracle: Oracle, like: Tensor) -> _Approximation:
        size = oracle.numel
        generator = torch.Generator().manual_seed(oracle.seed)
        chosen = torch.randperm(size, generator=generator)[: self.rank].to(like.device)
        ridge = oracle.problem.ridge_diagonal().double()
        rows = []
        for part in chosen.split(self.chunk):
            unit = like.new_zeros(len(part), size)
            unit[torch.arange(len(part), device=like.device), part] = 1.0
            rows.append(oracle.hvps(unit))
        columns = torch.cat(rows).T.double()  # (D, rank), of H
        places = torch.arange(len(chosen), device=like.device)
        columns[chosen, places] -= ridge[chosen]
        rho = self.rho
        if rho is None:
            known = bool((ridge > 0).all()) or len(chosen) == size
            rho = 0.0 if known else SHARE * float(columns[chosen, places].mean().abs())
        diagonal = ridge + rho
        if not bool((diagonal > 0).all()):  # no Woodbury identity: the ridge goes back into the columns
            columns[chosen, places] += ridge[chosen]
            diagonal.zero_()
        block = columns[chosen]  # W
        return _Approximation(columns, (block + block.T) / 2, diagonal, rho, torch.finfo(like.dtype).eps)

    @override
    def memory(self, theta: Variable) -> int:
        """The columns in theta's dtype, and three times in float64."""
        rank = min(self.rank, theta.numel)
        return vector_bytes(theta, rank + 4) + 3 * 8 * rank * theta.numel

    @property
    def products(self) -> int | None:
        """One for each column, and one for the residual."""
        return self.rank + 1


class _Approximation:
    """C W^+ C^T + D = D^{1/2} ( U diag(values) U^T + I ) D^{1/2}, with orthonormal columns in U.

    Where D is 0, it is U diag(values) U^T, inverted within its range.
    """

    def __init__(self, columns: Tensor, block: Tensor, diagonal: Tensor, rho: float, eps: float) -> None:
        self.rho = rho
        self.root = diagonal.sqrt() if bool((diagonal > 0).all()) else None
        weights, basis = _eigenvalues(block)
        # For directions with almost no weight the columns contain only rounding errors.
        kept = weights.abs() > len(columns) * eps * weights.abs().max()
        scaled = columns @ (basis[:, kept] / weights[kept].abs().sqrt())
        if self.root is not None:
            scaled = scaled / self.root[:, None]
        basis, triangle = torch.linalg.qr(scaled)
        values, turn = _eigenvalues(triangle @ torch.diag(weights[kept].sign()) @ triangle.T)
        self.values = values
        self.U: Tensor = basis @ turn  # (D, rank)
        # The Hessian of a net need not be positive definite; then the Woodbury identity still holds.
        self.indefinite = bool((values + (self.root is not None) <= 0).any())

    def inverse(self, u: Tensor) -> Tensor:
        """x for one u."""
        right: Tensor = u.double() if self.root is None else u.double() / self.root
        seen = self.U.T @ right
        if self.root is None:
            found: Tensor = self.U @ (seen / self.values)
            return found.to(u.dtype)
        found = self.U @ (seen / (1 + self.values))
        if self.U.shape[1] < len(u):  # otherwise only rounding errors are outside of U
            found += right - self.U @ seen
        return (found / self.root).to(u.dtype)


def _eigenvalues(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Of a small symmetric matrix, on the CPU: a GPU's solver can fail on many equal eigenvalues."""
    if not bool(torch.isfinite(matrix).all()):
        raise NonFiniteError("Nystrom: the columns of the Hessian contain nan or inf.")
    values, vectors = torch.linalg.eigh(matrix.cpu())
    return values.to(matrix.device), vectors.to(matrix.device)
