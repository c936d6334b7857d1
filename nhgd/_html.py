"""Results as small tables in HTML, for notebooks. All text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

# Colours and type are those of the page around it, so that a dark one stays dark.
_LEFT, _RIGHT = "text-align: left; vertical-align: top", "text-align: right; font-variant-numeric: tabular-nums"


def table(
    heads: Sequence[str], rows: Iterable[Sequence[Any]], title: str = "", notes: Iterable[str] = (), text: int = 1
) -> str:
    """A table with a title above and sentences below it.

    Args:
        heads: of the columns.
        rows: their cells; a row with fewer has a last one that reaches to the end, for a sentence.
        title: plain text, as everything else.
        notes: a paragraph each.
        text: how many of the first columns are text, and so aligned to the left.

    >>> table(["name", "n"], [["<a>", 3]])
    ... # doctest: +ELLIPSIS
    '<table><thead><tr><th style="text-align: left...>&lt;a&gt;</td>...
    """
    styles = [_LEFT if i < text else _RIGHT for i in range(len(heads))]
    head = "".join(f'<th style="{style}">{_shown(name)}</th>' for name, style in zip(heads, styles, strict=True))
    body = "".join(f"<tr>{_cells(row, styles)}</tr>" for row in rows)
    above = f"<div><strong>{_shown(title)}</strong></div>" if title else ""
    below = "".join(f"<p>{_shown(note)}</p>" for note in notes)
    return f"{above}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}"


def _cells(row: Sequence[Any], styles: Sequence[str]) -> str:
    cells = [f'<td style="{style}">{_shown(value)}</td>' for value, style in zip(row, styles, strict=False)]
    if len(row) < len(styles):
        cells[-1] = f'<td colspan="{len(styles) - len(row) + 1}" style="{_LEFT}">{_shown(row[-1])}</td>'
    return "".join(cells)


def _shown(value: Any) -> str:
    return escape(str(value))
