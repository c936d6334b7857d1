"""The start of a run: checks and decisions before the first outer step."""

from __future__ import annotations

from collections.abc import Iterable

from nhgd import _threads as threads
from nhgd._captured import Captured
from nhgd._cost import largest
from nhgd._randomness import Randomness
from nhgd._surroundings import library_settings
from nhgd.algorithm import AbstractAlgorithm, Loop, LoopSettings
from nhgd.checkpoint import Checkpoints, Progress
from nhgd.data.batch import Batch, common_length
from nhgd.errors import InputError, RunError
from nhgd.execution import AbstractExecutor
from nhgd.loop.accumulation import micro_batches
from nhgd.problem import Bilevel
from nhgd.schedule import Learnt


def start(
    problem: Bilevel,
    inner_data: Iterable[Batch],
    outer_data: Iterable[Batch],
    settings: LoopSettings,
    algorithm: AbstractAlgorithm,
    executor: AbstractExecutor,
    checkpoints: Checkpoints,
    randomness: Randomness,
    captured: Captured,
) -> Progress:
    """Lock the checkpoint folder, check the first batches, choose the threads and initialise the method."""
    with randomness.scope(), library_settings():
        try:
            _refuse_learnt_rate(settings, algorithm)
            _refuse_accumulation(settings, algorithm, executor)
            checkpoints.claim(problem.theta)
            loop = Loop(problem, inner_data, outer_data, settings, executor, algorithm.online)
            captured.begin(algorithm, loop)
            loop.repeats = captured.active
            for stream in (loop.inner, loop.outer):
                stream.remember = checkpoints.writer is not None
            _look_at_first_batches(loop)
            with loop.computing():
                loop.project_theta()
                loop.project_v()
                return Progress(loop, algorithm.init(loop), randomness)
        except RunError as error:
            # A worker that has lost another may hear why only now.
            found = executor.root_cause(error)
            if found is error:
                raise
            raise found from error


def _look_at_first_batches(loop: Loop) -> None:
    """Refuse what cannot be solved, and choose the threads, before anything moves; the run itself draws them again."""
    problem = loop.problem
    inner_batch = loop.inner.peek()
    with threads.measuring(problem.theta.device) as measured:
        problem.validate(micro_batches(inner_batch, loop.settings.accumulate)[0], loop.outer.peek(), loop.learnt_rate)
    work = largest(loop.inverse, problem.theta, common_length(inner_batch) or 1, loop.settings.inner_steps)
    loop.choose_threads(threads.suited(max(measured.flops, work), problem.theta.device))


def _refuse_learnt_rate(settings: LoopSettings, algorithm: AbstractAlgorithm) -> None:
    """A hypergradient that takes theta for the inner optimum would leave the step size as it is."""
    if isinstance(settings.inner_lr, Learnt) and not algorithm.unrolls:
        raise InputError(
            f"The method {algorithm.name} takes theta for the inner optimum, which depends on no step size, so it cannot"
            " learn inner_lr. Use method='itd' or 'truncated', which differentiate the inner steps, or pass a number."
        )


def _refuse_accumulation(settings: LoopSettings, algorithm: AbstractAlgorithm, executor: AbstractExecutor) -> None:
    """Micro-batches that would be passed over at once, or recorded one by one, would change nothing or too much."""
    if settings.accumulate == 1:
        return
    learner = None if algorithm.online is None else algorithm.online.learner
    if not algorithm.accumulates:
        raise InputError(f"The method {algorithm.name} takes whole batches. Omit accumulate, or use nhgd or aid.")
    if executor.group.team.size > 1:
        raise InputError("Workers share each batch already. Omit accumulate, or use more workers.")
    if learner is not None and learner.records in ("batch", "raw"):
        raise InputError(
            f"{learner.name} learns from the gradient of whole batches. Omit accumulate, or use records='sample', or kfac."
        )


def refuse_idle(executor: AbstractExecutor, algorithm: AbstractAlgorithm) -> None:
    """An execution with nothing to run would change nothing, and its user would believe that it did."""
    inverse = algorithm.online
    if executor.background and not executor.gathers and (inverse is None or inverse.learner is None):
        by = "" if inverse is None or inverse.name in algorithm.name else f" with {inverse.name}"
        raise InputError(
            f"The method {algorithm.name}{by} learns no curvature from the inner steps, so {executor.name} execution"
            " would have nothing to do. Use inline execution, or a method that learns, such as nhgd."
        )
