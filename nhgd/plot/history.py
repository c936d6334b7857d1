"""The losses of a run over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nhgd.plot.figure import figure
from nhgd.plot.style import save, styled


def draw_history(path: Path | None, history: Sequence[dict[str, Any]], method: str) -> Any:
    """A figure of the outer and the inner loss over seconds, written to `path` if there is one."""
    with styled():
        drawn = figure(8, 3.2)
        seconds = [row["seconds"] for row in history]
        for axes, key in zip(drawn.subplots(1, 2), ("outer_loss", "inner_loss"), strict=True):
            axes.plot(seconds, [row[key] for row in history])
            axes.set(xlabel="seconds", ylabel=key.replace("_", " "))
        drawn.suptitle(f"{method}, {len(history)} outer steps")
        if path is not None:
            save(drawn, [path])
    return drawn
