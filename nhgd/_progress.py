"""How far a command or a run has come: a bar on a terminal, text in a notebook, lines in a log."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TextIO, TypeAlias

Tick: TypeAlias = Callable[[float | None, str], None]
_REDRAWN = 0.2  # seconds between two drawings of a bar of text
_WIDE = 100  # columns of a terminal; a narrower one has room for the words alone
_NEXT_LINE = (10.0, 60.0)  # seconds between two lines of a log: at first, and at most


@dataclass
class _Open:
    """The display that is open."""

    tick: Tick
    shared: bool


_open: ContextVar[_Open | None] = ContextVar("progress", default=None)


@contextmanager
def bar(title: str, show: bool | None = None, lines: bool = False, shared: bool = False) -> Iterator[Tick]:
    """Yield a function of (fraction done, a few words); the fraction is None while nobody can tell.

    Args:
        title: what goes on.
        show: by default only on a terminal, where it is drawn on standard error, and in a notebook.
        lines: write lines now and then where neither is at hand.
        shared: bars that are opened inside continue this one; otherwise they are not shown.
    """
    around = _open.get()
    if around is not None:
        yield around.tick if around.shared and show is not False else _nothing
        return
    with _display(title, show, lines) as tick:
        token = _open.set(_Open(tick, shared))
        try:
            yield tick
        finally:
            _open.reset(token)


@contextmanager
def _display(title: str, show: bool | None, lines: bool) -> Iterator[Tick]:
    terminal, notebook = sys.stderr.isatty(), in_notebook()
    if show is False or not (show or terminal or notebook or lines):
        yield _nothing
    elif lines and not terminal and not notebook:
        yield _Lines(title, sys.stderr).tick
    elif notebook or not _has_rich():
        text = TextBar(title, sys.stdout if notebook else sys.stderr)  # notebooks show standard error as an alarm
        try:
            yield text.tick
        finally:
            text.end()
    else:
        with _rich(title) as tick:
            yield tick


def step_words(row: Mapping[str, Any], metrics: Iterable[str] = ()) -> str:
    """An outer step in a few words, the metric that says most among them.

    >>> step_words({"step": 7, "outer_loss": 0.5, "inner_loss": 0.25, "auc": 0.9}, ["auc"])
    'step 7, outer 0.5, inner 0.25, auc 0.9'
    """
    known = [name for name in metrics if isinstance(row.get(name), (int, float))]
    preferred = [name for mark in ("test_accuracy", "accuracy", "") for name in known if mark in name]
    shown = {"outer": row["outer_loss"], "inner": row["inner_loss"]} | {name: row[name] for name in preferred[:1]}
    return ", ".join(
        [f"step {row['step']}", *(f"{name.replace('_', ' ')} {value:.3g}" for name, value in shown.items())]
    )


@dataclass
class _Clock:
    """The time gone, and the time left by the speed since the fraction was first known."""

    now: Callable[[], float] = time.monotonic
    _first: tuple[float, float] | None = None
    _began: float = field(init=False)

    def __post_init__(self) -> None:
        self._began = self.now()

    @property
    def gone(self) -> float:
        return self.now() - self._began

    def left(self, done: float | None) -> float | None:
        if done is None:
            return None
        if self._first is None:
            self._first = self.now(), done
        since, start = self._first
        return (self.now() - since) * (1 - done) / (done - start) if start < done else None


def span(seconds: float) -> str:
    """A time as clocks show it.

    >>> span(7.4), span(3725)
    ('0:07', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class TextBar:
    """A bar of plain characters, drawn over itself: for notebooks, which need no widgets for it."""

    def __init__(self, title: str, stream: TextIO, now: Callable[[], float] = time.monotonic) -> None:
        self._title, self._stream, self._clock = title, stream, _Clock(now)
        self._drawn: float | None = None
        self._last: tuple[float | None, str] = None, ""
        self._shown = ""

    def tick(self, done: float | None, words: str) -> None:
        """Draw, unless that was done a moment ago; the last state is drawn by `end`."""
        self._last = done, words or self._last[1]
        self._clock.left(done)
        if self._drawn is None or self._clock.gone - self._drawn >= _REDRAWN:
            self._draw()

    def end(self) -> None:
        """Draw the last state and leave the line."""
        self._draw()
        print(file=self._stream, flush=True)

    def _draw(self) -> None:
        done, words = self._last
        self._drawn = self._clock.gone
        left = self._clock.left(done)
        filled = round(20 * (done or 0))
        known = "" if done is None else f" {'█' * filled}{'░' * (20 - filled)} {100 * done:3.0f} %"
        after = "" if left is None or done == 1 else f", {span(left)} left"
        line = f"{self._title}{known}  {span(self._clock.gone)}{after}  {words}".rstrip()
        if self._stream.isatty():
            line = line[: shutil.get_terminal_size().columns - 1]
        # Blanks, because a notebook does not know the terminal's way to clear the rest of a line.
        print(f"\r{line}{' ' * max(0, len(self._shown) - len(line))}", end="", file=self._stream, flush=True)
        self._shown = line


class _Lines:
    """A line at the start, at the first step, and then now and then, for logs."""

    def __init__(self, title: str, stream: TextIO, now: Callable[[], float] = time.monotonic) -> None:
        self._title, self._stream, self._clock = title, stream, _Clock(now)
        self._written: float | None = None
        self._words: str | None = None
        self._known = False

    def tick(self, done: float | None, words: str) -> None:
        left, gone = self._clock.left(done), self._clock.gone
        first = done is not None and not self._known
        changed = done is None and words != self._words
        least, most = _NEXT_LINE
        due = self._written is None or gone - self._written >= min(most, max(least, gone / 10))
        if not words or not (first or changed or due):
            return
        self._written, self._words, self._known = gone, words, done is not None
        percent = "" if done is None else f" {100 * done:.0f} %,"
        after = "" if left is None else f", about {span(left)} left"
        print(f"{self._title}:{percent} {words}; {span(gone)} gone{after}", file=self._stream, flush=True)


@contextmanager
def _rich(title: str) -> Iterator[Tick]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
    from rich.table import Column
    from rich.text import Text

    clock = _Clock()

    class Times(ProgressColumn):
        """The time gone, and the time left, going down between two ticks."""

        def render(self, task: Task) -> Text:
            end = task.fields["end"]
            left = "" if end is None else f", {span(max(0.0, end - clock.gone))} left"
            return Text(f"{span(clock.gone)}{left}", style="progress.remaining")

    console, whole = Console(stderr=True), Column(no_wrap=True)
    columns = (
        TextColumn("{task.description}", table_column=whole),
        *([BarColumn(bar_width=16)] if console.width >= _WIDE else []),
        TextColumn("{task.fields[percent]}", table_column=whole),
        Times(table_column=whole),
        TextColumn(
            "{task.fields[words]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1), markup=False
        ),
    )
    with Progress(*columns, console=console, expand=True) as progress:
        task = progress.add_task(title, total=None, words="", percent="", end=None)

        def tick(done: float | None, words: str) -> None:
            left = clock.left(done)
            if words:
                progress.update(task, words=words)
            progress.update(
                task,
                total=None if done is None else 1.0,
                completed=done or 0.0,
                percent="" if done is None else f"{100 * done:3.0f} %",
                end=None if left is None or done == 1 else clock.gone + left,
            )

        yield tick


def in_notebook() -> bool:
    """Whether this is a notebook's kernel."""
    python = sys.modules.get("IPython")
    shell = None if python is None else python.get_ipython()
    return type(shell).__name__ == "ZMQInteractiveShell"


def _has_rich() -> bool:
    try:
        import rich.progress  # noqa: F401
    except ImportError:
        return False
    return True


def _nothing(done: float | None, words: str) -> None:
    """For progress that nobody sees."""
