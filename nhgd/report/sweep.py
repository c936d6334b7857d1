"""The page of a sweep, from sweep.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nhgd.comparison.formats import said
from nhgd.report.chart import Line, chart
from nhgd.report.folder import read_json
from nhgd.report.html import Html, element, joined
from nhgd.report.learnt import learnt
from nhgd.report.page import Page, Section, command, listing, note, paragraph, plain, titled
from nhgd.report.provenance import PROVENANCE, provenance
from nhgd.report.shape import MAYBE_NUMBER, MAYBE_TEXT, NUMBER
from nhgd.report.table import Cell, Column, table

FILE = "sweep.json"
SHAPE = {
    "task": str, "preset": str, "method": str, "budget_words": str, "selection": str, "headline": str, "study": str,
    "storage": MAYBE_TEXT, "sampler": str, "pruner": str, "device": str, "space": {str: str}, "seeds": [int],
    "settings": {str: object}, "importance": {str: NUMBER},
    "best": {"parameters": {str: object}, "value": NUMBER, "number": int, "metrics": {str: MAYBE_NUMBER}},
    "trials": [
        {
            "number": int, "state": str, "parameters": {str: object}, "value": MAYBE_NUMBER, "seconds": MAYBE_NUMBER,
            "metrics": {str: MAYBE_NUMBER}, "error": MAYBE_TEXT,
        }
    ],
    "notes?": [str], "provenance?": PROVENANCE,
}  # fmt: skip


def page(folder: Path) -> Page:
    """The page of a folder of `nhgd sweep`."""
    found = read_json(folder / FILE, SHAPE)
    trials, best = found["trials"], found["best"]
    preset = f" ({found['preset']})" if found["preset"] not in ("", "default") else ""
    states = [row["state"] for row in trials]
    ended = ", ".join(f"{states.count(state)} {state}" for state in ("pruned", "failed") if state in states)
    return Page(
        f"{found['task']}{preset} by {found['method']}: {len(trials)} trials",
        f"{found['budget_words']} a trial, {found['sampler']} with {'no' if found['pruner'] == 'none' else found['pruner']} pruning{f', {ended}' if ended else ''},"
        f" on {found['device']}",
        f"The lowest {titled(found['selection'])} is {best['value']:.4g}, with {said(best['parameters'])}.",
        [
            Section("Best settings", _best(folder, found)),
            Section("Trials", joined([_history(found), learnt(folder, "", _pictures(folder)), _table(found)])),
            Section("What was searched", listing(_searched(found))),
            Section("Environment and command", provenance(found.get("provenance") or {})),
        ],
    )


def _best(folder: Path, found: Mapping[str, Any]) -> Html:
    best = found["best"]
    preset = "" if found["preset"] in ("", "default") else f" --preset {found['preset']}"
    metrics = {titled(name): value for name, value in best["metrics"].items()}
    return joined(
        [
            listing(best["parameters"]),
            *(note(words) for words in found.get("notes", [])),
            paragraph("To run the task with them:", "quiet"),
            command(f"nhgd run {found['task']}{preset} --params {folder / 'best.json'}"),
            element("h3", f"Metrics of trial {best['number']}"),
            listing(metrics),
        ]
    )


def _history(found: Mapping[str, Any]) -> Html:
    good = sorted((row for row in found["trials"] if row["value"] is not None), key=lambda row: row["number"])
    numbers: list[float] = [row["number"] for row in good]
    values: list[float] = [row["value"] for row in good]
    name = titled(found["selection"])
    return joined(
        [
            element("h3", "The best so far"),
            chart([Line("best so far", 0, numbers, _lowest(values))], "trial", name, whole=True),
        ]
    )


def _lowest(values: Sequence[float]) -> list[float]:
    """The lowest so far."""
    return [min(values[: nth + 1]) for nth in range(len(values))]


def _table(found: Mapping[str, Any]) -> Html:
    keys, headline = list(found["space"]), found["headline"]
    more = headline if headline != found["selection"] else None
    columns = [
        Column("trial"), Column("state", "words"), Column(titled(found["selection"])),
        *([Column(titled(more))] if more else []), *map(Column, keys), Column("seconds"), Column("error", "sentence"),
    ]  # fmt: skip
    best = found["best"]["number"]
    rows = []
    for row in found["trials"]:
        cells = [
            Cell(str(row["number"]), row["number"]),
            Cell(row["state"]),
            _number(row["value"], row["number"] == best),
        ]
        cells += [_number(row["metrics"].get(more))] if more else []
        cells += [_value(row["parameters"].get(key)) for key in keys]
        rows.append([*cells, _number(row["seconds"]), Cell(row["error"] or "")])
    if not any(row["error"] for row in found["trials"]):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return joined([element("h3", "Every trial"), table(columns, rows, "Every trial"), _importance(found)])


def _importance(found: Mapping[str, Any]) -> Html | None:
    if not found["importance"]:
        return note("Too few trials have ended to say how much each setting matters.")
    rows: Sequence[Sequence[Cell]] = [
        [Cell(key), Cell(f"{100 * share:.0f} %", share)] for key, share in found["importance"].items()
    ]
    words = "The share of each setting in what the trials differ by, by functional analysis of variance."
    return joined(
        [
            element("h3", "What matters"),
            paragraph(words, "quiet"),
            table([Column("setting", "words"), Column("share")], rows, "Importance of the settings"),
        ]
    )


def _searched(found: Mapping[str, Any]) -> dict[str, Any]:
    known = {key: found[key] for key in ("study", "storage", "selection", "seeds")}
    return {**known, **found["space"], **found["settings"]}


def _pictures(folder: Path) -> list[str]:
    return [name for name in ("parameters.png",) if (folder / name).exists()]


def _number(value: float | None, best: bool = False) -> Cell:
    return Cell("-") if value is None else Cell(f"{value:.4g}", value, best)


def _value(value: Any) -> Cell:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return Cell(f"{value:.4g}", value) if number else Cell(plain(value))
