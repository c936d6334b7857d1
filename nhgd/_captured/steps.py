"""A captured step, one that was replayed, and what an outer step gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from nhgd._captured.script import Script
from nhgd._solution import Row
from nhgd.algorithm import Loop


class StepSize(NamedTuple):
    """How many inner steps an outer step takes, and how many batches it draws."""

    steps: int
    inner: int
    outer: int

    @classmethod
    def since_start(cls, loop: Loop) -> StepSize:
        """Of all outer steps so far."""
        return cls(loop.clock.total, loop.inner.drawn, loop.outer.drawn)

    def minus(self, other: StepSize) -> StepSize:
        """Of those since another moment."""
        return StepSize(*(mine - its for mine, its in zip(self, other, strict=True)))


@dataclass
class CapturedStep:
    """A captured step.

    Attributes:
        script: the step.
        calls: how many derivatives it takes, by the name of their counter.
        counters: how much each integer of the states grows.
        wanted: comparisons before it is replayed.
        comparisons: how often its result was compared with that of an eager step.
        exact: whether the results were equal in every bit.
        since: replays since the last comparison.
        passes: how many gradients are taken of each inner batch, if shorter ones are filled up.
    """

    script: Script
    calls: dict[str, int]
    counters: dict[str, int]
    wanted: int
    comparisons: int = 0
    exact: bool = True
    since: int = 0
    passes: tuple[int, ...] = ()


@dataclass
class PendingStep:
    """A step that was launched, whose numbers have not been read yet."""

    graph: CapturedStep
    row: int
    step: int
    calls: dict[str, int]
    grown: dict[str, int]
    host_values: list[Any]
    done: Any = None  # event


@dataclass(frozen=True)
class StepResult:
    """An outer step: its row of the history, and the distance v moved where that is known."""

    row: Row
    stride: float | None = None
