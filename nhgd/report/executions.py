"""The page of executions that `nhgd bench --execution` has timed, from bench.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nhgd.report.folder import picture, read_json
from nhgd.report.html import Html, joined
from nhgd.report.page import Page, Section, paragraph
from nhgd.report.page import picture as figure
from nhgd.report.provenance import PROVENANCE, provenance
from nhgd.report.shape import NUMBER
from nhgd.report.table import Cell, Column, table

FILE, PICTURE = "bench.json", "bench.png"
PARTS = ("inner", "waited", "curvature")
SHAPE = {
    "task": str, "method": str, "preset": str, "seed": int, "device": str, "steps": int, "rounds": int,
    "rows": [
        {
            "execution": str, "milliseconds": NUMBER, "quartiles": [NUMBER], "speedup": NUMBER, "overlap": NUMBER,
            "largest_lag": NUMBER, "difference": NUMBER, **{f"{part}_milliseconds": NUMBER for part in PARTS},
        }
    ],
    "environment?": {str: object}, "provenance?": PROVENANCE,
}  # fmt: skip


def suits(folder: Path) -> bool:
    """Whether the file of a folder is of executions, not of methods."""
    found = read_json(folder / FILE, {"rows?": [dict]})
    return "kind" not in found and any("execution" in row for row in found.get("rows", []))


def page(folder: Path) -> Page:
    """The page of a folder of `nhgd bench --execution`."""
    found = read_json(folder / FILE, SHAPE)
    preset = f" ({found['preset']})" if found["preset"] not in ("", "default") else ""
    return Page(
        f"{found['task']}{preset} by {found['method']}: {len(found['rows'])} executions",
        f"one outer step, median of {found['rounds']} x {found['steps']}, seed {found['seed']}, on {found['device']}",
        None,
        [
            Section("Comparison", _comparison(folder, found)),
            Section("Environment and command", provenance(_origin(found))),
        ],
    )


def _origin(found: Mapping[str, Any]) -> dict[str, Any]:
    return dict(found.get("provenance") or {}) | {"environment": found.get("environment") or {}}


def _comparison(folder: Path, found: Mapping[str, Any]) -> Html:
    columns = [
        Column("execution", "words"), *map(Column, ("ms/step", "quartiles", "speedup", "inner ms", "waiting ms")),
        *map(Column, ("curvature ms", "overlap", "lag", "v differs by")),
    ]  # fmt: skip
    rows = [
        [
            Cell(row["execution"]),
            _number(row["milliseconds"]),
            Cell("-".join(f"{edge:.3g}" for edge in row["quartiles"])),
            _number(row["speedup"]),
            *(_number(row[f"{part}_milliseconds"]) for part in PARTS),
            Cell(f"{100 * row['overlap']:.0f} %", row["overlap"]),
            _number(row["largest_lag"]),
            _number(row["difference"]),
        ]
        for row in found["rows"]
    ]
    drawn = (
        figure(picture(folder / PICTURE), "An outer step under each execution") if (folder / PICTURE).exists() else None
    )
    words = "The executions were run in turns; v is compared with that of the inline run after the same steps."
    return joined([table(columns, rows, "Executions and their times"), paragraph(words, "quiet"), drawn])


def _number(value: float) -> Cell:
    return Cell(f"{value:.3g}", value)
