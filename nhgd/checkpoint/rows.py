"""The history in a checkpoint: one row a line, to which later rows are appended.

Each of the two checkpoints has its own file. A new one takes over the file of the one that it replaces, by a hard link,
and appends the new rows. That does not affect the older one, which knows the length of its part.

Rows are final once they are written, except the last, which the caller's own loop sees only then. If it has changed, or
the history was cleared and filled again, all rows are written anew; also if the file has other hard links.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nhgd.checkpoint.disk import Damaged, regular, to_disk, write_all

NAME = "history.jsonl"
_PART = 2**20


@dataclass(frozen=True)
class Written:
    """How far the rows of a checkpoint reach: their number, their bytes, the hash of those, ready to go on, and the
    last.
    """

    rows: int = 0
    size: int = 0
    digest: Any = field(default_factory=hashlib.sha256, compare=False)
    last: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON."""
        return {"rows": self.rows, "bytes": self.size, "sha256": self.digest.hexdigest()}


def write(
    draft: Path, history: Sequence[Any], pack: Callable[[int], Any], old: Iterable[tuple[Path, Written, bool]]
) -> Written:
    """Write the rows of a history into a draft; how far they reach.

    Args:
        draft: the folder of the new checkpoint.
        history: all rows.
        pack: the JSON of row i.
        old: checkpoints that hold the first of these rows, the best first: their folders, how far they reach, and
            whether their file may be taken over, since they will be taken away. Else it is copied.
    """
    file = draft / NAME
    begun = Written()
    for place, written, may_take in old:
        if _still_holds(written, history, pack) and _begin(file, place / NAME, written, may_take):
            begun = written
            break
    digest, size, last = begun.digest.copy(), begun.size, begun.last
    handle = os.open(file, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.ftruncate(handle, size)
        os.lseek(handle, size, os.SEEK_SET)
        lines: list[str] = []
        for i in range(begun.rows, len(history)):
            last = _line(pack(i))
            lines.append(last)
            if len(lines) == 1000 or i == len(history) - 1:
                part = "".join(lines).encode()
                write_all(handle, part)
                digest.update(part)
                size += len(part)
                lines = []
    finally:
        os.close(handle)
    to_disk(file)
    return Written(len(history), size, digest, last)


def _line(row: Any) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _still_holds(written: Written, history: Sequence[Any], pack: Callable[[int], Any]) -> bool:
    """Whether the history still begins with the rows that were written, judged by the last of them."""
    return written.rows <= len(history) and (written.rows == 0 or _line(pack(written.rows - 1)) == written.last)


def _begin(file: Path, old: Path, written: Written, may_take: bool) -> bool:
    """Let `file` begin with the rows of an older one."""
    try:
        if may_take:
            with contextlib.suppress(OSError):  # not every file system has second names
                os.link(old, file)
                found = os.stat(file)
                if found.st_size >= written.size and found.st_nlink == 2:  # a copy of the folder may share its files
                    return True
                os.unlink(file)
        digest = _copy(old, file, written.size)
    except (OSError, Damaged):
        digest = ""
    if digest == written.digest.hexdigest():
        return True
    with contextlib.suppress(FileNotFoundError):
        os.unlink(file)
    return False


def _copy(old: Path, file: Path, size: int) -> str:
    digest = hashlib.sha256()
    out = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        with regular(old) as handle:
            while size and (part := os.read(handle, min(size, _PART))):
                write_all(out, part)
                digest.update(part)
                size -= len(part)
    finally:
        os.close(out)
    return digest.hexdigest()


def read(place: Path, told: Any) -> tuple[list[Any], Written]:
    """The rows in a checkpoint as JSON, and how far they reach, made sure to be as written."""
    file = place / NAME
    count, size = told["rows"], told["bytes"]
    digest = hashlib.sha256()
    parts: list[bytes] = []
    left = size
    with regular(file) as handle:
        if os.fstat(handle).st_size < size:
            raise Damaged(file)
        while left and (part := os.read(handle, min(left, _PART))):
            digest.update(part)
            parts.append(part)
            left -= len(part)
    if digest.hexdigest() != told["sha256"]:
        raise Damaged(file)
    try:
        lines = b"".join(parts).splitlines(keepends=True)
        rows = [json.loads(line) for line in lines]
    except (ValueError, RecursionError) as error:
        raise Damaged(file) from error
    if len(rows) != count:
        raise Damaged(file)
    return rows, Written(count, size, digest, lines[-1].decode() if lines else "")
