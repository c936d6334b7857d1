"""The losses of a run over time, and the metric that its task is followed by."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nhgd.plot.comparison import suits_logarithm
from nhgd.plot.figure import figure
from nhgd.plot.style import PALETTE, QUIET, headed, save, styled

LOSSES = ("outer_loss", "inner_loss")


def draw_history(
    path: Path | None,
    history: Sequence[dict[str, Any]],
    title: str,
    metric: str | None = None,
    selected: float | None = None,
) -> Any:
    """A figure of both losses over seconds, with a metric of the task if there is one, written to `path` if it is
    given.

    Args:
        path: the file; None: the figure is not written.
        history: of the run.
        title: what was run.
        metric: a number of its rows.
        selected: the outer step whose numbers are reported, which is marked.
    """
    known = [row for row in history if metric in row] if metric not in (None, *LOSSES) else []
    names = [*LOSSES, *([metric] if metric is not None and known else [])]
    mark = next((row["seconds"] for row in history if row["step"] == selected), None)
    with styled():
        drawn = figure(3.6 * len(names) + 0.4, 3.3)
        for axes, name in zip(drawn.subplots(1, len(names)), names, strict=True):
            rows = [row for row in history if row.get(name) is not None]
            values = [row[name] for row in rows]
            axes.plot(
                [row["seconds"] for row in rows], values, color=PALETTE[0], marker="o" if len(rows) == 1 else None
            )
            if suits_logarithm([{"low": values, "high": values}]):
                axes.set_yscale("log")
            axes.set(xlabel="seconds", ylabel=name.replace("_", " "))
            if mark is not None:
                axes.axvline(mark, color=QUIET, linewidth=1.2, linestyle=(0, (3, 2)), zorder=1)
        if mark is not None:
            drawn.supxlabel(
                f"dashed: outer step {selected:g}, which the evaluation split selected", fontsize=8.5, color=QUIET
            )
        headed(drawn, f"{title}, {len(history)} outer steps")
        if path is not None:
            save(drawn, [path])
    return drawn
