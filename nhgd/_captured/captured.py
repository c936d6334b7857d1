"""The outer steps of a run, captured."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from nhgd import _tape as tape
from nhgd._autocast import set_aside
from nhgd._captured.comparison import close, counted, put
from nhgd._captured.draws import Draws
from nhgd._captured.graph import AbstractCapture, CudaCapture
from nhgd._captured.held import Held
from nhgd._captured.placeholders import Known
from nhgd._captured.refusal import refusal
from nhgd._captured.rehearsal import Rehearsal
from nhgd._captured.script import DEPTH, Script
from nhgd._captured.taken import Failed, Graph, Pending, Taken
from nhgd._solution import history_row
from nhgd.algorithm import AbstractAlgorithm, Loop, StepInfo
from nhgd.checkpoint import Progress
from nhgd.errors import InputError, NhgdError
from nhgd.execution.base import Traffic
from nhgd.inverse._learned.periods import Periodic
from nhgd.inverse.capabilities import follows_horizon
from nhgd.loop.horizon import Horizon

WARM_UP = 3  # outer steps that are taken plainly: whatever is looked at once is looked at there
PATIENCE = 0.2  # seconds for which nobody is asked
AHEAD = 64  # steps that are repeated without asking anybody
MOST = 128  # captured steps that are kept, one for each course
USUAL = 16  # from so many on, a course is met twice before its step is captured
TRIALS = 2  # comparisons with the step itself before a captured one is believed
FIRST = 4  # captured steps of which that is asked; of others, one
AGAIN = 1000  # times that a captured step is repeated before it is compared once more
FRUITLESS = 12  # outer steps in a row that could not be captured because the states changed their form


class CompileWarning(UserWarning):
    """compile="graph" was asked for, and outer steps are taken plainly."""


class Captured:
    """Takes outer steps by repeating what was captured of steps of the same course.

    The first steps are taken plainly. Then a step is rehearsed: taken as ever, while what its host does is noted. After that its
    Python runs once more, and this time the work on the device is captured and not done; the captured work is done from where the
    step began, and must arrive where the step did. It is believed from the second such comparison on, and compared again now and
    then: the functions of a problem might depend on more than what they are given.

    Which work a step takes may follow from its number: which inner steps are recorded, whether factors are decomposed, how
    large the batches are. Each such course has a captured step of its own.

    Args:
        mode: "auto", "graph" or False, as of the solver.
        capture: how work is captured; None: as CUDA graphs.

    Attributes:
        reason: why steps are taken plainly; None while they are not.
    """

    def __init__(self, mode: str | bool, capture: AbstractCapture | None = None) -> None:
        if mode == "inductor":
            raise InputError(
                "compile='inductor' is not available here. Wrap the model in torch.compile yourself, or use compile='graph'."
            )
        if mode not in ("auto", "graph", False):
            raise InputError(f"compile must be 'auto', 'graph' or False, got {mode!r}.")
        self.mode = mode
        self.capture = CudaCapture() if capture is None else capture
        self.reason: str | None = "compile=False was given" if mode is False else None
        self.repeated = 0
        self._plain_steps = 0
        self._fruitless = 0
        self._graphs: dict[Hashable, Graph] = {}
        self._held: Held | None = None
        self._resting = True
        self._next: Graph | None = None  # of the step that was found to be ready
        self._met: dict[Hashable, int] = {}
        self._draws: tuple[int, int] | None = None  # batches of a step, inner and outer
        self._ring: list[list[Tensor]] = []
        self._doubts: list[str] = []
        self._since = 0.0  # by the clock
        self._pace = PATIENCE / 2  # seconds of a step

    # -- what it says ----------------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """What was taken, and why, in a sentence."""
        taken = self.capture.name if self.repeated else "eager"
        return {"taken": taken, "why": self._why(), "captured": len(self._graphs), "repeated": self.repeated}

    def _why(self) -> str:
        if self.reason is not None:
            begun = f"{self.repeated} outer steps were repeated; then they were taken plainly" if self.repeated else ""
            return f"{begun or 'Outer steps were taken plainly'}, because {self.reason}."
        if not self.repeated:
            return "The run was too short for a captured step."
        exact = all(graph.exact for graph in self._graphs.values() if graph.trials)
        found = "in every bit" if exact else "to rounding"
        return f"{self.repeated} outer steps were repeated as captured work, which agreed with the steps themselves {found}."

    def give_up(self, reason: str) -> None:
        """Take all further steps plainly."""
        if self.reason is None:
            self.reason = reason
            if self.mode == "graph":
                warnings.warn(f"compile='graph': {self._why()}", CompileWarning, stacklevel=2)
        self.rest()
        self._graphs.clear()
        self._held = None

    # -- steps -----------------------------------------------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Whether steps are captured, or will be."""
        return self.reason is None

    def begin(self, algorithm: AbstractAlgorithm, loop: Loop) -> None:
        """Before a run: see whether anything is in the way."""
        if self.active:
            why = self.capture.refusal(loop.problem.theta.device)
            if why is None:
                loop.theta.prepare()
                loop.v.prepare()
                why = refusal(algorithm, loop)
                if why is not None:
                    loop.theta.prepare(False)
                    loop.v.prepare(False)
            if why is not None:
                self.give_up(why)

    def look_around(self) -> None:
        """Before a step: see whether the caller has changed what work is done, or where numbers are."""
        if self._held is not None and not self._held.stands():
            self._start_again()
        if self.active and any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
            self.give_up("autocast is on")

    def attempt(self, algorithm: AbstractAlgorithm, progress: Progress) -> StepInfo:
        """One step that is not repeated: a plain one, or a rehearsal, after which it may be captured."""
        if not self.active:
            return _plain(algorithm, progress)
        with tape.taping(None, repeatable=True):
            if self._plain_steps < WARM_UP:
                self._plain_steps += 1
                with Draws(progress.loop.problem) as draws:
                    info = _plain(algorithm, progress)
                if draws.seen is not None:
                    self.give_up(draws.seen)
                return info
            return self._rehearse(algorithm, progress)

    def ready(self, progress: Progress) -> bool:
        """Whether the next step can be repeated."""
        if not self.active or self._plain_steps < WARM_UP or self._draws is None:
            return False
        self._hold(progress)
        self._next = graph = self._graphs.get(self._course(progress))
        if graph is None or graph.since >= AGAIN:
            return False
        return graph.trials >= (TRIALS if len(self._graphs) <= FIRST else 1)

    def repeat(self, progress: Progress, most: int, before: Callable[[int], None]) -> list[Taken]:
        """Repeat captured steps, at most so many; those that were taken. The run's random numbers are drawn inside.

        Args:
            before: called with the number of steps taken here before each.
        """
        self._since, begun = time.perf_counter(), 0
        until = self._since + PATIENCE
        pending: deque[Pending] = deque()
        taken: list[Taken] = []
        error: BaseException | None = None
        try:
            while begun < min(most, AHEAD) and (not begun or self.ready(progress)):
                if begun and time.perf_counter() > until:
                    break
                while len(pending) >= min(DEPTH, max(1, PATIENCE / self._pace)):
                    self._look(progress, pending, taken)
                before(begun)
                pending.append(self._repeat_one(progress, begun % DEPTH))
                begun += 1
        except Failed:
            raise
        except BaseException as found:  # an earlier step may be why, and rows of steps that were taken are not lost
            error = found
        while pending:
            self._look(progress, pending, taken)
        if error is not None:
            assert self._held is not None
            if len(self._ring) > begun % DEPTH:
                put(self._held.point(), self._ring[begun % DEPTH])
            self._start_again()
            if isinstance(error, NhgdError):
                raise Failed(error, taken) from error
            raise error
        if self._doubts:
            self.give_up(self._doubts[0])
        return taken

    def rest(self) -> None:
        """States are as they are without captured steps: for a checkpoint, or a step that is taken plainly."""
        if self._held is not None and not self._resting:
            self._held.release()
        self._resting = True

    # -- inside ----------------------------------------------------------------------------------------------------------------

    def _hold(self, progress: Progress) -> Held:
        if self._held is None or self._resting:
            if self._held is None or not self._held.retake():
                self._graphs.clear()
                self._held, self._ring = Held(progress), []
            self._resting = False
        return self._held

    def _course(self, progress: Progress) -> Hashable:
        """What decides which work the next step takes, beside numbers."""
        loop = progress.loop
        clock, steps = loop.clock, loop.settings.inner_steps
        assert self._draws is not None
        learner = None if loop.inverse is None else loop.inverse.learner
        learnt: Hashable = None
        if isinstance(learner, Periodic):
            learnt = learner.course(clock.total, steps, loop.executor.keep().observed)
        horizon = getattr(progress.state, "horizon", None) if follows_horizon(loop.inverse) else None
        ahead = horizon.course(clock.k, steps) if isinstance(horizon, Horizon) else None
        return loop.inner.sizes(self._draws[0]), loop.outer.sizes(self._draws[1]), learnt, ahead

    def _rehearse(self, algorithm: AbstractAlgorithm, progress: Progress) -> StepInfo:
        loop, held = progress.loop, self._hold(progress)
        device = loop.problem.theta.device
        restore, owners, counters = held.host(), held.owners(), held.counters()
        before = [t.clone() for t in held.tensors()]
        calls = dict(vars(loop.calls))
        sizes = loop.inner.sizes(4 * loop.settings.inner_steps + 16), loop.outer.sizes(16)
        key = None if self._draws is None else self._course(progress)
        rehearsal = Rehearsal(device)
        try:
            info = self._step(algorithm, progress, rehearsal)
            rehearsal.check_draws()
        except NhgdError:
            raise
        except Exception as error:
            put(held.tensors(), before)
            restore()
            self.give_up(_in_words(error))
            return _plain(algorithm, progress)
        settled = held.settle()
        for end in rehearsal.ends:
            end()
        known = Known(rehearsal.values(), rehearsal.told_things)
        found = known.info(info, rehearsal.laters)
        if known.doubts:
            self.give_up(known.doubts[0])
            return found
        if not settled:
            self._fruitless += 1
            self.rest()
            self._held = None
            if self._fruitless > FRUITLESS:
                self.give_up("the states of the method keep changing their form")
            return found
        draws = tuple(rehearsal.draws.get(id(stream), 0) for stream in (loop.inner, loop.outer))
        if key is None or draws != self._draws:
            self._draws = (draws[0], draws[1])
            if draws[0] > len(sizes[0]) > 0:
                self.give_up("a step draws too many batches")
            return found
        self._fruitless = 0
        graph = self._graphs.get(key)
        self._met[key] = self._met.get(key, 0) + 1
        if graph is None and (len(self._graphs) >= MOST or (len(self._graphs) >= USUAL and self._met[key] < 2)):
            return found
        after = [t.clone() for t in held.tensors()]
        if graph is None:
            grown = {name: value - calls[name] for name, value in vars(loop.calls).items()}
            growing, why = counted(held, counters, owners)
            if why is None:
                graph, why = self._captured(algorithm, progress, rehearsal, before, after, restore, grown, growing)
            if graph is None:
                self.give_up(why or "it could not be captured")
                return found
            self._graphs[key] = graph
        self._try(graph, held, rehearsal, before, after)
        return found

    def _step(self, algorithm: AbstractAlgorithm, progress: Progress, noting: tape.Tape) -> StepInfo:
        with set_aside(), tape.taping(noting):
            progress.loop.begin()
            progress.state, info = algorithm.step(progress.loop, progress.state)
        return info

    def _captured(
        self,
        algorithm: AbstractAlgorithm,
        progress: Progress,
        rehearsal: Rehearsal,
        before: list[Tensor],
        after: list[Tensor],
        restore: Callable[[], None],
        calls: dict[str, int],
        counters: dict[str, int],
    ) -> tuple[Graph | None, str | None]:
        """The step captured, from where it began; the run stays where it ended."""
        held = self._held
        assert held is not None
        back = held.host()
        places = held.tensors()
        restore()
        put(places, before)
        script = Script(rehearsal, self.capture)
        why = None
        try:
            script.begin()
            info = self._step(algorithm, progress, script)
            if not held.settle(hang=False):
                raise tape.NotRepeatable("the states of the method changed their form")
            script.finish(info)
        except Exception as error:
            self.capture.abandon()
            why = _in_words(error)
        finally:
            back()
            put(places, after)
        return (None, why) if why is not None else (Graph(script, calls, counters), None)

    def _try(self, graph: Graph, held: Held, rehearsal: Rehearsal, before: list[Tensor], after: list[Tensor]) -> None:
        """Compare the captured step with the one that was just taken."""
        places = held.tensors()
        wanted = [*after, torch.tensor(rehearsal.values(), dtype=torch.float64)]
        try:
            put(places, before)
            graph.script.rehearsed(rehearsal)
            got = [*places, torch.tensor(graph.script.last_values(), dtype=torch.float64)]
            exact = all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
            starts = [*before, torch.zeros_like(wanted[-1])]
            alike = exact or all(close(a, b, c) for a, b, c in zip(got, wanted, starts, strict=True))
        except RuntimeError as error:
            put(places, after)
            self.give_up(_in_words(error))
            return
        put(places, after)
        if not alike:
            self.give_up("a captured step ended elsewhere than the step itself")
            return
        graph.trials += 1
        graph.since = 0
        graph.exact &= exact

    def _repeat_one(self, progress: Progress, row: int) -> Pending:
        loop, held, graph = progress.loop, self._hold(progress), self._next
        assert graph is not None
        while len(self._ring) <= row:
            self._ring.append([t.clone() for t in held.point()])
        torch._foreach_copy_(self._ring[row], held.point())
        calls = dict(vars(loop.calls))
        told = graph.script.play(row)
        graph.since += 1
        for name, grown in graph.calls.items():
            setattr(loop.calls, name, calls[name] + grown)
        held.count(graph.counters)
        loop.clock.k += 1
        done = None
        if loop.problem.theta.device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
        return Pending(graph, row, loop.clock.k, calls, told, done)

    def _look(self, progress: Progress, pending: deque[Pending], taken: list[Taken]) -> None:
        """Read the numbers of the first of the steps that were repeated, and write its row. Those behind it go on meanwhile."""
        loop, held, one = progress.loop, self._held, pending.popleft()
        assert held is not None
        assert one.graph.script.info is not None
        if one.done is not None:
            one.done.synchronize()
        known = Known(one.graph.script.values(one.row), one.told)
        try:
            info = known.info(one.graph.script.info, one.graph.script.laters)
        except NhgdError as found:
            if one.done is not None:
                torch.cuda.synchronize(loop.problem.theta.device)
            self._go_back(progress, one)
            raise Failed(found, taken) from found
        end = loop.clock.k, dict(vars(loop.calls))
        loop.clock.k = one.step
        vars(loop.calls).update({name: one.calls[name] + grown for name, grown in one.graph.calls.items()})
        moment = time.perf_counter()
        self._pace = seconds = max(moment - self._since, 1e-6)
        self._since = moment
        progress.seconds += seconds
        work = Traffic(processes=loop.executor.traffic.processes)
        row = history_row(loop, info, work, progress.seconds, seconds)
        loop.clock.k = end[0]
        vars(loop.calls).update(end[1])
        progress.history.append(row)
        self.repeated += 1
        self._doubts += known.doubts
        following = self._ring[pending[0].row] if pending else held.point()
        part = slice(len(loop.problem.theta.leaves), len(loop.problem.theta.leaves) + len(loop.problem.v.leaves))
        pairs = zip(following[part], self._ring[one.row][part], strict=True)
        lengths = [torch.linalg.vector_norm(a - b, dtype=torch.float64) for a, b in pairs]
        taken.append(Taken(row, lengths[0] if len(lengths) == 1 else torch.stack(lengths).norm()))

    def _go_back(self, progress: Progress, one: Pending) -> None:
        """To where a step began that failed."""
        loop, held = progress.loop, self._held
        assert held is not None
        put(held.point(), self._ring[one.row])
        loop.clock.k = one.step - 1
        vars(loop.calls).update(one.calls)
        loop.recent.clear()
        script = one.graph.script
        for stream, place in script.batches:
            if stream is loop.inner:
                loop.recent.append(loop.inner.gathered(script.arena.index(one.row, place)))
        self._start_again()

    def _start_again(self) -> None:
        """Look at the steps anew, after one has failed."""
        self.rest()
        self._graphs.clear()
        self._held = None
        self._plain_steps = 0


def _plain(algorithm: AbstractAlgorithm, progress: Progress) -> StepInfo:
    with set_aside():
        progress.loop.begin()
        progress.state, info = algorithm.step(progress.loop, progress.state)
    return info


def _in_words(error: Exception) -> str:
    if isinstance(error, tape.NotRepeatable):
        return str(error)
    said = " ".join(str(error).split())
    return f"a step could not be captured ({type(error).__name__}: {said[:200]})"
