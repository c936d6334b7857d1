"""Who may write into a folder of checkpoints: one run at a time.

The lock is the operating system's own, on a file in the folder, so that it ends with the process that holds it, however
that ends. It is not handed on to processes that are forked from it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import warnings
from pathlib import Path

from nhgd.errors import InputError, NhgdError

try:
    import fcntl
except ImportError:  # a platform without such locks
    fcntl = None  # type: ignore[assignment]  # in place of a module

NAME = "lock"
_UNKNOWN_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_held: dict[str, Lock] = {}  # those of this process, by the true path of their folder
_one_at_a_time = threading.RLock()
_spoken_of: set[str] = set()  # folders that cannot be locked, about which the user was warned


class Lock:
    """The right to write into a folder.

    Args:
        folder: created if missing, and removed again if nothing was written.

    Attributes:
        busy: whether the run that holds it is taking a step. An idle one gives way to a later one of the same process.
        excludes: whether others are truly kept out; not every file system can.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.busy = False
        self.excludes = False
        self._handle: int | None = None
        self._made: list[Path] = []

    @property
    def held(self) -> bool:
        """Whether this run has the right."""
        return self._handle is not None

    def acquire(self, error: type[NhgdError] = InputError) -> None:
        """Take the lock, or raise an error of this kind that says who holds it, or why nothing can be written."""
        with _one_at_a_time:
            if self.held:
                return
            key = os.path.realpath(self.folder)
            other = _held.get(key)
            if other is not None and not other.busy:
                other.release()
            try:
                self._make_folder()
                self._handle = self._opened(error)
            except OSError as failed:
                self._unmake_folder()
                raise error(
                    f"{self.folder} cannot be written: {failed.strerror or failed}. Choose another checkpoint folder."
                ) from failed
            except BaseException:
                self._unmake_folder()
                raise
            _held[key] = self

    def lost(self) -> bool:
        """Whether the file that was locked does not lie in the folder any more."""
        if self._handle is None:
            return True
        try:
            there, here = os.stat(self.folder / NAME), os.fstat(self._handle)
        except OSError:
            return True
        return (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino)

    def release(self) -> None:
        """Let another have it."""
        with _one_at_a_time:
            if self._handle is None:
                return
            lost = self.lost()
            handle, self._handle = self._handle, None
            for key in [key for key, lock in _held.items() if lock is self]:
                del _held[key]
            if not lost:
                with contextlib.suppress(OSError):
                    os.unlink(self.folder / NAME)  # while it is still locked: who waits for it looks again
            with contextlib.suppress(OSError):
                os.close(handle)
            self._unmake_folder()

    def forget(self) -> None:
        """In a forked process: the right stays with the one it was forked from."""
        if self._handle is not None:
            with contextlib.suppress(OSError):
                os.close(self._handle)
        self._handle = None
        self._made = []

    def _opened(self, error: type[NhgdError]) -> int:
        """The file, open and locked."""
        while True:
            handle = os.open(self.folder / NAME, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o644)
            try:
                self.excludes = self._locked(handle, error)
                here = os.fstat(handle)
                there = os.stat(self.folder / NAME)
                if (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino):
                    with contextlib.suppress(OSError):  # a full disk keeps no one out
                        os.ftruncate(handle, 0)
                        os.write(handle, json.dumps({"process": os.getpid(), "machine": socket.gethostname()}).encode())
                    return handle
            except FileNotFoundError:
                pass  # the one that had it has just taken the file away
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)

    def _locked(self, handle: int, error: type[NhgdError]) -> bool:
        if fcntl is None:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise error(
                f"{self.folder} is in use by another run{_who(handle)}. Wait until it has ended, or choose another"
                " folder."
            ) from None
        except OSError as failed:
            if failed.errno not in _UNKNOWN_HERE:
                raise
            self._warn(failed)
            return False
        return True

    def _warn(self, failed: OSError) -> None:
        place = os.path.realpath(self.folder)
        if place not in _spoken_of:
            _spoken_of.add(place)
            warnings.warn(
                f"{self.folder} is on a file system without locks ({failed.strerror}), so a second run there would"
                " not be detected. Make sure that there is none.",
                stacklevel=3,
            )

    def _make_folder(self) -> None:
        path = self.folder.absolute()
        for place in reversed([p for p in (path, *path.parents) if not p.exists()]):
            with contextlib.suppress(FileExistsError):
                os.mkdir(place)
                self._made.insert(0, place)

    def _unmake_folder(self) -> None:
        for place in self._made:
            try:
                os.rmdir(place)
            except OSError:
                break
        self._made = []


def _who(handle: int) -> str:
    """The run that holds the lock, as far as its file says."""
    try:
        told = json.loads(os.pread(handle, 1000, 0))
        number, machine = int(told["process"]), str(told["machine"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
    if machine != socket.gethostname():
        return f", process {number} on {machine}"
    return " of this process" if number == os.getpid() else f", process {number}"


def _forget_all() -> None:
    global _one_at_a_time
    _one_at_a_time = threading.RLock()  # another thread may have had it, and is not here
    for lock in list(_held.values()):
        lock.forget()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
