"""Standard output and standard error as commands need them: there, and able to print anything."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def prepare() -> None:
    """Open closed standard streams, and make sure that no character and no full disk can end a run.

    A standard output that was closed stays one that cannot be written, so that a command whose answer is lost says so.
    """
    for number, flags in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free descriptor is used, so this fills the gap; otherwise the next opened file would.
            os.open(os.devnull, flags)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115  for the life of the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    if sys.stderr is None or isinstance(sys.stderr, io.TextIOWrapper):
        encoding = "utf-8" if sys.stderr is None else sys.stderr.encoding
        sys.stderr = LossyStream(open(2, "wb", buffering=0, closefd=False), encoding=encoding)  # noqa: SIM115


class LossyStream(io.TextIOWrapper):
    """A stream whose output is dropped if it cannot be written, while the work continues."""

    def __init__(self, buffer: Any, encoding: str) -> None:
        super().__init__(buffer, encoding=encoding, errors="backslashreplace", write_through=True)

    def write(self, text: str) -> int:
        """Write, or not."""
        try:
            return super().write(text)
        except OSError:
            return len(text)

    def flush(self) -> None:
        """Nothing waits to be written, but a wrapper may ask."""
        try:
            super().flush()
        except OSError:
            return


def mute() -> None:
    """Silence standard output after its reader has gone, including what is still buffered."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # a stream of a test, which has no number
        return


@contextmanager
def waiting(words: str) -> Iterator[None]:
    """Show on a terminal that something goes on inside; nothing is left of it."""
    if not sys.stderr.isatty():
        yield
        return
    print(f"{words} ...", end="\r", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print("\033[K", end="", file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """One line that a terminal shows as it is: line breaks, escapes and bytes that are no text are spelt out.

    >>> print(printable("a\\nb\\x1b[31m"))
    a\\nb\\x1b[31m
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
