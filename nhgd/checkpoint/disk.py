"""Files as a checkpoint needs them: brought to disk when they are written, and bounded when they are read."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nhgd.errors import InputError

LARGEST = 2**26  # bytes of a file that is read at once


class Damaged(InputError):
    """A file of a checkpoint does not hold what was written."""

    def __init__(self, file: Path, why: str = "it does not match its hash") -> None:
        super().__init__(f"{file} is damaged: {why}.")


@contextmanager
def regular(path: Path) -> Iterator[int]:
    """An ordinary file, open for reading; a pipe, which would be waited for, or a device, which never ends, is
    refused.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise Damaged(path, "it is not a regular file")
        yield handle
    finally:
        os.close(handle)


def read_all(path: Path) -> bytes:
    """The bytes of a file of moderate size."""
    with regular(path) as handle:
        size = os.fstat(handle).st_size
        if size > LARGEST:
            raise Damaged(path, f"it has {size:,} bytes, more than the largest possible, {LARGEST:,}")
        parts = []
        while part := os.read(handle, 2**20):
            parts.append(part)
    return b"".join(parts)


def hash_file(path: Path) -> str:
    """The SHA-256 of a file."""
    digest = hashlib.sha256()
    with regular(path) as handle:
        while part := os.read(handle, 2**20):
            digest.update(part)
    return digest.hexdigest()


def write_all(handle: int, data: bytes) -> None:
    """Write all of it, in as many pieces as the system takes."""
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


def write_file(path: Path, data: bytes) -> None:
    """Write a new file and bring it to disk."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        write_all(handle, data)
        os.fsync(handle)
    finally:
        os.close(handle)


def to_disk(path: Path) -> None:
    """Flush a file or folder to the disk, so that it survives a loss of power."""
    folder = path.is_dir()
    if folder and os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if not folder or error.errno != errno.EINVAL:  # some file systems have nothing to bring to disk for a folder
            raise
    finally:
        os.close(handle)


@contextmanager
def draft_folder(place: Path) -> Iterator[Path]:
    """A temporary folder for files until they are renamed; always removed at the end."""
    try:
        shutil.rmtree(place, ignore_errors=True)
        os.mkdir(place)
        yield place
    finally:
        remove(place)


def remove(place: Path) -> None:
    """Remove a folder, or whatever has its name; interruptions wait until that is done."""
    try:
        shutil.rmtree(place, ignore_errors=True)
    finally:
        shutil.rmtree(place, ignore_errors=True)  # what failed once may not fail again
        with suppress(OSError):
            place.unlink(missing_ok=True)
