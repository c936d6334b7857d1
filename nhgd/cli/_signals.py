"""SIGTERM, SIGHUP and Ctrl-C: how a command ends when it is asked to.

Shells, schedulers and closed terminals send them, and what follows after a while cannot be held up. So a run ends after
the current outer step, saves its results, and says so; a second signal acts at once.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

SPOKEN_OF = {signal.SIGINT: "Ctrl-C"}
ENDING = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGXCPU") if hasattr(signal, name)
]  # not every platform has all


class Stopped(KeyboardInterrupt):
    """The command was asked to end, by the signal of this number."""

    def __init__(self, number: int, sentence: str = "") -> None:
        super().__init__(sentence)
        self.number = number


def name_of(number: int) -> str:
    """The user's name for a signal.

    >>> name_of(2), name_of(15)
    ('Ctrl-C', 'SIGTERM')
    """
    return SPOKEN_OF.get(signal.Signals(number), signal.Signals(number).name)


def number_of(stop: KeyboardInterrupt) -> int:
    """The number of the signal that caused it; Ctrl-C if unknown."""
    return stop.number if isinstance(stop, Stopped) else signal.SIGINT


@dataclass
class Asked:
    """Whether the command was asked to end, and by which signal."""

    number: int | None = None


@contextmanager
def raised() -> Iterator[None]:
    """A signal that would end the process raises `Stopped` inside; one that is ignored stays so.

    Ctrl-C does too: where a plain KeyboardInterrupt leaves code that was compiled from a string, as dataclasses are,
    Python ends the process by SIGINT even if it is caught further up, and the exit code would be lost.
    """

    def stop(number: int, frame: Any) -> None:
        raise Stopped(number)

    usual = (signal.SIG_DFL, signal.default_int_handler)
    with _handled([number for number in ENDING if _now(number) in usual], stop):
        yield


@contextmanager
def asking(stop: Callable[[], None], patient: bool = False) -> Iterator[Asked]:
    """The first signal inside calls `stop`, a second one raises `Stopped`; with `patient` it does nothing more.

    A started process of several is patient: it may hear of one wish to end from several sides.
    """
    asked = Asked()

    def ask(number: int, frame: Any) -> None:
        if asked.number is None:
            asked.number = number
            if not patient:
                with suppress(OSError):  # not by print: the signal may have come in the middle of one
                    os.write(
                        2, f"{name_of(number)}: ending after this outer step; send it again to stop at once.\n".encode()
                    )
            stop()
        elif not patient:
            raise Stopped(number)

    with _handled([number for number in ENDING if _now(number) is not signal.SIG_IGN], ask):
        yield asked


def _now(number: int) -> Any:
    return signal.getsignal(number)


@contextmanager
def _handled(numbers: list[int], handler: Callable[[int, Any], None]) -> Iterator[None]:
    """The signals go to a handler inside, where this is the main thread, which alone may set one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)
