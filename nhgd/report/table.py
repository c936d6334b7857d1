"""Tables, sorted by the reader where that helps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nhgd.report.html import Child, Html, element


@dataclass(frozen=True)
class Column:
    """A heading: its words, and whether its cells are numbers, words or sentences, which may wrap."""

    title: str
    kind: str = "number"


@dataclass(frozen=True)
class Cell:
    """A cell: what it shows, what it is sorted by, and whether it is the best of its column."""

    shown: Child
    value: float | str | None = None
    best: bool = False


def table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], label: str, sortable: bool = True) -> Html:
    """A table whose first column names its rows. A narrow screen scrolls it, not the page."""
    head = [_heading(column, sortable) for column in columns]
    body = [
        element(
            "tr", (_cell(cell, column, nth == 0) for nth, (cell, column) in enumerate(zip(row, columns, strict=True)))
        )
        for row in rows
    ]
    made = element(
        "table",
        element("caption", label, class_="hidden"),
        element("thead", element("tr", head)),
        element("tbody", body),
        class_="sortable" if sortable else None,
    )
    return element("div", made, class_="scroll", tabindex=0, role="region", aria_label=label)


def _heading(column: Column, sortable: bool) -> Html:
    inside: Child = element("button", column.title, type="button") if sortable else column.title
    kind = None if column.kind == "number" else "words"
    return element("th", inside, scope="col", class_=kind, data_kind=column.kind)


def _cell(cell: Cell, column: Column, first: bool) -> Html:
    value = cell.value if cell.value is not None or column.kind == "number" else cell.shown
    given = None if value is None else value if isinstance(value, str) else repr(float(value))  # type: ignore[arg-type]
    if first:
        return element("th", element("span", cell.shown, title=str(given or "")), scope="row", data_value=given)
    classes = {"words": "words", "sentence": "sentence"}.get(column.kind, "")
    return element(
        "td", cell.shown, class_=f"{classes} best".strip() if cell.best else classes or None, data_value=given
    )
