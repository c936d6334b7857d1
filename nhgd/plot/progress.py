"""Panels of curves over a common axis, each with its band, one legend for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nhgd.plot.comparison import suits_logarithm
from nhgd.plot.figure import figure
from nhgd.plot.style import headed, line_of, save, styled


def draw(paths: Sequence[Path], title: str, panels: Sequence[Mapping[str, Any]]) -> Sequence[Path]:
    """Write one figure in the formats that the names of the files say.

    Args:
        panels: each with the words of its axes "x" and "y", and "bands" by label, as `Table.bands` has them.
    """
    labels = list(dict.fromkeys(label for panel in panels for label in panel["bands"]))
    with styled():
        made = figure(5.2 * len(panels) + 0.4, 4.6)
        places: Any = made.subplots(1, len(panels), squeeze=False)[0]
        for axes, panel in zip(places, panels, strict=True):
            for label, band in panel["bands"].items():
                look = line_of(labels.index(label))
                axes.plot(band["x"], band["median"], label=label, **look)
                axes.fill_between(band["x"], band["low"], band["high"], color=look["color"], alpha=0.12, linewidth=0)
            axes.set(xlabel=panel["x"], ylabel=panel["y"])
            if panel["bands"] and suits_logarithm(list(panel["bands"].values())):
                axes.set_yscale("log")
        known = {
            label: handle for axes in places for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        if known:
            made.legend(known.values(), known.keys(), loc="outside lower center", ncols=4, fontsize=8)
        headed(made, title)
        save(made, paths)
    return paths
