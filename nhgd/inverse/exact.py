"""The dense Hessian, for small problems and as the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from nhgd.errors import InputError, counted, not_negative
from nhgd.inverse.base import AbstractInverse, SolveStats
from nhgd.point import Point
from nhgd.variable import Variable


@final
@dataclass(frozen=True)
class Exact(AbstractInverse):
    """The dense Hessian, formed by D products and solved directly.

        x = (H + damping I)^{-1} u

    A positive definite H is solved by Cholesky, any other by LU, and `notes["positive_definite"]` says which. The solve
    is in float64 whatever the dtype of theta.

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
        if at.numel > self.max_dim:
            raise InputError(
                f"Exact would form a {at.numel} x {at.numel} matrix by {at.numel} Hessian products. Use cg, or raise"
                f" max_dim (now {self.max_dim}) if you mean it."
            )
        before = at.calls.hvps
        hessian = at.dense().double()
        hessian.diagonal().add_(self.damping)
        b = u.double()
        factor, info = torch.linalg.cholesky_ex(hessian)
        definite = int(info) == 0
        if definite:
            x = torch.cholesky_solve(b[:, None], factor)[:, 0]
        else:
            x, singular = torch.linalg.solve_ex(hessian, b)
            if int(singular) != 0:
                x = torch.linalg.lstsq(
                    hessian, b[:, None], driver="gelsd" if b.device.type == "cpu" else None
                ).solution[:, 0]
        residual = float((hessian @ x - b).norm() / b.norm().clamp_min(torch.finfo(torch.float64).tiny))
        notes = {"positive_definite": definite}
        return x.to(u.dtype), SolveStats(residual, at.calls.hvps - before, residual < 1e-6, notes)

    def memory(self, theta: Variable) -> int:
        """H in theta's dtype, and twice in float64."""
        return theta.numel**2 * (theta.dtype.itemsize + 16)

    @property
    def products(self) -> int | None:
        """D of them."""
        return None
