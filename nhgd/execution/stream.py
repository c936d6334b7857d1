"""Curvature kept on a second CUDA stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, final

import torch

from nhgd.errors import InputError
from nhgd.execution.base import Traffic
from nhgd.execution.beside import AbstractBeside
from nhgd.execution.elsewhere import learner
from nhgd.execution.replay import Replay
from nhgd.execution.stopwatch import Stopwatch
from nhgd.record import InnerRecord, tensors
from nhgd.variable import Variable


@final
class Stream(AbstractBeside):
    """On a second stream of the same GPU: kernels of both run side by side where the GPU has room.

    A thread launches on the side stream, because some factorisations make their caller wait. The two streams wait for
    each other by events and the processor waits for neither: the side stream for the inner step that made a record, the
    inner stream for the last record before a solve. Memory that one stream made and the other reads is kept until both are
    done with it. The inner loop runs on a stream of high priority, so that its many small kernels pass those of the
    curvature; and what an inverse does alike for each record is a CUDA graph, because each kernel that a second thread
    launches by itself holds the first one up.

    Args:
        max_lag: how many records may be waiting to be launched before an inner step waits; default 8.
        stale: take the curvature as it stands when the inner loop ends, instead of waiting for the outstanding records.

    >>> Stream(max_lag=2).max_lag
    2
    """

    name: ClassVar[str] = "stream"
    _side: torch.cuda.Stream | None = None

    def _prepare(self, theta: Variable) -> None:
        if theta.device.type != "cuda":
            raise InputError(
                f"stream execution needs theta on a CUDA device, and it is on {theta.device}. Use execution='thread'."
            )
        if self._side is None or self._side.device != theta.device:
            self._side = torch.cuda.Stream(theta.device)
            self._inner = torch.cuda.Stream(theta.device, priority=-1)
            self._waiting = Stopwatch(theta.device)
            self._busy = Stopwatch(theta.device)
        self._side.wait_stream(torch.cuda.current_stream(theta.device))  # the first state is made on the inner stream
        self._replay = Replay()

    def _mark(self) -> Callable[[], None]:
        side = self._side
        assert side is not None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(side.device))
        return lambda: side.wait_event(event)

    def _received(self, record: InnerRecord) -> InnerRecord:
        assert self._side is not None
        for tensor in tensors(record):
            tensor.record_stream(self._side)
        return record

    def _folded(self, state: Any, record: InnerRecord) -> Any:
        kept: Any = learner(self._inverse)
        steady = kept.steady(state, record)
        if steady is None:
            return kept.observe(state, record)
        return kept.observe(state, record, self._replay(steady, record))

    @contextmanager
    def scope(self) -> Iterator[None]:
        """An outer step runs on the inner stream, after what was launched before it and before what comes next."""
        if self._side is None:
            yield
            return
        here = torch.cuda.current_stream(self._side.device)
        self._inner.wait_stream(here)
        try:
            with torch.cuda.stream(self._inner):
                yield
        finally:
            here.wait_stream(self._inner)

    @contextmanager
    def _there(self) -> Iterator[None]:
        assert self._side is not None
        with torch.cuda.device(self._side.device), torch.cuda.stream(self._side):
            yield

    def submit(self, record: InnerRecord) -> None:
        """Queue the record; with max_lag=0 the inner stream waits for it."""
        super().submit(record)
        if self.max_lag == 0:
            self._join()

    def snapshot(self) -> tuple[Any, int]:
        """The state, which the inner stream reads after the side stream's last work on it."""
        state, lag = super().snapshot()
        if self._side is not None and state is not None:
            self._join()
            here = torch.cuda.current_stream(self._side.device)
            for tensor in state.tensors().values():
                if tensor.is_cuda:
                    tensor.record_stream(here)
        return state, lag

    def _join(self) -> None:
        assert self._side is not None
        with self._waiting.running():
            torch.cuda.current_stream(self._side.device).wait_stream(self._side)

    def measured(self) -> Traffic:
        """What was done so far."""
        if self._side is not None:
            self.traffic.waited_seconds += self._waiting.take()
        return super().measured()
