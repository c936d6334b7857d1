"""Paths that people give: refused with a sentence before the work, not after it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from nhgd.errors import InputError

ROOM = 80  # bytes reserved for the names of files inside a folder
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def check_name(what: str, path: str | os.PathLike[str]) -> None:
    """Refuse a path that nothing can be called: empty, with a zero byte, or too long for the file system.

    >>> check_name("--out", "")
    Traceback (most recent call last):
    nhgd.errors.InputError: --out is empty. Name a place.
    """
    text = os.fspath(path)
    if not text:
        raise InputError(f"{what} is empty. Give a path.")
    if "\0" in text:
        raise InputError(f"{what} contains a zero byte, which no file or folder name can. Give another path.")
    place = Path(text).absolute()
    while not os.path.lexists(place):
        place = place.parent
    longest, whole = (_limit(place, of, usual) for of, usual in (("PC_NAME_MAX", 255), ("PC_PATH_MAX", 4096)))
    for part in Path(text).parts:
        if len(os.fsencode(part)) > longest:
            raise InputError(
                f"{what} has a name of {len(os.fsencode(part))} bytes, {part[:20]}..., but the file system allows at"
                f" most {longest}. Give another path."
            )
    if len(os.fsencode(text)) + ROOM > whole:
        raise InputError(
            f"{what} has {len(os.fsencode(text))} bytes, but the system allows paths of at most {whole}, including"
            " the files inside. Give another path."
        )


def check_folder(what: str, path: Path) -> None:
    """Refuse, without writing anything, a place where no folder can be made or written to."""
    check_name(what, path)
    try:
        place = path.absolute()
        while not os.path.lexists(place):
            place = place.parent
        is_folder = place.is_dir()
    except (OSError, ValueError) as error:
        raise unwritable(what, path, error) from error
    if not is_folder:
        raise InputError(f"{what} {path} cannot be a folder: {place} is a file. Give another path.")
    if not os.access(place, os.W_OK | os.X_OK):
        raise InputError(f"{what} {path} cannot be written: {place} does not permit it. Give another path.")


def unwritable(what: str, path: Path, error: OSError | ValueError) -> InputError:
    """A sentence about a place that the system refuses."""
    why = (error.strerror if isinstance(error, OSError) else None) or error
    return InputError(f"{what} {path} cannot be written: {why}. Give another path.")


def _limit(place: Path, of: str, usual: int) -> int:
    try:
        return os.pathconf(place, of)
    except (AttributeError, OSError, ValueError):  # no such call, or no such limit
        return usual


def expanded(what: str, text: str) -> Path:
    """A path with ~ replaced by the home folder that it means."""
    if "\0" in text:
        raise InputError(f"{what} contains a zero byte, which no file or folder name can. Give another path.")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise InputError(f"{what} is {text}, but there is no such user. Write the full path.") from error


def check_file(path: Path) -> None:
    """Refuse anything but a plain file before opening it: a pipe would block, and a device may never end."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:  # a zero byte, or characters that the file system does not have
        raise InputError(f"{str(path)!r} cannot be read: {error}.") from error
    if not stat.S_ISREG(mode):
        kind = next((word for is_kind, word in _KINDS if is_kind(mode)), "something else")
        remedy = "Give a file in it." if kind == "a folder" else "Copy its output into a file first."
        raise InputError(f"{path} cannot be read: it is {kind}, not a file. {remedy}")
