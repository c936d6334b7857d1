"""What is kept of a run, so that it can go on after it was broken off."""

from __future__ import annotations

from pathlib import Path

from nhgd.checkpoint.files import newest
from nhgd.checkpoint.keeper import Keeper, Saved


def exists(path: str | Path) -> bool:
    """Whether there is a checkpoint to go on from."""
    return newest(Path(path)) is not None


def last_kept(path: str | Path) -> str:
    """A sentence that names the newest checkpoint on disk, with a space before it; nothing if there is none."""
    return f" The last good checkpoint is {path}, outer step {Saved(path).step}." if exists(path) else ""


__all__ = ["Keeper", "Saved", "exists", "last_kept"]
