"""Timing of work on its own device, without synchronisation."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Adds up the time of marked sections: by the clock on the CPU, by events on a CUDA device.

    Events are only noted as the work is launched; the time between them is read later, so that nothing waits for it.
    One thread may mark sections while another reads.

    >>> watch = Stopwatch(torch.device("cpu"))
    >>> with watch.running():
    ...     _ = sum(range(1000))
    >>> watch.take() > 0, watch.take()
    (True, 0.0)
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ended: deque[float] = deque()
        self._events: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        # Read and ready for reuse: end events may still be referenced elsewhere
        self._free: deque[torch.cuda.Event] = deque()

    @contextmanager
    def running(self) -> Iterator[torch.cuda.Event | None]:
        """The time of this section counts, on the stream that is current here; the event of its end, on a CUDA
        device.
        """
        if self._device.type != "cuda":
            began = time.perf_counter()
            try:
                yield None
            finally:
                self._ended.append(time.perf_counter() - began)
            return
        stream = torch.cuda.current_stream(self._device)
        first, last = self.begin(stream), torch.cuda.Event(enable_timing=True)
        try:
            yield last
        finally:
            self.end(first, stream, last)

    def begin(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Start a section on a stream; pass the returned event to `end`."""
        first = self._free.popleft() if self._free else torch.cuda.Event(enable_timing=True)  # one thread begins
        first.record(stream)
        return first

    def end(
        self, first: torch.cuda.Event, stream: torch.cuda.Stream, last: torch.cuda.Event | None = None
    ) -> torch.cuda.Event:
        """It ends there; the event of its end."""
        last = torch.cuda.Event(enable_timing=True) if last is None else last
        last.record(stream)
        self._events.append((first, last))
        return last

    def take(self) -> float:
        """The seconds of the sections that have ended since the last call."""
        found = 0.0
        while self._ended:
            found += self._ended.popleft()
        while self._events and self._events[0][1].query():
            first, last = self._events.popleft()
            found += first.elapsed_time(last) / 1000
            self._free.append(first)
        return found
