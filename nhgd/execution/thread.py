"""Curvature kept in a thread of its own."""

from __future__ import annotations

from typing import ClassVar, final

from nhgd.execution.beside import AbstractBeside
from nhgd.execution.stopwatch import Stopwatch
from nhgd.variable import Variable


@final
class Thread(AbstractBeside):
    """In a second thread: the inner loop goes on while records are folded in.

    The arithmetic runs outside Python's lock, so it truly overlaps where there are cores for both. Nothing is copied. The
    state is that of the inline run, bit for bit, once drained.

    Args:
        max_lag: how many records may be outstanding before an inner step waits; default 8.
        stale: take the curvature as it stands when the inner loop ends, instead of waiting for the outstanding records.

    >>> Thread(max_lag=2).max_lag
    2
    """

    name: ClassVar[str] = "thread"

    def _prepare(self, theta: Variable) -> None:
        self._busy = Stopwatch(theta.device)
