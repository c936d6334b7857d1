"""What is kept of a run, so that an interrupted run can be resumed."""

from __future__ import annotations

import warnings
from contextlib import suppress
from pathlib import Path

from nhgd.checkpoint.fields import Progress
from nhgd.checkpoint.files import check_writable, newest
from nhgd.checkpoint.lock import Lock
from nhgd.checkpoint.reader import SavedCheckpoint, as_path
from nhgd.checkpoint.writer import CheckpointWriter, refuse_kept
from nhgd.errors import InputError


def exists(path: str | Path) -> bool:
    """Whether there is a checkpoint to go on from."""
    return newest(Path(path)) is not None


def last_kept(path: str | Path) -> str:
    """A sentence that names the newest checkpoint on disk, with a space before it; nothing if there is none to be read.

    It is said after an error, of which it must not make another: the process that writes may take away what is being read.
    """
    for _ in range(3):
        with suppress(InputError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if exists(path):
                return f" The last good checkpoint is {path}, outer step {SavedCheckpoint(path).step}."
    return ""


def claimed(path: str | Path, overwrite: bool, resume: bool = False) -> Lock:
    """The right to write checkpoints into a folder, taken before anything that takes long; a `Solver` takes it over.

    A folder that holds checkpoints is refused, unless they are to be gone on from or may go.
    """
    place = as_path(path)
    check_writable(place)
    refuse_kept(place, overwrite or resume)
    lock = Lock(place)
    lock.acquire()
    return lock


__all__ = ["CheckpointWriter", "Progress", "SavedCheckpoint", "claimed", "exists", "last_kept"]
