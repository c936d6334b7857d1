"""A table of the paper beside ours, as text and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

from nhgd.comparison.formats import aligned, said

HEARD = "runs had a warning"
HEADS = {
    "cleaning": ("test_accuracy", "f1", "outer_loss"),
    "distillation-5": ("test_accuracy", "loop_test_accuracy", "outer_loss"),
    "distillation-100": ("test_accuracy", "loop_test_accuracy", "outer_loss"),
    "pde": ("true_objective", "true_objective_grid", "objective_net"),
}


def text(found: Mapping[str, Any]) -> str:
    """Both protocols, the library's own form, and what a reader should know."""
    parts = [
        f"{found['experiment']}{', quick' if found['quick'] else ''}: {found['problem']}",
        "",
        f"The paper's settings, averages of the last {found['last']} outer steps ({_budget(found, 'printed')}), beside the paper's",
        *_aligned(*printed(found)),
        "",
        f"Fair: {_budget(found, 'fair')}, both step sizes from a grid on another seed",
        *_aligned(*fair(found)),
    ]
    if found["own"]:
        parts += [
            "",
            f"The library's own form of the problem, untuned: {_budget(found, 'own')}",
            *_aligned(*own(found)),
        ]
    parts += ["", *conclusions(found)]
    return "\n".join(parts)


def conclusions(found: Mapping[str, Any]) -> list[str]:
    """Who was first, how much is missing, and the notes of the comparisons."""
    lines = []
    first = found["first_in_time"]
    if first is not None and first["first"] is None:
        lines.append("No method reached the target with every seed.")
    elif first is not None:
        mine = "" if first["ours"] in (None, first["first"]) else f"; of ours {first['ours']}"
        held = "one of ours is first, or within one standard error of it" if first["held"] else "none of ours is first"
        lines.append(f"First to 90 % of the best {first['metric']}: {first['first']}{mine}: {held}.")
    for name, runs in found["runs"].items():
        if runs["done"] < runs["wanted"]:
            lines.append(
                f"{name}: {runs['done']} of {runs['wanted']} runs were made; the same command with --out goes on from there."
            )
    for name, notes in found["notes"].items():
        shown = [note for note in notes if HEARD not in note]
        lines += [fill(f"{name}: {note}", 118, subsequent_indent="    ") for note in shown]
    if any(HEARD in note for notes in found["notes"].values() for note in notes):
        lines.append("Warnings of single runs are in the JSON.")
    return lines


def printed(found: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The heads and the cells of the first protocol."""
    accuracy = any(row["paper"] and row["paper"]["test_accuracy"] is not None for row in found["rows"])
    heads = ["method", "paper: outer loss", "ours"]
    heads += ["paper: test accuracy", "ours"] if accuracy else []
    heads += ["seeds", "outer steps", "ms/step", "MB"]
    lines = []
    for row in found["rows"]:
        ours, theirs = row["printed"], row["paper"] or {}
        if ours is None:
            continue
        line = [
            row["method"],
            _with(theirs.get("outer_loss"), theirs.get("outer_loss_spread")),
            _last(ours, "outer_loss"),
        ]
        if accuracy:
            line += [
                _with(theirs.get("test_accuracy"), theirs.get("test_accuracy_spread")),
                _last(ours, "test_accuracy"),
            ]
        lines.append([*line, str(ours["seeds"]), _whole(ours.get("steps")), *_costs(ours)])
    return heads, lines


def fair(found: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The heads and the cells of the second protocol."""
    rows = [{"method": row["method"]} | row["fair"] for row in found["rows"] if row["fair"] is not None]
    return _rows(found, rows, settings=True)


def own(found: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The heads and the cells of the library's own form."""
    return _rows(found, found["own"], settings=False)


def _rows(
    found: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], settings: bool
) -> tuple[list[str], list[list[str]]]:
    names = [name for name in HEADS[found["experiment"]] if any(name in row.get("metrics", {}) for row in rows)]
    heads = [
        "method",
        *(name.replace("_", " ") for name in names),
        "s to target",
        "seeds",
        "outer steps",
        "ms/step",
        "MB",
    ]
    lines = []
    for row in rows:
        metrics = row.get("metrics", {})
        cells = [_with((one := metrics.get(name, {})).get("mean"), one.get("deviation")) for name in names]
        target = row.get("to_target") or {}
        line = [
            row["method"],
            *cells,
            _short(target.get("seconds")),
            str(row["seeds"]),
            _whole(row.get("steps")),
            *_costs(row),
        ]
        lines.append([*line, said(row["settings"]) if row["settings"] else ""] if settings else line)
    return [*heads, "settings"] if settings else heads, lines


def markdown(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Cells as a Markdown table."""
    return "\n".join(["| " + " | ".join(line) + " |" for line in (heads, ["---"] * len(heads), *lines)])


def _aligned(heads: list[str], lines: list[list[str]]) -> list[str]:
    return aligned([heads, *lines]) if lines else ["nothing yet"]


def _budget(found: Mapping[str, Any], name: str) -> str:
    about = found["protocols"][name]
    count = len(about["seeds"])
    return f"{about['budget']} a run, {count} seed{'' if count == 1 else 's'}"


def _last(row: Mapping[str, Any], name: str) -> str:
    if row.get(name) is None:
        return "failed" if row["failed"] else "-"
    spread = row[f"{name}_over_seeds"]
    return _with(row[name], row[f"{name}_within"] if spread is None else spread) + (" (*)" if row["failed"] else "")


def _with(value: float | None, spread: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" + ("" if spread is None else f" ± {spread:.4f}") if abs(value) < 1e3 else f"{value:.2g}"


def _costs(row: Mapping[str, Any]) -> list[str]:
    return [_short(row["milliseconds_per_step"]), _short(row["peak_megabytes"])]


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
