"""A CSV file: its header and rows, and what is wrong with them."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from nhgd._path import check_file
from nhgd.errors import InputError, Problems, unknown

MISSING = {"", "na", "n/a", "#n/a", "<na>", "nan", "-nan", "null", "none", "?"}
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
SHOWN = 3  # rows or cells that a sentence about many names


@dataclass(frozen=True)
class CSVFile:
    """A header and rows of text, as in the file. Row 1 is the first below the header.

    Attributes:
        numbers: of the rows, where some of the file were left out because their cells do not fit the header.
    """

    path: Path
    header: list[str]
    rows: list[list[str]]
    numbers: Sequence[int] = ()

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

    def where(self, name: str, wrong: Callable[[str], bool]) -> list[tuple[int, str]]:
        """The rows, by number, and cells of a column that are wrong."""
        numbers = self.numbers or range(1, len(self.rows) + 1)
        return [(row, cell) for row, cell in zip(numbers, self.column(name), strict=True) if wrong(cell)]


def separator_called(text: str) -> str:
    """The character between columns that a user named: itself, tab or \\t.

    >>> separator_called("tab"), separator_called(";")
    ('\\t', ';')
    """
    found = "\t" if text in ("tab", "\\t") else text
    if len(found) != 1 or found in '"\r\n' or found.isalnum():
        raise InputError(f"--sep {text!r} cannot separate columns. Give one character, such as ';' or '|', or tab.")
    return found


def read_table(path: Path, separator: str = ",", problems: Problems | None = None) -> CSVFile:
    """Read a CSV file with a header, and refuse one that is empty or ragged, naming the rows.

    Args:
        path: the file.
        separator: what stands between columns.
        problems: where to note what is wrong with the header or with rows, rather than to refuse the file for it; the
            table then has the rows that fit the header. A file that cannot be read at all is refused.
    """
    lines = _lines(path, separator)
    if not lines:
        raise InputError(f"{path} is empty. The first line must name the columns, followed by rows.")
    header, rows = [name.strip() for name in lines[0]], lines[1:]
    _check_separator(path, header, separator)
    found = Problems()
    _check_header(path, header, found)
    if not rows:
        found.add(f"{path} has a header but no rows. Add some.")
    ragged: dict[int, list[int]] = {}
    for number, row in enumerate(rows, start=1):
        if len(row) != len(header):
            ragged.setdefault(len(row), []).append(number)
    for width, those in ragged.items():
        found.add(
            f"{path}, {rows_called(those)}: {width} cells where the header has {len(header)}. Fix the"
            f" {'row' if len(those) == 1 else 'rows'}; quote cells that contain {SEPARATORS.get(separator, 'separators')}."
        )
    if problems is None:
        found.refuse()
        return CSVFile(path, header, rows)
    problems.sentences += found.sentences
    fitting = [(number, row) for number, row in enumerate(rows, start=1) if len(row) == len(header)]
    return CSVFile(path, header, [row for _, row in fitting], [number for number, _ in fitting])


def _lines(path: Path, separator: str) -> list[list[str]]:
    """The cells of every line that is not empty."""
    check_file(path)
    reader = None
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(_without_nul(file, path), delimiter=separator, strict=True)
            return [line for line in reader if line]
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not text in UTF-8 (byte {error.start}). Save it as CSV in UTF-8.") from error
    except csv.Error as error:
        where = f", line {reader.line_num}" if reader else ""
        raise InputError(f"{path}{where}, is not CSV: {error}. Check the quotation marks before it.") from error


def _without_nul(file: Iterator[str], path: Path) -> Iterator[str]:
    """The lines of a text file; zero bytes occur in other encodings and file types, never in CSV."""
    for number, line in enumerate(file, start=1):
        if "\0" in line:
            raise InputError(
                f"{path}, line {number}, contains a zero byte, so it is not UTF-8 text. Save it as CSV in UTF-8."
            )
        yield line


def _check_separator(path: Path, header: list[str], separator: str) -> None:
    if len(header) > 1:
        return
    other, count = max(((one, header[0].count(one)) for one in SEPARATORS), key=lambda pair: pair[1])
    if other != separator and count:
        name = {"\t": "tab", ",": "','"}.get(other, f"'{other}'")
        raise InputError(
            f"{path} has {SEPARATORS[other]} between its columns. Pass --sep {name}"
            f"{'; all files must have the same separator' if other == ',' else ''}."
        )


def _check_header(path: Path, header: list[str], problems: Problems) -> None:
    nameless = [place for place, name in enumerate(header, start=1) if not name]
    if nameless:
        several = len(nameless) > 1
        problems.add(
            f"{path}: {rows_called(nameless, 'column')} {'have' if several else 'has'} no name in the header. Name"
            f" {'them' if several else 'it'}; a column of row numbers can then be left out with --ignore."
        )
    twice = [name for name, count in Counter(header).items() if count > 1 and name]
    if twice:
        problems.add(
            f"{path} names the {'column' if len(twice) == 1 else 'columns'} {quoted(twice)} twice. Rename one of them."
        )


def missing(cell: str) -> bool:
    """Whether a cell marks a missing value."""
    return cell.strip().lower() in MISSING


def labels(table: CSVFile, name: str) -> list[str]:
    """The labels of a column; a missing one is an error."""
    cells = [cell.strip() for cell in table.column(name)]
    unlabelled = table.where(name, missing)
    if unlabelled:
        one = len(unlabelled) == 1
        raise InputError(
            f"{table.path}, {rows_called(row for row, _ in unlabelled)}: {nothing(unlabelled)} in the label column {name!r}."
            f" {'Give the row a label, or remove the row' if one else 'Give the rows labels, or remove them'}."
        )
    return cells


def rows_called(numbers: Iterable[int], noun: str = "row") -> str:
    """Rows in the words of a sentence.

    >>> rows_called([4]), rows_called([4, 9]), rows_called(range(1, 61))
    ('row 4', 'rows 4 and 9', 'rows 1, 2, 3 and 57 more')
    """
    return f"{noun} {one[0]}" if len(one := list(numbers)) == 1 else f"{noun}s {and_more(list(map(str, one)))}"


def quoted(cells: Iterable[str]) -> str:
    """Different cells, in quotation marks.

    >>> quoted(["a", "b", "a"])
    "'a' and 'b'"
    """
    return and_more([repr(cell) for cell in dict.fromkeys(cell.strip() for cell in cells)])


def and_more(words: Sequence[str]) -> str:
    """The first of some words, and how many more there are."""
    rest = len(words) - SHOWN
    if rest > 1:
        return f"{', '.join(words[:SHOWN])} and {rest} more"
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]


def nothing(cells: Sequence[tuple[int, str]]) -> str:
    """Missing cells in the words of a sentence."""
    written = [cell for _, cell in cells if cell.strip()]
    if not written:
        return "nothing"
    return f"{quoted(written)}, which {'reads' if len(set(written)) == 1 else 'read'} as missing,"
