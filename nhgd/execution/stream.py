"""Curvature kept on a second CUDA stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, TypeAlias, final

import torch
from torch import Tensor
from typing_extensions import override

from nhgd._tree import tensors
from nhgd.errors import InputError
from nhgd.execution._background import AbstractBackground
from nhgd.execution._cuda_graph import GraphCache
from nhgd.execution._queue import Launched
from nhgd.execution._stopwatch import Stopwatch
from nhgd.execution.base import Traffic
from nhgd.inverse._learned.graph import SupportsGraph
from nhgd.inverse.base import AbstractInverse
from nhgd.inverse.capabilities import begun
from nhgd.record import BatchGradient, InnerRecord
from nhgd.variable import Variable

TOGETHER = 5  # records, for which one launch is worth the wait of the first
PLACES = 64  # launches that may be unchecked at a time

Gathered: TypeAlias = tuple[InnerRecord, list[Tensor], list[tuple[Tensor, int]]]  # its tensors, and their versions


@final
class Stream(AbstractBackground):
    """On a second stream of the same GPU: kernels of both streams run concurrently if the GPU has room.

    A thread launches on the side stream, because some factorisations block the caller. The two streams synchronise by
    events: the side stream waits for the inner step that made a record, the inner stream for the last record before a
    solve. Memory that one stream made and the other reads is kept until both are done with it. The inner loop runs on a
    stream of high priority, so that its many small kernels overtake those of the curvature. Work that is the same for
    each record is a CUDA graph, because each kernel launch of the second thread delays the first. If a graph is all of
    a record's work, the inner loop collects a few records and launches one graph for them itself; its results are
    checked later.

    Args:
        max_lag: how many records may be outstanding before an inner step waits; default 8.
        stale: take the current curvature at the end of the inner loop, instead of waiting for the outstanding records.

    >>> Stream(max_lag=2).max_lag
    2
    """

    name: ClassVar[str] = "stream"
    _side: torch.cuda.Stream | None = None
    _replayed: tuple[AbstractInverse, Any] | None = None  # the inverse and the sizes of theta that the graphs are for
    _within = False  # whether an outer step is being taken, on the inner stream
    _ahead: Any = None  # the state after the work launched here, except for numbers not known yet
    _log: Tensor | None = None  # of those numbers, on the device: a place for each launch, and then the first again
    _beginning = False  # whether the next launch must start a new outer step of the inverse

    def __init__(self, max_lag: int | None = None, stale: bool = False) -> None:
        super().__init__(max_lag, stale)
        self._gathered: list[Gathered] = []

    def _prepare(self, theta: Variable) -> None:
        if theta.device.type != "cuda":
            raise InputError(
                f"stream execution needs theta on a CUDA device, and it is on {theta.device}. Use execution='thread'."
            )
        if self._side is None or self._side.device != theta.device:
            self._side = torch.cuda.Stream(theta.device)
            self._replayed = None
            self._inner = torch.cuda.Stream(theta.device, priority=-1)
            self._waiting = Stopwatch(theta.device)
            self.busy = Stopwatch(theta.device)
        if self._replayed is None or self._replayed[0] is not self.inverse or self._replayed[1] != theta.sizes:
            self._replay, self._replayed, self._log = GraphCache(), (self.inverse, theta.sizes), None
        elif self._log is not None:
            self._place.zero_()
        self._repeating = self.learner if isinstance(self.learner, SupportsGraph) else None
        self._side.wait_stream(torch.cuda.current_stream(theta.device))  # the first state is made on the inner stream
        self._marker = torch.cuda.Event()
        self._several = torch.cuda.device_count() > 1
        self._together = min(TOGETHER, self.max_lag // 2 + 1)
        self._gathered.clear()
        self._ahead = None
        self._ahead_of: dict[type[Any], bool] = {}
        self._beginning = self._under_way = False
        self._next = 0

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
        learner = self._repeating
        graphable = None if learner is None else learner.graphable(state, record)
        if learner is None or graphable is None:
            return super()._folded(state, record)
        return learner.observe(state, record, self._replay([graphable], [record], _only, capture=False))

    @contextmanager
    @override
    def scope(self) -> Iterator[None]:
        """Run an outer step on the inner stream, after earlier work and before later work."""
        if self._side is None:
            yield
            return
        here = torch.cuda.current_stream(self._side.device)
        self._marker.record(here)
        self._inner.wait_event(self._marker)
        device = self._switch(self._inner)
        self._within = True
        try:
            yield
        finally:
            self._within = False
            self._switch(here, device)
            self._marker.record(self._inner)
            here.wait_event(self._marker)

    def _current(self) -> torch.cuda.Stream:
        """The stream of the inner loop; torch is queried only outside of `scope`, because that is slow."""
        assert self._side is not None
        return self._inner if self._within else torch.cuda.current_stream(self._side.device)

    def _switch(self, stream: torch.cuda.Stream, device: int | None = None) -> int | None:
        """Make a stream current, and a device if one is given; returns the previous device if there are several."""
        before = torch.cuda.current_device() if self._several else None
        torch.cuda.set_stream(stream)
        if device is not None:
            torch.cuda.set_device(device)
        return before

    @contextmanager
    def _there(self) -> Iterator[None]:
        assert self._side is not None
        with torch.cuda.device(self._side.device), torch.cuda.stream(self._side):
            yield

    @contextmanager
    def _on_side(self) -> Iterator[None]:
        """In the inner loop's thread: launch work on the side stream, after everything launched before."""
        side, inner = self._side, self._current()
        assert side is not None
        device = self._on(side, inner)
        try:
            yield
        finally:
            self._switch(inner, device)

    def _on(self, stream: torch.cuda.Stream, before: torch.cuda.Stream) -> int | None:
        """Make a stream current, synchronised with the other one; see `_switch`."""
        self._marker.record(before)  # one event for all: a stream waits for what it meant when asked
        stream.wait_event(self._marker)
        return self._switch(stream)

    @override
    def begin(self) -> None:
        self._catch_up()
        if not self.queue.is_open or self.queue.unfinished:
            super().begin()
            return
        self.queue.raise_error()
        self._beginning = True

    @override
    def submit(self, record: InnerRecord) -> None:
        """Gather the record, to be launched from here, or queue it for the thread."""
        if not self._direct(record):
            self._catch_up()
            if self._replay.due and not self.queue.unfinished and self.queue.is_open:
                self._prepare_graph(record)
            super().submit(record)
            return
        self.queue.raise_error()
        gathered = self._gathered
        given = tensors(record)
        gathered.append((record, given, [(t, t._version) for t in given]))
        if len(gathered) >= self._together:
            self._launch()
        self.traffic.records += 1
        self.hold_back(self.outstanding() if self._under_way else len(self._gathered))

    def _prepare_graph(self, record: InnerRecord) -> None:
        graphable = None if self._repeating is None else self._repeating.graphable(self.queue.state, record)
        if graphable is not None:
            with self._on_side():
                self._replay.prepare(graphable, record, _only)

    def _direct(self, record: InnerRecord) -> bool:
        """Whether all of a record's work can be launched from here, before the results of the one before are known."""
        if self.queue.unfinished or not self.queue.is_open:
            return False
        kind = type(record)
        found = self._ahead_of.get(kind)
        if found is None:
            graphable = None if self._repeating is None else self._repeating.graphable(self.queue.state, record)
            found = self._ahead_of[kind] = graphable is not None and graphable.speculative is not None
        # The gradient of a batch is in memory of its own, and all this is time of the inner loop.
        return found and (kind is BatchGradient or not any(map(self.moves, tensors(record))))

    def _launch(self) -> None:
        """Launch the work on the collected records, after that of a new outer step if one has begun."""
        if not self._gathered and not self._beginning:
            return
        side, inner = self._side, self._current()
        assert side is not None
        while len(self.queue.launched) > min(self.max_lag, PLACES - 2):
            self.queue.finish_oldest()  # done long ago: no more than `max_lag` records are not
        gathered, self._gathered = self._gathered, []
        began = self._on(side, inner)
        try:
            if self._beginning:
                self._beginning = False
                with torch.no_grad():
                    assert self.learner is not None
                    self.queue.state = begun(self.learner, self.queue.state)
            if gathered:
                self._launch_records(gathered, side)
        finally:
            self._switch(inner, began)

    def _launch_records(self, gathered: list[Gathered], side: torch.cuda.Stream) -> None:
        learner, busy = self._repeating, self.busy
        assert learner is not None
        assert busy is not None
        records, given, versions, graphables = [], [], [], []
        state = self.queue.state if self._ahead is None else self._ahead
        for record, some, pairs in gathered:
            records.append(record)
            given.append(some)
            versions += pairs
            graphable = learner.graphable(state, record)
            assert graphable is not None
            graphables.append(graphable)
            state = graphable.speculative
        began = busy.begin(side)
        self._replay(graphables, records, self._noted, given)
        done = busy.end(began, side)
        place, self._next = self._next, (self._next + 1) % len(self._shown)

        def late(state: Any) -> Any:
            for graphable, row in zip(graphables, self._shown[place].tolist(), strict=False):
                assert graphable.finalise is not None
                state = graphable.finalise(state, row)
            return state

        self.queue.launched.append(Launched(done, versions, len(records), late))
        self._under_way = True
        self._ahead = state

    def _noted(self, found: list[Tensor]) -> None:
        """Write the results for some records into the log. This is part of the graph, so the device counts the rows."""
        numbers = torch.stack(found)
        if self._log is None:
            # More rows than unchecked launches, so that none is overwritten before it is read.
            self._log = numbers.new_zeros(min(self.max_lag + 2, PLACES), TOGETHER, *numbers.shape[1:])
            self._place = torch.zeros(1, dtype=torch.int64, device=numbers.device)
            self._shown = torch.zeros_like(self._log, device="cpu", pin_memory=self._log.is_cuda)
        self._log[:, : len(found)].index_copy_(0, self._place, numbers[None])
        self._place.add_(1).remainder_(len(self._log))
        self._shown.copy_(self._log, non_blocking=True)  # a value written twice during a read is the same

    @override
    def outstanding(self) -> int:
        """How many records are not in the state yet, also those that are not launched."""
        queue = self.queue
        if not queue.unfinished and queue.launched and queue.launched[-1].done.query():
            self._under_way = False
            return len(self._gathered)
        return len(self._gathered) + super().outstanding()

    def _catch_up(self) -> None:
        """Check results that were launched here, before the thread takes over the state."""
        self._launch()
        if self._ahead is not None:
            self.queue.wait(lambda: not self.queue.launched)
            self._ahead = None

    @override
    def inner_loop_ended(self) -> bool:
        """Launch the collected records; the host does not wait for work launched here."""
        self._launch()
        return super().inner_loop_ended()

    @override
    def drain(self) -> None:
        """Wait until every submitted record is folded in."""
        self._launch()
        super().drain()
        self._ahead = None

    @override
    def raise_deferred(self) -> None:
        """Check what the device has found so far, without waiting."""
        super().raise_deferred()
        if not self.queue.launched and not self._gathered:
            self._ahead = None

    def _copied(self) -> tuple[Any, Callable[[], None]]:
        state = self.queue.state.clone()
        event = torch.cuda.Event()
        event.record(self._side)
        return state, lambda: self._join(event)

    @override
    def state(self, wait: bool = False) -> tuple[Any, int]:
        """The state, which the inner stream reads after the side stream's work on it."""
        self._launch()
        state, lag = super().state(wait)
        if self._side is not None and state is not None:
            if state is self.queue.state:
                self._marker.record(self._side)
                self._join(self._marker)
                state = state if self._ahead is None else self._ahead
            here = self._current()
            for tensor in state.tensors().values():
                if tensor.is_cuda:
                    tensor.record_stream(here)
        return state, lag

    @override
    def start(self, inverse: AbstractInverse, theta: Variable, v: Variable | None = None) -> None:
        super().start(inverse, theta, v)
        self._take_over()

    @override
    def restore(self, state: Any) -> None:
        super().restore(state)
        self._mark()()
        self._take_over()

    def _take_over(self) -> None:
        """Let the side stream use a state made elsewhere: its memory is kept alive until then."""
        assert self._side is not None
        for tensor in () if self.queue.state is None else self.queue.state.tensors().values():
            if tensor.is_cuda:
                tensor.record_stream(self._side)

    def _join(self, event: torch.cuda.Event) -> None:
        here = self._current()
        began = self._waiting.begin(here)
        here.wait_event(event)
        self._waiting.end(began, here)

    @override
    def close(self) -> None:
        """Stop the thread; queued records are dropped."""
        self._gathered.clear()
        self._beginning = False
        super().close()

    @override
    def measured(self) -> Traffic:
        if self._side is not None:
            self.traffic.waited_seconds += self._waiting.take()
        return super().measured()


def _only(found: list[Any]) -> Any:
    return found[0]
