"""Conjugate gradients on the inner Hessian."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from torch import Tensor
from typing_extensions import override

from nhgd import _tape as tape
from nhgd._validation import counted, not_negative
from nhgd.inverse._krylov.pcg import pcg
from nhgd.inverse._learned.damping import check_damping
from nhgd.inverse.base import Iterative, SolveStats, vector_bytes
from nhgd.oracle import Oracle
from nhgd.variable import Variable


@final
@dataclass(frozen=True)
class CG(Iterative):
    """Conjugate gradients, with a stopping test and checks for negative and for vanishing curvature.

        r = u - H x,  p = r
        repeat:  alpha = r.r / p.Hp;  x += alpha p;  r_new = r - alpha Hp;  p = r_new + (r_new.r_new / r.r) p

    It stops after `steps` products, when |r| <= tol |u|, or when the curvature along p is not positive. If it is
    clearly negative, `notes["negative_curvature"]` is True. If it is no larger than the rounding error of the largest
    one seen, p may belong to a badly scaled parameter, or H may be singular: the iteration continues, and one more
    product shows whether the residual really fell. If it did not, x is reset, and the rest of u, the fraction
    `notes["outside"]` of its length, is outside the range of H. In both cases, and if the residual of the last iterate
    is longer than u or than ten times the least, x is the iterate of least residual.

    Args:
        steps: maximum number of products.
        tol: relative residual at which to stop.
        damping: added to the diagonal of H. "auto": the horizon's in a run; nothing elsewhere.

    >>> CG(steps=10, tol=1e-6).products
    10

    References: M. R. Hestenes, E. Stiefel, Methods of conjugate gradients for solving linear systems, 1952, section 3;
    J. Nocedal, S. J. Wright, Numerical Optimization, 2006, algorithms 5.2 and 7.1 (negative curvature).
    Deviations: 1. the iterate of least residual is the best combination of iterates (`LeastResidual`).
    """

    name: ClassVar[str] = "cg"
    steps_field: ClassVar[str | None] = "steps"
    steps: int = 40
    tol: float = 1e-8
    damping: float | Literal["auto"] = 0.0

    def __post_init__(self) -> None:
        counted("CG", steps=self.steps)
        not_negative("CG", tol=self.tol)
        check_damping("CG", self.damping)

    @property
    def follows_horizon(self) -> bool:
        """Whether its damping is "auto"."""
        return self.damping == "auto"

    @override
    def solve(self, u: Tensor, oracle: Oracle, start: Tensor | None = None) -> tuple[Tensor, SolveStats]:
        """Iterate from `start` if it is better than zero, else from zero."""
        before = oracle.calls.hvps
        # Below this the recursion continues with meaninglessly small numbers until they vanish.
        tol = max(self.tol, torch.finfo(u.dtype).eps ** 2)
        x, residual, notes = pcg("CG", lambda x: self._product(oracle, x), u, self.steps, tol, start)
        return x, SolveStats(
            residual, oracle.calls.hvps - before, tape.defer(lambda left: left <= tol, residual), notes
        )

    def _product(self, oracle: Oracle, x: Tensor) -> Tensor:
        found = oracle.hvp(x)
        return found if self.damping == "auto" or not self.damping else found.add_(x, alpha=self.damping)

    @override
    def memory(self, theta: Variable) -> int:
        """x, r, p and Hp, and the best x and r."""
        return vector_bytes(theta, 6)

    @property
    def products(self) -> int | None:
        """At most `steps`, one more to try a given start, and one if the curvature is of rounding size."""
        return self.steps
