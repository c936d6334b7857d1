"""The page of a folder that holds folders of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from nhgd.report.history import FILE, History
from nhgd.report.html import Html, element, joined
from nhgd.report.learnt import learnt
from nhgd.report.lines import Panel, compared, swatch
from nhgd.report.page import Page, Section, more, titled
from nhgd.report.provenance import provenance
from nhgd.report.run import settings
from nhgd.report.table import Cell, Column, table

MOST = 60  # runs on a page


def folders(folder: Path) -> list[Path]:
    """The folders in it, and in those, that hold a run."""
    found = [*folder.glob(f"*/{FILE}"), *folder.glob(f"*/*/{FILE}")]
    return sorted(file.parent for file in found)


def page(folder: Path) -> Page:
    """The page of all runs in a folder, those of one task together."""
    places = folders(folder)
    runs = {str(place.relative_to(folder)): History.read(place) for place in places[:MOST]}
    tasks: dict[str, dict[str, History]] = {}
    for name, run in runs.items():
        tasks.setdefault(run.about["task"], {})[name] = run
    left = f"; the first {MOST} are shown" if len(places) > MOST else ""
    return Page(
        f"{folder.resolve().name}: {len(places)} run{'s' if len(places) != 1 else ''}",
        f"{', '.join(tasks)}{left}",
        None,
        [
            *(Section(task, _compared(own)) for task, own in tasks.items()),
            Section("What was learnt", _learnt(folder, runs)),
            Section("Settings", joined(_titled(name, settings(run.about)) for name, run in runs.items())),
            Section(
                "Environment and commands", joined(_titled(name, provenance(run.about)) for name, run in runs.items())
            ),
        ],
    )


def _compared(runs: Mapping[str, History]) -> Html:
    names = list(runs)
    metrics = list(dict.fromkeys(name for run in runs.values() for name in run.metrics))
    panels = {
        metric: [
            Panel(
                axis,
                [
                    run.line(metric, axis, name, index)
                    for index, (name, run) in enumerate(runs.items())
                    if metric in run.metrics
                ],
            )
            for axis in ("seconds", "gradients")
        ]
        for metric in metrics
    }
    words = (
        "One curve for each run. Oracle calls are counted in gradients of one batch; a Hessian product counts as two."
    )
    return joined([_table(runs), element("h3", "Curves"), compared(names, panels, words)])


def _table(runs: Mapping[str, History]) -> Html:
    first = next(iter(runs.values()))
    known = dict.fromkeys(name for run in runs.values() if run.result is not None for name in run.result["metrics"])
    names = [
        name for name in dict.fromkeys((first.headline, "f1", first.curve, "outer_loss", "inner_loss")) if name in known
    ]
    columns = [
        Column("run", "words"),
        Column("method", "words"),
        Column("seed"),
        *(Column(titled(name)) for name in names),
        Column("steps"),
        Column("seconds"),
    ]
    rows = [[*_named(index, name, run), *_numbers(run, names)] for index, (name, run) in enumerate(runs.items())]
    return table(columns, rows, "Runs and their results")


def _named(index: int, name: str, run: History) -> list[Cell]:
    method = run.about["method"]
    return [Cell([swatch(index), name], name), Cell(method), Cell(str(run.about["seed"]), run.about["seed"])]


def _numbers(run: History, names: Sequence[str]) -> list[Cell]:
    if run.result is None:
        return [Cell("no result"), *(Cell("-") for _ in range(len(names) + 1))]
    values = [run.result["metrics"].get(name) for name in names]
    cells = [Cell("-") if value is None else Cell(f"{value:.4g}", value) for value in values]
    last = run.rows[-1] if run.rows else {}
    steps, seconds = last.get("step"), run.result["seconds"]
    return [
        *cells,
        Cell("-") if steps is None else Cell(str(steps), steps),
        Cell("-") if seconds is None else Cell(f"{seconds:.3g}", seconds),
    ]


def _learnt(folder: Path, runs: Mapping[str, History]) -> Html | None:
    parts = [_titled(name, learnt(folder, name, run.pictures)) for name, run in runs.items() if run.pictures]
    return joined(parts) if parts else None


def _titled(name: str, content: Html | None) -> Html | None:
    return more(name, content) if content else None
