"""What is kept of a run, so that it can go on after it was broken off."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from nhgd.checkpoint.files import newest
from nhgd.checkpoint.keeper import Keeper, Saved
from nhgd.errors import InputError


def exists(path: str | Path) -> bool:
    """Whether there is a checkpoint to go on from."""
    return newest(Path(path)) is not None


def last_kept(path: str | Path) -> str:
    """A sentence that names the newest checkpoint on disk, with a space before it; nothing if there is none to be read.

    It is said after an error, of which it must not make another: the process that writes may take away what is being read.
    """
    for _ in range(3):
        if exists(path):
            with suppress(InputError):
                return f" The last good checkpoint is {path}, outer step {Saved(path).step}."
    return ""


__all__ = ["Keeper", "Saved", "exists", "last_kept"]
