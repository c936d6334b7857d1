"""What is stored of a run, so that an interrupted run can be resumed."""

from __future__ import annotations

from pathlib import Path

from nhgd._path import check_folder
from nhgd.checkpoint.checkpoints import Checkpoints
from nhgd.checkpoint.fields import Progress
from nhgd.checkpoint.lock import Lock
from nhgd.checkpoint.reader import SavedCheckpoint, as_path, exists, last_kept
from nhgd.checkpoint.writer import CheckpointWriter, refuse_existing


def claimed(path: str | Path, overwrite: bool, resume: bool = False) -> Lock:
    """The right to write checkpoints into a folder, taken before anything that takes long; a `Solver` takes it over.

    A folder that contains checkpoints is refused, unless they are to be resumed or overwritten.
    """
    place = as_path(path)
    check_folder("checkpoint", place)
    refuse_existing(place, overwrite or resume)
    lock = Lock(place)
    lock.acquire()
    return lock


__all__ = ["CheckpointWriter", "Checkpoints", "Progress", "SavedCheckpoint", "claimed", "exists", "last_kept"]
