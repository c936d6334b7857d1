"""One outer step of a run: taken as a whole, or undone with a sentence that says why."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nhgd._autocast import set_aside
from nhgd._nonfinite import check_losses, explained
from nhgd._solution import Row, history_row
from nhgd.algorithm import AbstractAlgorithm, StepInfo
from nhgd.checkpoint import Checkpoints, Progress
from nhgd.errors import NhgdError, NonFiniteError, RunError
from nhgd.execution.base import scope_of


def advance(algorithm: AbstractAlgorithm, progress: Progress, checkpoints: Checkpoints) -> Row:
    """Take one outer step; its row of the history, which has no metrics yet."""
    loop = progress.loop
    loop.problem.refuse_inference()
    start = loop.problem.point()
    before = loop.executor.measured()
    started = time.perf_counter()
    with progress.randomness.scope(), loop.computing():
        try:
            info = _attempt(algorithm, progress)
        except NonFiniteError as error:
            loop.problem.go_to(start)
            cause = loop.executor.root_cause(error)
            if isinstance(cause, NonFiniteError):
                cause = explained(loop, cause)
            raise checkpoints.named_in(cause) from error
        except NhgdError as error:
            raise checkpoints.named_in(error) from error.__cause__
        loop.clock.k += 1
    taken = time.perf_counter() - started
    progress.seconds += taken
    row = history_row(loop, info, loop.executor.measured().since(before), progress.seconds, taken)
    progress.history.append(row)
    return row


def _attempt(algorithm: AbstractAlgorithm, progress: Progress) -> StepInfo:
    loop = progress.loop
    with scope_of(loop.executor), set_aside(), _fitting(progress):
        loop.begin()
        progress.state, info = algorithm.step(loop, progress.state)
    check_losses(info)
    return info


@contextmanager
def _fitting(progress: Progress) -> Iterator[None]:
    """The first step after a resume shows whether what was read fits the problem in every respect."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, AssertionError, RuntimeError) as error:
        if progress.resumed is None or isinstance(error, (NhgdError, torch.OutOfMemoryError)):
            raise
        raise RunError(
            f"The first outer step from {progress.resumed} failed ({type(error).__name__}: {' '.join(str(error).split())}). What"
            " is kept there does not fit the problem, or the problem's functions are not what they were."
        ) from error
    progress.resumed = None
