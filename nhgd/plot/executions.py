"""The picture of `nhgd bench`: how an outer step is divided under each execution."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nhgd.plot.figure import figure
from nhgd.plot.style import GRID, INK, PALETTE, QUIET, save, styled


def draw(path: Path, answer: dict[str, Any]) -> None:
    """Write the picture: for each execution a bar for the outer step, as high as its number, and one for the
    curvature.
    """
    rows = answer["rows"]
    with styled():
        drawn = figure(max(5.0, 1.6 + 1.5 * len(rows)) + 1.9, 3.8)
        axes = drawn.subplots()
        for place, row in enumerate(rows):
            middle, (low, high) = row["milliseconds"], row["quartiles"]
            waited = min(row["waited_milliseconds"], middle)
            parts = (
                (place - 0.2, middle - waited, 0.0, PALETTE[0], "inner loop and solve"),
                (place - 0.2, waited, middle - waited, PALETTE[1], "waiting for curvature"),
                (place + 0.2, row["curvature_milliseconds"], 0.0, QUIET, "curvature"),
            )
            for x, height, bottom, colour, name in parts:
                axes.bar(x, height, 0.36, bottom, color=colour, label=None if place else name)
            axes.errorbar(
                place - 0.2, middle, [[max(0.0, middle - low)], [max(0.0, high - middle)]], color=INK, capsize=3, linewidth=1
            )  # fmt: skip
            axes.text(place - 0.2, max(high, middle), f" {middle:.3g}", ha="center", va="bottom", fontsize=9)
        axes.set_xticks(range(len(rows)), [row["execution"] for row in rows])
        axes.tick_params(axis="x", length=0)
        axes.grid(visible=False, axis="x")
        axes.grid(visible=True, axis="y", color=GRID)
        axes.set_ylabel("milliseconds of an outer step")
        axes.set_ylim(0, 1.12 * max(max(row["quartiles"][1], row["curvature_milliseconds"]) for row in rows))
        drawn.suptitle(
            f"{answer['task']} by {answer['method']}, on {answer['device']}", x=0.01, ha="left", fontweight="bold", fontsize=11
        )  # fmt: skip
        drawn.legend(loc="outside right upper")
        save(drawn, [path])
