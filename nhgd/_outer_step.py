"""One outer step of a run: completed, or undone with an error that says why."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from nhgd._captured import Captured
from nhgd._captured.replay import StepFailed
from nhgd._captured.steps import StepResult
from nhgd._memory import synchronise
from nhgd._nonfinite import check_losses, root_cause
from nhgd._solution import Row, history_row
from nhgd.algorithm import AbstractAlgorithm, Loop, StepInfo
from nhgd.checkpoint import Checkpoints, Progress
from nhgd.errors import NhgdError, NonFiniteError, RunError
from nhgd.execution.base import scope_of


def advance_by(
    algorithm: AbstractAlgorithm,
    progress: Progress,
    checkpoints: Checkpoints,
    captured: Captured,
    most: int = 1,
    before: Callable[[int], None] = lambda taken: None,
) -> list[StepResult]:
    """Take one to `most` outer steps; returns their results in order, without metrics.

    Args:
        captured: replays steps that were captured.
        before: called before each step with the number of steps begun here.
    """
    loop = progress.loop
    captured.check_environment()
    if not captured.ready(progress):
        before(0)
        return [StepResult(advance(algorithm, progress, checkpoints, captured))]
    loop.problem.refuse_inference()
    with progress.randomness.scope(), loop.computing():
        try:
            return captured.replay(progress, most, before)
        except StepFailed as failed:
            raise _with_cause(loop, failed.error, checkpoints) from failed
        except NhgdError as error:
            raise _with_cause(loop, error, checkpoints) from error


def advance(algorithm: AbstractAlgorithm, progress: Progress, checkpoints: Checkpoints, captured: Captured) -> Row:
    """Take one outer step; its row of the history, which has no metrics yet."""
    loop = progress.loop
    loop.problem.refuse_inference()
    start = loop.problem.point()
    before = loop.executor.measured()
    started = time.perf_counter()
    with progress.randomness.scope(), loop.computing():
        try:
            info = _attempt(algorithm, progress, captured)
        except NonFiniteError as error:
            loop.problem.set_point(start)
            raise _with_cause(loop, error, checkpoints) from error
        except NhgdError as error:
            raise checkpoints.named_in(error) from error.__cause__
        loop.clock.k += 1
    taken = time.perf_counter() - started
    progress.seconds += taken
    row = history_row(loop, info, loop.executor.measured().since(before), progress.seconds, taken)
    progress.history.append(row)
    return row


def finish_on_the_clock(progress: Progress, row: Row) -> None:
    """Wait for what a step left running on its device: that time is the step's, not that of the metrics after it."""
    if progress.loop.problem.theta.device.type == "cpu":
        return
    before = time.perf_counter()
    synchronise(progress.loop.problem.theta.device)
    waited = time.perf_counter() - before
    progress.seconds += waited
    row["seconds"] += waited


def _with_cause(loop: Loop, error: NhgdError, checkpoints: Checkpoints) -> NhgdError:
    """The error to show to the user, once theta and v are back where the step began."""
    cause = loop.executor.root_cause(error)
    if isinstance(cause, NonFiniteError):
        cause = root_cause(loop, cause)
    return checkpoints.named_in(cause)


def _attempt(algorithm: AbstractAlgorithm, progress: Progress, captured: Captured) -> StepInfo:
    with scope_of(progress.loop.executor), _blaming_checkpoint(progress):
        info = captured.run_eagerly(algorithm, progress)
    check_losses(info)
    return info


@contextmanager
def _blaming_checkpoint(progress: Progress) -> Iterator[None]:
    """Blame the checkpoint for an error of the first step after a resume."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, AssertionError, RuntimeError) as error:
        if progress.resumed is None or isinstance(error, (NhgdError, torch.OutOfMemoryError)):
            raise
        raise RunError(
            f"The first outer step from {progress.resumed} failed ({type(error).__name__}:"
            f" {' '.join(str(error).split())}). The checkpoint does not fit the problem, or the problem's functions"
            " have changed."
        ) from error
    progress.resumed = None
