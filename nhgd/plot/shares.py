"""A picture of learnt class shares."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nhgd.plot.figure import figure
from nhgd.plot.style import GRID, INK, PALETTE, QUIET, save, styled


def draw_shares(path: Path, counts: Sequence[int], learnt: Sequence[float]) -> Path:
    """The share of each class in the training loss, from the most frequent to the rarest: by count, and as learnt."""
    order = sorted(range(len(counts)), key=lambda c: -counts[c])
    with styled():
        drawn = figure(6.8, 3.8)
        axes = drawn.subplots()
        places = range(len(order))
        by_count = [counts[c] / sum(counts) for c in order]
        axes.bar([p - 0.2 for p in places], by_count, 0.4, color=GRID, edgecolor=QUIET, linewidth=0.6, label="by count")
        axes.bar([p + 0.2 for p in places], [learnt[c] for c in order], 0.4, color=PALETTE[0], label="learnt")
        axes.axhline(1 / len(order), color=INK, linewidth=1, linestyle="--", label="inverse frequency")
        axes.set_xticks(list(places), [f"{c}\n{counts[c]}" for c in order])
        axes.tick_params(axis="x", length=0)
        axes.grid(visible=False, axis="x")
        axes.set(xlabel="class, and its number of samples", ylabel="share of the loss")
        drawn.legend(loc="outside lower center", ncols=3)
        drawn.suptitle(
            "The share of each class in the training loss", x=0.01, ha="left", fontsize=11, fontweight="bold"
        )
        save(drawn, [path])
    return path
