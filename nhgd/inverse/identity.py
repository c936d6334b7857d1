"""T1-T2: pretend that the Hessian is the identity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor
from typing_extensions import override

from nhgd._validation import positive
from nhgd.inverse.base import Iterative, SolveStats
from nhgd.oracle import Oracle
from nhgd.variable import Variable


@final
@dataclass(frozen=True)
class Identity(Iterative):
    """T1-T2: the Hessian taken as a multiple of the identity, no product at all.

        x = scale * u

    Args:
        scale: the inverse curvature.

    >>> Identity(scale=0.5).name
    'identity'

    References: J. Luketina, M. Berglund, K. Greff, T. Raiko, Scalable gradient-based tuning of continuous
    regularization hyperparameters, 2016, section 3.
    Deviations: 1. the paper multiplies by the inner learning rate; here that is `scale`, 1 by default.
    """

    name: ClassVar[str] = "identity"
    squares: ClassVar[bool] = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        positive("Identity", scale=self.scale)

    @override
    def solve(self, u: Tensor, oracle: Oracle, start: Tensor | None = None) -> tuple[Tensor, SolveStats]:
        return self.scale * u, SolveStats(residual=None, hvps=0, converged=True)

    @override
    def memory(self, theta: Variable) -> int:
        return 0
