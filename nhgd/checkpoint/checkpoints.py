"""The checkpoints of a run of one or more processes: when they are written, and how errors mention them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from nhgd._duration import checkpoint_interval
from nhgd._interruption import deferred_interrupts
from nhgd.algorithm.base import AbstractAlgorithm
from nhgd.checkpoint.fields import Progress
from nhgd.checkpoint.reader import SavedCheckpoint, last_kept
from nhgd.checkpoint.writer import CheckpointWriter
from nhgd.errors import InputError, NhgdError
from nhgd.execution.base import AbstractExecutor
from nhgd.variable import Variable


class Checkpoints:
    """The checkpoints of a run, or none where no folder is named. Of several processes the one that leads writes.

    Args:
        path: the folder they go into.
        every: outer steps between two of them, or a time such as "60s".
        overwrite: whether the folder may hold those of another run.
        executor: of the run; it knows the other processes.
    """

    def __init__(
        self, path: str | Path | None, every: int | str | None, overwrite: bool, executor: AbstractExecutor
    ) -> None:
        interval = checkpoint_interval(every)
        if overwrite and path is None:
            raise InputError(
                "overwrite=True applies to a checkpoint folder. Give one: Solver(..., checkpoint='runs/a')."
            )
        self.writer = None if path is None else CheckpointWriter(path, *interval, overwrite)
        self._executor = executor

    def claim(self, theta: Variable) -> None:
        """Lock the folder against other runs; refuse what no single process could write."""
        if self.writer is not None:
            if theta.shards is not None:
                raise InputError(
                    "A checkpoint is written by one process, but the optimiser's moments are divided by fully_shard. Omit"
                    " checkpoint, call problem.reshard() after the run, and save the model by torch.distributed.checkpoint."
                )
            if not self._executor.holds_all:
                raise InputError(
                    "A checkpoint is written by one process, but divide=True divides the curvature over several. Omit one of"
                    " the two."
                )
            self._executor.group.join(theta)
            if self._executor.group.leads:
                self.writer.claim()

    def register(self, progress: Progress, algorithm: AbstractAlgorithm, arguments: Mapping[str, Any]) -> None:
        """Take note of a run before its first step, and of the solver's arguments, as given; refuse what cannot be
        kept.
        """
        if self.writer is not None:
            self.writer.register(progress, algorithm, arguments)

    def release(self) -> None:
        """Unlock the folder until the next step."""
        if self.writer is not None:
            self.writer.release()

    def restore(self, saved: SavedCheckpoint, progress: Progress) -> None:
        """Restore the saved run in a fresh one."""
        assert self.writer is not None  # a run that is resumed is kept
        self.writer.restore(saved, progress)

    def save(self, progress: Progress) -> None:
        """Write one now, between two outer steps."""
        if self.writer is None:
            raise InputError("This solver has no checkpoint folder. Give it one: Solver(..., checkpoint='runs/a').")
        if self._executor.group.leads:
            with self.named_in_errors():
                self.writer.write(progress)

    def is_due(self, progress: Progress) -> bool:
        """Whether it is time for one."""
        return self.writer is not None and self.writer.due(progress.loop.clock.k)

    def steps_to_next(self, step: int) -> int:
        """How many outer steps may be taken before that is to be asked again."""
        return 2**30 if self.writer is None else self.writer.steps_to_next(step)

    def save_unless_saved(self, progress: Progress) -> None:
        """Write one, unless the last one is of this very outer step."""
        if self.writer is not None and self.writer.step != progress.loop.clock.k:
            self.save(progress)

    @contextmanager
    def at_work(self, progress: Progress) -> Iterator[Callable[[], None]]:
        """The context of outer steps: the folder is locked, and Ctrl-C leaves a checkpoint of the last complete step.

        Yields a function to call between two steps, where Ctrl-C may take effect.
        """
        if self.writer is None or not self._executor.group.leads:
            yield lambda: None
            return
        with ExitStack() as stack:
            stack.enter_context(self.writer.at_work())
            try:
                yield stack.enter_context(deferred_interrupts())
                stack.close()  # Ctrl-C may have come during the last step
            except KeyboardInterrupt as stop:
                self._save_what_is_whole(progress)
                stop.args = stop.args or (self.writer.last().strip(),)
                raise

    def _save_what_is_whole(self, progress: Progress) -> None:
        if progress.whole:
            try:
                self.save_unless_saved(progress)
            except NhgdError as error:
                warnings.warn(str(error), stacklevel=2)

    @contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """An error inside, or the loss of a process behind it, names the last good checkpoint."""
        try:
            yield
        except NhgdError as error:
            cause = self.named_in(error)
            if cause is error:
                raise
            raise cause from error

    def named_in(self, error: NhgdError) -> NhgdError:
        """The same error, or the loss of a process behind it, naming the last good checkpoint."""
        error = self._executor.root_cause(error)
        if self.writer is not None and not error.checkpoint:
            known = self.writer.last() if self._executor.group.leads else last_kept(self.writer.path)
            error.checkpoint = known.strip()
        return error
