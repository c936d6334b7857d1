"""Runs of a comparison in several processes, with nothing but the standard library: for machines that have no joblib.

Each worker takes one run after another, so that what is loaded or warmed up once serves all of its runs. A worker that
dies, or that outlasts its limit, costs the run it had and no other.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

import torch
from typing_extensions import Self

from nhgd._results import jsonable
from nhgd._validation import shown
from nhgd.comparison.store import Store, kept
from nhgd.comparison.trial import Run, Trial, blank
from nhgd.errors import InputError

PATIENCE = 1.0  # seconds between two looks at the clock


@dataclass
class _Worker:
    """A process, the way to it, and what it does."""

    process: BaseProcess
    connection: Connection
    trial: Trial | None = None
    since: float = 0.0


class Workers:
    """Processes that take runs.

    Args:
        jobs: how many; each has its share of the cores, and no more threads than torch takes by itself.
        limit: seconds after which a run is given up; None: never.
    """

    def __init__(self, jobs: int, limit: float | None = None) -> None:
        if not isinstance(jobs, int) or isinstance(jobs, bool) or jobs < 1:
            raise InputError(f"jobs is a number of processes of at least 1, got {shown(jobs)}.")
        self.jobs = jobs
        self.limit = limit
        self._workers: list[_Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            _end(worker)
        self._workers.clear()

    def measured(self, trials: Iterable[Trial], store: Store | None) -> Iterator[tuple[Trial, Run]]:
        """Every trial with its run, in the order in which they end. `trials` is asked for the next when a worker is
        free.
        """
        left = iter(trials)
        try:
            while True:
                self._hand_out(left, store)
                busy = {worker.connection: worker for worker in self._workers if worker.trial is not None}
                if not busy:
                    return
                for connection in wait(list(busy), timeout=PATIENCE):
                    yield self._received(busy.pop(connection))  # type: ignore[call-overload]
                for worker in busy.values():
                    if self.limit is not None and time.monotonic() - worker.since > self.limit:
                        yield self._lost(worker, f"The run was given up after {self.limit:g} seconds.")
        finally:
            for worker in [one for one in self._workers if one.trial is not None]:  # nobody waits for their results
                self._workers.remove(worker)
                _end(worker)

    def _hand_out(self, left: Iterator[Trial], store: Store | None) -> None:
        """A trial for every worker without one; more workers are started while there are trials for them."""
        idle = [worker for worker in self._workers if worker.trial is None]
        while idle or len(self._workers) < self.jobs:
            trial = next(left, None)
            if trial is None:
                return
            if not idle:
                idle.append(_begun(max(1, (os.cpu_count() or 1) // self.jobs)))
                self._workers.append(idle[-1])
            worker = idle.pop(0)
            worker.trial, worker.since = trial, time.monotonic()
            worker.connection.send((trial, store))

    def _received(self, worker: _Worker) -> tuple[Trial, Run]:
        try:
            found: Run = worker.connection.recv()
        except (EOFError, OSError):
            worker.process.join(1.0)
            return self._lost(worker, f"The process of the run ended, with {worker.process.exitcode}.")
        trial, worker.trial = worker.trial, None
        assert trial is not None
        return trial, found

    def _lost(self, worker: _Worker, words: str) -> tuple[Trial, Run]:
        self._workers.remove(worker)
        _end(worker)
        assert worker.trial is not None
        return worker.trial, blank(worker.trial) | {"error": words}


def _begun(threads: int) -> _Worker:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_work, args=(there, threads), daemon=True)
    process.start()
    there.close()
    return _Worker(process, here)


def _end(worker: _Worker) -> None:
    worker.process.kill()
    worker.process.join(5.0)
    worker.connection.close()


def _work(connection: Any, threads: int) -> None:
    """What a worker does until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started it, which ends its workers
    torch.set_num_threads(min(threads, torch.get_num_threads()))
    while True:
        try:
            trial, store = connection.recv()
        except (EOFError, OSError):
            return
        connection.send(jsonable(kept(trial, store, False)[1]))
