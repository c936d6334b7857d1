"""The files of a folder of results, read with an error for everything that is not as it should be."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from nhgd.errors import InputError
from nhgd.report.shape import Shape, checked

LARGEST = 256 * 2**20  # bytes of a file of numbers
LARGEST_PICTURE = 16 * 2**20
PNG = b"\x89PNG\r\n\x1a\n"


def read_json(file: Path, shape: Shape) -> Any:
    """The content of a JSON file."""
    content = _read(file, LARGEST)
    try:
        found = json.loads(content.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise InputError(f"{file} is damaged: it is not JSON.") from None
    return checked(found, shape, str(file))


def read_lines(file: Path, shape: Shape) -> list[Any]:
    """The lines of a JSON Lines file; a last line that is not whole is that of a run that goes on, and is left out."""
    found = []
    lines = _read(file, LARGEST).split(b"\n")
    for nth, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"), parse_constant=_no_constant)
        except (ValueError, RecursionError):
            if nth == len(lines):
                break
            raise InputError(f"{file} is damaged: line {nth} is not JSON.") from None
        found.append(checked(row, shape, f"Line {nth} of {file}"))
    return found


def picture(file: Path) -> str:
    """A PNG file as the address of an image in a page."""
    content = _read(file, LARGEST_PICTURE)
    if not content.startswith(PNG):
        raise InputError(f"{file} is damaged: it is not a PNG picture.")
    return "data:image/png;base64," + base64.b64encode(content).decode("ascii")


def inside(folder: Path, name: str) -> Path:
    """A file that a result names; it must lie in the folder."""
    if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
        raise InputError(f"{folder} is damaged: it names {name!r}, which is not a file in it.")
    return folder / name


def _read(file: Path, largest: int) -> bytes:
    try:
        if not file.is_file():
            raise InputError(f"{file} is {'no file' if file.exists() else 'missing'}.")
        if file.stat().st_size > largest:
            raise InputError(f"{file} is larger than {largest // 2**20} MiB, too large for a page.")
        return file.read_bytes()
    except OSError as error:
        raise InputError(f"{file} could not be read: {error.strerror or error}.") from None


def _no_constant(word: str) -> None:
    raise ValueError(word)  # NaN and Infinity are no JSON
