"""A comparison as text, CSV, LaTeX and HTML."""

from __future__ import annotations

import csv
import html as escaping
import io
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nhgd.comparison.bands import rises

if TYPE_CHECKING:
    from nhgd.comparison.table import Table

LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"} | {
    letter: f"\\{letter}" for letter in "&%$#_{}"
}


def main_metrics(about: Mapping[str, Any], summary: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the tables show of all metrics: the headline, the selection, and the outer loss."""
    known = {row["metric"] for row in summary}
    names = (about["headline"], *_MORE, about["selection"], "outer_loss")
    return [name for name in dict.fromkeys(names) if name in known]


_MORE = ("f1", "true_objective_grid", "test_accuracy")  # of tasks that have them


def text(table: Table) -> str:
    """Plain text: the comparison, what steps cost, and notes."""
    about, names = table.about, main_metrics(table.about, table.summary)
    cells = _summary_cells(table)
    to_target = {row["method"]: row for row in (table.target or {"methods": []})["methods"]}
    head = ["method", *(_titled(name) for name in names), "median steps", "ms/step", "gradients/step"]
    axis = "gradients" if about["unit"] == "g" else "seconds"
    target = table.target
    if target is not None:
        head.append(f"{'s' if axis == 'seconds' else 'gradients'} to {target_words(target)}")
    lines = []
    for cost in table.costs:
        line = [cost["method"], *(cells.get((cost["method"], name), "-") for name in names)]
        line += [
            _short(cost["steps"], ".0f"),
            _short(cost["step_seconds"], ".3g", 1e3),
            _short(cost["step_gradients"], ".4g"),
        ]
        if target is not None:
            line.append(reached_words(to_target[cost["method"]], axis))
        lines.append(line)
    seeds = len({run["seed"] for run in table.runs})
    title = (
        f"{about['task']}{_preset(about)}: {about['budget_words']} for each of {len(table.runs)} runs on {about['device']},"
        f" {seeds} seed{'s' if seeds > 1 else ''}, mean +- deviation"
    )
    parts = [title, "", *aligned([head, *lines])]
    settings = [row for row in table.costs if row["settings"]]
    if settings:
        parts += ["", f"Settings, chosen by {_titled(about['selection'])}:" if _is_grid(table) else "Settings:"]
        parts += aligned([["  " + row["method"], said(row["settings"])] for row in settings], left=2)
    parts += ["", *LEGEND]
    parts += ["", *(f"Note: {note}" for note in table.notes)] if table.notes else []
    return "\n".join(parts)


LEGEND = (
    "A step of one method is not a step of another: compare by time or by gradients. A gradient is one backward pass over a",
    "batch; a Hessian product counts as two. Work without derivatives, such as K-FAC's, takes time but no gradients.",
)


def target_words(target: Mapping[str, Any]) -> str:
    """What counts as reached, in a few words.

    >>> target_words({"value": None, "part": 0.9, "metric": "f1"}), target_words({"value": 0.8, "metric": "f1"})
    ('90 % of best', 'f1 0.8')
    """
    if target["value"] is None:
        return f"{100 * target['part']:.0f} % of best"
    return f"{_titled(target['metric'])} {target['value']:g}"


def aligned(lines: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Cells in columns, the first `left` at the left, the others at the right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def csv_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV; what is not a plain value stands there as JSON."""
    out = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(
            {key: json.dumps(value) if isinstance(value, (dict, list)) else value for key, value in row.items()}
        )
    return out.getvalue()


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with settings, metrics and calls as columns of their own.

    >>> flat({"method": "soba", "settings": {"outer_lr": 0.1}, "metrics": {"f1": 0.5}, "oracle_calls": {"hvps": 3}})
    {'method': 'soba', 'outer_lr': 0.1, 'f1': 0.5, 'hvps': 3}
    """
    found: dict[str, Any] = {}
    for key, value in row.items():
        if key in ("settings", "metrics", "oracle_calls"):
            found |= {name: item for name, item in value.items() if name not in found}
        elif key == "step_cost":
            found |= {f"step_{name}": item for name, item in (value or {}).items()}
        elif key not in ("warnings", "pictures", "folder"):
            found[key] = value
    return found


def latex(table: Table) -> str:
    """A table for a paper, with booktabs; the best mean of each column is bold."""
    names = main_metrics(table.about, table.summary)
    methods = [row["method"] for row in table.costs]
    means = {(row["method"], row["metric"]): row["mean"] for row in table.summary}
    lines = []
    for method in methods:
        line = [_escaped(method)]
        for name in names:
            row = next((r for r in table.summary if (r["method"], r["metric"]) == (method, name)), None)
            if row is None:
                line.append("--")
                continue
            best = (max if rises(name) else min)(means[m, name] for m in methods if (m, name) in means)
            mean, _, spread = mean_and_deviation(row).partition(" +- ")
            spread = rf" \pm {spread}" if spread else ""
            line.append(rf"$\mathbf{{{mean}}}{spread}$" if row["mean"] == best else f"${mean}{spread}$")
        lines.append(" & ".join(line) + r" \\")
    about = table.about
    head = " & ".join(["method", *(_escaped(_titled(name)) for name in names)]) + r" \\"
    seeds = len({run["seed"] for run in table.runs})
    says = f"{_escaped(about['task'])}, {_escaped(about['budget_words'])} a run, {seeds} seeds: mean $\\pm$ deviation"
    rows = [rf"\begin{{tabular}}{{l{'r' * len(names)}}}", r"\toprule", head, r"\midrule", *lines, r"\bottomrule"]
    return "\n".join([f"% {says}", *rows, r"\end{tabular}", ""])


def html(table: Table) -> str:
    """For notebooks."""
    names, cells = main_metrics(table.about, table.summary), _summary_cells(table)
    escape = escaping.escape
    head = "".join(f"<th>{escape(word)}</th>" for word in ("method", *map(_titled, names), "ms/step", "gradients/step"))
    body = ""
    for cost in table.costs:
        line = [cost["method"], *(cells.get((cost["method"], name), "-") for name in names)]
        line += [_short(cost["step_seconds"], ".3g", 1e3), _short(cost["step_gradients"], ".4g")]
        body += "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>"
    notes = "".join(f"<p>{escape(note)}</p>" for note in table.notes)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{notes}"


def said(settings: Mapping[str, Any]) -> str:
    """Settings as they are written on the command line."""
    return " ".join(
        f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in settings.items()
    )


def mean_and_deviation(row: Mapping[str, Any]) -> str:
    """One cell, the digits of the mean by the size of the deviation.

    >>> mean_and_deviation({"mean": 0.91234, "deviation": 0.012}), mean_and_deviation({"mean": 12.5, "deviation": None})
    ('0.912 +- 0.012', '12.5')
    """
    if row["deviation"] is None:
        return f"{row['mean']:.4g}"
    spread = row["deviation"]
    if not 1e-3 <= abs(row["mean"]) < 1e5 or (spread and spread < 1e-4):
        return f"{row['mean']:.3g} +- {spread:.1g}"
    digits = 3 if spread < 1 else 1
    return f"{row['mean']:.{digits}f} +- {spread:.{digits}f}"


def _summary_cells(table: Table) -> dict[tuple[str, str], str]:
    return {(row["method"], row["metric"]): mean_and_deviation(row) for row in table.summary}


def _is_grid(table: Table) -> bool:
    return any(not row["chosen"] for row in table.tried)


def reached_words(row: Mapping[str, Any], axis: str) -> str:
    """When a target was reached, and by how many seeds where not by all."""
    if not row["runs"]:
        return "-"
    if row[axis] is None:
        return f"{row['reached']} of {row['runs']} seeds"
    few = f" ({row['reached']} of {row['runs']})" if row["reached"] < row["runs"] else ""
    return f"{row[axis]:.3g}{few}"


def _short(value: float | None, form: str, times: float = 1.0) -> str:
    return "-" if value is None else format(value * times, form)


def _titled(name: str) -> str:
    return name.replace("_", " ")


def _preset(about: Mapping[str, Any]) -> str:
    return f" ({about['preset']})" if about.get("preset") not in (None, "", "default") else ""


def _escaped(text: str) -> str:
    return "".join(LATEX.get(letter, letter) for letter in text)
