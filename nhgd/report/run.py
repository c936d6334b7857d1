"""The page of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nhgd.comparison.bands import rises
from nhgd.report.chart import chart
from nhgd.report.history import History
from nhgd.report.html import Html, element, joined
from nhgd.report.learnt import learnt
from nhgd.report.lines import AXES, Panel, compared
from nhgd.report.page import Page, Section, listing, more, note, titled
from nhgd.report.provenance import provenance
from nhgd.report.table import Cell, Column, table


def page(folder: Path) -> Page:
    """The page of a folder of `nhgd run`."""
    run = History.read(folder)
    about = run.about
    preset = f" ({about['preset']})" if about.get("preset") not in (None, "", "default") else ""
    return Page(
        f"{about['task']}{preset} by {about['method']}",
        _lead(run),
        _finding(run),
        [
            Section("Curves", _curves(run)),
            Section("Result", _result(run)),
            Section("What was learnt", learnt(folder, "", run.pictures)),
            Section("Settings", settings(about)),
            Section("Environment and command", provenance(about)),
        ],
    )


def settings(about: Mapping[str, Any]) -> Html | None:
    """Those of the task, the solver and the method, each on request."""
    found = about.get("settings") or {}
    parts = [more(titled(key), listing(value)) for key, value in found.items() if isinstance(value, Mapping) and value]
    return joined(parts) if parts else None


def _lead(run: History) -> str:
    about, result = run.about, run.result
    said = [f"seed {about['seed']}", f"on {about['device']}" if about.get("device") else ""]
    steps = run.rows[-1]["step"] if run.rows else 0
    seconds = run.rows[-1]["seconds"] if run.rows else None
    said.insert(1, f"{steps} outer steps" + ("" if seconds is None else f" in {seconds:.3g} s"))
    if result is not None and result.get("result"):
        said.append(f"ended by {result['result']}")
    return ", ".join(word for word in said if word)


def _finding(run: History) -> str | None:
    if run.result is None:
        return "This run has no result yet: it goes on, or it failed."
    value = run.result["metrics"].get(run.headline)
    if value is None:
        return None
    step = run.result["metrics"].get("selected_step")
    where = "" if step is None else f", at outer step {step:g}, which the evaluation split selected"
    return f"{titled(run.headline).capitalize()} {value:.4g}{where}."


def _curves(run: History) -> Html | None:
    names = run.metrics
    if not names:
        return None
    main = [name for name in (run.curve, "outer_loss", "inner_loss") if name in names]
    drawn = [
        chart([run.line(name, "seconds", titled(name))], AXES["seconds"], titled(name), moment=run.selected("seconds"))
        for name in dict.fromkeys(main)
    ]
    every = {
        name: [
            Panel(axis, [run.line(name, axis, titled(name))], moment=run.selected(axis))
            for axis in ("gradients", "step")
        ]
        for name in names
    }
    words = "Oracle calls are counted in gradients of one batch; a Hessian product counts as two."
    return joined(
        [
            element("div", drawn, class_="panels"),
            element(
                "div",
                element("h3", "Every metric over oracle calls and outer steps"),
                compared([titled(run.curve)], every, words),
            ),
        ]
    )


def _result(run: History) -> Html | None:
    result = run.result
    if result is None:
        return None
    known = {name: value for name, value in result["metrics"].items() if value is not None}
    first = [name for name in (run.headline, run.curve, "outer_loss", "inner_loss") if name in known]
    rows = [
        [Cell(titled(name)), Cell(f"{known[name]:.6g}", known[name]), Cell(_way(name))]
        for name in dict.fromkeys([*first, *known])
    ]
    calls = {titled(name): f"{value:,.0f}" for name, value in result["oracle_calls"].items() if value is not None}
    return joined(
        [
            note(f"The run failed: {result['error']}", bad=True) if result.get("error") else None,
            note(result["stagnation"]) if result.get("stagnation") else None,
            note("The run was stopped before its end.") if result.get("partial") else None,
            [note(words) for words in result.get("warnings", [])],
            table(
                [Column("metric", "words"), Column("value"), Column("better", "words")], rows, "Metrics of the result"
            ),
            element("h3", "Oracle calls"),
            listing(calls),
        ]
    )


def _way(name: str) -> str:
    if name.endswith(("loss", "error", "objective", "objective_grid")):
        return "lower"
    return "higher" if rises(name) else ""
