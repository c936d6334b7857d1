"""The page of a comparison, from bench.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nhgd.comparison.bands import rises
from nhgd.comparison.formats import LEGEND, main_metrics, mean_and_deviation, reached_words, said, target_words
from nhgd.report.chart import Line
from nhgd.report.folder import read_json
from nhgd.report.html import Child, Html, element, joined
from nhgd.report.learnt import learnt
from nhgd.report.lines import Panel, compared, swatch
from nhgd.report.page import Page, Section, more, note, paragraph, titled
from nhgd.report.provenance import PROVENANCE, provenance
from nhgd.report.shape import MAYBE_NUMBER, MAYBE_TEXT, NUMBER
from nhgd.report.table import Cell, Column, table

FILE = "bench.json"
MOST_CURVES = 16  # metrics that can be chosen

BAND = {key: [MAYBE_NUMBER] for key in ("x", "median", "low", "high")}
SHAPE = {
    "task": str,
    "preset?": MAYBE_TEXT,
    "device": str,
    "budget_words": str,
    "unit": str,
    "methods": [str],
    "seeds": [int],
    "settings?": object,
    "headline": str,
    "curve": str,
    "selection": str,
    "command?": MAYBE_TEXT,
    "rows": [
        {
            "method": str, "seed": int, "settings": {str: object}, "metrics": {str: MAYBE_NUMBER}, "seconds": MAYBE_NUMBER,
            "oracle_calls": {str: MAYBE_NUMBER}, "steps?": MAYBE_NUMBER, "gradients?": MAYBE_NUMBER, "error": MAYBE_TEXT,
            "warnings?": [str], "folder?": MAYBE_TEXT, "pictures?": [str],
        }
    ],
    "summary": [
        {
            "method": str, "metric": str, "mean": MAYBE_NUMBER, "deviation": MAYBE_NUMBER, "median": MAYBE_NUMBER,
            "low": MAYBE_NUMBER, "high": MAYBE_NUMBER, "seeds": int,
        }
    ],
    "costs": [
        {
            "method": str, "settings": {str: object}, "runs": int, "failed": int, "steps": MAYBE_NUMBER,
            "step_seconds": MAYBE_NUMBER, "step_gradients": MAYBE_NUMBER,
        }
    ],
    "target": (dict, type(None)),
    "tried": [
        {"method": str, "settings": {str: object}, "selection": MAYBE_NUMBER, "failed": int, "runs": int, "chosen": bool}
    ],
    "edges": [{"method": str, "key": str, "edge": str}],
    "notes": [str],
    "curves": {str: {str: {str: BAND}}},
    "environment?": (dict, type(None)),
    "provenance?": PROVENANCE,
}  # fmt: skip
TARGET = {
    "target": {
        "metric": str,
        "value": MAYBE_NUMBER,
        "part?": NUMBER,
        "methods": [
            {
                "method": str,
                "reached": int,
                "runs": int,
                **dict.fromkeys(("seconds", "gradients", "step"), MAYBE_NUMBER),
            }
        ],
    }
}


def page(folder: Path) -> Page:
    """The page of a folder of `nhgd bench`."""
    found = read_json(folder / FILE, SHAPE)
    if found["target"] is not None:
        found = read_json(folder / FILE, SHAPE | TARGET)
    summary = [row for row in found["summary"] if row["mean"] is not None]
    found["summary"] = summary
    seeds, methods = len(found["seeds"]), len(found["costs"])
    preset = f" ({found['preset']})" if found.get("preset") not in (None, "", "default") else ""
    return Page(
        f"{found['task']}{preset}: {_some(methods, 'method')} compared",
        f"{_some(seeds, 'seed')}, {found['budget_words']} for each of {len(found['rows'])} runs, on {found['device']}",
        _finding(found),
        [
            Section("Comparison", _comparison(found)),
            Section("Curves", _curves(found)),
            Section("Settings tried", _settings(found)),
            Section("What was learnt", _learnt(folder, found)),
            Section("Every run", _runs(found)),
            Section("Environment and command", provenance(_origin(found))),
        ],
    )


def _finding(found: Mapping[str, Any]) -> str | None:
    """Who has the best mean of the headline."""
    name = found["headline"]
    rows = [row for row in found["summary"] if row["metric"] == name]
    if not rows:
        return None
    best, *others = sorted(rows, key=lambda row: row["mean"], reverse=rises(name))
    which = "highest" if rises(name) else "lowest"
    said = f"{best['method']} has the {which} mean {titled(name)}, {_shown(best)}"
    if not others:
        return f"{said}."
    second = others[0]
    near = abs(best["mean"] - second["mean"]) < max(row["deviation"] or 0.0 for row in (best, second))
    doubt = " They differ by less than the deviation over the seeds." if near else ""
    return f"{said}; {second['method']} follows with {_shown(second)}.{doubt}"


def _comparison(found: Mapping[str, Any]) -> Html:
    names = main_metrics(found, found["summary"])
    by_method = {(row["method"], row["metric"]): row for row in found["summary"]}
    target = found["target"]
    axis = "gradients" if found["unit"] == "g" else "seconds"
    reached = {} if target is None else {row["method"]: row for row in target["methods"]}
    columns = [
        Column("method", "words"),
        *(Column(titled(name)) for name in names),
        Column("steps"),
        Column("ms/step"),
        Column("gradients/step"),
    ]
    if target is not None:
        columns.append(Column(f"{'s' if axis == 'seconds' else 'gradients'} to {target_words({'part': 0.9} | target)}"))
    rows = []
    for index, cost in enumerate(found["costs"]):
        method = cost["method"]
        line = [Cell([swatch(index), method], method)]
        line += [_metric(by_method, method, name) for name in names]
        line += [
            _number(cost["steps"], ".0f"),
            _number(cost["step_seconds"], ".3g", 1e3),
            _number(cost["step_gradients"], ".4g"),
        ]
        if target is not None:
            row = reached.get(method)
            line.append(Cell("-") if row is None else Cell(reached_words(row, axis), row[axis]))
        rows.append(line)
    return joined(
        [
            table(columns, rows, "Methods with mean ± deviation over the seeds"),
            paragraph(
                "Mean ± deviation over the seeds; the best mean of a column is bold. Choose a heading to sort.", "quiet"
            ),
            paragraph(" ".join(LEGEND), "quiet"),
            [note(words, "failed" in words) for words in found["notes"]],
            more("All metrics", _all_metrics(found, by_method)),
        ]
    )


def _all_metrics(found: Mapping[str, Any], by_method: Mapping[tuple[str, str], Mapping[str, Any]]) -> Html:
    methods = [row["method"] for row in found["costs"]]
    names = dict.fromkeys(row["metric"] for row in found["summary"])
    rows = [[Cell(titled(name)), *(_metric(by_method, method, name) for method in methods)] for name in names]
    return table([Column("metric", "words"), *map(Column, methods)], rows, "Every metric of every method")


def _metric(by_method: Mapping[tuple[str, str], Mapping[str, Any]], method: str, name: str) -> Cell:
    row = by_method.get((method, name))
    if row is None:
        return Cell("-")
    means = [other["mean"] for (_, metric), other in by_method.items() if metric == name]
    best = len(means) > 1 and row["mean"] == (max if rises(name) else min)(means)
    return Cell(_shown(row), row["mean"], best)


def _curves(found: Mapping[str, Any]) -> Html | None:
    methods = [row["method"] for row in found["costs"]]
    names = [name for name in found["curves"] if any(found["curves"][name].values())]
    first = [name for name in (found["curve"], found["headline"], "outer_loss") if name in names]
    panels = {}
    for name in list(dict.fromkeys([*first, *names]))[:MOST_CURVES]:
        level = None
        if found["target"] is not None and found["target"]["metric"] == name and found["target"]["value"] is not None:
            level = (found["target"]["value"], f"target {found['target']['value']:g}")
        panels[name] = [
            Panel(
                axis,
                [_line(method, index, bands[method]) for index, method in enumerate(methods) if method in bands],
                level,
            )
            for axis in ("seconds", "gradients")
            if (bands := found["curves"][name].get(axis))
        ]
    if not panels:
        return None
    words = "The median over the seeds with the band from the 20 % to the 80 % quantile. Evaluation and warm-up are outside the clock."
    return joined([compared(methods, panels, words), _to_target(found)])


def _line(method: str, index: int, band: Mapping[str, Sequence[float | None]]) -> Line:
    return Line(method, index, band["x"], band["median"], band["low"], band["high"])


def _to_target(found: Mapping[str, Any]) -> Html | None:
    target = found["target"]
    if target is None or not target["methods"]:
        return None
    columns = [
        Column("method", "words"),
        *map(Column, ("seeds that reached it", "seconds", "gradients", "outer steps")),
    ]
    rows = [
        [
            Cell(row["method"], row["method"]),
            Cell(f"{row['reached']} of {row['runs']}", row["reached"]),
            _number(row["seconds"], ".3g"),
            *(_number(row[axis], ",.0f") for axis in ("gradients", "step")),
        ]
        for row in target["methods"]
    ]
    if target["value"] is None:
        part = f"{100 * target.get('part', 0.9):.0f} %"
        words = f"{part} of the way from each seed's start to the best {titled(target['metric'])} that any run reached; medians over the seeds."
    else:
        words = f"{titled(target['metric'])} {target['value']:g}; medians over the seeds."
    return joined(
        [
            element("h3", "Time to target"),
            paragraph(words, "quiet"),
            table(columns, rows, "When each method reached the target"),
        ]
    )


def _settings(found: Mapping[str, Any]) -> Html | None:
    if not any(row["settings"] for row in found["tried"]):
        return None
    selection = titled(found["selection"])
    several = any(not row["chosen"] for row in found["tried"])
    rows = [
        [
            Cell(row["method"], row["method"]),
            Cell(said(row["settings"])),
            Cell(
                "-" if row["selection"] is None else f"{row['selection']:.4g}",
                row["selection"],
                several and row["chosen"],
            ),
            Cell(f"{row['failed']} of {row['runs']}", row["failed"]),
            Cell(_verdict(found, row)),
        ]
        for row in found["tried"]
    ]
    columns = [
        Column("method", "words"),
        Column("settings", "words"),
        Column(f"mean {selection}"),
        Column("failed"),
        Column("verdict", "words"),
    ]
    inside = several and not found["edges"]
    return joined(
        [
            paragraph(f"Each method is shown with the settings that have its lowest mean {selection} over the seeds."),
            paragraph("Every value that was chosen lies inside of what was tried.") if inside else None,
            table(columns, rows, "Settings that were tried"),
        ]
    )


def _verdict(found: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """Whether these settings were chosen, and whether the best may lie beyond."""
    if not row["chosen"]:
        return ""
    at = [f"{edge['key']} is the {edge['edge']} tried" for edge in found["edges"] if edge["method"] == row["method"]]
    return f"chosen, but {' and '.join(at)}" if at else "chosen"


def _learnt(folder: Path, found: Mapping[str, Any]) -> Html | None:
    """What the runs of the first seed have drawn, by method."""
    chosen = {row["method"]: row["settings"] for row in found["costs"]}
    parts: list[Child] = []
    shown: set[str] = set()
    for row in found["rows"]:
        if row["method"] in shown or row["settings"] != chosen.get(row["method"]) or not row.get("pictures"):
            continue
        made = learnt(folder, row.get("folder") or "", row["pictures"])
        if made:
            shown.add(row["method"])
            parts.append(joined([element("h3", f"{row['method']}, seed {row['seed']}"), made]))
    return joined(parts) if parts else None


def _runs(found: Mapping[str, Any]) -> Html:
    names = main_metrics(found, found["summary"])
    columns = [
        Column("method", "words"), Column("seed"), Column("settings", "words"), *(Column(titled(name)) for name in names),
        *map(Column, ("steps", "seconds", "gradients", "hvps", "cross")), Column("error", "sentence"),
    ]  # fmt: skip
    rows = []
    for row in found["rows"]:
        calls = row["oracle_calls"]
        rows.append(
            [
                Cell(row["method"], row["method"]),
                Cell(str(row["seed"]), row["seed"]),
                Cell(said(row["settings"])),
                *(_number(row["metrics"].get(name), ".4g") for name in names),
                _number(row.get("steps"), ".0f"),
                _number(row["seconds"], ".3g"),
                *(_number(calls.get(name), ",.0f") for name in ("gradients", "hvps", "cross")),
                Cell(row["error"] or ""),
            ]
        )
    if not any(row["error"] for row in found["rows"]):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return more(_some(len(rows), "run"), table(columns, rows, "Every run"))


def _origin(found: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of where the numbers come from."""
    origin = dict(found.get("provenance") or {})
    origin.setdefault("command", found.get("command"))
    if found.get("environment"):
        origin["environment"] = found["environment"]
    return origin


def _shown(row: Mapping[str, Any]) -> str:
    return mean_and_deviation(row).replace("+-", "±")


def _number(value: float | None, form: str, times: float = 1.0) -> Cell:
    return Cell("-") if value is None else Cell(format(value * times, form), value)


def _some(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
