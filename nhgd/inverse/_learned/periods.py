"""Learned inverses that record a part of the inner steps: at given periods, or within a budget."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, TypeVar

from typing_extensions import override

from nhgd._recording.sampling import Sampling
from nhgd.inverse._learned.effort import Effort
from nhgd.inverse.base import Learned
from nhgd.record import RecordKind

S = TypeVar("S")
OVERHEAD = 0.1  # of the inner loop, by default


@dataclass(frozen=True)
class Periodic(Learned[S]):
    """A learned inverse that takes a record at given periods, or as an `overhead` allows."""

    @property
    def factor_every(self) -> int:
        """Inner steps from one record to the next, unless an effort decides."""
        return 1

    @property
    @abstractmethod
    def overhead(self) -> float | None:
        """The share of an inner loop's cost that curvature may take in a run; None: the periods are given."""

    @property
    @abstractmethod
    def effort(self) -> Effort | None:
        """What the overhead allows for a model and its batches; None: not decided yet, or nothing to decide."""

    def needs_record(self, step: int) -> bool:
        """Every `factor_every`-th step, or as the effort decides."""
        return step % self.factor_every == 0 if self.effort is None else self.effort.records(step)

    def signature(self, first: int, steps: int, observed: int) -> tuple[Any, ...]:
        """What decides which work some inner steps do, after `observed` observations, numbers aside."""
        found: list[Any] = []
        for step in range(first, first + steps):
            if not self.needs_record(step):
                found.append(None)
                continue
            observed += 1
            taken = self.sampling(step)
            full = self.effort is not None and self.effort.in_full(observed)
            small = None if self.effort is None else self.effort.refreshes(observed)
            found.append((taken and taken[:2], full, small, self.is_due(observed)))
        return tuple(found)

    def is_due(self, observed: int) -> bool:
        """Whether more than usual is done at this observation."""
        return False

    def sampling(self, step: int) -> Sampling | None:
        """How much of the record the effort takes."""
        return None if self.effort is None else self.effort.sampling(step)


@dataclass(frozen=True)
class LayerMeans(Periodic[S]):
    """Running means of layer statistics. Each layer, or each parameter, has a block of its own."""

    @property
    @override
    def records(self) -> RecordKind:
        return "layer"

    @property
    def reduces(self) -> bool:
        """Means over samples are all it takes of a batch."""
        return True

    @property
    def couples(self) -> bool:
        """No product of two blocks is taken."""
        return False
