"""`nhgd clean`: which rows of a CSV file are mislabelled?"""

from __future__ import annotations

import csv
import time
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from nhgd._path import check_folder, check_name
from nhgd._results import folder
from nhgd.cli._options import Device, Json, Seed, checked_seed, device_called
from nhgd.cli._output import console, print_json, table
from nhgd.data.csv_file import CSVFile, labels, missing, quoted, read_table, rows_called, separator_called
from nhgd.data.features import Features
from nhgd.errors import InputError, Problems

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
    sep: Annotated[str, typer.Option(help="What stands between columns: one character, or tab.")] = ",",
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
    separator = separator_called(sep)
    door = _door()
    cleaner = door.LabelCleaner(
        steps=steps,
        random_state=checked_seed(seed) % 2**32,
        device=str(device_called(device)),
        verbose=None if as_json else True,
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        problems = Problems()
        rows, examples = _tables(train, trusted, separator, problems)
        features = Features(impute, frozenset(_names(categorical)))
        X, y, given = _numbers(rows, examples, label, _names(ignore), features, problems)
        with folder(out.parent) as place, folder(None if cleaned is None else cleaned.parent) as other:
            assert place is not None
            started = time.perf_counter()
            _fit(cleaner, X, y, given)
            taken = time.perf_counter() - started
            place.write(out.name, lambda path: _write(path, rows, cleaner, separator))
            if other is not None and cleaned is not None:
                other.write(cleaned.name, lambda path: _write_cleaned(path, rows, label, cleaner, relabel, separator))
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


def _write(path: Path, rows: CSVFile, cleaner: Any, separator: str) -> None:
    """Write every row in its order, with the findings."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter=separator)
        writer.writerow([*rows.header, *ADDED])
        found = zip(rows.rows, cleaner.weights_, cleaner.suggested_labels_, cleaner.scores_, strict=True)
        for cells, weight, better, score in found:
            suspect = int(weight < 0.5)
            # Rounded, a weight just below a half would read as one that is not suspect.
            shown = min(weight, 0.499999) if suspect else weight
            writer.writerow([*cells, f"{shown:.6f}", suspect, better, f"{score:.9g}"])


def _write_cleaned(path: Path, rows: CSVFile, label: str, cleaner: Any, relabel: bool, separator: str) -> None:
    """Write the trusted rows and, with `relabel`, the others with the suggested label."""
    place = rows.header.index(label)
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter=separator)
        writer.writerow(rows.header)
        for cells, weight, better in zip(rows.rows, cleaner.weights_, cleaner.suggested_labels_, strict=True):
            if weight >= 0.5:
                writer.writerow(cells)
            elif relabel:
                writer.writerow([*cells[:place], better, *cells[place + 1 :]])


def _by_class(cleaner: Any, y: list[str]) -> list[dict[str, Any]]:
    """For each class how many rows are given this label, how many of them were found suspect, and to how many suspects
    of other classes it is suggested; and which labels are suggested to its own suspects.
    """
    names, given = [str(name) for name in cleaner.classes_], Counter(y)
    counted = []
    for i, name in enumerate(names):
        found, suggested = cleaner.issue_counts_[i].tolist(), cleaner.issue_counts_[:, i].tolist()
        instead = {other: count for other, count in zip(names, found, strict=True) if count}
        row = {"label": name, "given": given[name], "found": sum(found), "suggested": sum(suggested)}
        counted.append(row | {"instead": instead})
    return counted


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


def _tables(train: Path, trusted: Path | None, separator: str, problems: Problems) -> tuple[CSVFile, CSVFile | None]:
    """Both files, with the rows that can be read; a file that cannot be is refused with all that is wrong with the
    other.
    """
    found: list[CSVFile | None] = []
    for path in (train, trusted):
        found.append(None)
        if path is not None:
            with problems.gathered():
                found[-1] = read_table(path, separator, problems)
    rows, examples = found
    if rows is None or (examples is None and trusted is not None):
        problems.refuse()
    assert rows is not None
    return rows, examples


def _numbers(
    rows: CSVFile,
    examples: CSVFile | None,
    label: str,
    ignore: set[str],
    features: Features,
    problems: Problems,
) -> tuple[Any, list[str], dict[str, Any]]:
    """Features and labels of the rows, and those of the trusted rows as further arguments of fit.

    All that is wrong with the two tables is refused together.
    """
    for added in ADDED:
        if added in rows.header:
            problems.add(f"{rows.path} already has a column {added!r}, which the result would add. Rename it.")
    for name in sorted(ignore | features.categorical):
        with problems.gathered():
            rows.column(name)
    if label in ignore | features.categorical:
        option = "--ignore" if label in ignore else "--categorical"
        problems.add(f"The column {label!r} is the label, so it cannot also be passed to {option}.")
    y, classes = [], None
    with problems.gathered():
        y = [cell.strip() for cell in rows.column(label)]
        with problems.gathered():
            labels(rows, label)
        classes = _classes_of(rows, [name for name in y if not missing(name)], label, alone=examples is None)
    columns = Counter(rows.header)
    names = [name for name in columns if name and columns[name] == 1 and name != label and name not in ignore]
    with problems.gathered():
        features.fit(rows, names)
    given: dict[str, Any] = {}
    if examples is not None:
        with problems.gathered():
            given["X_trusted"] = features.transform(examples)
        if classes is not None:
            with problems.gathered():
                given["y_trusted"] = _trusted_labels(examples, rows, label, classes)
    problems.refuse()
    return features.transform(rows), y, given


def _classes_of(rows: CSVFile, y: list[str], label: str, alone: bool) -> Counter[str]:
    """How many rows each class has; labels that are no classes are refused. `alone`: without trusted rows."""
    classes = Counter(y)
    if len(classes) == 1:
        raise InputError(f"{rows.path}: every row has the label {y[0]!r}. At least two different labels are needed.")
    if len(classes) > max(2, len(y) // 2):
        raise InputError(
            f"{rows.path}: the column {label!r} holds {len(classes)} different labels in {len(y)} rows, too many for"
            " classes. Give the column of the classes as --label."
        )
    single = [name for name, count in classes.items() if count == 1]
    if alone and single:
        raise InputError(
            f"{rows.path}: {'the label' if len(single) == 1 else 'the labels'} {quoted(single)} {'has' if len(single) == 1 else 'have'}"
            " only one row, so none can be held out. Correct it, or give rows with correct labels as --trusted FILE.csv."
        )
    return classes


def _trusted_labels(examples: CSVFile, rows: CSVFile, label: str, classes: Counter[str]) -> list[str]:
    """The labels of trusted rows, of which every class of the others needs two."""
    answers = _spelt_alike(labels(examples, label), classes)
    problems = Problems()
    numbers = examples.numbers or range(1, len(answers) + 1)
    strange = [(number, answer) for number, answer in zip(numbers, answers, strict=True) if answer not in classes]
    if strange:
        one = len({answer for _, answer in strange}) == 1
        hint = ", ".join(sorted(classes)[:10]) + (", ..." if len(classes) > 10 else "")
        problems.add(
            f"{examples.path}, {rows_called(number for number, _ in strange)}: the {'label' if one else 'labels'}"
            f" {quoted(answer for _, answer in strange)} {'does' if one else 'do'} not occur in {rows.path}, which has:"
            f" {hint}. Spell labels the same in both files, and remove rows of other classes."
        )
    counts = Counter(answers)
    few = [name for name in classes if counts[name] < 2]
    if few:
        problems.add(
            f"{examples.path}: at least two rows of every class of {rows.path} are needed, but there are fewer of"
            f" {quoted(few)}. Add some, or remove that class from both files."
        )
    problems.refuse()
    return answers


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


def _tell(answer: dict[str, Any], rows: CSVFile, label: str, cleaner: Any) -> None:
    out = console()
    for sentence in answer["warnings"]:
        out.print(f"{sentence}\n")
    share = answer["suspects"] / answer["rows"]
    out.print(
        f"{answer['suspects']} of {answer['rows']} rows ({share:.1%}) are suspect, after {answer['seconds']:.1f} s."
    )
    if answer["worst"]:
        out.print()
        listed = table(
            "the worst",
            "row",
            "label",
            "suggested",
            "wrong_score",
            left=3,
        )
        for row in answer["worst"]:
            score = f"{cleaner.scores_[row - 1]:.3g}"
            listed.add_row(str(row), rows.column(label)[row - 1], str(cleaner.suggested_labels_[row - 1]), score)
        out.print(listed)
        out.print(_classes(answer["by_class"]))
    out.print(
        f"\nEvery row, with its weight, wrong_score (the log-odds that its label is wrong) and a suggested label:\n{answer['out']}"
    )
    if answer["cleaned"] is not None:
        out.print(f"The cleaned table: {answer['cleaned']}")


def _classes(by_class: list[dict[str, Any]]) -> Any:
    """The classes with the most suspects, in their order."""
    most = sorted(by_class, key=lambda one: -one["found"] - one["suggested"])[:MOST_CLASSES]
    shown = [one for one in by_class if one in most]
    left = len(by_class) - len(shown)
    counted = table(
        "\nby class" + (f" ({left} more in the JSON)" if left else ""), "label", "given", "found", "suggested"
    )
    counted.add_column("instead", overflow="fold")
    for one in shown:
        often = sorted(one["instead"].items(), key=lambda pair: -pair[1])
        words = ", ".join(f"{name} ({count})" for name, count in often[:3]) + (", ..." if len(often) > 3 else "")
        counted.add_row(one["label"], str(one["given"]), str(one["found"]), str(one["suggested"]), words)
    return counted
