"""A picture of learnt class shares."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nhgd.plot.figure import figure


def draw_shares(path: Path, counts: Sequence[int], learnt: Sequence[float]) -> Path:
    """The share of each class in the training loss, from the most frequent to the rarest: by count, and as learnt."""
    order = sorted(range(len(counts)), key=lambda c: -counts[c])
    drawn = figure(6.4, 3.6)
    axes = drawn.subplots()
    places = range(len(order))
    axes.bar([p - 0.2 for p in places], [counts[c] / sum(counts) for c in order], 0.4, color="0.75", label="by count")
    axes.bar([p + 0.2 for p in places], [learnt[c] for c in order], 0.4, color="#0072B2", label="learnt")
    axes.axhline(1 / len(order), color="black", linewidth=1, linestyle="--", label="inverse frequency")
    axes.set_xticks(list(places), [f"{c}\n{counts[c]}" for c in order])
    axes.set(xlabel="class, and its number of samples", ylabel="share of the loss")
    axes.legend(fontsize=8)
    drawn.savefig(path, dpi=120)
    return path
