"""`nhgd clean`: which rows of a CSV file are mislabelled?"""

from __future__ import annotations

import csv
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from nhgd._path import check_folder, check_name
from nhgd.cli._options import Device, Json, Seed, checked_seed, device_called
from nhgd.cli._output import console, folder, print_json, table
from nhgd.data.table import Features, Table, labels, read_table
from nhgd.errors import InputError

ADDED = ("weight", "suspect", "suggested_label", "wrong_score")
MOST_CLASSES = 30  # that the table for people lists


def clean(
    train: Annotated[Path, typer.Argument(metavar="TRAIN.csv", help="The rows to check.")],
    label: Annotated[str, typer.Option(help="The label column.")],
    trusted: Annotated[
        Path | None,
        typer.Option(
            help="Rows with correct labels and the same columns; a few for each class help.", show_default=False
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where to write the rows with the findings.")] = Path("weights.csv"),
    cleaned: Annotated[
        Path | None,
        typer.Option(help="Where to write the rows without the suspects, columns as they were.", show_default=False),
    ] = None,
    relabel: Annotated[
        bool, typer.Option("--relabel", help="Keep suspects in --cleaned, with the suggested label.")
    ] = False,
    ignore: Annotated[
        str | None, typer.Option(help="Comma-separated columns to leave out, such as an id.", show_default=False)
    ] = None,
    impute: Annotated[bool, typer.Option("--impute", help="Fill missing cells instead of refusing them.")] = False,
    categorical: Annotated[
        str | None,
        typer.Option(help="Comma-separated columns of numbers that stand for categories.", show_default=False),
    ] = None,
    steps: Annotated[int, typer.Option(help="Maximum number of outer steps; the best on held-out rows is used.")] = 40,
    seed: Seed = 0,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Find mislabelled rows. --out has every row in its order, with weight, suspect, suggested_label and wrong_score
    added.
    """
    _check_out("--out", out, train, trusted)
    if cleaned is not None:
        _check_out("--cleaned", cleaned, train, trusted)
        if cleaned.absolute() == out.absolute() or (cleaned.exists() and out.exists() and cleaned.samefile(out)):
            raise InputError(f"--cleaned {cleaned} is the same file as --out. Choose another file.")
    elif relabel:
        raise InputError("--relabel changes the file of --cleaned, which is missing. Add --cleaned FILE.csv.")
    door = _door()
    cleaner = door.LabelCleaner(
        steps=steps, random_state=checked_seed(seed) % 2**32, device=str(device_called(device)), verbose=None
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        rows = read_table(train)
        examples = None if trusted is None else read_table(trusted)
        X, y, given = _numbers(rows, examples, label, _names(ignore), _names(categorical), impute)
        with folder(out.parent) as place, folder(None if cleaned is None else cleaned.parent) as other:
            assert place is not None
            started = time.perf_counter()
            _fit(cleaner, X, y, given)
            taken = time.perf_counter() - started
            place.write(out.name, lambda path: _write(path, rows, cleaner))
            if other is not None and cleaned is not None:
                other.write(cleaned.name, lambda path: _write_cleaned(path, rows, label, cleaner, relabel))
    answer = {
        "rows": len(y),
        "suspects": len(cleaner.label_issues_),
        "classes": list(cleaner.classes_),
        "trusted": None if examples is None else len(examples.rows),
        "seconds": taken,
        "out": str(out),
        "cleaned": None if cleaned is None else str(cleaned),
        "selected_step": cleaner.selected_step_,
        "by_class": _by_class(cleaner, y),
        "worst": [int(i) + 1 for i in cleaner.label_issues_[:10]],
        "warnings": [_sentence(item.message, door.NoTrustedSetWarning) for item in said],
    }
    if as_json:
        print_json(answer)
    else:
        _tell(answer, rows, label, cleaner)


def _door() -> Any:
    try:
        from nhgd.sklearn import cleaner
    except ModuleNotFoundError:
        raise InputError("Cleaning a table needs scikit-learn: pip install 'nhgd[cli]'.") from None
    return cleaner


def _fit(cleaner: Any, X: Any, y: list[str], given: dict[str, Any]) -> None:
    try:
        cleaner.fit(X, y, **given)
    except InputError:
        raise
    except ValueError as error:  # scikit-learn's own checks
        raise InputError(str(error).splitlines()[0]) from error


def _write(path: Path, rows: Table, cleaner: Any) -> None:
    """Write every row in its order, with the findings."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*rows.header, *ADDED])
        found = zip(rows.rows, cleaner.weights_, cleaner.suggested_labels_, cleaner.scores_, strict=True)
        for cells, weight, better, score in found:
            suspect = int(weight < 0.5)
            # Rounded, a weight just below a half would read as one that is not suspect.
            shown = min(weight, 0.499999) if suspect else weight
            writer.writerow([*cells, f"{shown:.6f}", suspect, better, f"{score:.9g}"])


def _write_cleaned(path: Path, rows: Table, label: str, cleaner: Any, relabel: bool) -> None:
    """Write the trusted rows and, with `relabel`, the others with the suggested label."""
    place = rows.header.index(label)
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(rows.header)
        for cells, weight, better in zip(rows.rows, cleaner.weights_, cleaner.suggested_labels_, strict=True):
            if weight >= 0.5:
                writer.writerow(cells)
            elif relabel:
                writer.writerow([*cells[:place], better, *cells[place + 1 :]])


def _by_class(cleaner: Any, y: list[str]) -> list[dict[str, Any]]:
    """For each class its rows, its suspects, and the labels suggested for those."""
    names = [str(name) for name in cleaner.classes_]
    found = []
    for name, counts in zip(names, cleaner.issue_counts_.tolist(), strict=True):
        suggested = {other: count for other, count in zip(names, counts, strict=True) if count}
        found.append({"label": name, "rows": y.count(name), "suspects": sum(counts), "suggested": suggested})
    return found


def _check_out(option: str, out: Path, train: Path, trusted: Path | None) -> None:
    """Refuse, before anything is read, a file that cannot be written or must not be."""
    check_name(option, out)
    check_folder(option, out.parent)
    if out.is_dir():
        raise InputError(f"{option} {out} is a folder. Give a file, for example {out / 'weights.csv'}.")
    if out.exists() and not out.is_file():
        raise InputError(f"{option} {out} is a device or a pipe, which cannot be replaced. Give a file.")
    for given in (train, trusted):
        if given is not None and given.exists() and out.exists() and out.samefile(given):
            raise InputError(f"{option} {out} would overwrite the input {given}. Choose another file.")


def _names(text: str | None) -> set[str]:
    return {name.strip() for name in (text or "").split(",") if name.strip()}


def _numbers(
    rows: Table, examples: Table | None, label: str, ignore: set[str], categorical: set[str], impute: bool
) -> tuple[Any, list[str], dict[str, Any]]:
    """Features and labels of the rows, and those of the trusted rows as further arguments of fit."""
    for added in ADDED:
        if added in rows.header:
            raise InputError(f"{rows.path} already has a column {added!r}, which the result would add. Rename it.")
    for name in (label, *sorted(ignore | categorical)):
        rows.column(name)
    if label in ignore | categorical:
        option = "--ignore" if label in ignore else "--categorical"
        raise InputError(f"The column {label!r} is the label, so it cannot also be passed to {option}.")
    y = labels(rows, label)
    classes = dict.fromkeys(y)
    if len(classes) == 1:
        raise InputError(f"{rows.path}: every row has the label {y[0]!r}. At least two different labels are needed.")
    if len(classes) > max(2, len(y) // 2):
        raise InputError(
            f"{rows.path}: the column {label!r} holds {len(classes)} different labels in {len(y)} rows, too many for"
            " classes. Give the column of the classes as --label."
        )
    features = Features(impute, frozenset(categorical))
    X = features.fit(rows, [name for name in rows.header if name != label and name not in ignore]).transform(rows)
    if examples is None:
        return X, y, {}
    answers = _spelt_alike(labels(examples, label), classes)
    for number, answer in enumerate(answers, start=1):
        if answer not in classes:
            hint = ", ".join(sorted(classes)[:10]) + (", ..." if len(classes) > 10 else "")
            raise InputError(
                f"{examples.path}, row {number}: the label {answer!r} does not occur in {rows.path}, which has:"
                f" {hint}. Spell labels the same in both files, and remove rows of other classes."
            )
    return X, y, {"X_trusted": features.transform(examples), "y_trusted": answers}


def _spelt_alike(answers: list[str], classes: Iterable[str]) -> list[str]:
    """Labels spelled as the classes are: 1.0 becomes 1 if that is a class, because tools that fill gaps write it so."""
    known = {_value(name): name for name in classes if _value(name) is not None}
    return [answer if answer in classes else known.get(_value(answer), answer) for answer in answers]


def _value(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _sentence(warning: Warning | str, no_trusted_set: type[Any]) -> str:
    """A warning in the words of the command line."""
    if isinstance(warning, no_trusted_set):
        return (
            f"{warning.finding} A few rows with correct labels, given as --trusted FILE.csv, would give better results."
        )
    return str(warning)


def _tell(answer: dict[str, Any], rows: Table, label: str, cleaner: Any) -> None:
    out = console()
    for sentence in answer["warnings"]:
        out.print(f"{sentence}\n")
    share = answer["suspects"] / answer["rows"]
    out.print(
        f"{answer['suspects']} of {answer['rows']} rows ({share:.1%}) are suspect, after {answer['seconds']:.1f} s.\n"
    )
    if answer["worst"]:
        listed = table("the worst", "row", "label", "suggested", "wrong_score", left=3)
        for row in answer["worst"]:
            score = f"{cleaner.scores_[row - 1]:.3g}"
            listed.add_row(str(row), rows.column(label)[row - 1], str(cleaner.suggested_labels_[row - 1]), score)
        out.print(listed)
        counted = table("\nby class", "label", "suggested", "rows", "suspects", left=2)
        for one in answer["by_class"][:MOST_CLASSES]:
            often = sorted(one["suggested"].items(), key=lambda pair: -pair[1])[:3]
            words = ", ".join(f"{name} ({count})" for name, count in often)
            counted.add_row(one["label"], words, str(one["rows"]), str(one["suspects"]))
        out.print(counted)
    out.print(f"\nEvery row, with its weight, score and a suggested label: {answer['out']}")
    if answer["cleaned"] is not None:
        out.print(f"The cleaned table: {answer['cleaned']}")
