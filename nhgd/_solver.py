"""The one driver: `Solver`."""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from torch.amp.grad_scaler import GradScaler

from nhgd import execution as executions
from nhgd._callbacks import Callbacks, OnStep
from nhgd._captured import Captured
from nhgd._captured.steps import StepResult
from nhgd._duration import seconds
from nhgd._outer_step import advance_by, finish_on_the_clock
from nhgd._peers import Peers
from nhgd._progress import bar, step_words
from nhgd._randomness import Randomness
from nhgd._solution import Metrics, Row, Solution, evaluated, statistics
from nhgd._stagnation import StagnationWarning, Trajectory, held_by
from nhgd._start import refuse_idle, start
from nhgd._validation import check_seed, validated, validated_but
from nhgd.algorithm import AbstractAlgorithm, Loop, LoopSettings, prepared
from nhgd.checkpoint import Checkpoints, CheckpointWriter, SavedCheckpoint
from nhgd.data.batch import Batch
from nhgd.errors import InputError
from nhgd.execution import AbstractExecutor
from nhgd.loop.settings import OptimizerFactory, Projection
from nhgd.problem import Bilevel
from nhgd.schedule import Learnt, Rate
from nhgd.stop import AbstractStop, Run, Spent, chosen


class Solver:
    """Runs an algorithm on a problem.

    Used in a with statement, it stops its curvature threads at the end; otherwise they stop with the solver itself.

    Args:
        problem: a `Bilevel`. Its theta and v are trained in place.
        inner_data, outer_data: `nhgd.Data`, DataLoaders, or lists of batches; iterated over repeatedly.
        method: a name such as "nhgd" or "aid-cg", or an algorithm object.
        inner_steps: inner steps for each outer step.
        inner_lr, outer_lr: step sizes: numbers (default 0.1 and 0.01), functions of the outer step, or schedules. The
            methods `itd` and `truncated` also learn an inner_lr: `nhgd.schedule.Learnt(function of v)`.
        inner_optimizer, outer_optimizer: any torch optimiser: a class, a factory of parameters, or an instance.
        project: the radius R of the ball theta is kept in, or a function that changes theta in place.
        project_v: the box (low, high) v is kept in, or a function that changes v in place.
        outer_clip: the largest norm of a hypergradient; longer ones are shortened to it, because one wild estimate
            would affect the moments of Adam for hundreds of steps.
        accumulate: micro-batches into which the batch of an inner step is divided, for memory: gradient, curvature and
            cross derivative are those of the whole batch. `nhgd` and `aid` do so.
        scaler: a `torch.amp.GradScaler`, for functions under float16 autocast. Backward passes of both levels start
            from losses times its scale; gradients, curvature and hypergradients are unscaled. A pass that overflows is
            not used: the scale is lowered and the pass taken again, on the same batch. `stats["scaler"]` counts them.
        execution: where curvature is kept up to date: "inline", "thread", "stream", "device" or an executor.
        max_lag: how many records of inner steps may be pending before the inner loop waits.
        seed: of every random number the run draws. The caller's generators are left as they were.
        metrics: (theta, v) -> dict of numbers, added to the history; not part of the time.
        metrics_every: outer steps between two evaluations of the metrics.
        on_step: a function of the row of each outer step, or a list of them; not part of the time (docs/callbacks.md).
        checkpoint: a folder for checkpoints, from which `Solver.resume` continues an interrupted run bit for bit. A
            folder that contains an earlier run, or is in use by another, is refused.
        checkpoint_every: outer steps between two checkpoints, or a time such as "60s"; by default every 30 seconds, and
            less often if they would take more than 2 % of the time. The end of `run` is always saved, and so is the
            step during which Ctrl-C was pressed.
        overwrite: whether `checkpoint` may hold an earlier run, which stays until this one first writes.
        compile: "auto": on a CUDA device outer steps are captured as CUDA graphs and replayed without their Python,
            where possible; "graph": so too, with a warning if not, and on the CPU as lists of operations; False: never.
            stats["compile"] says which, and why. The problem's functions must then depend on their arguments only.

    >>> import torch
    >>> problem = Bilevel(
    ...     inner=lambda theta, v, x: (theta - v).square().expand(len(x)),
    ...     outer=lambda theta, v, x: (theta - 3).square(),
    ...     theta=torch.tensor(0.0), v=torch.tensor(0.0))
    >>> data = [torch.zeros(4)]
    >>> solution = Solver(problem, data, data, method="aid-cg", outer_lr=0.3).run(steps=50)
    >>> round(float(solution.v), 3)
    3.0
    """

    @validated_but(
        "method", "inner_optimizer", "outer_optimizer", "project", "project_v", "checkpoint_every", "on_step"
    )
    def __init__(
        self,
        problem: Bilevel,
        inner_data: Iterable[Batch],
        outer_data: Iterable[Batch],
        method: str | AbstractAlgorithm = "nhgd",
        inner_steps: int = 10,
        inner_lr: Rate | Learnt | None = None,
        outer_lr: Rate | None = None,
        inner_optimizer: OptimizerFactory | None = None,
        outer_optimizer: OptimizerFactory | None = None,
        project: Projection = None,
        project_v: Projection = None,
        outer_clip: float | None = None,
        accumulate: int = 1,
        scaler: GradScaler | None = None,
        execution: str | AbstractExecutor = "inline",
        max_lag: int | None = None,
        seed: int = 0,
        metrics: Metrics | None = None,
        metrics_every: int = 1,
        on_step: OnStep = None,
        checkpoint: str | Path | None = None,
        checkpoint_every: int | str | None = None,
        overwrite: bool = False,
        compile: str | bool = "auto",
    ) -> None:
        given = dict(locals())
        check_seed(seed)
        if metrics_every < 1:
            raise InputError(f"metrics_every must be at least 1, got {metrics_every}.")
        self._captured = Captured(compile)
        self.problem = problem
        self.algorithm = prepared(method, problem)
        self.executor = executions.resolve(execution, max_lag=max_lag)
        refuse_idle(self.executor, self.algorithm)
        self.metrics, self.metrics_every = metrics, metrics_every
        self._stopping, self._measured = False, list[str]()  # the names of the metrics
        self.on_step = Callbacks(on_step, self.executor.group)
        self._checkpoints = Checkpoints(checkpoint, checkpoint_every, overwrite, self.executor)
        self._peers = Peers(self.executor.group, self._checkpoints)
        settings = LoopSettings(
            inner_steps,
            inner_lr,
            outer_lr,
            inner_optimizer,
            outer_optimizer,
            project,
            project_v,
            outer_clip,
            accumulate,
            scaler,
        )
        randomness = Randomness(seed, problem.theta.device)
        with self._peers.informed():
            self._progress = start(
                problem,
                inner_data,
                outer_data,
                settings,
                self.algorithm,
                self.executor,
                self._checkpoints,
                randomness,
                self._captured,
            )
            self._checkpoints.register(self._progress, self.algorithm, given)
        self._close_when_let_go()

    def _close_when_let_go(self) -> None:
        """Clean up after a solver that is never closed, unless its executor has been handed to another by then."""
        if self.checkpoint is not None:
            weakref.finalize(self, self.checkpoint.lock.release)
        self.executor.user = user = object()
        weakref.finalize(self, _close_unless_used, self.executor, user).atexit = False

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
        """A solver that continues the run of a checkpoint bit for bit.

        Its next `run` continues the interrupted one: the steps and the seconds of that count. So
        `run(steps=1000)` ends where an uninterrupted `run(steps=1000)` would have ended, and `run()` reuses the
        original stop rules.

        Args:
            path: the folder that was given as `checkpoint`; it is written to again, unless another is given.
            problem, inner_data, outer_data: built as they were for that run. theta and v take the values that were
                kept.
            settings: of the `Solver`. What was kept need not be given again, and may not differ; functions, such as a
                step size or an optimiser's factory, cannot be kept and must be given.
        """
        saved = SavedCheckpoint(path)
        chosen = saved.settings(settings, problem)
        strange = sorted(set(chosen) - set(inspect.signature(cls.__init__).parameters))
        if strange:
            raise InputError(
                f"{saved.path} contains settings that no Solver has ({', '.join(strange)}): it is damaged, or from"
                " another version."
            )
        solver = cls(problem, inner_data, outer_data, **chosen)
        with solver._peers.informed():
            solver._checkpoints.restore(saved, solver._progress)
        return solver

    @property
    def loop(self) -> Loop:
        """The loop that the algorithm acts on."""
        return self._progress.loop

    @property
    def history(self) -> list[Row]:
        """One row for each outer step."""
        return self._progress.history

    @property
    def state(self) -> Any:
        """The state of the algorithm."""
        return self._progress.state

    @property
    def continued(self) -> int:
        """Outer steps of an interrupted run that the next `run` continues."""
        interrupted = self._progress.interrupted
        return 0 if interrupted is None else self.loop.clock.k - interrupted.first

    @property
    def seconds(self) -> float:
        """That the outer steps took."""
        return self._progress.seconds

    @property
    def checkpoint(self) -> CheckpointWriter | None:
        """What keeps the run, if anything does: `checkpoint.path`, and `checkpoint.step` of the last one written."""
        return self._checkpoints.writer

    def save(self) -> None:
        """Write a checkpoint now, between two outer steps."""
        self._captured.suspend()
        self._checkpoints.save(self._progress)

    def step(self) -> Row:
        """One outer step; its row of the history."""
        if self.executor.group.serves:
            raise InputError(
                "This process keeps curvature for others and takes no steps. Call run() or iterate over the solver:"
                " both end here when they end in the other processes."
            )
        with self._peers.informed(), self._checkpoints.at_work(self._progress):
            row = self._advance()[0].row
            self._save_if_due()
            self.on_step.show(row)
        self._peers.waiting = True
        return row

    def stop(self) -> None:
        """End `run` when the outer step that it is at is done, as a handler of a signal or another thread may ask."""
        self._stopping = True

    def _advance(self, most: int = 1, before: Callable[[int], None] = lambda taken: None) -> list[StepResult]:
        """Take one to `most` outer steps, with metrics due at most after the last."""
        self._progress.whole = False
        if self.metrics is not None:
            to_metrics = self.metrics_every - self.loop.clock.k % self.metrics_every
            most = min(most, to_metrics if self.history else 1)
        taken = advance_by(self.algorithm, self._progress, self._checkpoints, self._captured, most, before)
        if self.metrics is not None and ((row := taken[-1].row)["step"] % self.metrics_every == 0 or row["step"] == 1):
            finish_on_the_clock(self._progress, row)
            finish_on_the_clock(self._progress, row)
            row |= (found := self.evaluate())  # it may raise: the step is complete, and its row stays
            self._measured = list(found)
        self._progress.whole = True
        return taken

    def _save_if_due(self) -> None:
        if self._checkpoints.is_due(self._progress):
            self.save()

    def evaluate(self) -> dict[str, float]:
        """The metrics at the current point; buffers, training flags and random numbers stay as they are."""
        return {} if self.metrics is None else evaluated(self.metrics, self.loop)

    def __iter__(self) -> Iterator[Row]:
        """One outer step after another, for the caller's own loop; it ends when the caller leaves it.

        In a process that keeps curvature for others it is empty, and ends when the others have left theirs.
        """
        if self.executor.group.serves:
            self._peers.serve(self._progress)
            return
        try:
            while True:
                yield self.step()
        except GeneratorExit:
            self._peers.finish(self._progress, self.solution())
            self._checkpoints.release()

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
        rules = chosen(steps, None if budget is None else seconds(budget), plateau, stop)
        if self.executor.group.serves:
            return self._peers.serve(self._progress)
        goes_on = self._progress.interrupted is not None
        run = self._begun(rules)
        try:
            with self._peers.informed(), self._checkpoints.at_work(self._progress) as between_steps:
                if self.checkpoint is not None and not goes_on and run.first:
                    self.save()  # a second run: should it be interrupted at once, it is this one that is resumed
                solution = self._run_until_the_end(run, progress, between_steps)
        finally:
            self._stopping = False
        self._checkpoints.release()
        self._peers.finish(self._progress, solution)
        return solution

    def _begun(self, rules: Sequence[AbstractStop[Any]]) -> Run:
        """The run that ends by these rules: a new one, or the interrupted one it continues."""
        progress = self._progress
        if progress.interrupted is not None:
            run = progress.interrupted.resumed(rules, progress.history)
        elif rules:
            run = Run(rules, self.loop.clock.k, progress.seconds, self.loop.calls.equivalents)
        else:
            raise InputError("run() needs to know when to stop: steps=1000, budget='60s' or plateau=50.")
        progress.run, progress.interrupted = run, None
        return run

    def _run_until_the_end(self, run: Run, progress: bool | None, between_steps: Callable[[], None]) -> Solution:
        trajectory = Trajectory(self.problem.v.flat())
        with bar(self.algorithm.name, progress) as tick:
            while (result := run.ended_by(spent := self._spent(run))) is None:

                def before(taken: int, spent: Spent = spent) -> None:
                    self.loop.clock.done = run.fraction(replace(spent, steps=spent.steps + taken))

                taken = self._advance(self._ahead(run, spent), before)
                v = self.problem.v.flat()
                for step in taken:
                    run.note(step.row)
                    trajectory.note(v, step.row, step.stride)
                    self.on_step.show(step.row)
                between_steps()
                self._save_if_due()
                tick(self.loop.clock.done, step_words(taken[-1].row, self._measured))
            tick(1.0, "")
        self.loop.division.assert_equal()
        self._captured.suspend()
        self._checkpoints.save_unless_saved(self._progress)
        solution = self.solution(result)
        remark = trajectory.remark(held_by(self.loop.settings.project_v, self.problem.v.leaves))
        solution.stats["stagnation"] = remark
        if remark is not None and self.executor.group.leads:
            warnings.warn(remark, StagnationWarning, stacklevel=3)
        return solution

    def _ahead(self, run: Run, spent: Spent) -> int:
        """How many outer steps may be taken before their rows are needed."""
        return min(run.steps_until_check(spent), self._checkpoints.steps_to_next(self.loop.clock.k))

    def _spent(self, run: Run) -> Spent:
        """What the run has used so far. Workers use the numbers of the first, so that they stop together."""
        division = self.loop.division
        used = self.seconds - run.began
        requested = self._stopping and bool(self.history)  # what ends has something to show
        return Spent(
            self.loop.clock.k - run.first,
            division.agreed(used) if run.clocked else used,
            bool(division.agreed(float(requested))) if division.workers > 1 else requested,
            self.loop.calls.equivalents - run.gradients,
        )

    def solution(self, result: str = "stopped") -> Solution:
        """The result so far."""
        self._captured.suspend()
        stats = statistics(self.algorithm, self.loop, self.history, self.seconds)
        stats["compile"] = self._captured.stats()
        given = self.problem.v.given, self.problem.theta.given
        return Solution(*given, self.history, stats, result, tuple(self._measured))

    def close(self) -> None:
        """Release the executor's resources and the checkpoint folder."""
        self._checkpoints.release()
        if self._peers.waiting and not self.executor.group.serves:
            self._peers.finish(self._progress, self.solution())
        self.executor.close()

    def __enter__(self) -> Solver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise InputError(
            "A Solver cannot be copied or pickled: it trains its problem in place and walks over its data. To"
            " continue twice from one point, save the run (checkpoint='runs/a') and resume it with a copy of the"
            " problem: Solver.resume('runs/a', problem, inner_data, outer_data, checkpoint='runs/b')."
        )


def _close_unless_used(executor: AbstractExecutor, user: object) -> None:
    """End the threads of an executor whose solver is gone."""
    if executor.user is user:
        executor.close()
