"""Solving where the curvature is kept, instead of moving it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias, final

from torch import Tensor
from typing_extensions import override

from nhgd.inverse.base import AbstractInverse, Learned, SolveStats
from nhgd.inverse.capabilities import label, with_learner
from nhgd.record import FisherKind, InnerRecord, RecordKind
from nhgd.ridge import Ridge
from nhgd.variable import Variable

# (state, u, ridge, error=None) -> x and its statistics; with an error, what of u exceeds it, and None
Ask: TypeAlias = Callable[..., tuple[Tensor, SolveStats | None]]


@final
@dataclass(frozen=True)
class RemoteInverse(Learned[Any]):
    """A learned inverse whose state is kept somewhere else: u and the ridge go there, x comes back.

    Args:
        inverse: what keeps the state.
        ask: solves there. The state is what the executor's `state` gives, perhaps only a token of the true one.
    """

    inverse: Learned[Any]
    ask: Ask
    name: ClassVar[str] = "remote"

    @property
    def label(self) -> str:
        """The label of the inverse."""
        return label(self.inverse)

    @property
    @override
    def records(self) -> RecordKind:
        return self.inverse.records

    @property
    @override
    def fisher(self) -> FisherKind:
        return self.inverse.fisher

    @override
    def init(self, theta: Variable) -> Any:
        return self.inverse.init(theta)

    @override
    def observe(self, state: Any, record: InnerRecord) -> Any:
        return self.inverse.observe(state, record)

    @override
    def solve(self, state: Any, u: Tensor, ridge: Ridge) -> tuple[Tensor, SolveStats]:
        x, stats = self.ask(state, u, ridge)
        assert stats is not None
        return x.to(u), stats

    def significant(self, state: Any, u: Tensor, error: Tensor) -> tuple[Tensor, Any]:
        """What of u exceeds its sampling error."""
        return self.ask(state, u, Ridge(0.0), error)[0].to(u), state

    @override
    def memory(self, theta: Variable) -> int:
        return self.inverse.memory(theta)


def asking(inverse: AbstractInverse, ask: Ask) -> AbstractInverse:
    """The inverse as the inner loop sees it: its learner, if any, solves remotely."""
    learner = inverse.learner
    return inverse if learner is None else with_learner(inverse, RemoteInverse(learner, ask))
