"""What an algorithm acts on: data streams, optimisers, projections and counters.

An algorithm says who moves when; how a step is taken, recorded, projected and counted is here, once for all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from nhgd import _tape as tape
from nhgd import _threads as threads
from nhgd._recording.lagged_cross import LaggedCross
from nhgd._recording.recognition import Recognition, recognise
from nhgd._recording.recorder import Recorder
from nhgd._recording.weighing import Weighing
from nhgd._scaling import Scaling
from nhgd._tree import map_tensors
from nhgd.data.batch import Batch, move
from nhgd.data.loader import Data
from nhgd.data.stream import BatchStream
from nhgd.data_parallel import Division
from nhgd.errors import InputError, NonFiniteError
from nhgd.execution.base import AbstractExecutor, SupportsOverlap
from nhgd.hypergradients.implicit import SolveWarnings
from nhgd.inverse.base import AbstractInverse
from nhgd.inverse.capabilities import couples, fold, needs_record, needs_records, sampling
from nhgd.loop.accumulation import accumulated, micro_batches
from nhgd.loop.horizon import Horizon
from nhgd.loop.mover import Mover
from nhgd.loop.projection import project
from nhgd.loop.settings import LoopSettings
from nhgd.losses import check_weight
from nhgd.objective import NO_TAP, Objective, OracleCalls
from nhgd.oracle import Oracle
from nhgd.problem import Bilevel
from nhgd.record import InnerStep
from nhgd.schedule import ByStep, Clock, Learnt, Rate

MOST_BATCHES = 1_000_000  # at one point
RECENT = 64  # batches
Product: TypeAlias = Callable[[Tensor], list[Tensor]]  # of the transposed cross derivative with a vector (D,)


@dataclass(frozen=True)
class StepInfo:
    """The report of one outer step: the losses, the lag of the curvature, and notes by name."""

    outer_loss: float
    inner_loss: float
    hypergradient_norm: float
    lag: int = 0
    notes: dict[str, Any] = field(default_factory=dict)


class Loop:
    """One run's data, optimisers, projections, executor and counters."""

    def __init__(
        self,
        problem: Bilevel,
        inner_data: Iterable[Batch],
        outer_data: Iterable[Batch],
        settings: LoopSettings,
        executor: AbstractExecutor,
        inverse: AbstractInverse | None = None,
    ) -> None:
        device = problem.theta.device
        self.problem = problem
        problem.scaling = self._scaling(settings, device)
        self.settings = settings
        self.inner = BatchStream(inner_data, "inner_data", device)
        self.outer = BatchStream(outer_data, "outer_data", device)
        self.calls = OracleCalls()
        self.solve_warnings = SolveWarnings()
        self.clock = Clock()
        self.repeats = False  # whether outer steps may be captured, and repeated without their Python
        self.remarks: dict[str, Any] = {}  # what the method has found out about the problem, for the run's stats
        # CPU threads to compute on, and those that torch had at the choice
        self._threads: tuple[int, int] | None = None
        self.theta = Mover(problem.theta, "inner", settings.inner_optimizer, self._inner_rate(), 0.1)
        self.v = Mover(problem.v, "outer", settings.outer_optimizer, settings.outer_lr, 0.01)
        self.executor = executor
        executor.group.join(problem.theta)
        self.division = Division(problem, executor.group.team, self.inner, self.outer, self.clock)
        # A loader of the user's own may fill one buffer again and again, while records of the steps before share it, or
        # they are passed over again.
        self._refills = not isinstance(inner_data, (Data, list, tuple))
        self.recent: deque[Batch] = deque(maxlen=RECENT)  # this outer step's last inner batches, for diagnosis
        self.last_gradient: Sequence[Tensor] | None = None  # of the last inner step
        self.use(inverse)

    @property
    def learnt_rate(self) -> Learnt | None:
        """The inner step size, if it is a function of v."""
        return self.settings.inner_lr if isinstance(self.settings.inner_lr, Learnt) else None

    def _scaling(self, settings: LoopSettings, device: torch.device) -> Scaling:
        """Of the backward passes of the run."""
        scaling = Scaling(settings.scaler, device)
        for variable in (self.problem.theta, self.problem.v):
            coarse = [n for n, t in zip(variable.names, variable.leaves, strict=True) if t.dtype is torch.float16]
            if coarse and scaling.active:
                raise InputError(
                    f"A scaler needs gradients of float32, but {coarse[0]!r} is of float16. Keep the parameters in float32, and"
                    " run the model under torch.autocast(..., dtype=torch.float16)."
                )
        return scaling

    def _inner_rate(self) -> Rate | None:
        """The inner step size as a number that follows the clock; a learnt one follows v."""
        learnt, problem = self.learnt_rate, self.problem
        if learnt is not None:
            return ByStep(lambda k: problem.rate(learnt).item())
        return self.settings.inner_lr  # type: ignore[return-value]  # a Rate, as it is not learnt

    @property
    def threads(self) -> int:
        """How many CPU threads steps are computed on: as many as were chosen, unless the user has changed them
        since.
        """
        now = torch.get_num_threads()
        return now if self._threads is None or now not in self._threads else self._threads[0]

    def choose_threads(self, count: int | None) -> None:
        """Compute on this many CPU threads from now on; None: on torch's own number."""
        self._threads = None if count is None else (count, torch.get_num_threads())

    def computing(self) -> AbstractContextManager[None]:
        """Inside, as many CPU threads are used as suit the problem; afterwards as many as before."""
        return threads.limited(self.threads)

    def restore_threads(self, count: int) -> None:
        """Choose the threads of the run that is resumed, if it chose them and nobody has chosen others since."""
        if (
            count in (1, torch.get_num_threads())
            and self.problem.theta.device.type == "cpu"
            and not threads.are_chosen()
        ):
            self.choose_threads(count)

    def use(self, inverse: AbstractInverse | None) -> None:
        """Keep the state of this inverse from now on, starting afresh."""
        self.inverse = inverse
        self._recording: Recorder | None = None
        self._weighing: Weighing | None = None
        if inverse is not None:
            self.executor.start(inverse, self.problem.theta, self.problem.v)
            learner = inverse.learner
            if learner is not None:
                self._recording = Recorder(self.problem, learner.records, learner.fisher, couples=couples(learner))

    def recorder_memory(self) -> dict[str, Any] | None:
        """What the recorder knows about the model; None without a recorder."""
        return None if self._recording is None else self._recording.memory()

    @property
    def batch_objective(self) -> bool:
        """Whether curvature is learnt from the batch objective, because of BatchNorm in training mode."""
        return self._recording is not None and self._recording.batch_objective

    def recall(self, memory: dict[str, Any] | None) -> None:
        """Let the recorder go on with what another had found out."""
        if self._recording is not None and memory is not None:
            self._recording.recall(memory)

    def horizon(self, warm: bool = True) -> Horizon:
        """How far ahead the hypergradients of this run answer, before the first outer step."""
        values, theta = self.outer.values, self.problem.theta
        return Horizon.start(theta.device, warm, values is None or values >= self.problem.v.numel)

    def records(self, first: int, steps: int) -> Callable[[int], bool]:
        """Whether the outer step that comes so many after one has a record; the one of `steps` inner steps from
        `first` on.
        """
        learner = None if self.inverse is None else self.inverse.learner

        def has_one(later: int) -> bool:
            start = first + later * steps
            return learner is not None and needs_records(learner, range(start, start + steps))

        return has_one

    @property
    def _total(self) -> Any:
        """Inner steps since the start of the run; a Number in a captured step."""
        return self.clock.total if tape.tape() is None else tape.number(lambda: float(self.clock.total))

    @property
    def weighing(self) -> Weighing:
        """Takes the cross derivative from plain passes, if v only weighs samples or moves the ridge."""
        if self._weighing is None:
            self._weighing = Weighing(self.problem, self._recording)
        return self._weighing

    def recognise(self, in_step: bool) -> Recognition:
        """How v enters the last inner batch. `in_step`: the cross derivative is to come from inner steps."""
        return recognise(self.weighing, self.objective(self.recent[-1]), in_step)

    def lagged_cross(self, x: Tensor) -> LaggedCross:
        """Takes the cross derivative along x from the inner steps it is handed to."""
        return LaggedCross(self.weighing, x, self.division.workers, isinstance(self.inner.source, Data))

    def plain_cross(self, at: Oracle) -> Product:
        """As `Oracle.cross`, by plain passes; that over a single batch is taken here and now."""
        total = [torch.zeros_like(leaf) for leaf in self.problem.v.leaves]
        # Where curvature is waited for meanwhile, the pass is taken before; else it can use x as scores arrive.
        early = isinstance(self.executor, SupportsOverlap) or tape.tape() is not None
        passes = [partial(self.weighing.cross, objective, self.calls, early) for objective in at.objectives]
        first = passes[0]() if len(passes) == 1 else None

        def times(x: Tensor) -> list[Tensor]:
            self.calls.cross += len(passes)
            if first is not None:
                return first(x)[0]
            for taken, share in zip(passes, at.shares, strict=True):
                for t, part in zip(total, taken()(x)[0], strict=True):
                    t.add_(part, alpha=share)
            return total

        return times

    def seed(self) -> int:
        """A fresh seed for a pass that will be replayed."""
        found = tape.number(lambda: int(torch.randint(2**31 - 1, ())))
        return found if isinstance(found, tape.Number) else int(found)  # type: ignore[return-value]  # a whole number

    def objective(self, batch: Batch, seed: int | None = None) -> Objective:
        """The inner objective on a batch. Using it again, here or at another point, repeats its dropout.

        Without a seed an inner step draws from the run's generators.
        """
        return self.division.objective(batch, seed)

    def inner_batch(self) -> Batch:
        """The next inner batch."""
        batch = self.inner.next()
        if self._refills:
            batch = map_tensors(_own, batch)
        self.recent.append(batch)
        return batch

    def inner_batches(self, count: int | str) -> list[Batch]:
        """The next `count` inner batches, or "all": one pass over the data."""
        if count == "all":
            return [move(batch, self.problem.theta.device) for batch in self.inner.source]
        if int(count) > MOST_BATCHES:
            raise InputError(
                f"batches = {count} would keep more than {MOST_BATCHES:,} inner batches at once. Use batches='all'"
                " for one pass over the data, or fewer."
            )
        return [self.inner_batch() for _ in range(int(count))]

    def gradient(
        self, objective: Objective, record: bool = True, always: bool = False, cross: LaggedCross | None = None
    ) -> InnerStep:
        """The inner gradient on a batch, its record handed to the executor when the inverse wants it, or `always`.

        `cross` takes its cross derivative from the same pass.
        """
        learner = None if self.inverse is None else self.inverse.learner
        wanted = record and learner is not None and (always or needs_record(learner, self.clock.total))
        recorder = self._recording if wanted else None
        if recorder is not None and learner is not None:
            taken = None if always else sampling(learner, self._total)
            if taken is not None and taken.samples is not None:
                taken = taken._replace(samples=-(-taken.samples // self.settings.accumulate))  # of each micro-batch
            recorder.sampling = taken
            recorder.streams = self.executor.background is False and self.division.workers == 1
            recorder.fold = fold(learner) if recorder.streams else None
        parts = micro_batches(objective.batch, self.settings.accumulate)
        if len(parts) == 1:
            found = self._pass(objective, recorder, cross)
        else:
            if cross is not None:
                cross.steps += 1
            folds = None if recorder is None or recorder.sampling is not None else recorder.fold
            found = accumulated(
                parts,
                lambda part, share: self._pass(self.objective(part, objective.seed), recorder, cross, share),
                folds,
            )
        if found.record is not None:
            self.executor.submit(found.record)
        return found

    def _pass(
        self, objective: Objective, recorder: Recorder | None, cross: LaggedCross | None, share: float | None = None
    ) -> InnerStep:
        """The gradient on a batch, or on a micro-batch with this share of one, with its record and cross derivative."""
        if cross is None:
            return objective.step(NO_TAP if recorder is None else recorder, self.calls)
        tap = cross.tap(recording=recorder is not None, whole=share is None)
        found = objective.step(tap, self.calls)
        cross.take(objective, tap, self.calls, share)
        return found

    def inner_step(
        self, objective: Objective | None = None, record: bool = True, cross: LaggedCross | None = None
    ) -> Tensor:
        """One projected optimiser step on theta, by default on the next batch; returns the loss before it."""
        chosen = self.objective(self.inner_batch()) if objective is None else objective
        self.last_gradient = None  # which would be held beside everything that the pass needs
        found = self.gradient(chosen, record, cross=cross)
        self.last_gradient = found.gradient

        def closure() -> Tensor:
            again = self.gradient(chosen, record=False)
            self.theta.set_gradient(again.gradient)
            return again.value

        self.move_theta(found.gradient, closure)
        return found.value

    def move_theta(self, direction: Sequence[Tensor], closure: Callable[[], Tensor] | None = None) -> None:
        """One projected optimiser step on theta along a direction, and one tick of the inner clock."""
        self.theta.move(direction, self.clock, closure)
        self.project_theta()
        self.tick()

    def tick(self) -> None:
        """One inner step was taken."""

        def tick() -> None:
            self.clock.t += 1
            self.clock.total += 1

        tape.effect(tick)

    def plain_rate(self, owner: str) -> float:
        """The size of the next inner step, for a method that takes plain gradient steps; other optimisers are
        refused.
        """
        return self.theta.plain_rate(self.clock, owner)

    @contextmanager
    def temporarily_at(self, theta: Tensor, v: Tensor | None = None) -> Iterator[None]:
        """A context in which theta (D,), and v (P,) if given, have other values."""
        here = self.problem.theta.flat(), None if v is None else self.problem.v.flat()
        self.problem.theta.assign(theta)
        if v is not None:
            self.problem.v.assign(v)
        try:
            yield
        finally:
            self.problem.theta.assign(here[0])
            if here[1] is not None:
                self.problem.v.assign(here[1])

    def projected(self, theta: Tensor) -> Tensor:
        """A vector (D,) after the projection of theta, which does not move."""
        if self.settings.project is None:
            return theta
        with self.temporarily_at(theta):
            self.project_theta()
            return self.problem.theta.flat()

    def projected_v(self, v: Tensor) -> Tensor:
        """A vector (P,) after the projection of v, which does not move."""
        if self.settings.project_v is None:
            return v
        with self.temporarily_at(self.problem.theta.flat(), v):
            self.project_v()
            return self.problem.v.flat()

    def shift_theta(self, change: Tensor) -> None:
        """Add a vector (D,) to theta, project, and let the inner clock tick."""
        self.problem.theta.assign(self.problem.theta.flat() + change)
        self.project_theta()
        self.tick()

    def project_theta(self) -> None:
        """Bring theta back onto the ball of radius R, or apply the user's projection."""
        project(self.problem.theta, self.settings.project)

    def oracle(self, inner_batches: Sequence[Batch], outer_batch: Batch = None, seed: int | None = None) -> Oracle:
        """The current point with these batches. A seed given twice replays dropout."""
        seed = self.seed() if seed is None else seed
        parts = [part for batch in inner_batches for part in micro_batches(batch, self.settings.accumulate)]
        inner = self.division.objectives(parts, seed)
        return Oracle.over(inner, self.division.outer(outer_batch, seed), self.calls)

    def replay(self, objective: Objective) -> Oracle:
        """The current point with an objective that was met before, at this point or at another: its dropout is the
        same.
        """
        return Oracle.over([objective], calls=self.calls)

    def move_v(self, gradient: Sequence[Tensor]) -> float:
        """One projected optimiser step on v along the hypergradient, clipped; its norm before. Non-finite ones are
        refused.
        """
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradient]
        numbers = [norms[0] if len(norms) == 1 else torch.stack(norms).norm()]
        low = self.problem.lowest_weight()
        tape.join()
        if low is not None:
            numbers.append(low.to(numbers[0]))
        clip = self.settings.outer_clip
        if tape.tape() is not None:
            norm: float = tape.defer(_checked, *map(tape.reading, numbers))
            if clip is not None:
                least = torch.full_like(numbers[0], clip)
                shorter = torch.where(numbers[0] > clip, least / numbers[0], 1.0)
                gradient = [g * shorter for g in gradient]
        else:
            read: list[float] = torch.stack(numbers).tolist()  # in one transfer
            if isinstance(self.executor, SupportsOverlap):
                self.executor.raise_deferred()  # nothing is under way any more, because a number has come from the device
            norm = _checked(*read)
            if clip is not None and norm > clip:
                gradient = [g * (clip / norm) for g in gradient]
        self.v.move(gradient, self.clock)
        self.project_v()
        return norm

    def project_v(self) -> None:
        """Bring v back into its box, or apply the user's projection."""
        project(self.problem.v, self.settings.project_v)

    def begin(self) -> None:
        """Start a new outer step: reset the inner clock and inform the executor."""
        tape.effect(self._reset_inner_clock)
        self.recent.clear()
        self.problem.check_ridge()
        if (self.clock.k & (self.clock.k - 1) == 0 and self.clock.k > 0) or self.clock.k % 256 == 255:
            self.division.assert_equal()  # often at first, before time is spent on a run that will be refused at its end
        if self.inverse is not None:
            self.executor.begin()

    def _reset_inner_clock(self) -> None:
        self.clock.t = 0
        self.theta.reset_distance()


def _checked(norm: float, low: float | None = None) -> float:
    """The norm of a hypergradient; refused are one that is not finite, and weights below 0."""
    if norm != norm or norm == float("inf"):
        raise NonFiniteError("the hypergradient")
    check_weight(low)
    return norm


def _own(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of one in the memory of NumPy or of another process: a change there leaves no trace."""
    return tensor.clone() if tensor.device.type == "cpu" and not tensor.untyped_storage().resizable() else tensor
