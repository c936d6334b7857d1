"""`nhgd clean`: which rows of a CSV file are mislabelled?"""

from __future__ import annotations

import csv
import time
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from nhgd.cli.options import Device, Json, Seed, checked_seed, device_called
from nhgd.cli.output import Folder, check_folder, console, print_json, table
from nhgd.data.table import Features, Table, missing, read_table
from nhgd.errors import InputError


def clean(
    train: Annotated[Path, typer.Argument(metavar="TRAIN.csv", help="The rows to look through.")],
    label: Annotated[str, typer.Option(help="The column that holds the label.")],
    trusted: Annotated[
        Path | None,
        typer.Option(
            help="Rows with right labels, the same columns; even a few for each class help.", show_default=False
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where to write the rows with what was found.")] = Path("weights.csv"),
    ignore: Annotated[
        str | None, typer.Option(help="Columns to leave out, with commas between, such as an id.", show_default=False)
    ] = None,
    impute: Annotated[bool, typer.Option("--impute", help="Fill missing cells instead of refusing them.")] = False,
    steps: Annotated[int, typer.Option(help="Outer steps.")] = 150,
    seed: Seed = 0,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Find mislabelled rows. --out has every row in its order, with weight, suspect and suggested_label added."""
    check_folder(out.parent)
    if out.is_dir():
        raise InputError(f"--out {out} is a folder. Name a file, for example {out / 'weights.csv'}.")
    rows = read_table(train)
    examples = None if trusted is None else read_table(trusted)
    for added in ("weight", "suspect", "suggested_label"):
        if added in rows.header:
            raise InputError(f"{train} already has a column {added!r}, which the result would add. Rename it.")
    left_out = {label} | {name.strip() for name in (ignore or "").split(",") if name.strip()}
    for name in left_out:
        rows.column(name)
    features = Features(impute).fit(rows, [name for name in rows.header if name not in left_out])
    y = _labels(rows, label)
    X = features.transform(rows)
    given = (
        {} if examples is None else {"X_trusted": features.transform(examples), "y_trusted": _labels(examples, label)}
    )
    cleaner = _cleaner()(
        steps=steps, random_state=checked_seed(seed) % 2**32, device=str(device_called(device)), verbose=None
    )
    started = time.perf_counter()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            cleaner.fit(X, y, **given)
        except InputError:
            raise
        except ValueError as error:  # scikit-learn's own checks
            raise InputError(str(error).splitlines()[0]) from error
    taken = time.perf_counter() - started
    suspect = cleaner.weights_ < 0.5

    def write(path: Path) -> None:
        with open(path, "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*rows.header, "weight", "suspect", "suggested_label"])
            for cells, weight, flag, better in zip(
                rows.rows, cleaner.weights_, suspect, cleaner.suggested_labels_, strict=True
            ):
                writer.writerow([*cells, f"{weight:.6f}", int(flag), better])

    out.parent.mkdir(parents=True, exist_ok=True)
    Folder(out.parent).write(out.name, write)
    answer = {
        "rows": len(y),
        "suspects": int(suspect.sum()),
        "classes": list(cleaner.classes_),
        "trusted": None if examples is None else len(examples.rows),
        "seconds": taken,
        "out": str(out),
        "worst": [int(i) + 1 for i in cleaner.label_issues_[:10]],
        "warnings": [str(item.message) for item in said],
    }
    if as_json:
        print_json(answer)
    else:
        _tell(answer, rows, label, cleaner)


def _cleaner() -> Any:
    try:
        from nhgd.estimators.cleaner import LabelCleaner
    except ModuleNotFoundError:
        raise InputError("Cleaning a table needs scikit-learn: pip install 'nhgd[cli]'.") from None
    return LabelCleaner


def _labels(table: Table, label: str) -> list[str]:
    cells = [cell.strip() for cell in table.column(label)]
    for number, cell in enumerate(cells, start=1):
        if missing(cell):
            raise InputError(f"{table.path}, row {number}: no label in the column {label!r}.")
    return cells


def _tell(answer: dict[str, Any], rows: Table, label: str, cleaner: Any) -> None:
    out = console()
    for sentence in answer["warnings"]:
        out.print(f"{sentence}\n")
    share = answer["suspects"] / answer["rows"]
    out.print(
        f"{answer['suspects']} of {answer['rows']} rows ({share:.1%}) are suspect, after {answer['seconds']:.1f} s.\n"
    )
    if answer["worst"]:
        listed = table("the worst", "row", "label", "suggested", "weight", left=3)
        for row in answer["worst"]:
            weight = f"{cleaner.weights_[row - 1]:.3g}"
            listed.add_row(str(row), rows.column(label)[row - 1], str(cleaner.suggested_labels_[row - 1]), weight)
        out.print(listed)
    out.print(f"\nEvery row, with its weight and a suggested label: {answer['out']}")
