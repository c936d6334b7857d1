"""Solving where the curvature is, rather than moving it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias, cast, final

import torch
from torch import Tensor

from nhgd.inverse import AbstractInverse, Refined
from nhgd.inverse.base import SolveStats
from nhgd.oracle import Oracle
from nhgd.record import FisherKind, RecordKind
from nhgd.variable import Variable

Ask: TypeAlias = Callable[[Any, Tensor, Tensor], tuple[Tensor, SolveStats]]


@dataclass(frozen=True)
class RidgePoint:
    """All that an inverse which learns asks of a point: the ridge's Hessian, (D,), where the state is."""

    ridge: Tensor
    number: float | None = None  # where it is one number
    team: None = None  # who shares the work of a solve: nobody

    @property
    def problem(self) -> RidgePoint:
        """The ridge stands for the problem,"""
        return self

    @property
    def theta(self) -> RidgePoint:
        """and for theta,"""
        return self

    @property
    def device(self) -> torch.device:
        """of which the device is asked."""
        return self.ridge.device

    def ridge_diagonal(self) -> Tensor:
        """2 l2 for every coordinate of theta."""
        return self.ridge

    def ridge_number(self) -> float | None:
        """The same where it is one number."""
        return self.number


def ridge_point(u: Tensor, ridge: Tensor) -> Oracle:
    """The point of a solve for u, (D,): the ridge is (D,), or 0-dimensional in the host's memory."""
    number = float(ridge.to(u.dtype)) if ridge.ndim == 0 else None
    return cast(Oracle, RidgePoint(ridge.to(u).expand_as(u), number))


def solve_there(inverse: AbstractInverse, state: Any, u: Tensor, ridge: Tensor) -> tuple[Tensor, SolveStats]:
    """What is done where the state is, with u, (D,), moved there: the inverse's own solve."""
    return inverse.solve(state, u, ridge_point(u, ridge))


@final
@dataclass(frozen=True)
class RemoteInverse(AbstractInverse):
    """An inverse whose state is somewhere else: u and the ridge go there, x comes back.

    Args:
        inverse: what keeps the state; one that learns from records.
        ask: (state, u, ridge) -> x and its statistics. The state is what the executor's `snapshot` gives, perhaps only a
            token of the true one; the ridge is (D,), or 0-dimensional where it is the same everywhere.
    """

    inverse: AbstractInverse
    ask: Ask
    name: ClassVar[str] = "elsewhere"

    @property
    def label(self) -> str:
        """That of the inverse."""
        return self.inverse.label

    @property
    def records(self) -> RecordKind | None:
        """Those of the inverse."""
        return self.inverse.records

    @property
    def fisher(self) -> FisherKind:
        """That of the inverse."""
        return self.inverse.fisher

    def solve(self, state: Any, u: Tensor, at: Oracle, start: Tensor | None = None) -> tuple[Tensor, SolveStats]:
        """Ask, and bring x back to where u is."""
        x, stats = self.ask(state, u, compact_ridge(at))
        return x.to(u), stats

    def operator(self, state: Any, at: Oracle) -> Callable[[Tensor], Tensor]:
        """u -> x, the ridge found once."""
        ridge = compact_ridge(at)
        return lambda u: self.ask(state, u, ridge)[0].to(u)

    def memory(self, theta: Variable) -> int:
        """What the inverse holds, there."""
        return self.inverse.memory(theta)


def compact_ridge(at: Oracle) -> Tensor:
    """The ridge's Hessian, (D,), or one number when all of it is the same."""
    if not callable(at.problem.l2):
        return torch.tensor(2 * float(at.problem.l2), dtype=at.problem.theta.dtype)
    return at.problem.ridge_diagonal()


def standing_in(inverse: AbstractInverse, ask: Ask) -> AbstractInverse:
    """The inverse as the inner loop sees it: itself when it learns nothing, else asking for what it learnt."""
    if inverse.records is None:
        return inverse
    if isinstance(inverse, Refined):
        return replace(inverse, inverse=RemoteInverse(inverse.inverse, ask))
    return RemoteInverse(inverse, ask)


def learner(inverse: AbstractInverse) -> AbstractInverse:
    """The part of an inverse that has a state: what a refined one refines."""
    return inverse.inverse if isinstance(inverse, Refined) else inverse
