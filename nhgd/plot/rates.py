"""Panels of errors in double logarithms, each line with its fitted slope."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nhgd.plot.figure import figure
from nhgd.plot.style import QUIET, headed, line_of, save, styled

ACROSS = 3


def draw(paths: Sequence[Path], title: str, panels: Sequence[Mapping[str, Any]]) -> Sequence[Path]:
    """Write one figure in the formats that the names of the files say.

    Args:
        panels: each with a title, the words of its axes "x" and "y", and lines: label, x, y, optionally low and high (a
            band) and guide, the slope of a thin line beside it.
    """
    down = -(-len(panels) // ACROSS)
    with styled():
        from matplotlib.ticker import LogLocator

        made = figure(4.1 * min(ACROSS, len(panels)) + 0.3, 3.5 * down + 0.3)
        places: Any = made.subplots(down, min(ACROSS, len(panels)), squeeze=False)
        flat = [axes for row in places for axes in row]
        for axes, panel in zip(flat, panels, strict=False):
            for index, line in enumerate(panel["lines"]):
                _line(axes, line, index)
            axes.set(xscale="log", yscale="log", xlabel=panel["x"], ylabel=panel["y"], title=panel["title"])
            axes.xaxis.set_minor_locator(LogLocator(subs=(2, 5)))  # all nine would overlap where they are labelled
            axes.legend(fontsize=7.5)
        for axes in flat[len(panels) :]:
            axes.set_visible(False)
        headed(made, title)
        save(made, paths)
    return paths


def _line(axes: Any, line: Mapping[str, Any], index: int) -> None:
    look = line_of(index)
    axes.plot(line["x"], line["y"], marker="o", markersize=3, label=line["label"], **look)
    if "low" in line:
        axes.fill_between(line["x"], line["low"], line["high"], color=look["color"], alpha=0.12, linewidth=0)
    if line.get("guide") is not None:
        first, last = line["x"][0], line["x"][-1]
        start = line["y"][0]
        ends = [start, start * (last / first) ** line["guide"]]
        axes.plot([first, last], ends, color=QUIET, linewidth=0.8, linestyle=(0, (2, 2)), zorder=1)
