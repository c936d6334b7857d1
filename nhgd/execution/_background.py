"""A thread that keeps curvature while the inner loop goes on: what thread, stream and device have in common."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nhgd._tree import map_tensors, tensors
from nhgd.errors import NhgdError, RunError
from nhgd.execution._stopwatch import Stopwatch
from nhgd.execution.base import AbstractExecutor, Curvature, Traffic
from nhgd.inverse.base import AbstractInverse, Learned
from nhgd.record import InnerRecord
from nhgd.variable import Variable


class Launched(NamedTuple):
    """Records that are being folded in on a CUDA device: when that is done, and what is done then.

    `given` are their tensors, which are kept until then, with their versions. `late` makes the state after them, where that
    takes numbers which the device must give first.
    """

    done: torch.cuda.Event
    given: list[tuple[Tensor, int]]
    records: int = 1
    finalise: Callable[[Any], Any] | None = None


class _Job(NamedTuple):
    work: Callable[[], Launched | None]
    is_record: bool
    threads: int  # of the inner loop: the last digits of a sum depend on it


class AbstractBackground(AbstractExecutor):
    """Records wait in a queue of at most `max_lag`; one thread folds them in, in the order they came.

    The order is that of the inline run and each record is folded in by the same code, so the state is the same once
    drained. What the thread raises is raised in the inner loop, at its next call. On a CUDA device a record is outstanding
    until its work there is done, not only launched.
    """

    def __init__(self, max_lag: int | None = None, stale: bool = False) -> None:
        super().__init__(max_lag, stale)
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._unfinished = 0  # jobs, also those that are no records
        self._lag = 0  # records that wait for the thread
        self._launched: deque[Launched] = deque()  # records that the thread has done with, and the device perhaps not
        self._error: BaseException | None = None
        self._ended = False
        self._thread: threading.Thread | None = None
        self._moving: set[int] = set()

    def start(self, inverse: AbstractInverse, theta: Variable, v: Variable | None = None) -> None:
        """Make the first state; records of an earlier start are finished first."""
        self.drain()
        self._inverse, self._learner = inverse, inverse.learner
        for variable in (theta, v):
            if variable is not None:
                self._moving |= {leaf.untyped_storage().data_ptr() for leaf in variable.leaves}
        self._prepare(theta)
        self._state: Any = None if self._learner is None else self._first(self._learner, theta)
        if self._thread is None and self._learner is not None:
            self._ended = False
            self._thread = threading.Thread(target=self._serve, name="nhgd curvature", daemon=True)
            self._thread.start()

    @abstractmethod
    def _prepare(self, theta: Variable) -> None:
        """Make what the backend needs for this theta, and the stopwatch `_busy` for where curvature is kept."""
        self._busy = Stopwatch(theta.device)

    def _first(self, learner: Learned[Any], theta: Variable) -> Any:
        """The first state, where it is to be kept."""
        return learner.init(theta)

    def _mark(self) -> Callable[[], None]:
        """In the inner loop's thread: how the other thread waits for what was launched until now."""
        return lambda: None

    def _received(self, record: InnerRecord) -> InnerRecord:
        """In the thread: the record where the curvature is kept."""
        return record

    def _folded(self, state: Any, record: InnerRecord) -> Any:
        """In the thread: the state after a record."""
        assert self._learner is not None
        return self._learner.observe(state, record)

    def _copied(self) -> tuple[Any, Callable[[], None]]:
        """In the thread: a copy of the state, and how the inner loop's thread waits for it."""
        return self._state.clone(), lambda: None

    @contextmanager
    def _there(self) -> Iterator[None]:
        """The setting of all work on the state, in the thread."""
        yield

    def begin(self) -> None:
        """Tell the inverse, after the records before, that a new outer step begins."""
        learner = self._learner
        if self._thread is None or learner is None:
            return
        wait = self._mark()

        def work() -> None:
            wait()
            self._state = learner.begin(self._state)

        self._put(work)

    def submit(self, record: InnerRecord) -> None:
        """Queue the record; wait while more than `max_lag` are outstanding."""
        given = tensors(record)
        if any(map(self._moves, given)):
            record = map_tensors(lambda t: t.clone() if self._moves(t) else t, record)
            given = tensors(record)
        versions = [(t, t._version) for t in given]
        wait = self._mark()

        def work() -> Launched | None:
            wait()
            received = self._received(record)
            with self._busy.running() as done:
                self._state = self._folded(self._state, received)
            if done is not None:
                return Launched(done, versions)
            self._check_unchanged(versions)
            return None

        self._put(work, is_record=True)
        self._hold_back()

    def _hold_back(self) -> None:
        """Count a record that was handed over, and wait while more than `max_lag` are outstanding."""
        self.traffic.records += 1
        while self._launched and self._launched[0].finalise is None and self._launched[0].done.query():
            self._settle()  # soon, because its memory is kept until then
        lag = self._outstanding()
        if lag > self.traffic.largest_lag:
            self.traffic.largest_lag = min(lag, self.max_lag)
        if lag > self.max_lag:
            self._wait(lambda: self._outstanding() <= self.max_lag)

    def _outstanding(self) -> int:
        """How many records wait for the thread or for the device."""
        found = self._lag  # first, because the thread takes a record from here to there
        if not self._launched:
            return found
        with self._changed:
            found, under_way = self._lag, tuple(self._launched)
        for launched in reversed(under_way):
            if launched.done.query():
                break  # and all before it
            found += launched.records
        return found

    def inner_loop_ended(self) -> bool:
        """Whether the thread has still something to do."""
        return self._unfinished > 0

    def raise_deferred(self) -> None:
        """Look at what the device has found by now; nothing is waited for."""
        while self._launched and self._launched[0].done.query():
            self._settle()

    def root_cause(self, error: NhgdError) -> NhgdError:
        """The error, or what the curvature had to say before it."""
        if self._error is None:
            try:
                self.drain()
            except NhgdError as earlier:
                return earlier
        return error

    def _settle(self) -> None:
        """Wait until the device has done the oldest records, and look at what it read and found."""
        launched = self._launched[0]
        launched.done.synchronize()
        try:
            self._check_unchanged(launched.given)
            if launched.finalise is not None:
                self._state = launched.finalise(self._state)
        except Exception as error:
            self._error = error
            raise
        self._launched.popleft()

    def _moves(self, tensor: Tensor) -> bool:
        """Whether it is a part of theta or v, which will move."""
        return tensor.untyped_storage().data_ptr() in self._moving

    def _check_unchanged(self, versions: list[tuple[Tensor, int]]) -> None:
        if any(t._version != version for t, version in versions):
            raise RunError(
                f"A tensor of an inner step was changed in place before its curvature was taken, which {self.name} execution"
                " does while the next step runs. Let inner() and the loader make new tensors, or set max_lag=0."
            )

    def _put(self, work: Callable[[], Launched | None], is_record: bool = False, first: bool = False) -> None:
        """Queue a job, to be done on as many CPU threads as this thread computes on."""
        job = _Job(work, is_record, torch.get_num_threads())
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

    def _wait(self, done: Callable[[], bool], device: bool = True) -> None:
        """Until something is done; with `device` records that are being folded in there are waited for, too."""
        began = time.perf_counter()
        while not done() and self._error is None:
            if device and self._launched:
                self._settle()
                continue
            with self._changed:
                if not done() and self._error is None and not (device and self._launched):
                    self._changed.wait(0.5)  # a wait without a limit keeps Ctrl-C out on some platforms
        self.traffic.waited_seconds += time.perf_counter() - began
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _serve(self) -> None:
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
        if torch.get_num_threads() != job.threads:
            torch.set_num_threads(job.threads)
        launched = job.work()
        with self._changed:
            if launched is not None:
                self._launched.append(launched)
            self._unfinished -= 1
            self._lag -= job.is_record
            self._changed.notify_all()
        return True

    def drain(self) -> None:
        """Wait until every submitted record is folded in."""
        if self._thread is not None:
            self._wait(lambda: self._unfinished == 0 and not self._launched)

    def curvature(self) -> Curvature:
        """What an outer step solves with: all that was submitted, unless `stale` ones are wanted.

        On a CUDA device the work may still be under way, and what reads the state waits for it there.
        """
        if not self.stale:
            self._wait(lambda: self._unfinished == 0, device=False)
        state, lag = self.snapshot()
        return Curvature(self.solving, state, lag)

    def snapshot(self) -> tuple[Any, int]:
        """The state, and how many records it lacks. With none that wait for the thread it is the state itself, else a copy.

        What the thread has launched on a device is in the copy, and nothing that it launches later is waited for.
        """
        self._raise()
        with self._changed:
            if self._unfinished == 0:
                return self._state, 0
        copies: list[tuple[Any, Callable[[], None], int]] = []
        # Between two records, ahead of those that wait.
        self._put(lambda: copies.append((*self._copied(), self._lag)), first=True)
        self._wait(lambda: bool(copies), device=False)
        state, wait, lag = copies[0]
        wait()
        return state, lag

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
        if self._launched:
            with suppress(RuntimeError):  # of a device that has failed
                self._launched[-1].done.synchronize()
            self._launched.clear()
        self._unfinished = self._lag = 0  # also of the job that was under way
        self._error = None
