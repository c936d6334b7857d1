"""A queue of records, and the thread that folds them into a state in the order they came."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nhgd.errors import RunError
from nhgd.execution.base import Traffic


class Launched(NamedTuple):
    """Records being folded in on a CUDA device: the event of their end, and what to do then.

    `given` are their tensors, which are kept until then, with their versions. `finalise` makes the state after them,
    where that takes numbers which the device must give first.
    """

    done: torch.cuda.Event
    given: list[tuple[Tensor, int]]
    records: int = 1
    finalise: Callable[[Any], Any] | None = None


class _Job(NamedTuple):
    work: Callable[[], Launched | None]
    is_record: bool
    threads: int  # of the inner loop: the last digits of a sum depend on it


class Queue:
    """Jobs that one thread does, in their order, and what they change: a state.

    What the thread raises is raised in the inner loop, at its next call. On a CUDA device a record is outstanding until
    its work there is done, not only launched.

    Args:
        owner: the name of the executor, for messages.
        traffic: counts the seconds that the inner loop waits.

    Attributes:
        state: what records are folded into.
        unfinished: jobs, also those that are no records.
        lag: records that wait for the thread.
        launched: records that the thread has done with, and the device perhaps not.
        error: raised by the thread, or by a check of the device.
    """

    def __init__(self, owner: str, traffic: Traffic) -> None:
        self.state: Any = None
        self.unfinished = 0
        self.lag = 0
        self.launched: deque[Launched] = deque()
        self.error: BaseException | None = None
        self._owner, self._traffic = owner, traffic
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._ended = False
        self._thread: threading.Thread | None = None

    @property
    def is_open(self) -> bool:
        """Whether there is a thread."""
        return self._thread is not None

    def open(self, setting: Callable[[], AbstractContextManager[None]]) -> None:
        """Start the thread, unless there is one, in a setting for all of its jobs."""
        if self._thread is None:
            self._ended = False
            self._thread = threading.Thread(target=self._serve, args=(setting,), name="nhgd curvature", daemon=True)
            self._thread.start()

    def put(self, work: Callable[[], Launched | None], is_record: bool = False, first: bool = False) -> None:
        """Queue a job, to be done on as many CPU threads as this thread computes on."""
        job = _Job(work, is_record, torch.get_num_threads())
        with self._changed:
            self.raise_error()
            if self._thread is None:
                raise RunError(f"The {self._owner} executor is closed. Make a new one for another run.")
            if first:
                self._jobs.appendleft(job)
            else:
                self._jobs.append(job)
            self.unfinished += 1
            self.lag += job.is_record
            self._changed.notify_all()

    def outstanding(self) -> int:
        """How many records wait for the thread or for the device."""
        found = self.lag  # first, because the thread takes a record from here to there
        if not self.launched:
            return found
        with self._changed:
            found, under_way = self.lag, tuple(self.launched)
        for launched in reversed(under_way):
            if launched.done.query():
                break  # and all before it
            found += launched.records
        return found

    def wait(self, done: Callable[[], bool], device: bool = True) -> None:
        """Until something is done; with `device` records that are being folded in there are waited for, too."""
        began = time.perf_counter()
        while not done() and self.error is None:
            if device and self.launched:
                self.finish_oldest()
                continue
            with self._changed:
                if not done() and self.error is None and not (device and self.launched):
                    self._changed.wait(0.5)  # a wait without a limit keeps Ctrl-C out on some platforms
        self._traffic.waited_seconds += time.perf_counter() - began
        self.raise_error()

    def drain(self) -> None:
        """Wait until every record is in the state."""
        if self._thread is not None:
            self.wait(lambda: self.unfinished == 0 and not self.launched)

    def finish_oldest(self) -> None:
        """Wait for the oldest records on the device, and check their results."""
        launched = self.launched[0]
        launched.done.synchronize()
        try:
            self.check_unchanged(launched.given)
            if launched.finalise is not None:
                self.state = launched.finalise(self.state)
        except Exception as error:
            self.error = error
            raise
        self.launched.popleft()

    def raise_error(self) -> None:
        """Raise the error of the thread."""
        if self.error is not None:
            raise self.error

    def check_unchanged(self, versions: list[tuple[Tensor, int]]) -> None:
        """Refuse tensors of a record that were changed in place before it was folded in."""
        if any(t._version != version for t, version in versions):
            raise RunError(
                "A tensor of an inner step was changed in place before its curvature was computed, which"
                f" {self._owner} execution does during the next step. Let inner() and the loader create new tensors,"
                " or set max_lag=0."
            )

    def copied(self, copy: Callable[[], tuple[Any, Callable[[], None]]]) -> tuple[Any, int]:
        """The state, and how many records it lacks. With none that wait for the thread it is the state itself, else
        a copy.

        What the thread has launched on a device is in the copy, and nothing that it launches later is waited for.

        Args:
            copy: in the thread: a copy of the state, and how the inner loop's thread waits for it.
        """
        self.raise_error()
        with self._changed:
            if self.unfinished == 0:
                return self.state, 0
        copies: list[tuple[Any, Callable[[], None], int]] = []
        # Between two records, ahead of those that wait.
        self.put(lambda: copies.append((*copy(), self.lag)), first=True)
        self.wait(lambda: bool(copies), device=False)
        state, wait, lag = copies[0]
        wait()
        return state, lag

    def close(self) -> None:
        """Stop the thread; queued records are dropped."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        with self._changed:
            self._ended = True
            self._jobs.clear()
            self.unfinished = self.lag = 0
            self._changed.notify_all()
        thread.join(timeout=30)
        if self.launched:
            with suppress(RuntimeError):  # of a device that has failed
                self.launched[-1].done.synchronize()
            self.launched.clear()
        self.unfinished = self.lag = 0  # also of the job that was under way
        self.error = None

    def _serve(self, setting: Callable[[], AbstractContextManager[None]]) -> None:
        try:
            with torch.no_grad(), setting():
                while self._serve_one():
                    pass
        except BaseException as error:
            with self._changed:
                self.error = error
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
                self.launched.append(launched)
            self.unfinished -= 1
            self.lag -= job.is_record
            self._changed.notify_all()
        return True
