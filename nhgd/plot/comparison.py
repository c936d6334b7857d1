"""Figures of a comparison: curves with bands, and bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nhgd.plot.figure import figure
from nhgd.plot.style import INK, QUIET, headed, line_of, save, styled

LABELS = {"seconds": "seconds, evaluation excluded", "gradients": "gradient-equivalents", "step": "outer steps"}


def draw_curves(paths: Sequence[Path], drawn: Mapping[str, Any]) -> Sequence[Path]:
    """Write one figure in several formats: a panel for each axis, the same metric in all."""
    metric, panels = drawn["metric"], drawn["panels"]
    methods = [row["method"] for row in drawn["costs"]]
    value = None if drawn["target"] is None else drawn["target"]["value"]
    with styled():
        made = figure(4.6 * len(panels) + 0.4, 3.7)
        row: Any = made.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        logarithmic = suits_logarithm([band for bands in panels.values() for band in bands.values()])
        for axes, (axis, bands) in zip(row, panels.items(), strict=True):
            for index, method in enumerate(methods):
                if method in bands:
                    _line(axes, bands[method], method, index)
            if value is not None:
                axes.axhline(value, color=QUIET, linewidth=1, linestyle=(0, (2, 2)), zorder=1)
            axes.set_xlabel(LABELS[axis])
            axes.set_xlim(left=0)
            if logarithmic:
                axes.set_yscale("log")
        row[0].set_ylabel(metric.replace("_", " "))
        if value is not None:
            row[0].annotate(
                f"target {value:g}", (1, value), xycoords=("axes fraction", "data"),
                xytext=(-3, 3), textcoords="offset points", ha="right", fontsize=8, color=QUIET,
            )  # fmt: skip
        handles, labels = row[0].get_legend_handles_labels()
        made.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 5))
        headed(made, _title(drawn["about"], metric))
        save(made, paths)
    return paths


def draw_bars(paths: Sequence[Path], drawn: Mapping[str, Any]) -> Sequence[Path]:
    """Write one figure in several formats: the mean of a metric with its deviation, each bar's number at its end."""
    rows, metric = drawn["rows"], drawn["metric"]
    with styled():
        made = figure(6.4, 1.1 + 0.42 * max(len(rows), 1))
        axes = made.subplots()
        places = list(range(len(rows)))[::-1]
        for index, (place, row) in enumerate(zip(places, rows, strict=True)):
            axes.barh(place, row["mean"], 0.66, color=line_of(index)["color"])
            if row["deviation"]:
                axes.errorbar(row["mean"], place, xerr=row["deviation"], color=INK, capsize=3, linewidth=1)
            axes.annotate(
                row["words"], (max(row["mean"] + (row["deviation"] or 0), 0), place),
                xytext=(6, 0), textcoords="offset points", va="center", fontsize=9,
            )  # fmt: skip
        axes.set_yticks(places, [row["method"] for row in rows])
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.margins(x=0.28)
        axes.set_xlim(left=min(0.0, *(row["mean"] for row in rows)) if rows else 0.0)
        if drawn["share"]:  # shares: none is above 1
            axes.set_xticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
        axes.set_xlabel(f"{metric.replace('_', ' ')}, mean ± deviation")
        headed(made, _title(drawn["about"], metric))
        save(made, paths)
    return paths


def suits_logarithm(bands: Sequence[Mapping[str, Sequence[float]]]) -> bool:
    """Whether values above 0 span more than a factor of thirty.

    >>> suits_logarithm([{"low": [1.0, 0.01], "high": [1.0, 0.02]}]), suits_logarithm([{"low": [0.5], "high": [0.9]}])
    (True, False)
    """
    values = [value for band in bands for key in ("low", "high") for value in band[key]]
    return bool(values) and min(values) > 0 and max(values) / min(values) > 30


def _line(axes: Any, band: Mapping[str, Sequence[float]], method: str, index: int) -> None:
    look = line_of(index)
    axes.plot(band["x"], band["median"], label=method, **look)
    axes.fill_between(band["x"], band["low"], band["high"], color=look["color"], alpha=0.1, linewidth=0)
    for edge in (band["low"], band["high"]):
        axes.plot(band["x"], edge, color=look["color"], linewidth=0.6, alpha=0.55)


def _title(about: Mapping[str, Any], metric: str) -> str:
    seeds = about.get("seeds", [])
    return (
        f"{about['task']}: {metric.replace('_', ' ')}, {about['budget_words']} a run,"
        f" {len(seeds)} seed{'s' if len(seeds) != 1 else ''}"
    )
