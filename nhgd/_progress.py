"""A progress bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

Tick: TypeAlias = Callable[[float, str], None]


@contextmanager
def bar(title: str, show: bool | None = None) -> Iterator[Tick]:
    """Yield a function of (fraction done, a few words). Shown on standard error; by default only on a terminal."""
    if not (sys.stderr.isatty() if show is None else show):
        yield lambda done, words: None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    except ImportError:

        def tick(done: float, words: str) -> None:
            print(f"\r{title} {100 * done:3.0f} % {words}\033[K", end="", file=sys.stderr, flush=True)

        try:
            yield tick
        finally:
            print(file=sys.stderr)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[words]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=1.0, words="")
        yield lambda done, words: progress.update(task, completed=done, words=words)
