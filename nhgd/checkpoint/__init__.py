"""What is kept of a run, so that it can go on after it was broken off."""

from __future__ import annotations

from pathlib import Path

from nhgd.checkpoint.files import newest
from nhgd.checkpoint.keeper import Keeper, Saved


def exists(path: str | Path) -> bool:
    """Whether there is a checkpoint to go on from."""
    return newest(Path(path)) is not None


__all__ = ["Keeper", "Saved", "exists"]
