"""Captured steps, replayed: launched ahead of the host, which reads their numbers some steps later."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from nhgd._captured.comparison import copy_into
from nhgd._captured.placeholders import StepValues
from nhgd._captured.script import DEPTH
from nhgd._captured.static_state import StaticState
from nhgd._captured.steps import CapturedStep, PendingStep, StepResult
from nhgd._solution import history_row
from nhgd.checkpoint import Progress
from nhgd.errors import NhgdError
from nhgd.execution.base import Traffic

RESPONSE_SECONDS = 0.2  # how late a signal, a stop rule or an error may be noticed


class Replay:
    """Replays captured steps on the static state of a run.

    theta and v are copied before each step, so that a step that turns out to have failed can be undone.

    Attributes:
        refusals: why further steps cannot be captured, if a replayed one showed it.
    """

    def __init__(self, progress: Progress, static: StaticState) -> None:
        self.static = static
        self.refusals: list[str] = []
        self._progress = progress
        self._states: list[Tensor] = []  # everything a step changes
        self._starts: list[list[Tensor]] = []  # theta and v before each of the steps that are pending
        self._last_read = 0.0  # by the clock
        self._seconds_per_step = RESPONSE_SECONDS / 2

    def begin(self) -> float:
        """Start the clock; returns its time."""
        self._last_read = time.perf_counter()
        return self._last_read

    @property
    def max_pending(self) -> float:
        """How many steps may be launched before the numbers of the first are read."""
        return min(DEPTH, max(1, RESPONSE_SECONDS / self._seconds_per_step))

    def launch(self, graph: CapturedStep, row: int) -> PendingStep:
        """Launch one step, whose numbers arrive in this row of the script's memory."""
        loop, static = self._progress.loop, self.static
        while len(self._starts) <= row:
            self._starts.append([t.clone() for t in static.point()])
        torch._foreach_copy_(self._starts[row], static.point())
        calls, grown = dict(vars(loop.calls)), self._grown(graph)
        self._states = self._states or static.tensors()
        host_values = graph.script.play(row, self._states)
        graph.since += 1
        vars(loop.calls).update({name: calls[name] + more for name, more in grown.items()})
        static.count(graph.counters)
        loop.clock.k += 1
        done = None
        if loop.problem.theta.device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
        return PendingStep(graph, row, loop.clock.k, calls, grown, host_values, done)

    def _grown(self, graph: CapturedStep) -> dict[str, int]:
        """How many derivatives the next step takes; the samples of shorter batches are fewer."""
        if not graph.passes:
            return graph.calls
        sizes, longest = self._progress.loop.inner.sizes(len(graph.passes)), self._progress.loop.inner.longest
        missing = sum(times * (longest - size) for times, size in zip(graph.passes, sizes, strict=True))
        return graph.calls | {"samples": graph.calls["samples"] - missing}

    def read(self, step: PendingStep) -> StepResult:
        """Wait for the numbers of a step and write its row of the history, while the steps behind it run on."""
        progress, loop = self._progress, self._progress.loop
        script = step.graph.script
        assert script.info is not None
        if step.done is not None:
            step.done.synchronize()
        found, stride = script.values(step.row)
        values = StepValues(found, step.host_values)
        ahead = loop.clock.k, dict(vars(loop.calls))
        loop.clock.k = step.step - 1  # as within the step
        info = values.info(script.info, script.deferred)
        self.refusals += values.refusals
        loop.clock.k = step.step
        vars(loop.calls).update({name: step.calls[name] + more for name, more in step.grown.items()})
        moment = time.perf_counter()
        self._seconds_per_step = seconds = max(moment - self._last_read, 1e-6)
        self._last_read = moment
        progress.seconds += seconds
        work = Traffic(processes=loop.executor.traffic.processes)
        row = history_row(loop, info, work, progress.seconds, seconds)
        loop.clock.k = ahead[0]
        vars(loop.calls).update(ahead[1])
        progress.history.append(row)
        return StepResult(row, stride)

    def restore_start(self, row: int) -> None:
        """Put theta and v back to where a step began that could not be launched as a whole."""
        if len(self._starts) > row:
            copy_into(self.static.point(), self._starts[row])

    def undo(self, step: PendingStep) -> None:
        """Go back to where a step began that failed."""
        loop = self._progress.loop
        if step.done is not None:
            torch.cuda.synchronize(loop.problem.theta.device)
        copy_into(self.static.point(), self._starts[step.row])
        loop.clock.k = step.step - 1
        vars(loop.calls).update(step.calls)
        loop.recent.clear()
        script = step.graph.script
        for stream, place in script.batches:
            if stream is loop.inner:
                index = script.arena.index(step.row, place)
                filled = len(index) > loop.inner.longest
                loop.recent.append(loop.inner.gathered(index[: int(index[-1])] if filled else index))


class StepFailed(Exception):
    """A replayed step failed; theta and v are back where it began."""

    def __init__(self, error: NhgdError, taken: list[StepResult]) -> None:
        super().__init__(str(error))
        self.error, self.taken = error, taken
