"""A CSV file as numbers: which columns are numeric, which are categories, and where something is missing."""

from __future__ import annotations

import csv
import math
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from nhgd._path import check_file
from nhgd.errors import InputError, unknown

MISSING = {"", "na", "n/a", "#n/a", "<na>", "nan", "-nan", "null", "none", "?"}
LARGEST = 1e100  # larger values have squares that overflow
Array = np.ndarray[Any, Any]


class UnseenCategoryWarning(UserWarning):
    """A row holds a category that the table from which the columns were understood does not."""


@dataclass(frozen=True)
class Table:
    """A header and rows of text, as in the file. Row 1 is the first below the header."""

    path: Path
    header: list[str]
    rows: list[list[str]]

    @cached_property
    def _places(self) -> dict[str, int]:
        """The index of each column; a table may have many."""
        return {name: place for place, name in enumerate(self.header)}

    def column(self, name: str) -> list[str]:
        """The cells of a column."""
        if name not in self._places:
            raise unknown(f"column of {self.path.name}", name, self.header)
        place = self._places[name]
        return [row[place] for row in self.rows]


def read_table(path: Path) -> Table:
    """Read a CSV file with a header, and refuse one that is empty or ragged, naming the row."""
    check_file(path)
    reader = None
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(_without_nul(file, path), strict=True)
            lines = [line for line in reader if line]
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not text in UTF-8 (byte {error.start}). Save it as CSV in UTF-8.") from error
    except csv.Error as error:
        where = f", line {reader.line_num}" if reader else ""
        raise InputError(f"{path}{where}, is not CSV: {error}. Check the quotation marks before it.") from error
    if not lines:
        raise InputError(f"{path} is empty. The first line must name the columns, followed by rows.")
    header, rows = [name.strip() for name in lines[0]], lines[1:]
    _check_header(path, header)
    if not rows:
        raise InputError(f"{path} has a header but no rows. Add some.")
    for number, row in enumerate(rows, start=1):
        if len(row) != len(header):
            raise InputError(
                f"{path}, row {number}: {len(row)} cells where the header has {len(header)}. Fix the row; quote cells"
                " that contain commas."
            )
    return Table(path, header, rows)


def _without_nul(file: Iterator[str], path: Path) -> Iterator[str]:
    """The lines of a text file; zero bytes occur in other encodings and file types, never in CSV."""
    for number, line in enumerate(file, start=1):
        if "\0" in line:
            raise InputError(
                f"{path}, line {number}, contains a zero byte, so it is not UTF-8 text. Save it as CSV in UTF-8."
            )
        yield line


def _check_header(path: Path, header: list[str]) -> None:
    for separator, word in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars")):
        if len(header) == 1 and separator in header[0]:
            raise InputError(
                f"{path} has {word} between its columns. Save it with commas as separators and points as decimal marks."
            )
    if "" in header:
        raise InputError(
            f"{path}: column {header.index('') + 1} has no name in the header. Name it; a column of row numbers can then be"
            " left out with --ignore."
        )
    twice = [name for name, count in Counter(header).items() if count > 1]
    if twice:
        raise InputError(f"{path} names the column {twice[0]!r} twice. Rename one of them.")


def missing(cell: str) -> bool:
    """Whether a cell marks a missing value."""
    return cell.strip().lower() in MISSING


def _number(cell: str) -> float | None:
    """A number as it is written, infinite ones among them."""
    try:
        return float(cell)
    except ValueError:
        return None


@dataclass
class Features:
    """How the columns of a table become numbers: numeric ones unchanged, others one column for each category.

    A column is numeric when all its cells are numbers. Where nine of ten are, the others are taken for mistakes and
    refused, since a stray word would otherwise make a category of every number.

    Args:
        impute: fill missing cells by the median, or by a category of their own; otherwise they are refused.
        categorical: columns that are categories although their cells are numbers.
    """

    impute: bool = False
    categorical: frozenset[str] = frozenset()
    names: list[str] = field(default_factory=list)
    medians: dict[str, float] = field(default_factory=dict)
    categories: dict[str, list[str]] = field(default_factory=dict)

    def fit(self, table: Table, names: list[str]) -> Features:
        """Decide the type of each named column."""
        self.names = names
        if not names:
            raise InputError(
                f"{table.path} has no columns apart from the label and those left out, so there is nothing to learn"
                " from."
            )
        for name in names:
            cells = table.column(name)
            known = [cell for cell in cells if not missing(cell)]
            self._refuse_missing(table, name, cells)
            if not known:
                raise InputError(f"{table.path}: the column {name!r} is empty. Leave it out with --ignore.")
            numbers = [number for number in map(_number, known) if number is not None]
            if name not in self.categorical and len(numbers) >= 0.9 * len(known):
                for row, cell in enumerate(cells, start=1):
                    self._numeric(table, name, row, cell)
                self.medians[name] = float(np.median(numbers))
                continue
            found = sorted({cell.strip() for cell in known})
            if len(found) > 50 and len(found) > 0.5 * len(known):
                raise InputError(
                    f"{table.path}: the column {name!r} has {len(found)} distinct values, too many for a categorical column."
                    " Leave it out with --ignore."
                )
            self.categories[name] = found
        return self

    def transform(self, table: Table) -> Array:
        """The rows of a table as numbers, (N, P)."""
        columns: list[list[float]] = []
        for name in self.names:
            cells = table.column(name)
            self._refuse_missing(table, name, cells)
            if name in self.medians:
                columns.append([self._numeric(table, name, i, cell) for i, cell in enumerate(cells, start=1)])
            else:
                # A category that was never seen, or nothing, is zero in every column.
                self._warn_of_new(table, name, cells)
                columns += [[float(cell.strip() == kind) for cell in cells] for kind in self.categories[name]]
        return np.array(columns, dtype=np.float64).T

    def _numeric(self, table: Table, name: str, row: int, cell: str) -> float:
        if missing(cell):
            return self.medians.get(name, 0.0)
        found = _number(cell)
        if found is None or not math.isfinite(found):
            raise InputError(
                f"{table.path}, row {row}: {cell.strip()!r} in the column {name!r}, whose other cells are numbers."
                " Correct it, or clear it and pass --impute; if the numbers are categories, pass --categorical."
            )
        if abs(found) > LARGEST:
            raise InputError(
                f"{table.path}, row {row}: {cell.strip()} in the column {name!r} is too large to compute with. Correct it, or"
                " leave the column out with --ignore."
            )
        return found

    def _warn_of_new(self, table: Table, name: str, cells: list[str]) -> None:
        known = set(self.categories[name])
        new = [(i, cell.strip()) for i, cell in enumerate(cells, 1) if not missing(cell) and cell.strip() not in known]
        if new:
            row, first = new[0]
            warnings.warn(
                f"{table.path}, row {row}{_and_more(len(new) - 1)}: {first!r} in the column {name!r} does not occur"
                " in the rows to be cleaned, so it counts as an unknown category.",
                UnseenCategoryWarning,
                stacklevel=3,
            )

    def _refuse_missing(self, table: Table, name: str, cells: list[str]) -> None:
        if self.impute:
            return
        rows = [number for number, cell in enumerate(cells, start=1) if missing(cell)]
        if rows:
            raise InputError(
                f"{table.path}, row {rows[0]}{_and_more(len(rows) - 1)}: {_nothing(cells[rows[0] - 1])} in the column"
                f" {name!r}. Fill it, or pass --impute to fill such cells with the median or a category of their own."
            )


def labels(table: Table, name: str) -> list[str]:
    """The labels of a column; a missing one is an error."""
    cells = [cell.strip() for cell in table.column(name)]
    rows = [number for number, cell in enumerate(cells, start=1) if missing(cell)]
    if rows:
        raise InputError(
            f"{table.path}, row {rows[0]}{_and_more(len(rows) - 1)}: {_nothing(cells[rows[0] - 1])} in the label column"
            f" {name!r}. Give the row a label, or remove the row."
        )
    return cells


def _nothing(cell: str) -> str:
    return f"{cell.strip()!r}, which reads as missing," if cell.strip() else "nothing"


def _and_more(rows: int) -> str:
    return f" (and {rows} more)" if rows > 0 else ""
