"""Which outer steps of a run are captured, and when they are replayed."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from nhgd import _tape as tape
from nhgd._captured.comparison import close, copy_into, counter_increments
from nhgd._captured.filling import can_fill
from nhgd._captured.graph import AbstractCapture, CudaCapture
from nhgd._captured.operations import OperationCapture
from nhgd._captured.placeholders import StepValues
from nhgd._captured.random_draws import RandomDraws
from nhgd._captured.refusal import refusal
from nhgd._captured.rehearsal import Rehearsal
from nhgd._captured.replay import RESPONSE_SECONDS, Replay, StepFailed
from nhgd._captured.script import DEPTH, Script
from nhgd._captured.static_state import StaticState
from nhgd._captured.steps import CapturedStep, PendingStep, StepResult, StepSize
from nhgd._surroundings import library_settings
from nhgd.algorithm import AbstractAlgorithm, Loop, StepInfo
from nhgd.checkpoint import Progress
from nhgd.data.padding import Padded
from nhgd.errors import InputError, NhgdError
from nhgd.inverse._learned.periods import Periodic
from nhgd.inverse.capabilities import follows_horizon
from nhgd.loop.horizon import Horizon

WARM_UP_STEPS = 2  # outer steps that run eagerly first: checks that are made once are made there
STEPS_PER_CALL = 64  # replayed before the caller regains control
MAX_GRAPHS = 128  # captured steps that are kept, one for each signature
GRAPHS_AT_ONCE = 16  # beyond these, a signature must occur twice before its step is captured
EARLY = 0.5  # of a run: a signature that is new later seldom comes again, and must occur twice as well
COMPARISONS = 2  # with an eager step before the first captured one is replayed; one for each of the others
RECOMPARE_AFTER = 1000  # replays
MAX_FORM_CHANGES = 12  # outer steps in a row that could not be captured because the states changed their form


class CompileWarning(UserWarning):
    """compile="graph" was requested, but outer steps run eagerly."""


class Captured:
    """Takes outer steps by replaying captured ones of the same signature.

    The first steps run eagerly. Then a step is rehearsed: it runs eagerly while a tape notes what the host does. Its
    Python runs once more from the same start, this time under capture. The captured work is launched from that start
    and must arrive where the eager step did. After two such comparisons, of later signatures one, the step is replayed,
    and it is compared again now and then, because the functions of a problem may depend on more than their arguments.

    The step number can change which work a step does: which inner steps are recorded, whether factors are decomposed,
    how large the batches are. Each such signature has a captured step of its own.

    Args:
        mode: "auto", "graph" or False, as for the solver.
        capture: how work is captured; None: as CUDA graphs, or on the CPU, where "graph" asks for it, as operations.

    Attributes:
        reason: why steps run eagerly; None while they are captured.
    """

    def __init__(self, mode: str | bool, capture: AbstractCapture | None = None) -> None:
        if mode == "inductor":
            raise InputError(
                "compile='inductor' is not available here. Wrap the model in torch.compile yourself, or use compile='graph'."
            )
        if mode not in ("auto", "graph", False):
            raise InputError(f"compile must be 'auto', 'graph' or False, got {mode!r}.")
        self.mode = mode
        self.capture = capture
        self.reason: str | None = "compile=False was given" if mode is False else None
        self.replayed = 0
        self._eager_steps = 0
        self._form_changes = 0
        self._graphs: dict[Hashable, CapturedStep] = {}
        self._replay: Replay | None = None
        self._suspended = True
        self._next: CapturedStep | None = None  # that `ready` found
        self._met: dict[Hashable, int] = {}
        self._sizes: dict[bool, StepSize] = {}  # by whether several outer batches are averaged, of the last eager steps
        self._loop: Loop | None = None

    # -- report
    # ----------------------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """How steps were taken, and why, in a sentence."""
        taken = self.capture.name if self.replayed and self.capture is not None else "eager"
        return {"taken": taken, "why": self._why(), "captured": len(self._graphs), "repeated": self.replayed}

    def _why(self) -> str:
        if self.reason is not None:
            begun = f"{self.replayed} outer steps were replayed, the rest ran eagerly" if self.replayed else ""
            return f"{begun or 'Outer steps ran eagerly'}, because {self.reason}."
        if not self.replayed:
            return "The run was too short for a captured step."
        exact = all(graph.exact for graph in self._graphs.values() if graph.comparisons)
        agreed = "in every bit" if exact else "to rounding"
        return f"{self.replayed} outer steps were replayed from captured work, which agreed with eager steps {agreed}."

    def give_up(self, reason: str) -> None:
        """Run all further steps eagerly."""
        if self.reason is None:
            self.reason = reason
            if self._loop is not None:
                self._loop.inner.pads = False
            if self.mode == "graph":
                warnings.warn(f"compile='graph': {self._why()}", CompileWarning, stacklevel=2)
        self._discard()

    def _discard(self) -> None:
        self.suspend()
        self._graphs.clear()
        self._replay = None

    def _start_again(self) -> None:
        """Capture anew, from eager steps on."""
        self._discard()
        self._eager_steps = 0

    # -- steps

    @property
    def active(self) -> bool:
        """Whether steps are captured, or will be."""
        return self.reason is None

    def begin(self, algorithm: AbstractAlgorithm, loop: Loop) -> None:
        """Before a run: give up if its settings rule out capturing."""
        if self.active:
            device = loop.problem.theta.device
            if self.capture is None:
                on_cpu = device.type == "cpu" and self.mode == "graph"
                self.capture = OperationCapture() if on_cpu else CudaCapture()
            why = self.capture.refusal(device)
            if why is None:
                loop.theta.prepare()
                loop.v.prepare()
                why = refusal(algorithm, loop)
                if why is not None:
                    loop.theta.prepare(False)
                    loop.v.prepare(False)
            if why is not None:
                self.give_up(why)
            else:
                self._loop = loop
                loop.inner.pads = can_fill(algorithm, loop)

    def check_environment(self) -> None:
        """Before a step: notice tensors that the caller has moved, and autocast."""
        if self._replay is not None and not self._replay.static.in_place():
            self._start_again()
        if self.active and any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
            self.give_up("autocast is on")

    def run_eagerly(self, algorithm: AbstractAlgorithm, progress: Progress) -> StepInfo:
        """One step that is not replayed: a plain one, or a rehearsal, after which it may be captured."""
        if not self.active:
            return _eager(algorithm, progress)
        with tape.taping(None, repeatable=True):
            if self._eager_steps < WARM_UP_STEPS:
                self._eager_steps += 1
                averages, before = _averages(progress), StepSize.since_start(progress.loop)
                with RandomDraws(progress.loop.problem) as draws:
                    info = _eager(algorithm, progress)
                self._sizes[averages] = StepSize.since_start(progress.loop).minus(before)
                if draws.seen is not None:
                    self.give_up(draws.seen)
                return info
            return self._rehearse(algorithm, progress)

    def ready(self, progress: Progress) -> bool:
        """Whether the next step can be replayed."""
        if not self.active or self._eager_steps < WARM_UP_STEPS or not self._sizes:
            return False
        self._resume(progress)
        self._next = graph = self._graphs.get(self._signature(progress))
        if graph is None or graph.since >= RECOMPARE_AFTER:
            return False
        return graph.comparisons >= graph.wanted

    def replay(self, progress: Progress, most: int, before: Callable[[int], None]) -> list[StepResult]:
        """Replay at most `most` captured steps; returns those that were taken. Call it within the run's random scope.

        Args:
            before: called before each step with the number of steps this call has begun.
        """
        replay, begun = self._resume(progress), 0
        until = replay.begin() + RESPONSE_SECONDS
        pending: deque[PendingStep] = deque()
        taken: list[StepResult] = []
        error: BaseException | None = None
        try:
            while begun < min(most, STEPS_PER_CALL) and (not begun or self.ready(progress)):
                if begun and time.perf_counter() > until:
                    break
                assert self._next is not None
                while len(pending) >= min(replay.max_pending, self._next.script.most_pending):
                    self._read_first(replay, pending, taken)
                before(begun)
                pending.append(replay.launch(self._next, begun % DEPTH))
                begun += 1
        except StepFailed:
            raise
        except BaseException as found:  # an earlier step may be the cause, and rows of finished steps are kept
            error = found
        while pending:
            self._read_first(replay, pending, taken)
        if error is not None:
            replay.restore_start(begun % DEPTH)
            self._start_again()
            if isinstance(error, NhgdError):
                raise StepFailed(error, taken) from error
            raise error
        if replay.refusals:
            self.give_up(replay.refusals[0])
        return taken

    def _read_first(self, replay: Replay, pending: deque[PendingStep], taken: list[StepResult]) -> None:
        step = pending.popleft()
        try:
            taken.append(replay.read(step))
        except NhgdError as error:
            replay.undo(step)
            self._start_again()
            raise StepFailed(error, taken) from error
        self.replayed += 1

    def suspend(self) -> None:
        """Give the states their usual form, for a checkpoint or an eager step outside the captured run."""
        if self._replay is not None and not self._suspended:
            self._replay.static.release()
        self._suspended = True

    def _resume(self, progress: Progress) -> Replay:
        if self._replay is None or self._suspended:
            if self._replay is None or not self._replay.static.reattach():
                self._graphs.clear()
                self._replay = Replay(progress, StaticState(progress))
            self._suspended = False
        return self._replay

    def _signature(self, progress: Progress) -> Hashable:
        """What decides which work the next step does, numbers aside."""
        loop = progress.loop
        clock, size = loop.clock, self._sizes.get(_averages(progress), next(iter(self._sizes.values())))
        learner = None if loop.inverse is None else loop.inverse.learner
        learnt: Hashable = None
        if isinstance(learner, Periodic):
            learnt = learner.signature(clock.total, size.steps, loop.executor.keep().observed)
        horizon = _horizon(progress)
        measured = None
        if horizon is not None:
            measured = horizon.signature(clock.k, size.steps, loop.records(clock.total, size.steps))
        sizes = size.inner if loop.inner.pads else loop.inner.sizes(size.inner)
        return sizes, loop.outer.sizes(size.outer), learnt, measured

    # -- capturing
    # -------------------------------------------------------------------------------------------------------------

    def _rehearse(self, algorithm: AbstractAlgorithm, progress: Progress) -> StepInfo:
        """Take a step eagerly with its host noted, and capture it or compare it with the captured one."""
        loop, static = progress.loop, self._resume(progress).static
        restore, owners, counters = static.snapshot_host(), static.owners(), static.counters()
        before = [t.clone() for t in static.tensors()]
        calls = dict(vars(loop.calls))
        sizes = loop.inner.sizes(4 * loop.settings.inner_steps + 16)
        averages = _averages(progress)
        key, begun = self._signature(progress), StepSize.since_start(loop)
        rehearsal = Rehearsal(loop.problem.theta.device)
        try:
            info = _taped(algorithm, progress, rehearsal)
            rehearsal.check_draws()
        except NhgdError:
            raise
        except Exception as error:
            copy_into(static.tensors(), before)
            restore()
            self.give_up(_in_words(error))
            return _eager(algorithm, progress)
        settled = static.settle()
        for end in rehearsal.ends:
            end()
        values = StepValues(rehearsal.values(), rehearsal.host_values)
        found = values.info(info, rehearsal.deferred)
        if values.refusals:
            self.give_up(values.refusals[0])
            return found
        if not settled:
            self._form_changes += 1
            self.suspend()
            self._replay = None
            if self._form_changes > MAX_FORM_CHANGES:
                self.give_up("the states of the method keep changing their form")
            return found
        size = StepSize.since_start(loop).minus(begun)
        if size != self._sizes.get(averages):
            self._sizes[averages] = size
            if size.inner > len(sizes) > 0:
                self.give_up("a step draws too many batches")
            return found
        self._form_changes = 0
        graph = self._graphs.get(key)
        self._met[key] = self._met.get(key, 0) + 1
        if graph is None and not self._has_room(key, loop.clock.done):
            return found
        if graph is not None and not graph.script.fits(rehearsal):
            self.give_up("a step did other work than an earlier one of its kind")
            return found
        after = [t.clone() for t in static.tensors()]
        if graph is None:
            grown = {name: value - calls[name] for name, value in vars(loop.calls).items()}
            drawn = [batch for stream, batch in rehearsal.batches if stream is loop.inner]
            filled = [batch for batch in drawn if isinstance(batch, Padded)]
            grown["samples"] += sum(batch.passes * (len(batch.share) - batch.samples) for batch in filled)
            passes = tuple(batch.passes for batch in filled)
            try:
                increments = counter_increments(static, counters, owners)
                script = self._capture(algorithm, progress, rehearsal, before, after, restore)
            except tape.NotRepeatable as error:
                self.give_up(str(error))
                return found
            wanted = 1 if self._graphs else COMPARISONS
            graph = self._graphs[key] = CapturedStep(script, grown, increments, wanted, passes=passes)
        self._compare(graph, static, rehearsal, before, after)
        return found

    def _has_room(self, key: Hashable, done: float) -> bool:
        at_once = len(self._graphs) < GRAPHS_AT_ONCE and (done < EARLY or not self._graphs)
        return at_once or (len(self._graphs) < MAX_GRAPHS and self._met[key] > 1)

    def _capture(
        self,
        algorithm: AbstractAlgorithm,
        progress: Progress,
        rehearsal: Rehearsal,
        before: list[Tensor],
        after: list[Tensor],
        restore: Callable[[], None],
    ) -> Script:
        """Capture the step from its start; the run stays at its end."""
        static = self._resume(progress).static
        restore_end = static.snapshot_host()
        places = static.tensors()
        restore()
        copy_into(places, before)
        assert self.capture is not None
        script = Script(rehearsal, self.capture)
        try:
            script.begin()
            start = [leaf.detach().clone() for leaf in progress.loop.problem.v.leaves]
            info = _taped(algorithm, progress, script)
            if not static.settle(rebind=False):
                raise tape.NotRepeatable("the states of the method changed their form")
            script.finish(info, _distance(progress.loop.problem.v.leaves, start))
        except Exception as error:
            self.capture.abandon()
            raise tape.NotRepeatable(_in_words(error)) from error
        finally:
            restore_end()
            copy_into(places, after)
        return script

    def _compare(
        self, graph: CapturedStep, static: StaticState, rehearsal: Rehearsal, before: list[Tensor], after: list[Tensor]
    ) -> None:
        """Compare the captured step with the eager one that was just taken."""
        places = static.tensors()
        wanted = [*after, torch.tensor(rehearsal.values(), dtype=torch.float64)]
        try:
            copy_into(places, before)
            graph.script.rehearsed(rehearsal, places)
            got = [*places, torch.tensor(graph.script.last_values(), dtype=torch.float64)]
            exact = all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
            starts = [*before, torch.zeros_like(wanted[-1])]
            precision = static.precision
            agrees = exact or all(close(*three, precision) for three in zip(got, wanted, starts, strict=True))
        except RuntimeError as error:
            copy_into(places, after)
            self.give_up(_in_words(error))
            return
        copy_into(places, after)
        if not agrees:
            self.give_up("a captured step and the same step run eagerly gave different results")
            return
        graph.comparisons += 1
        graph.since = 0
        graph.exact &= exact


@torch.no_grad()
def _distance(here: Sequence[Tensor], there: Sequence[Tensor]) -> Tensor:
    lengths: list[Tensor] = [
        torch.linalg.vector_norm(a - b, dtype=torch.float64) for a, b in zip(here, there, strict=True)
    ]
    return lengths[0] if len(lengths) == 1 else torch.stack(lengths).norm()


def _horizon(progress: Progress) -> Horizon | None:
    found = getattr(progress.state, "horizon", None) if follows_horizon(progress.loop.inverse) else None
    return found if isinstance(found, Horizon) else None


def _averages(progress: Progress) -> bool:
    """Whether the next step may average outer batches: the one change of how many batches a step draws."""
    horizon = _horizon(progress)
    return horizon is not None and horizon.averages


def _taped(algorithm: AbstractAlgorithm, progress: Progress, noting: tape.Tape) -> StepInfo:
    with tape.taping(noting):
        return _eager(algorithm, progress)


def _eager(algorithm: AbstractAlgorithm, progress: Progress) -> StepInfo:
    with library_settings():
        progress.loop.begin()
        progress.state, info = algorithm.step(progress.loop, progress.state)
    return info


def _in_words(error: Exception) -> str:
    if isinstance(error, tape.NotRepeatable):
        return str(error)
    message = " ".join(str(error).split())
    return f"a step could not be captured ({type(error).__name__}: {message[:200]})"
