"""Writes the checkpoints of a run: decides when one is due, and what it holds."""

from __future__ import annotations

import platform
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from nhgd._path import check_folder
from nhgd._tree.encoding import Classes, Encoder, Unencodable, expected
from nhgd.algorithm.base import AbstractAlgorithm
from nhgd.checkpoint import files, schema
from nhgd.checkpoint.compatibility import check_optimisers, optimisers, signature
from nhgd.checkpoint.fields import PROGRESS, Progress, curvature, kept
from nhgd.checkpoint.lock import Lock
from nhgd.checkpoint.reader import SavedCheckpoint, as_path, same_place
from nhgd.checkpoint.settings import encoded, remade
from nhgd.errors import InputError, RunError
from nhgd.loop.loop import Loop

CHECKPOINT_SECONDS = 30.0  # seconds between two, unless the user sets a period
LARGEST_FRACTION = 0.02  # of the time that may go into them


class CheckpointWriter:
    """Writes the checkpoints of one run.

    Args:
        path: the folder they go into.
        steps: outer steps between two of them.
        seconds: between two of them. Without either, 30, or longer, so that they take at most 2 % of the time.
        overwrite: whether the folder may hold those of another run, which stay until this one writes its first.
    """

    def __init__(self, path: str | Path, steps: int | None, seconds: float | None, overwrite: bool = False) -> None:
        files.safetensors()
        self.path = as_path(path)
        check_folder("checkpoint", self.path)
        refuse_existing(self.path, overwrite)
        self._steps, self._seconds = steps, seconds
        self.lock = Lock(self.path)
        self._classes: Classes = {}
        self._fixed: dict[str, Any] = {}
        self.step: int | None = None  # the outer step of the last one
        self._kept: list[files.Kept] = []  # the last ones of this run, two at most
        self._earlier = [number for number, _ in files.numbered(self.path)]
        self._known = set(self._earlier)  # and what this run has begun
        self._written = time.monotonic()
        self._took = 0.0

    def register(self, progress: Progress, algorithm: AbstractAlgorithm, arguments: Mapping[str, Any]) -> None:
        """Take note of a run before its first step, and of the solver's arguments, as given; refuse what cannot be
        kept.
        """
        self._classes = expected(progress.state, curvature(progress.loop))
        self._fixed = {
            "problem": signature(progress.loop.problem),
            "optimisers": optimisers(progress.loop),
            "settings": encoded(arguments, algorithm),
        }
        self._document(progress)

    def claim(self) -> None:
        """Lock the folder against other runs."""
        self.lock.acquire(InputError)
        self._refuse_foreign_checkpoints(InputError)
        if self.lock.excludes:  # a run that is resumed at its end writes nothing more, and would leave them
            files.remove_drafts(self.path)

    def release(self) -> None:
        """Unlock the folder until the next step."""
        self.lock.release()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """The setting of a step."""
        if not self.lock.held:
            self.lock.acquire(RunError)
            self._refuse_foreign_checkpoints(RunError)
        self.lock.busy = True
        try:
            yield
        finally:
            self.lock.busy = False

    def due(self, step: int) -> bool:
        """Whether one is to be written after this outer step."""
        if self._steps is not None:
            return step % self._steps == 0
        interval = max(CHECKPOINT_SECONDS, self._took / LARGEST_FRACTION) if self._seconds is None else self._seconds
        return time.monotonic() - self._written >= interval

    def steps_to_next(self, step: int) -> int:
        """How many outer steps there are until one is due by their number."""
        return 2**30 if self._steps is None else self._steps - step % self._steps

    def write(self, progress: Progress) -> None:
        """Write a checkpoint between two outer steps."""
        began = time.monotonic()
        document, tensors = self._document(progress)
        kept = self._on_disk(document, tensors, progress.history)
        self._kept = [*self._kept[-1:], kept]
        self.step = progress.loop.clock.k
        files.tidy(self.path, {one.number for one in self._kept}, self.lock.excludes)
        self._written = time.monotonic()
        self._took = self._written - began

    def _on_disk(
        self, document: dict[str, Any], tensors: dict[str, torch.Tensor], history: Sequence[Any]
    ) -> files.Kept:
        """Write to the disk, once more if the folder was removed meanwhile."""
        for tries_left in (2, 1, 0):
            try:
                self._ensure_folder()
                number = max(self._known, default=0) + 1
                self._known.add(number)
                return files.write(
                    self.path,
                    number,
                    document,
                    tensors,
                    history,
                    lambda i: Encoder({}, inline=True).encode(history[i], f"history/{i}"),
                    self._kept,
                )
            except Unencodable as found:
                raise _unkept(found) from found
            except RunError:
                if not (tries_left and self._is_deleted()):
                    raise
        raise AssertionError

    def _is_deleted(self) -> bool:
        return self.lock.lost() or any(files.gone(self.path, kept.number) for kept in self._kept[-1:])

    def _ensure_folder(self) -> None:
        """Restore a folder that was removed; refuse one that another run has taken."""
        if not self.lock.held or self.lock.lost():
            self.lock.release()
            self.lock.acquire(RunError)
        self._refuse_foreign_checkpoints(RunError)
        last = self._kept[-1].number if self._kept else None
        if last is not None and files.gone(self.path, last):
            warnings.warn(
                f"The checkpoints in {self.path} were deleted during the run. It continues and writes new ones there.",
                stacklevel=2,
            )
            self._kept, self.step = [], None

    def _refuse_foreign_checkpoints(self, error: type[InputError | RunError]) -> None:
        if {number for number, _ in files.numbered(self.path)} - self._known:
            raise error(
                f"{self.path} contains checkpoints that this run did not write: another run has used the folder"
                " meanwhile. They are left untouched. Choose another folder, or resume from them."
            )

    def _document(self, progress: Progress) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """All but the history, as JSON and tensors."""
        encoder, loop = Encoder(self._classes), progress.loop
        try:
            moving = {name: encoder.encode(part, name) for name, part in kept(PROGRESS, progress).items()}
        except Unencodable as found:
            raise _unkept(found) from found
        document = {
            "step": loop.clock.k,
            "torch": torch.__version__,
            "threads": loop.threads,
            "python": platform.python_version(),
            **self._fixed,
            **moving,
            "inverse": Encoder(opaque=True).encode(loop.inverse, "inverse"),
        }
        return document, encoder.tensors

    def last(self) -> str:
        """A sentence about the last good checkpoint, with a leading space; empty if there is none."""
        if self.step is None and any(not files.gone(self.path, number) for number in self._earlier):
            return f" {self.path} still contains the earlier run, which was to be overwritten."
        if self.step is None or not self._kept or files.gone(self.path, self._kept[-1].number):
            return ""
        return f" The last good checkpoint is {self.path}, outer step {self.step}."

    def restore(self, saved: SavedCheckpoint, progress: Progress) -> None:
        """Restore the saved run in a fresh one. Nothing changes before everything was checked."""
        if same_place(self.path, saved.path):
            self._known = saved.seen
            self._refuse_foreign_checkpoints(InputError)  # another run may have resumed it since it was read
        with saved.readable("optimisers"):
            check_optimisers(saved.path, saved.document["optimisers"], self._fixed["optimisers"])
        loop = progress.loop
        loop.restore_threads(saved.document["threads"])
        _warn_of_other_arithmetic(saved, loop.threads)
        with saved.readable("inverse"), progress.randomness.scope():
            self._use_inverse(saved, loop)
        device = loop.problem.theta.device
        values = {field.name: saved.tree(field.name, self._classes, device) for field in PROGRESS}
        history = saved.history(device)
        for field in PROGRESS:
            with saved.readable(field.name):
                field.check(progress)(values[field.name], field.name)
        with saved.readable("loop"):
            if values["loop"]["clock"]["k"] != saved.step:
                raise schema.Misfit("loop/clock/k", f"the outer step, {saved.step}")
        for field in PROGRESS:
            with saved.readable(field.name):
                field.put(progress, values[field.name])
        if same_place(self.path, saved.path):
            self.step, self._kept = saved.step, [saved.kept]
        progress.history, progress.resumed = history, saved.path

    def _use_inverse(self, saved: SavedCheckpoint, loop: Loop) -> None:
        """Periods that a clock has chosen are taken over: measured again, they may come out differently."""
        node = saved.document["inverse"]
        if loop.inverse is None or node == Encoder(opaque=True).encode(loop.inverse, "inverse"):
            return
        found = saved.tree("inverse", expected(loop.inverse), loop.problem.theta.device)
        schema.check_same_kind(found, loop.inverse, "inverse")
        loop.use(remade(found))


def refuse_existing(path: Path, overwrite: bool) -> None:
    """Refuse a folder that holds checkpoints already, unless they may go."""
    if not overwrite and files.newest(path) is not None:
        raise InputError(
            f"{path} contains the checkpoints of an earlier run. Resume it (--resume, or Solver.resume), replace it"
            " (--overwrite, or overwrite=True), or choose another folder."
        )


def _unkept(found: Unencodable) -> InputError:
    return InputError(
        f"A checkpoint cannot hold a {found.kind}, found at {found.path} of this run. States and metrics may contain"
        " tensors, numbers, text, lists, tuples, dicts, and the dataclasses named in their annotations."
    )


def _warn_of_other_arithmetic(saved: SavedCheckpoint, threads: int) -> None:
    was = saved.document["torch"], saved.document["threads"]
    now = torch.__version__, threads
    if was != now:
        warnings.warn(
            f"{saved.path} was written with torch {was[0]} and {was[1]} thread(s); now it is {now[0]} and {now[1]}."
            " The run continues, but its last digits may differ from those of an uninterrupted run.",
            stacklevel=4,
        )
