"""Who keeps the checkpoints of a run: when one is due, how it is written, and what was written last."""

from __future__ import annotations

import os
import platform
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from nhgd._path import check_name
from nhgd._tree.encoding import Classes, Decoder, Encoder, Unencodable, expected
from nhgd.algorithm.base import AbstractAlgorithm
from nhgd.checkpoint import contents, files, schema
from nhgd.checkpoint.lock import Lock
from nhgd.checkpoint.settings import encoded, remade, to_continue
from nhgd.errors import InputError, NhgdError, RunError
from nhgd.loop.loop import Loop
from nhgd.problem import Bilevel

USUAL = 30.0  # seconds
SHARE = 0.02  # of the time, at most, goes into checkpoints unless the user says how often
_CPU = torch.device("cpu")


class Saved:
    """A checkpoint that was read: what a new solver needs to know first, and the rest for `CheckpointWriter.put_back`.

    It is the newest that is as it was written. Where newer ones are damaged, a warning says so.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = as_path(path)
        check_name("The folder of a checkpoint", self.path)
        self.seen = {number for number, _ in files.numbered(self.path)}
        found, wrong = files.read(self.path)
        self.document, self.tensors, self.rows, self.kept = found.contents, found.tensors, found.rows, found.kept
        if wrong:
            reasons = " ".join(map(str, wrong))
            warnings.warn(
                f"{reasons} The run goes on from the checkpoint before, {files.called(self.path, self.kept.number)}, outer step"
                f" {self.step}.",
                stacklevel=3,
            )

    @property
    def step(self) -> int:
        """The outer steps that had been taken."""
        return int(self.document["step"])

    def settings(self, given: Mapping[str, Any], problem: Bilevel) -> dict[str, Any]:
        """The settings of the solver that goes on; a problem or settings that do not fit are refused."""
        contents.check_portrait(self.path, self.document["problem"], problem)
        with self.readable("settings"):
            found = to_continue(self.path, self.document["settings"], given, problem)
        chosen = {"checkpoint": self.path} | found
        if chosen["checkpoint"] is None:
            raise InputError(
                f"A run that goes on is kept. Leave checkpoint away, and it is written to {self.path} again, or name another"
                " folder."
            )
        check_name("checkpoint", as_path(chosen["checkpoint"]))
        if _same(chosen["checkpoint"], self.path):
            chosen["overwrite"] = True  # what lies there is this run itself
        return chosen

    def tree(self, name: str, classes: Classes, device: torch.device) -> Any:
        """One part of what was kept."""
        with self.readable(name):
            return Decoder(self.tensors, classes, device).decode(self.document[name])

    def history(self, device: torch.device) -> list[dict[str, Any]]:
        """The rows."""
        with self.readable("history"):
            check = schema.tree({})
            found, decoder = [], Decoder({}, {}, device)
            for i, row in enumerate(self.rows):
                check(row, f"history/{i}")
                made = decoder.decode(row)
                schema.mapping(schema.anything)(made, f"history/{i}")
                for name in ("step", "seconds", "outer_loss", "inner_loss"):
                    schema.number(made.get(name), f"history/{i}/{name}")
                found.append(made)
            return found

    @contextmanager
    def readable(self, name: str) -> Iterator[None]:
        """What goes wrong inside is said of this part of the checkpoint."""
        try:
            yield
        except NhgdError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
            raise InputError(
                f"{self.path} holds no {name} that this nhgd can read ({str(error).splitlines()[0] if str(error) else error!r})."
                " Continue with the nhgd, the method and the data it was written with."
            ) from error


class CheckpointWriter:
    """Writes the checkpoints of one run.

    Args:
        path: the folder they go into.
        steps: outer steps between two of them.
        seconds: between two of them. Without either, 30, and so many more that they take a fiftieth of the time at most.
        overwrite: whether the folder may hold those of another run, which stay until this one writes its first.
    """

    def __init__(self, path: str | Path, steps: int | None, seconds: float | None, overwrite: bool = False) -> None:
        files.safetensors()
        self.path = as_path(path)
        files.check_writable(self.path)
        refuse_kept(self.path, overwrite)
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

    def begin(self, loop: Loop, algorithm: AbstractAlgorithm, state: Any, settings: Mapping[str, Any]) -> None:
        """Take note of a run before its first step: its loop, its state, and the settings of the solver, as given."""
        self._classes = contents.classes(loop, state)
        self._fixed = {
            "problem": contents.portrait(loop.problem),
            "optimisers": contents.optimisers(loop),
            "settings": encoded(settings, algorithm),
        }

    def claim(self) -> None:
        """Keep other runs out of the folder from now on."""
        self.lock.acquire(InputError)
        self._refuse_strangers(InputError)
        if self.lock.excludes:  # a run that is resumed at its end writes nothing more, and would leave them
            files.remove_drafts(self.path)

    def release(self) -> None:
        """Let other runs into the folder, until the next step."""
        self.lock.release()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """The setting of a step."""
        if not self.lock.held:
            self.lock.acquire(RunError)
            self._refuse_strangers(RunError)
        self.lock.busy = True
        try:
            yield
        finally:
            self.lock.busy = False

    def due(self, step: int) -> bool:
        """Whether one is to be written after this outer step."""
        if self._steps is not None:
            return step % self._steps == 0
        interval = max(USUAL, self._took / SHARE) if self._seconds is None else self._seconds
        return time.monotonic() - self._written >= interval

    def rehearse(self, loop: Loop, state: Any, rest: Mapping[str, Any]) -> None:
        """Refuse a run that could not be kept, before its first step."""
        self._document(loop, state, rest)

    def write(self, loop: Loop, state: Any, rest: Mapping[str, Any], history: Sequence[Any]) -> None:
        """Keep the run as it stands between two outer steps."""
        began = time.monotonic()
        document, tensors = self._document(loop, state, rest)
        kept = self._on_disk(document, tensors, history)
        self._kept = [*self._kept[-1:], kept]
        self.step = loop.clock.k
        files.tidy(self.path, {one.number for one in self._kept}, self.lock.excludes)
        self._written = time.monotonic()
        self._took = self._written - began

    def _on_disk(
        self, document: dict[str, Any], tensors: dict[str, torch.Tensor], history: Sequence[Any]
    ) -> files.Kept:
        """Write one; where the folder is taken away meanwhile, once more."""
        for tries_left in (2, 1, 0):
            try:
                self._make_sure_of_the_folder()
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
                if not (tries_left and self._is_taken_away()):
                    raise
        raise AssertionError

    def _is_taken_away(self) -> bool:
        return self.lock.lost() or any(files.gone(self.path, kept.number) for kept in self._kept[-1:])

    def _make_sure_of_the_folder(self) -> None:
        """Make it again where it was taken away; where another run has come into it, this one may not write there."""
        if not self.lock.held or self.lock.lost():
            self.lock.release()
            self.lock.acquire(RunError)
        self._refuse_strangers(RunError)
        last = self._kept[-1].number if self._kept else None
        if last is not None and files.gone(self.path, last):
            warnings.warn(
                f"The checkpoints in {self.path} were taken away during the run. It goes on, and writes new ones there.",
                stacklevel=2,
            )
            self._kept, self.step = [], None

    def _refuse_strangers(self, error: type[InputError | RunError]) -> None:
        if {number for number, _ in files.numbered(self.path)} - self._known:
            raise error(
                f"{self.path} holds checkpoints that this run has not written: another run has used the folder meanwhile. They"
                " are left as they are. Name another folder, or go on from them."
            )

    def _document(
        self, loop: Loop, state: Any, rest: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        encoder = Encoder(self._classes)
        written = {
            "step": loop.clock.k,
            "torch": torch.__version__,
            "threads": loop.threads,
            "python": platform.python_version(),
            **self._fixed,
        }
        try:
            inverse = Encoder(opaque=True).encode(loop.inverse, "inverse")
            kept = {"loop": contents.of_loop(loop), "state": state, **rest}
            written |= {name: encoder.encode(part, name) for name, part in kept.items()}
        except Unencodable as found:
            raise _unkept(found) from found
        return written | {"inverse": inverse}, encoder.tensors

    def last(self) -> str:
        """A sentence that says which checkpoint is the last good one, with a space before it; nothing if there is none."""
        if self.step is None and any(not files.gone(self.path, number) for number in self._earlier):
            return f" {self.path} still holds the earlier run, which was to be overwritten."
        if self.step is None or not self._kept or files.gone(self.path, self._kept[-1].number):
            return ""
        return f" The last good checkpoint is {self.path}, outer step {self.step}."

    def put_back(self, saved: Saved, loop: Loop, fresh: Any) -> tuple[Any, dict[str, Any]]:
        """Bring a fresh loop to where the saved run stood; the state of its method, and the rest that was kept.

        Args:
            saved: what was kept.
            loop: the fresh loop.
            fresh: the state of the method before its first step.
        """
        if _same(self.path, saved.path):
            self._known = saved.seen
            self._refuse_strangers(InputError)  # another run may have gone on from it since it was read
        with saved.readable("optimisers"):
            contents.check_optimisers(saved.path, saved.document["optimisers"], self._fixed["optimisers"])
        loop.take_threads(saved.document["threads"])
        _warn_of_other_arithmetic(saved, loop.threads)
        device = loop.problem.theta.device
        with saved.readable("inverse"):
            self._use_inverse(saved, loop)
        found = saved.tree("loop", self._classes, device)
        state = saved.tree("state", self._classes, device)
        rest = {name: saved.tree(name, {}, device) for name in ("randomness", "seconds", "run")}
        rest["history"] = saved.history(device)
        with saved.readable("state"):
            schema.alike(state, fresh, "state")
            schema.generators(rest["randomness"], "randomness")
            schema.seconds(rest["seconds"], "seconds")
        with saved.readable("loop"):
            contents.check_loop(loop, found, saved.step)
            contents.into_loop(loop, found)
            # The walks draw random numbers; where the generators end is put right by the caller afterwards.
            loop.inner.go_to(found["inner_data"])
            loop.outer.go_to(found["outer_data"])
        if _same(self.path, saved.path):
            self.step, self._kept = saved.step, [saved.kept]
        return state, rest

    def _use_inverse(self, saved: Saved, loop: Loop) -> None:
        """Periods that a clock has chosen are taken over: measured again, they may come out differently."""
        node = saved.document["inverse"]
        if loop.inverse is None or node == Encoder(opaque=True).encode(loop.inverse, "inverse"):
            return
        found = saved.tree("inverse", expected(loop.inverse), loop.problem.theta.device)
        schema.alike(found, loop.inverse, "inverse")
        loop.use(remade(found))


def as_path(path: str | Path) -> Path:
    """The folder a user named."""
    if not isinstance(path, (str, os.PathLike)) or not str(path):
        raise InputError(f"A place for checkpoints is the name of a folder, such as 'runs/a', got {path!r}.")
    return Path(path)


def refuse_kept(path: Path, overwrite: bool) -> None:
    """Refuse a folder that holds checkpoints already, unless they may go."""
    if not overwrite and files.newest(path) is not None:
        raise InputError(
            f"{path} holds the checkpoints of an earlier run. Go on with that (--resume, or Solver.resume), replace it"
            " (--overwrite, or overwrite=True), or name another folder."
        )


def _same(one: str | Path, other: str | Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _unkept(found: Unencodable) -> InputError:
    return InputError(
        f"A checkpoint cannot hold a {found.kind}, which stands at {found.path} of this run. States and metrics are"
        " made of tensors, numbers, text, lists, tuples, dicts and the dataclasses that their fields announce."
    )


def _warn_of_other_arithmetic(saved: Saved, threads: int) -> None:
    was = saved.document["torch"], saved.document["threads"]
    now = torch.__version__, threads
    if was != now:
        warnings.warn(
            f"{saved.path} was written with torch {was[0]} and {was[1]} thread(s); now it is {now[0]} and {now[1]}. The run goes"
            " on, but its last digits may differ from those of an unbroken run.",
            stacklevel=4,
        )
