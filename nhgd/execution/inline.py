"""Curvature kept in the thread of the inner loop."""

from __future__ import annotations

from typing import Any, ClassVar, final

from nhgd.execution.base import AbstractExecutor
from nhgd.inverse.base import AbstractInverse
from nhgd.record import InnerRecord
from nhgd.variable import Variable


@final
class Inline(AbstractExecutor):
    """In the inner loop's own thread: each record is folded in before the next inner step."""

    name: ClassVar[str] = "inline"

    def start(self, inverse: AbstractInverse, theta: Variable) -> None:
        """Make the first state."""
        self._inverse = inverse
        self._state: Any = inverse.init(theta)

    def begin(self) -> None:
        """Tell the inverse that a new outer step begins."""
        self._state = self._inverse.begin(self._state)

    def submit(self, record: InnerRecord) -> None:
        """Fold the record in at once."""
        self._state = self._inverse.observe(self._state, record)

    def snapshot(self) -> tuple[Any, int]:
        """The state; it never lags."""
        return self._state, 0

    def restore(self, state: Any) -> None:
        """Go on from this state."""
        self._state = state

    def drain(self) -> None:
        """Nothing is ever outstanding."""

    def close(self) -> None:
        """Nothing to let go of."""
