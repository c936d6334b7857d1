"""Curvature updated by a thread while the inner loop runs: the common part of thread, stream and device."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor
from typing_extensions import override

from nhgd._tree import map_tensors, tensors
from nhgd.errors import NhgdError
from nhgd.execution._queue import Launched, Queue
from nhgd.execution._stopwatch import Stopwatch
from nhgd.execution.base import AbstractExecutor, Curvature, Traffic
from nhgd.inverse.base import AbstractInverse, Learned
from nhgd.inverse.capabilities import begun
from nhgd.record import InnerRecord
from nhgd.variable import Variable


class AbstractBackground(AbstractExecutor):
    """Records wait in a queue of at most `max_lag`; one thread folds them in, in order.

    The order and the code are those of the inline run, so the final state is the same. Backends override the methods
    with an underscore.

    Attributes:
        queue: the pending records, and the state.
        busy: the time of the curvature work on its device; made by `_prepare`.
    """

    def __init__(self, max_lag: int | None = None, stale: bool = False) -> None:
        super().__init__(max_lag, stale)
        self.queue = Queue(self.name, self.traffic)
        self.busy: Stopwatch | None = None
        self._moving: set[int] = set()

    @override
    def start(self, inverse: AbstractInverse, theta: Variable, v: Variable | None = None) -> None:
        self.drain()
        super().start(inverse, theta, v)
        for variable in (theta, v):
            if variable is not None:
                self._moving |= {leaf.untyped_storage().data_ptr() for leaf in variable.leaves}
        self._prepare(theta)
        self.queue.state = None if self.learner is None else self._first(self.learner, theta)
        if self.learner is not None:
            self.queue.open(self._there)

    @abstractmethod
    def _prepare(self, theta: Variable) -> None:
        """Create what the backend needs for this theta, and the stopwatch `busy` of the curvature work."""

    def _first(self, learner: Learned[Any], theta: Variable) -> Any:
        """The first state, on the device of the curvature."""
        return learner.init(theta)

    def _mark(self) -> Callable[[], None]:
        """In the inner loop's thread: how the worker thread waits for the work launched so far."""
        return lambda: None

    def _received(self, record: InnerRecord) -> InnerRecord:
        """In the worker thread: the record on the device of the curvature."""
        return record

    def _folded(self, state: Any, record: InnerRecord) -> Any:
        """In the thread: the state after a record."""
        assert self.learner is not None
        return self.learner.observe(state, record)

    def _copied(self) -> tuple[Any, Callable[[], None]]:
        """In the thread: a copy of the state, and how the inner loop's thread waits for it."""
        return self.queue.state.clone(), lambda: None

    @contextmanager
    def _there(self) -> Iterator[None]:
        """The setting of all work on the state, in the thread."""
        yield

    @override
    def begin(self) -> None:
        """Start a new outer step of the inverse, after the records before it."""
        learner, queue = self.learner, self.queue
        if not queue.is_open or learner is None:
            return
        wait = self._mark()

        def work() -> None:
            wait()
            queue.state = begun(learner, queue.state)

        queue.put(work)

    @override
    def submit(self, record: InnerRecord) -> None:
        """Queue the record; wait while more than `max_lag` are outstanding."""
        given = tensors(record)
        if any(map(self.moves, given)):
            record = map_tensors(lambda t: t.clone() if self.moves(t) else t, record)
            given = tensors(record)
        versions = [(t, t._version) for t in given]
        wait, queue, busy = self._mark(), self.queue, self.busy
        assert busy is not None

        def work() -> Launched | None:
            wait()
            received = self._received(record)
            with busy.running() as done:
                queue.state = self._folded(queue.state, received)
            if done is not None:
                return Launched(done, versions)
            queue.check_unchanged(versions)
            return None

        queue.put(work, is_record=True)
        self.traffic.records += 1
        while queue.launched and queue.launched[0].finalise is None and queue.launched[0].done.query():
            queue.finish_oldest()  # soon, because its memory is kept until then
        self.hold_back(self.outstanding())

    def outstanding(self) -> int:
        """How many records are not in the state yet."""
        return self.queue.outstanding()

    def hold_back(self, lag: int) -> None:
        """Note how many records are outstanding, and wait while they are more than `max_lag`."""
        if lag > self.traffic.largest_lag:
            self.traffic.largest_lag = min(lag, self.max_lag)
        if lag > self.max_lag:
            self.queue.wait(lambda: self.outstanding() <= self.max_lag)

    def moves(self, tensor: Tensor) -> bool:
        """Whether it is a part of theta or v, which will move."""
        return tensor.untyped_storage().data_ptr() in self._moving

    def scope(self) -> AbstractContextManager[None]:
        """The setting of an outer step in the inner loop's thread."""
        return nullcontext()

    def inner_loop_ended(self) -> bool:
        """Whether the thread has still something to do."""
        return self.queue.unfinished > 0

    def raise_deferred(self) -> None:
        """Check what the device has found so far, without waiting."""
        queue = self.queue
        while queue.launched and queue.launched[0].done.query():
            queue.finish_oldest()

    @override
    def root_cause(self, error: NhgdError) -> NhgdError:
        """The error, or an earlier one of the curvature that explains it."""
        if self.queue.error is None:
            try:
                self.drain()
            except NhgdError as earlier:
                return earlier
        return error

    def drain(self) -> None:
        """Wait until every submitted record is in the state."""
        self.queue.drain()

    @override
    def state(self, wait: bool = False) -> tuple[Any, int]:
        """The state, and how many records it lacks; a copy, where some wait for the thread and are not waited for."""
        if wait:
            self.drain()
        return self.queue.copied(self._copied)

    @override
    def curvature(self) -> Curvature:
        """The curvature to solve with: all submitted records, unless `stale` is set.

        On a CUDA device the work may still be under way, and what reads the state waits for it there.
        """
        if not self.stale:
            self.queue.wait(lambda: self.queue.unfinished == 0, device=False)
        return Curvature(self.inverse, *self.state())

    @override
    def restore(self, state: Any) -> None:
        self.drain()
        self.queue.state = state

    @override
    def measured(self) -> Traffic:
        if self.busy is not None:
            self.traffic.curvature_seconds += self.busy.take()
        return super().measured()

    @override
    def close(self) -> None:
        """Stop the thread; queued records are dropped."""
        self.queue.close()
