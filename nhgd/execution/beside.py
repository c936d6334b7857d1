"""A thread that keeps curvature while the inner loop goes on: what thread, stream and device have in common."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nhgd.errors import RunError
from nhgd.execution.base import AbstractExecutor, Traffic
from nhgd.execution.stopwatch import Stopwatch
from nhgd.inverse.base import AbstractInverse
from nhgd.record import InnerRecord, mapped, tensors
from nhgd.variable import Variable


class _Job(NamedTuple):
    work: Callable[[], None]
    is_record: bool


class AbstractBeside(AbstractExecutor):
    """Records wait in a queue of at most `max_lag`; one thread folds them in, in the order they came.

    The order is that of the inline run and each record is folded in by the same code, so the state is the same once
    drained. What the thread raises is raised in the inner loop, at its next call.
    """

    def __init__(self, max_lag: int | None = None, stale: bool = False) -> None:
        super().__init__(max_lag, stale)
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._unfinished = 0  # jobs, also those that are no records
        self._lag = 0  # records
        self._error: BaseException | None = None
        self._ended = False
        self._thread: threading.Thread | None = None
        self._moving: set[int] = set()

    def start(self, inverse: AbstractInverse, theta: Variable, v: Variable | None = None) -> None:
        """Make the first state; records of an earlier start are finished first."""
        self.drain()
        self._inverse = inverse
        for variable in (theta, v):
            if variable is not None:
                self._moving |= {leaf.untyped_storage().data_ptr() for leaf in variable.leaves}
        self._prepare(theta)
        self._state: Any = self._first(inverse, theta)
        if self._thread is None and inverse.records is not None:
            self._ended = False
            # A new thread has its own number of threads for a sum, on which the sum's last digits depend.
            threads = torch.get_num_threads()
            self._thread = threading.Thread(target=self._serve, args=(threads,), name="nhgd curvature", daemon=True)
            self._thread.start()

    @abstractmethod
    def _prepare(self, theta: Variable) -> None:
        """Make what the backend needs for this theta, and the stopwatch `_busy` for where curvature is kept."""
        self._busy = Stopwatch(theta.device)

    def _first(self, inverse: AbstractInverse, theta: Variable) -> Any:
        """The first state, where it is to be kept."""
        return inverse.init(theta)

    def _mark(self) -> Callable[[], None]:
        """In the inner loop's thread: how the other thread waits for what was launched until now."""
        return lambda: None

    def _received(self, record: InnerRecord) -> InnerRecord:
        """In the thread: the record where the curvature is kept."""
        return record

    def _folded(self, state: Any, record: InnerRecord) -> Any:
        """In the thread: the state after a record."""
        return self._inverse.observe(state, record)

    @contextmanager
    def _there(self) -> Iterator[None]:
        """The setting of all work on the state, in the thread."""
        yield

    def begin(self) -> None:
        """Tell the inverse, after the records before, that a new outer step begins."""
        if self._thread is None:
            return
        wait = self._mark()

        def work() -> None:
            wait()
            self._state = self._inverse.begin(self._state)

        self._put(_Job(work, is_record=False))

    def submit(self, record: InnerRecord) -> None:
        """Queue the record; wait while more than `max_lag` are outstanding."""
        given = list(tensors(record))
        if any(map(self._moves, given)):
            record = mapped(record, lambda t: t.clone() if self._moves(t) else t)
            given = list(tensors(record))
        versions = [(t, t._version) for t in given]
        wait = self._mark()

        def work() -> None:
            wait()
            received = self._received(record)
            with self._busy.running():
                self._state = self._folded(self._state, received)
            self._check_unchanged(versions)

        lag = self._put(_Job(work, is_record=True))
        self.traffic.records += 1
        self.traffic.largest_lag = max(self.traffic.largest_lag, min(lag, self.max_lag))
        if lag > self.max_lag:
            self._wait(lambda: self._lag <= self.max_lag)

    def _moves(self, tensor: Tensor) -> bool:
        """Whether it is a part of theta or v, which will move."""
        return tensor.untyped_storage().data_ptr() in self._moving

    def _check_unchanged(self, versions: list[tuple[Tensor, int]]) -> None:
        if any(t._version != version for t, version in versions):
            raise RunError(
                f"A tensor of an inner step was changed in place before its curvature was taken, which {self.name} execution"
                " does while the next step runs. Let inner() and the loader make new tensors, or set max_lag=0."
            )

    def _put(self, job: _Job, first: bool = False) -> int:
        """Queue a job; how many records are outstanding with it."""
        with self._changed:
            self._raise()
            if self._thread is None:
                raise RunError(f"The {self.name} executor is closed. Make a new one for another run.")
            if first:
                self._jobs.appendleft(job)
            else:
                self._jobs.append(job)
            self._unfinished += 1
            self._lag += job.is_record
            self._changed.notify_all()
            return self._lag

    def _wait(self, done: Callable[[], bool]) -> None:
        began = time.perf_counter()
        with self._changed:
            # With a time limit, because a wait without one keeps Ctrl-C out on some platforms.
            while not done() and self._error is None:
                self._changed.wait(0.5)
        self.traffic.waited_seconds += time.perf_counter() - began
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _serve(self, threads: int) -> None:
        torch.set_num_threads(threads)
        try:
            with torch.no_grad(), self._there():
                while self._serve_one():
                    pass
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _serve_one(self) -> bool:
        """Do one job, if one comes before the end."""
        with self._changed:
            while not self._jobs and not self._ended:
                self._changed.wait()
            if self._ended:
                return False
            job = self._jobs.popleft()
        job.work()
        with self._changed:
            self._unfinished -= 1
            self._lag -= job.is_record
            self._changed.notify_all()
        return True

    def drain(self) -> None:
        """Wait until every submitted record is folded in."""
        if self._thread is not None:
            self._wait(lambda: self._unfinished == 0)

    def snapshot(self) -> tuple[Any, int]:
        """The state, and how many records it lacks. With none outstanding it is the state itself, else a copy."""
        self._raise()
        with self._changed:
            if self._unfinished == 0:
                return self._state, 0
        copies: list[tuple[Any, int]] = []
        # Between two records, ahead of those that wait.
        self._put(_Job(lambda: copies.append((self._state.clone(), self._lag)), is_record=False), first=True)
        self._wait(lambda: bool(copies))
        return copies[0]

    def restore(self, state: Any) -> None:
        """Go on from the state that is given."""
        self.drain()
        self._state = state

    @property
    def solving(self) -> AbstractInverse:
        """The inverse itself: the state is where the inner loop can read it."""
        return self._inverse

    def measured(self) -> Traffic:
        """What was done so far."""
        if hasattr(self, "_busy"):
            self.traffic.curvature_seconds += self._busy.take()
        return super().measured()

    def close(self) -> None:
        """End the thread; what is still queued is dropped."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        with self._changed:
            self._ended = True
            self._jobs.clear()
            self._unfinished = self._lag = 0
            self._changed.notify_all()
        thread.join(timeout=30)
