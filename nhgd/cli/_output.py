"""The output of commands: text for people, one JSON object for programs."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from nhgd._results import jsonable


def print_json(answer: Mapping[str, Any]) -> None:
    """One JSON object on standard output."""
    print(json.dumps(jsonable(answer), indent=2, allow_nan=False))


def lines_unless(as_json: bool) -> Callable[[str], None]:
    """A function that writes lines about what is done to standard error, where no bar shows it."""

    def say(words: str) -> None:
        if not as_json and not sys.stderr.isatty():
            print(words, file=sys.stderr, flush=True)

    return say


def console() -> Console:
    """The console for people. If it is not a terminal, lines are long enough never to wrap."""
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120, highlight=False, markup=False)


def table(title: str, *columns: str, left: int = 1) -> Table:
    """A table whose first `left` columns are words and whose others are numbers."""
    made = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for i, column in enumerate(columns):
        made.add_column(column, justify="left" if i < left else "right", overflow="fold")
    return made


def number(value: Any, form: str = ".4g") -> str:
    """A number for a cell; a dash for none."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    return format(value, form)
