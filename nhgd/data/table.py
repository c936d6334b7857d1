"""A CSV file as numbers: which columns are numeric, which are categories, and where something is missing."""

from __future__ import annotations

import csv
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nhgd.errors import InputError, unknown

MISSING = {"", "na", "n/a", "nan", "null", "none", "?"}
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Table:
    """A header and rows of text, as they stand in the file. Row 1 is the first below the header."""

    path: Path
    header: list[str]
    rows: list[list[str]]

    def column(self, name: str) -> list[str]:
        """The cells of a column."""
        if name not in self.header:
            raise unknown(f"column of {self.path.name}", name, self.header)
        place = self.header.index(name)
        return [row[place] for row in self.rows]


def read_table(path: Path) -> Table:
    """Read a CSV file with a header, and refuse one that is empty or ragged, naming the row."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            lines = [line for line in csv.reader(file, strict=True) if line]
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not text in UTF-8 (byte {error.start}). Save it as CSV in UTF-8.") from error
    except csv.Error as error:
        raise InputError(f"{path} is not a CSV file: {error}.") from error
    if not lines:
        raise InputError(f"{path} is empty. The first line must name the columns.")
    header, rows = [name.strip() for name in lines[0]], lines[1:]
    if not rows:
        raise InputError(f"{path} has a header but no rows.")
    twice = [name for name, count in Counter(header).items() if count > 1]
    if twice:
        raise InputError(f"{path} names the column {twice[0]!r} twice.")
    for number, row in enumerate(rows, start=1):
        if len(row) != len(header):
            raise InputError(f"{path}, row {number}: {len(row)} cells where the header has {len(header)}.")
    return Table(path, header, rows)


def missing(cell: str) -> bool:
    """Whether a cell says that nothing is known."""
    return cell.strip().lower() in MISSING


def _number(cell: str) -> float | None:
    try:
        found = float(cell)
    except ValueError:
        return None
    return found if math.isfinite(found) else None


@dataclass
class Features:
    """How the columns of a table become numbers: numeric ones as they are, others one column a category.

    Args:
        impute: fill missing cells by the median, or by a category of their own; otherwise they are refused.
    """

    impute: bool = False
    names: list[str] = field(default_factory=list)
    medians: dict[str, float] = field(default_factory=dict)
    categories: dict[str, list[str]] = field(default_factory=dict)

    def fit(self, table: Table, names: list[str]) -> Features:
        """Decide, for each named column, what it is."""
        self.names = names
        if not names:
            raise InputError(f"{table.path} has no column beside the label.")
        for name in names:
            cells = table.column(name)
            known = [cell for cell in cells if not missing(cell)]
            self._refuse_missing(table, name, cells)
            if not known:
                raise InputError(f"{table.path}: the column {name!r} is empty. Leave it away with --ignore.")
            numbers = [_number(cell) for cell in known]
            if all(n is not None for n in numbers):
                self.medians[name] = float(np.median([n for n in numbers if n is not None]))
            else:
                found = sorted({cell.strip() for cell in known})
                if len(found) > 50 and len(found) > 0.5 * len(known):
                    raise InputError(
                        f"{table.path}: the column {name!r} holds {len(found)} different texts, so it is no category. Leave"
                        " it away with --ignore."
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
                columns += [[float(cell.strip() == kind) for cell in cells] for kind in self.categories[name]]
        return np.array(columns, dtype=np.float64).T

    def _numeric(self, table: Table, name: str, row: int, cell: str) -> float:
        if missing(cell):
            return self.medians[name]
        found = _number(cell)
        if found is None:
            raise InputError(f"{table.path}, row {row}: {cell.strip()!r} in the numeric column {name!r}.")
        return found

    def _refuse_missing(self, table: Table, name: str, cells: list[str]) -> None:
        if self.impute:
            return
        for number, cell in enumerate(cells, start=1):
            if missing(cell):
                raise InputError(
                    f"{table.path}, row {number}: nothing in the column {name!r}. Fill it, or pass --impute to fill such cells"
                    " by the median or by a category of their own."
                )
