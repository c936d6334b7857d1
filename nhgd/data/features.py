"""The columns of a table as numbers: which are numeric, which are categories, and which cells are neither."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nhgd.data.csv_file import CSVFile, and_more, missing, nothing, quoted, rows_called
from nhgd.errors import InputError, Problems

LARGEST = 1e100  # larger values have squares that overflow
Array = np.ndarray[Any, Any]
IMPUTE = "or pass --impute to fill such cells with the median or a category of their own."


class UnseenCategoryWarning(UserWarning):
    """A row holds a category that the table from which the columns were understood does not."""


def _number(cell: str) -> float | None:
    """A number as it is written, infinite ones among them."""
    try:
        return float(cell)
    except ValueError:
        return None


def _unusable(cell: str) -> bool:
    """Whether it is no number to compute with: nothing, a word, or too large."""
    number = _number(cell)
    return number is None or not abs(number) <= LARGEST


@dataclass
class Features:
    """How the columns of a table become numbers: numeric ones unchanged, others one column for each category.

    A column is numeric when all its cells are numbers. Where nine of ten are, the others are taken for mistakes and
    refused, since a stray word would otherwise make a category of every number. An error names all cells to be mended.

    Args:
        impute: fill missing cells by the median, or by a category of their own; otherwise they are refused.
        categorical: columns that are categories although their cells are numbers.
    """

    impute: bool = False
    categorical: frozenset[str] = frozenset()
    names: list[str] = field(default_factory=list)
    medians: dict[str, float] = field(default_factory=dict)
    categories: dict[str, list[str]] = field(default_factory=dict)

    def fit(self, table: CSVFile, names: list[str]) -> Features:
        """Decide the type of each named column."""
        self.names = names
        if not names:
            raise InputError(
                f"{table.path} has no columns apart from the label and those left out, so there is nothing to learn"
                " from."
            )
        problems = Problems()
        for name in names:
            with problems.gathered():
                self._decide(table, name)
        self._check_missing(
            table, [name for name in names if name in self.medians or name in self.categories], problems
        )
        problems.refuse()
        return self

    def _decide(self, table: CSVFile, name: str) -> None:
        known = [cell for cell in table.column(name) if not missing(cell)]
        if not known:
            if table.rows:
                raise InputError(f"{table.path}: the column {name!r} is empty. Leave it out with --ignore.")
            return
        numbers = [number for number in map(_number, known) if number is not None]
        if name not in self.categorical and len(numbers) >= 0.9 * len(known):
            self.medians[name] = float(np.median(numbers))
            self._check_numbers(table, name)
            return
        if name not in self.categorical:
            self._refuse_decimal_commas(table, name, known)
        found = sorted({cell.strip() for cell in known})
        if len(found) > 50 and len(found) > 0.5 * len(known):
            raise InputError(
                f"{table.path}: the column {name!r} has {len(found)} distinct values, too many for a categorical column."
                " Leave it out with --ignore."
            )
        self.categories[name] = found

    def transform(self, table: CSVFile) -> Array:
        """The rows of a table as numbers, (N, P)."""
        problems = Problems()
        # After a fit that failed, what is known of the columns can still be asked for.
        names = [name for name in self.names if name in self.medians or name in self.categories]
        present = []
        for name in names:
            with problems.gathered():
                table.column(name)
                present.append(name)
                if name in self.medians:
                    self._check_numbers(table, name)
        self._check_missing(table, present, problems)
        problems.refuse()
        columns: list[list[float]] = []
        for name in names:
            cells = table.column(name)
            if name in self.medians:
                columns.append([self.medians[name] if _unusable(cell) else float(cell) for cell in cells])
            else:
                # A category that was never seen, or nothing, is zero in every column.
                self._warn_of_new(table, name)
                columns += [[float(cell.strip() == kind) for cell in cells] for kind in self.categories[name]]
        return np.array(columns, dtype=np.float64).T

    def _check_numbers(self, table: CSVFile, name: str) -> None:
        """Refuse the cells of a numeric column that no number stands in, or one too large."""
        problems = Problems()
        wrong = [(row, cell) for row, cell in table.where(name, _unusable) if not missing(cell)]
        large = [(row, cell) for row, cell in wrong if math.isfinite(_number(cell) or math.inf)]
        words = [pair for pair in wrong if pair not in large]
        if words:
            it = "it" if len(words) == 1 else "them"
            problems.add(
                f"{table.path}, {rows_called(row for row, _ in words)}: {quoted(cell for _, cell in words)} in the column"
                f" {name!r}, whose other cells are numbers. Correct {it}, or clear {it} and pass --impute; if the numbers"
                " are categories, pass --categorical."
            )
        if large:
            one = len(large) == 1
            problems.add(
                f"{table.path}, {rows_called(row for row, _ in large)}: {and_more([cell.strip() for _, cell in large])} in"
                f" the column {name!r} {'is' if one else 'are'} too large to compute with. Correct"
                f" {'it' if one else 'them'}, or leave the column out with --ignore."
            )
        problems.refuse()

    def _refuse_decimal_commas(self, table: CSVFile, name: str, known: list[str]) -> None:
        """Numbers with decimal commas would be taken for categories."""
        with_commas = [
            cell for cell in known if _number(cell) is None and _number(cell.replace(",", ".", 1)) is not None
        ]
        if with_commas and len(with_commas) >= 0.5 * len(known):
            raise InputError(
                f"{table.path}: the column {name!r} has commas in its numbers, as in {with_commas[0].strip()!r}. Save it"
                " with points as decimal marks, or pass --categorical if they are categories."
            )

    def _warn_of_new(self, table: CSVFile, name: str) -> None:
        known = set(self.categories[name])
        new = table.where(name, lambda cell: not missing(cell) and cell.strip() not in known)
        if new:
            warnings.warn(
                f"{table.path}, {rows_called(row for row, _ in new)}: {quoted(cell for _, cell in new)} in the column {name!r}"
                f" {'does' if len(new) == 1 else 'do'} not occur in the rows to be cleaned, so"
                f" {'it counts as an unknown category' if len(new) == 1 else 'they count as unknown categories'}.",
                UnseenCategoryWarning,
                stacklevel=3,
            )

    def _check_missing(self, table: CSVFile, names: list[str], problems: Problems) -> None:
        """Note the missing cells of all columns together: where one column has some, others often do."""
        if self.impute:
            return
        found = {name: cells for name in names if (cells := table.where(name, missing))}
        if len(found) == 1:
            ((name, cells),) = found.items()
            problems.add(
                f"{table.path}, {rows_called(row for row, _ in cells)}: {nothing(cells)} in the column {name!r}. Fill"
                f" {'it' if len(cells) == 1 else 'them'}, {IMPUTE}"
            )
        elif found:
            columns = [f"{name!r} ({rows_called(row for row, _ in cells)})" for name, cells in found.items()]
            problems.add(
                f"{table.path}: {sum(map(len, found.values()))} cells are empty or read as missing, in the columns"
                f" {and_more(columns)}. Fill them, {IMPUTE}"
            )
