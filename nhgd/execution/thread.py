"""Curvature kept in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, final

import torch

from nhgd.execution._background import AbstractBackground
from nhgd.execution._stopwatch import Stopwatch
from nhgd.variable import Variable


@final
class Thread(AbstractBackground):
    """In a second thread: records are folded in while the inner loop continues.

    The arithmetic runs outside Python's lock, so it overlaps if there are cores for both. Nothing is copied. The
    state is that of the inline run, bit for bit, once drained.

    Args:
        max_lag: how many records may be outstanding before an inner step waits; default 8.
        stale: take the current curvature at the end of the inner loop, instead of waiting for the outstanding records.

    >>> Thread(max_lag=2).max_lag
    2
    """

    name: ClassVar[str] = "thread"

    _device: torch.device | None = None

    def _prepare(self, theta: Variable) -> None:
        if self._device != theta.device:
            self._device = theta.device
            self.busy = Stopwatch(theta.device)

    def _mark(self) -> Callable[[], None]:
        if self._device is None or self._device.type != "cuda":
            return lambda: None
        # What the thread launches comes after what this one has launched, on the same stream.
        stream = torch.cuda.current_stream(self._device)
        return lambda: torch.cuda.set_stream(stream)
