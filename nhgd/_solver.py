"""The one driver: `Solver`."""

from __future__ import annotations

import inspect
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch

from nhgd import _threads as threads
from nhgd import execution as executions
from nhgd._autocast import set_aside
from nhgd._cost import largest
from nhgd._duration import checkpoint_interval, seconds
from nhgd._interruption import held_back
from nhgd._nonfinite import check_losses, explained
from nhgd._path import check_name
from nhgd._progress import bar
from nhgd._randomness import Randomness
from nhgd._solution import Metrics, Row, Solution, history_row, metric_values, statistics
from nhgd._stagnation import Course, StagnationWarning, held_by
from nhgd._validation import shown, validated, validated_but
from nhgd.algorithm import AbstractAlgorithm, Loop, LoopSettings
from nhgd.algorithm import resolve as resolve_algorithm
from nhgd.checkpoint import CheckpointWriter, Progress, SavedCheckpoint, last_kept
from nhgd.data.batch import Batch, common_length
from nhgd.errors import InputError, NhgdError, NonFiniteError, RunError, check_seed
from nhgd.execution import AbstractExecutor
from nhgd.execution.group import Report
from nhgd.loop.settings import OptimizerFactory, Projection
from nhgd.problem import Bilevel
from nhgd.schedule import Rate
from nhgd.stop import AbstractStop, Budget, Interrupted, Plateau, Run, Spent, Steps


class Solver:
    """Runs an algorithm on a problem.

    It may be used in a with statement, which ends the threads that keep its curvature; else they end with the solver itself.

    Args:
        problem: a `Bilevel`. Its theta and v are trained in place.
        inner_data, outer_data: `nhgd.Data`, DataLoaders, or lists of batches; walked over again and again.
        method: a name such as "nhgd" or "aid-cg", or an algorithm object.
        inner_steps: inner steps for each outer step.
        inner_lr, outer_lr: step sizes: numbers (default 0.1 and 0.01), functions of the outer step, or schedules.
        inner_optimizer, outer_optimizer: any torch optimiser: a class, a factory of parameters, or an instance.
        project: the radius R of the ball theta is kept in, or a function that changes theta in place.
        project_v: the box (low, high) v is kept in, or a function that changes v in place.
        outer_clip: the largest norm of a hypergradient; longer ones are shortened to it, because one wild estimate would
            fill the moments of Adam for hundreds of steps.
        execution: where curvature is kept up to date: "inline", "thread", "stream", "device" or an executor.
        max_lag: how many records of inner steps may wait for their curvature before the inner loop does; 0: none.
        seed: of every random number the run draws. The caller's generators are left as they were.
        metrics: (theta, v) -> dict of numbers, added to the history; not part of the time.
        metrics_every: outer steps between two evaluations of the metrics.
        checkpoint: a folder to keep the run in, so that `Solver.resume` can go on with it, bit for bit, after it was broken
            off. One that holds an earlier run, or in which another run is at work, is refused.
        checkpoint_every: outer steps between two checkpoints, or a time such as "60s"; by default every 30 seconds, and less
            often where that would take more than a fiftieth of the time. The end of `run` is always kept, and so is the
            step during which Ctrl-C was pressed.
        overwrite: whether `checkpoint` may hold an earlier run, which stays until this one first writes.

    >>> problem = Bilevel(
    ...     inner=lambda theta, v, x: (theta - v).square().expand(len(x)),
    ...     outer=lambda theta, v, x: (theta - 3).square(),
    ...     theta=torch.tensor(0.0), v=torch.tensor(0.0))
    >>> data = [torch.zeros(4)]
    >>> solution = Solver(problem, data, data, method="aid-cg", outer_lr=0.3).run(steps=50)
    >>> round(float(solution.v), 3)
    3.0
    """

    @validated_but("method", "inner_optimizer", "outer_optimizer", "project", "project_v", "checkpoint_every")
    def __init__(
        self,
        problem: Bilevel,
        inner_data: Iterable[Batch],
        outer_data: Iterable[Batch],
        method: str | AbstractAlgorithm = "nhgd",
        inner_steps: int = 10,
        inner_lr: Rate | None = None,
        outer_lr: Rate | None = None,
        inner_optimizer: OptimizerFactory | None = None,
        outer_optimizer: OptimizerFactory | None = None,
        project: Projection = None,
        project_v: Projection = None,
        outer_clip: float | None = None,
        execution: str | AbstractExecutor = "inline",
        max_lag: int | None = None,
        seed: int = 0,
        metrics: Metrics | None = None,
        metrics_every: int = 1,
        checkpoint: str | Path | None = None,
        checkpoint_every: int | str | None = None,
        overwrite: bool = False,
    ) -> None:
        check_seed(seed)
        if checkpoint is not None:
            check_name("checkpoint", checkpoint)
        if metrics_every < 1:
            raise InputError(f"metrics_every must be at least 1, got {metrics_every}.")
        every = checkpoint_interval(checkpoint_every)
        if overwrite and checkpoint is None:
            raise InputError(
                "overwrite=True is about a folder of checkpoints. Name it: Solver(..., checkpoint='runs/a')."
            )
        settings = LoopSettings(
            inner_steps, inner_lr, outer_lr, inner_optimizer, outer_optimizer, project, project_v, outer_clip
        )
        given = {
            **vars(settings),
            "method": method,
            "execution": execution,
            "max_lag": max_lag,
            "seed": seed,
            "metrics": metrics,
            "metrics_every": metrics_every,
            "checkpoint": checkpoint,
            "checkpoint_every": checkpoint_every,
            "overwrite": overwrite,
        }
        self.problem = problem
        self.algorithm = resolve_algorithm(method).prepared(problem)
        self.executor = executions.resolve(execution, max_lag=max_lag)
        _refuse_idle(self.executor, self.algorithm)
        self.metrics = metrics
        self.metrics_every = metrics_every
        self.history: list[Row] = []
        self.seconds = 0.0
        self._unfinished = False  # whether steps were taken that other processes were not told the end of
        self._whole = True  # whether the run stands between two outer steps
        self._stopping = False
        self._resumed: Path | None = None  # the checkpoint from which it goes on, until its first step
        self._run: Run | None = None
        self._interrupted: Interrupted | None = None
        self._writer = None if checkpoint is None else CheckpointWriter(checkpoint, *every, overwrite)
        self._randomness = Randomness(seed, problem.theta.device)
        with self._telling_peers(), self._randomness.scope(), set_aside():
            try:
                self._set_up(inner_data, outer_data, settings)
            except RunError as error:
                # A worker that has lost another may hear why only now.
                found = self.executor.root_cause(error)
                if found is error:
                    raise
                raise found from error
        if self._writer is not None:
            with self._telling_peers():
                self._writer.begin(self._progress(), self.algorithm, given)
            weakref.finalize(self, self._writer.lock.release)
        # Where the solver is let go of without having been closed. An executor of the caller's may serve another by then.
        self.executor.user = user = object()
        weakref.finalize(self, _close_unless_used, self.executor, user).atexit = False

    def _set_up(self, inner_data: Iterable[Batch], outer_data: Iterable[Batch], settings: LoopSettings) -> None:
        """Claim the folder, look at the first batches, choose the threads and bring the method to its start."""
        problem = self.problem
        if self._writer is not None:
            self.executor.group.join(problem.theta)
            if self.executor.group.leads:
                self._writer.claim()
        self.loop = Loop(problem, inner_data, outer_data, settings, self.executor, self.algorithm.online)
        # The first batches are looked at before anything moves, then drawn again by the run itself.
        for stream in (self.loop.inner, self.loop.outer):
            stream.remember = self._writer is not None
        inner_batch = self.loop.inner.peek()
        with threads.measuring(problem.theta.device) as measured:
            problem.validate(inner_batch, self.loop.outer.peek())
        work = largest(self.loop.inverse, problem.theta, common_length(inner_batch) or 1, settings.inner_steps)
        self.loop.choose_threads(threads.suited(max(measured.flops, work), problem.theta.device))
        with self.loop.computing():
            self.loop.project_theta()
            self.loop.project_v()
            self._state = self.algorithm.init(self.loop)

    @classmethod
    @validated
    def resume(
        cls,
        path: str | Path,
        problem: Bilevel,
        inner_data: Iterable[Batch],
        outer_data: Iterable[Batch],
        **settings: Any,
    ) -> Solver:
        """A solver that stands where the run in a checkpoint stood, and goes on bit for bit as that would have.

        Its next `run` continues the interrupted one: the steps and the seconds of that count. So
        `run(steps=1000)` ends where an unbroken `run(steps=1000)` would have ended, and `run()` reuses the original stop rules.

        Args:
            path: the folder that was given as `checkpoint`; it is written to again, unless another is given.
            problem, inner_data, outer_data: built as they were for that run. theta and v take the values that were kept.
            settings: of the `Solver`. What was kept need not be given again, and may not differ; functions, such as a
                step size or an optimiser's factory, cannot be kept and must be given.
        """
        saved = SavedCheckpoint(path)
        chosen = saved.settings(settings, problem)
        strange = sorted(set(chosen) - set(inspect.signature(cls.__init__).parameters))
        if strange:
            raise InputError(
                f"{saved.path} holds settings that no Solver has ({', '.join(strange)}): it is damaged, or of another version."
            )
        solver = cls(problem, inner_data, outer_data, **chosen)
        assert solver._writer is not None
        with solver._telling_peers():
            progress = solver._progress()
            solver.history = solver._writer.restore(saved, progress)
        solver._state, solver.seconds, solver._interrupted = progress.state, progress.seconds, progress.interrupted
        solver._resumed = saved.path
        return solver

    def save(self) -> None:
        """Write a checkpoint now, between two outer steps."""
        if self._writer is None:
            raise InputError("This solver has no place for checkpoints. Give it one: Solver(..., checkpoint='runs/a').")
        if not self.executor.group.leads:
            return  # one process writes for all
        try:
            self._writer.write(self._progress(), self.history)
        except NhgdError as error:
            raise self._with_last(error) from error

    @property
    def checkpoint(self) -> CheckpointWriter | None:
        """What keeps the run, if anything does: `checkpoint.path`, and `checkpoint.step` of the last one written."""
        return self._writer

    def _progress(self) -> Progress:
        """What a checkpoint keeps of the run."""
        return Progress(self.loop, self._state, self._randomness, self.seconds, self._run)

    def _with_last(self, error: NhgdError) -> NhgdError:
        """The same error, or the loss of a process behind it, naming the last good checkpoint."""
        error = self.executor.root_cause(error)
        if self._writer is not None and not error.checkpoint:
            known = self._writer.last() if self.executor.group.leads else last_kept(self._writer.path)
            error.checkpoint = known.strip()
        return error

    def step(self) -> Row:
        """One outer step; its row of the history."""
        if self.executor.group.serves:
            raise InputError(
                "This process keeps curvature for others and takes no steps. Call run(), or iterate over the solver, which both"
                " end here when they end there."
            )
        with self._telling_peers(), self._at_work():
            row = self._advance()
            self._save_if_due()
        self._unfinished = True
        return row

    def stop(self) -> None:
        """End `run` when the outer step that it is at is done, as a handler of a signal or another thread may ask."""
        self._stopping = True

    @contextmanager
    def _at_work(self) -> Iterator[Callable[[], None]]:
        """The setting of steps: no other run is in the folder of checkpoints, and Ctrl-C leaves one of the last whole step.

        What is given is to be called between two steps, where Ctrl-C may come.
        """
        writer = self._writer if self.executor.group.leads else None
        with ExitStack() as stack:
            if writer is not None:
                stack.enter_context(writer.at_work())
            try:
                yield stack.enter_context(held_back(writer is not None))
                stack.close()  # Ctrl-C may have come during the last step
            except KeyboardInterrupt as stop:
                if writer is not None:
                    self._save_what_is_whole(writer)
                    stop.args = stop.args or (writer.last().strip(),)
                raise

    def _save_what_is_whole(self, writer: CheckpointWriter) -> None:
        if self._whole and writer.step != self.loop.clock.k:
            try:
                self.save()
            except NhgdError as error:
                warnings.warn(str(error), stacklevel=2)

    def _save_if_due(self) -> None:
        if self._writer is not None and self._writer.due(self.loop.clock.k):
            self.save()

    def _advance(self) -> Row:
        self._whole = False
        problem, clock = self.problem, self.loop.clock
        problem.refuse_inference()
        theta, v = problem.theta.flat(), problem.v.flat()
        buffers = self._buffers()
        before = self.executor.measured()
        started = time.perf_counter()
        with self._randomness.scope(), self.loop.computing():
            try:
                with self.executor.scope(), set_aside(), self._fitting():
                    self.loop.begin()
                    self._state, info = self.algorithm.step(self.loop, self._state)
                check_losses(info)
            except NonFiniteError as error:
                problem.theta.assign(theta)
                problem.v.assign(v)
                for buffer, value in buffers:
                    buffer.copy_(value)
                cause = self.executor.root_cause(error)
                if isinstance(cause, NonFiniteError):
                    cause = explained(self.loop, cause)
                raise self._with_last(cause) from error
            except NhgdError as error:
                raise self._with_last(error) from error.__cause__
            clock.k += 1
        taken = time.perf_counter() - started
        self.seconds += taken
        work = self.executor.measured().since(before)
        row = history_row(self.loop, info, work, self.seconds, taken)
        self.history.append(row)  # before the metrics, which may raise: the step is taken
        if self.metrics is not None and (clock.k % self.metrics_every == 0 or clock.k == 1):
            row |= self.evaluate()
        self._whole = True
        return row

    @contextmanager
    def _fitting(self) -> Iterator[None]:
        """The first step after a resume shows whether what was read fits the problem in every respect."""
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError, AssertionError, RuntimeError) as error:
            if self._resumed is None or isinstance(error, (NhgdError, torch.OutOfMemoryError)):
                raise
            raise RunError(
                f"The first outer step from {self._resumed} failed ({type(error).__name__}: {' '.join(str(error).split())}). What"
                " is kept there does not fit the problem, or the problem's functions are not what they were."
            ) from error
        self._resumed = None

    def evaluate(self) -> dict[str, float]:
        """The metrics at the current point; buffers, training flags and random numbers stay as they are."""
        if self.metrics is None:
            return {}
        problem = self.problem
        with (
            self.loop.computing(),
            problem.guarded(seed=0),
            torch.no_grad(),
            problem.theta.view() as theta,
            problem.v.view() as v,
        ):
            return metric_values(self.metrics(theta, v))

    def __iter__(self) -> Iterator[Row]:
        """One outer step after another, for the caller's own loop; it ends when the caller leaves it.

        In a process that keeps curvature for others there is nothing to see: it ends, empty, when the others have left theirs.
        """
        if self.executor.group.serves:
            self._serve()
            return
        try:
            while True:
                yield self.step()
        except GeneratorExit:
            self._finish(self.solution())
            self._leave_folder()

    @validated
    def run(
        self,
        steps: int | None = None,
        budget: str | float | None = None,
        plateau: int | None = None,
        progress: bool | None = None,
        stop: Sequence[AbstractStop[Any]] = (),
    ) -> Solution:
        """Run until a stop rule holds.

        After `Solver.resume` the first call continues the interrupted run: its steps and seconds count, and without
        arguments its stop rules are used again.

        Args:
            steps: outer steps.
            budget: seconds of solving, as a number or as "60s", "5m", "1h". Metrics and checkpoints do not count.
            plateau: stop when the outer loss has not fallen by a part of 1e-4 for this many outer steps.
            progress: a bar on standard error; by default on a terminal only.
            stop: further rules, asked after those above; see `nhgd.stop`.
        """
        rules: list[AbstractStop[Any]] = [] if steps is None else [Steps(steps)]
        rules += [] if budget is None else [Budget(seconds(budget))]
        rules += [] if plateau is None else [Plateau(plateau)]
        if isinstance(stop, Mapping) or not all(isinstance(rule, AbstractStop) for rule in stop):
            raise InputError(f"stop takes a list of rules, such as nhgd.stop.Plateau(50), got {shown(stop)}.")
        rules += stop
        if self.executor.group.serves:
            return self._serve()
        interrupted = self._interrupted
        if interrupted is not None:
            run = interrupted.resumed(rules, self.history)
        elif rules:
            run = Run(rules, self.loop.clock.k, self.seconds)
        else:
            raise InputError("run() needs to know when to stop: steps=1000, budget='60s' or plateau=50.")
        self._run, self._interrupted = run, None
        try:
            with self._telling_peers(), self._at_work() as between_steps:
                if self._writer is not None and interrupted is None and run.first:
                    self.save()  # a second run: should it be interrupted at once, it is this one that is resumed
                solution = self._run_until_the_end(run, progress, between_steps)
        finally:
            self._stopping = False
        self._leave_folder()
        self._finish(solution)
        return solution

    def _run_until_the_end(self, run: Run, progress: bool | None, between_steps: Callable[[], None]) -> Solution:
        course = Course(self.problem.v.flat())
        with bar(self.algorithm.name, progress) as tick:
            while (result := run.ended_by(spent := self._spent(run))) is None:
                self.loop.clock.done = run.fraction(spent)
                row = self._advance()
                run.note(row)
                course.note(self.problem.v.flat(), row)
                between_steps()
                self._save_if_due()
                tick(self.loop.clock.done, f"step {row['step']}, outer loss {row['outer_loss']:.4g}")
            tick(1.0, "")
        self.loop.division.assert_equal()
        if self._writer is not None and self._writer.step != self.loop.clock.k:
            self.save()
        solution = self.solution(result)
        remark = course.remark(held_by(self.loop.settings.project_v, self.problem.v.leaves))
        solution.stats["stagnation"] = remark
        if remark is not None and self.executor.group.leads:
            warnings.warn(remark, StagnationWarning, stacklevel=3)
        return solution

    def _spent(self, run: Run) -> Spent:
        """What the run has used up; workers agree on what the first of them says, so that they stop together."""
        division = self.loop.division
        used = self.seconds - run.began
        requested = self._stopping and bool(self.history)  # what ends has something to show
        return Spent(
            self.loop.clock.k - run.first,
            division.agreed(used) if run.clocked else used,
            bool(division.agreed(float(requested))) if division.workers > 1 else requested,
        )

    @contextmanager
    def _telling_peers(self) -> Iterator[None]:
        """An error inside is told to the other processes, so that nobody waits for this one, and the folder is left."""
        try:
            yield
        except BaseException as error:
            self._leave_folder()
            self.executor.group.fail(error)
            raise

    def _leave_folder(self) -> None:
        if self._writer is not None:
            self._writer.release()

    def _finish(self, solution: Solution) -> None:
        """The run has ended: the processes that served it learn what it found."""

        def report() -> Report:
            told = {
                "history": self.history,
                "stats": solution.stats,
                "result": solution.result,
                "step": self.loop.clock.k,
                "seconds": self.seconds,
            }
            return Report(told, [self.problem.theta.flat(), self.problem.v.flat(), *(b for b, _ in self._buffers())])

        with self._telling_peers():
            try:
                self.executor.group.finish(report)
            except NhgdError as error:
                raise self._with_last(error) from error
        self._unfinished = False

    def _serve(self) -> Solution:
        """Keep curvature for the processes of the inner loop until they have finished; what they found."""
        with self._telling_peers():
            try:
                with self.loop.computing():
                    told, (theta, v, *buffers) = self.executor.group.serve()
            except NhgdError as error:
                raise self._with_last(error) from error
        problem = self.problem
        problem.theta.assign(theta.to(problem.theta.device))
        problem.v.assign(v.to(problem.v.device))
        for (buffer, _), value in zip(self._buffers(), buffers, strict=True):
            buffer.copy_(value)
        self.history, self.seconds, self.loop.clock.k = told["history"], told["seconds"], told["step"]
        return Solution(problem.v.given, problem.theta.given, self.history, told["stats"], told["result"])

    def _buffers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [*self.problem.theta.buffers(), *self.problem.v.buffers()]

    def solution(self, result: str = "stopped") -> Solution:
        """What has been found so far."""
        stats = statistics(self.algorithm, self.loop, self.history, self.seconds)
        return Solution(self.problem.v.given, self.problem.theta.given, self.history, stats, result)

    def close(self) -> None:
        """Let go of what the executor holds, and of the folder of the checkpoints."""
        self._leave_folder()
        if self._unfinished and not self.executor.group.serves:
            self._finish(self.solution())
        self.executor.close()

    def __enter__(self) -> Solver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise InputError(
            "A Solver cannot be copied or pickled: it trains its problem in place and walks over its data. To go on twice from"
            " one point, keep the run (checkpoint='runs/a') and resume it with a copy of the problem:"
            " Solver.resume('runs/a', problem, inner_data, outer_data, checkpoint='runs/b')."
        )


def _refuse_idle(executor: AbstractExecutor, algorithm: AbstractAlgorithm) -> None:
    """An execution with nothing to run would change nothing, and its user would believe that it did."""
    inverse = algorithm.online
    if executor.background and not executor.gathers and (inverse is None or inverse.learner is None):
        by = "" if inverse is None or inverse.name in algorithm.name else f" with {inverse.name}"
        raise InputError(
            f"The method {algorithm.name}{by} learns no curvature from the inner steps, so {executor.name} execution would have"
            " nothing to run. Use execution inline, or a method that learns, such as nhgd."
        )


def _close_unless_used(executor: AbstractExecutor, user: object) -> None:
    """End the threads of an executor whose solver is gone."""
    if executor.user is user:
        executor.close()
