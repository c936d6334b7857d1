"""The interface of estimators of grad Phi, and their result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from nhgd._registry import summary
from nhgd._validation import Validated
from nhgd.data.batch import Batch
from nhgd.errors import NonFiniteError
from nhgd.inverse.base import AbstractInverse, SolveStats
from nhgd.losses import check_weight
from nhgd.objective import OracleCalls
from nhgd.problem import Bilevel
from nhgd.schedule import Learnt
from nhgd.variable import Like


@dataclass(frozen=True)
class Hypergradient:
    """An estimate of grad Phi(v).

    Attributes:
        grad: shaped like v: a Tensor for a Tensor, a dict by parameter name for a dict or a module.
        value: the outer loss.
        stats: how the linear solve went.
        leaves: the same gradient, one tensor for each leaf of v.
        adjoint: x = H^{-1} grad_theta f where the estimator has one, (D,); a first guess for the next outer step.
    """

    grad: Like
    value: float
    stats: SolveStats
    leaves: list[Tensor] = field(repr=False, default_factory=list)
    adjoint: Tensor | None = field(repr=False, default=None)

    def check(self, problem: Bilevel, by: str) -> None:
        """Refuse numbers that are not finite, and weights below 0, which may be why; `by` is what made the estimate."""
        check_weight(problem.lowest_weight())
        if not all(bool(torch.isfinite(leaf).all()) for leaf in self.leaves):
            raise NonFiniteError(
                f"The hypergradient by {by} contains nan or inf. Train the inner problem further, add l2, or use"
                " another inverse, such as cg; nhgd.check compares them."
            )


@dataclass(frozen=True)
class AbstractHypergradient(Validated, ABC):
    """A way to get grad Phi(v) at the problem's current theta and v, which stay as they are."""

    name: ClassVar[str]
    inverts: ClassVar[bool] = True  # whether it uses the inverse it is handed

    @property
    def learnt_rate(self) -> Learnt | None:
        """The inner step size, if it is a function of v."""
        return None

    @abstractmethod
    def estimate(
        self,
        problem: Bilevel,
        inner_batches: Sequence[Batch],
        outer_batch: Batch,
        inverse: AbstractInverse,
        seed: int = 0,
        calls: OracleCalls | None = None,
    ) -> Hypergradient:
        """The estimate from these batches."""

    @classmethod
    def summary(cls) -> str:
        """The first line of the docstring."""
        return summary(cls)
