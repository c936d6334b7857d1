"""The losses of a run over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nhgd.plot.figure import figure


def draw_history(path: Path, history: Sequence[dict[str, Any]], method: str) -> Path:
    """The outer and the inner loss over seconds."""
    drawn = figure(8, 3.2)
    seconds = [row["seconds"] for row in history]
    for axes, key in zip(drawn.subplots(1, 2), ("outer_loss", "inner_loss"), strict=True):
        axes.plot(seconds, [row[key] for row in history])
        axes.set(xlabel="seconds", ylabel=key.replace("_", " "))
        axes.grid(alpha=0.3)
    drawn.suptitle(f"{method}, {len(history)} outer steps")
    drawn.savefig(path, dpi=120)
    return path
