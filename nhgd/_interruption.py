"""Ctrl-C between two steps rather than within one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def deferred_interrupts() -> Iterator[Callable[[], None]]:
    """Defer Ctrl-C until the block calls the function it is given, or ends. A second Ctrl-C acts at once.

    Nothing happens if Ctrl-C does not mean KeyboardInterrupt, or outside the main thread, which alone receives it.
    """
    came = False

    def hold(number: int, frame: Any) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True

    def let_through() -> None:
        if came:
            raise KeyboardInterrupt

    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield let_through
        return
    signal.signal(signal.SIGINT, hold)
    try:
        yield let_through
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    let_through()
