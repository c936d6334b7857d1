"""The picture of `nhgd bench`: how an outer step is divided under each execution."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nhgd.plot.figure import figure

INNER, WAITING, CURVATURE = "#2a78a8", "#d1603d", "#b9c0c7"


def draw(path: Path, answer: dict[str, Any]) -> None:
    """Write the picture: for each execution a bar for the inner loop and one for the curvature."""
    rows = answer["rows"]
    drawn = figure(max(5.0, 1.6 + 1.5 * len(rows)), 3.8, facecolor="white")
    axes = drawn.subplots()
    for place, row in enumerate(rows):
        inner, waited, curvature = (row[f"{part}_milliseconds"] for part in ("inner", "waited", "curvature"))
        first = place == 0
        axes.bar(place - 0.2, inner, 0.36, color=INNER, label="inner loop and solve" if first else None)
        axes.bar(place - 0.2, waited, 0.36, inner, color=WAITING, label="waiting for curvature" if first else None)
        axes.bar(place + 0.2, curvature, 0.36, color=CURVATURE, label="curvature" if first else None)
        low, high = row["quartiles"]
        middle = row["milliseconds"]
        spread = [[max(0.0, middle - low)], [max(0.0, high - middle)]]
        axes.errorbar(place - 0.2, middle, spread, color="#333333", capsize=3, linewidth=1)
        axes.text(place - 0.2, high, f" {middle:.3g}", ha="center", va="bottom", fontsize=9)
    axes.set_xticks(range(len(rows)), [row["execution"] for row in rows], fontsize=9)
    axes.set_ylabel("milliseconds of an outer step")
    axes.set_ylim(0, 1.12 * max(max(row["quartiles"][1], row["curvature_milliseconds"]) for row in rows))
    axes.set_title(f"{answer['task']} by {answer['method']}, on {answer['device']}", loc="left", fontsize=11)
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axes.spines[["top", "right"]].set_visible(False)
    drawn.savefig(path, dpi=130)
