"""A checkpoint that was read."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from nhgd._path import check_name
from nhgd._tree.encoding import Classes, Decoder
from nhgd.checkpoint import files, schema
from nhgd.checkpoint.compatibility import check_signature
from nhgd.checkpoint.fields import NAMES
from nhgd.checkpoint.settings import to_continue
from nhgd.errors import InputError, NhgdError
from nhgd.problem import Bilevel


class SavedCheckpoint:
    """A checkpoint as read: what a new solver needs first, and the rest for `CheckpointWriter.restore`.

    It is the newest that is as it was written. Where newer ones are damaged, a warning says so.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = as_path(path)
        check_name("The folder of a checkpoint", self.path)
        self.seen = {number for number, _ in files.numbered(self.path)}
        found, wrong = files.read(self.path, NAMES)
        self.document, self.tensors, self.rows, self.kept = found.contents, found.tensors, found.rows, found.kept
        if wrong:
            reasons = " ".join(map(str, wrong))
            warnings.warn(
                f"{reasons} The run continues from the previous checkpoint,"
                f" {files.called(self.path, self.kept.number)}, outer step {self.step}.",
                stacklevel=3,
            )

    @property
    def step(self) -> int:
        """The outer steps that had been taken."""
        return int(self.document["step"])

    def settings(self, given: Mapping[str, Any], problem: Bilevel) -> dict[str, Any]:
        """The settings of the resumed solver; a problem or settings that do not fit are refused."""
        check_signature(self.path, self.document["problem"], problem)
        with self.readable("settings"):
            found = to_continue(self.path, self.document["settings"], given, problem)
        chosen = {"checkpoint": self.path} | found
        if chosen["checkpoint"] is None:
            raise InputError(
                f"A resumed run writes checkpoints. Omit checkpoint to write to {self.path} again, or give another"
                " folder."
            )
        check_name("checkpoint", as_path(chosen["checkpoint"]))
        if same_place(chosen["checkpoint"], self.path):
            chosen["overwrite"] = True  # the folder holds this very run
        return chosen

    def tree(self, name: str, classes: Classes, device: torch.device) -> Any:
        """One part of the checkpoint."""
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
        """Blame this part of the checkpoint for errors inside the block."""
        try:
            yield
        except NhgdError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
            raise InputError(
                f"{self.path} holds no {name} that this nhgd can read ({str(error).splitlines()[0] if str(error) else error!r})."
                " Continue with the nhgd, the method and the data it was written with."
            ) from error


def as_path(path: str | Path) -> Path:
    """The folder a user named."""
    if not isinstance(path, (str, os.PathLike)) or not str(path):
        raise InputError(f"The checkpoint folder must be a path such as 'runs/a', got {path!r}.")
    return Path(path)


def same_place(one: str | Path, other: str | Path) -> bool:
    """Whether two names are of one folder."""
    return os.path.realpath(one) == os.path.realpath(other)


def exists(path: str | Path) -> bool:
    """Whether there is a checkpoint to go on from."""
    return files.newest(Path(path)) is not None


def last_kept(path: str | Path) -> str:
    """A sentence that names the newest checkpoint on disk, with a space before it; nothing if there is none to be read.

    It is part of an error message and must not fail itself: the writing process may delete what is being read.
    """
    for _ in range(3):
        with suppress(InputError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if exists(path):
                return f" The last good checkpoint is {path}, outer step {SavedCheckpoint(path).step}."
    return ""
