"""Figures of a sweep: its trials in their order, and what each parameter does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from nhgd.plot.comparison import suits_logarithm
from nhgd.plot.figure import figure
from nhgd.plot.style import INK, PALETTE, QUIET, headed, save, styled

EQUAL = 1e-6  # values that differ by less, relatively, differ by rounding
Trials = Sequence[Mapping[str, Any]]


def draw_trials(paths: Sequence[Path], drawn: Mapping[str, Any]) -> Sequence[Path]:
    """Write one figure in several formats: the value of every trial, where a pruned one ended, and the best so far."""
    good = _good(drawn["trials"])
    values = [row["value"] for row in good]
    pruned = [row for row in drawn["trials"] if row["state"] == "pruned" and row["last_value"] is not None]
    failed = [row["number"] for row in drawn["trials"] if row["state"] == "failed"]
    with styled():
        made = figure(7.2, 3.7)
        axes = made.subplots()
        top = _top(axes, values)
        _points(axes, [row["number"] for row in good], values, top, PALETTE[0], "trial")
        if pruned:
            x, y = [row["number"] for row in pruned], [row["last_value"] for row in pruned]
            _points(axes, x, y, top, "none", "pruned, last value", QUIET)
        if failed:
            low = axes.get_xaxis_transform()
            axes.plot(failed, [0.02] * len(failed), "x", color=INK, markersize=6, label="failed", transform=low)
        lowest = list(accumulate(values, min))
        axes.step(
            [*(row["number"] for row in good), len(drawn["trials"]) - 1], [*lowest, lowest[-1]], where="post",
            color=PALETTE[1], label="best so far", zorder=1,
        )  # fmt: skip
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set(xlabel="trial", ylabel=_words(drawn["about"]["selection"]))
        made.legend(loc="outside lower center", ncols=5)
        headed(made, _title(drawn["about"]))
        save(made, paths)
    return paths


def draw_parameters(paths: Sequence[Path], drawn: Mapping[str, Any]) -> Sequence[Path]:
    """Write one figure in several formats: the value of the trials over each parameter, and how much it matters."""
    good = _good(drawn["trials"])
    keys = list(drawn["about"]["space"])
    values = [row["value"] for row in good]
    best = min(good, key=lambda row: row["value"])
    across = min(len(keys), 3)
    down = -(-len(keys) // across)
    with styled():
        made = figure(3.4 * across + 0.6, 2.7 * down + 0.5)
        places = made.subplots(down, across, squeeze=False, sharey=True)
        top = _top(places.flat[0], values)
        for nth, axes in enumerate(places.flat):
            if nth >= len(keys):
                axes.set_axis_off()
                continue
            key = keys[nth]
            x: list[Any] = [row["parameters"].get(key) for row in good]
            numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in x)
            if not numbers:
                names = sorted({str(value) for value in x}, key=_in_order)
                x = [names.index(str(value)) for value in x]
                axes.set_xticks(range(len(names)), names)
                axes.set_xlim(-0.5, len(names) - 0.5)
            elif key in drawn["logarithmic"]:
                axes.set_xscale("log")
            if key in drawn["about"]["ranges"]:
                low, high = drawn["about"]["ranges"][key]
                room = (high / low) ** 0.03 if key in drawn["logarithmic"] else 0.03 * (high - low)
                axes.set_xlim(
                    *((low / room, high * room) if key in drawn["logarithmic"] else (low - room, high + room))
                )
            if numbers and key not in drawn["logarithmic"] and all(isinstance(value, int) for value in x):
                axes.xaxis.get_major_locator().set_params(integer=True)
            _points(axes, x, values, top, PALETTE[0], None)
            at = good.index(best)
            axes.scatter(
                [x[at]], [values[at]], s=70, facecolors="none", edgecolors=PALETTE[1], linewidth=1.6, label="best"
            )
            share = drawn["importance"].get(key)
            axes.set_title(
                "" if share is None else f"{100 * share:.0f} % of the variation", fontsize=9, fontweight="normal"
            )
            axes.set_xlabel(key)
            if nth % across == 0:
                axes.set_ylabel(_words(drawn["about"]["selection"]))
        places.flat[0].legend(loc="best", fontsize=8)
        headed(made, _title(drawn["about"]))
        save(made, paths)
    return paths


def _top(axes: Any, values: Sequence[float]) -> float:
    """Set the axis of the values such that the good ones can be told apart; its upper end."""
    ordered = sorted(values)
    low, usual = ordered[0], ordered[(3 * (len(ordered) - 1)) // 4]
    logarithmic = suits_logarithm([{"low": [low], "high": [usual]}])
    top = ordered[-1] if logarithmic else min(ordered[-1], low + 3 * (usual - low))
    if ordered[-1] - low <= EQUAL * abs(low):
        return ordered[-1]
    if logarithmic:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.2, top * 1.2)
    elif top > low:
        axes.set_ylim(low - 0.08 * (top - low), top + 0.08 * (top - low))
        top += 0.05 * (top - low)
    return top


def _points(
    axes: Any,
    x: Sequence[Any],
    values: Sequence[float],
    top: float,
    fill: str,
    name: str | None,
    edge: str | None = None,
) -> None:
    """A point for each trial; those above the figure are triangles at its upper end."""
    for marker, above in (("o", False), ("^", True)):
        some = [(place, min(value, top)) for place, value in zip(x, values, strict=True) if (value > top) == above]
        if some:
            kept = name
            if above and name is not None:
                kept = "beyond the axis" if edge is None else f"{name}, beyond the axis"
            axes.scatter(
                *zip(*some, strict=True), s=24, marker=marker, facecolors=fill, edgecolors=edge or fill, label=kept
            )


def _good(trials: Trials) -> list[Mapping[str, Any]]:
    return sorted((row for row in trials if row["value"] is not None), key=lambda row: row["number"])


def _in_order(name: str) -> tuple[int, float, str]:
    """Numbers by their size, after words."""
    try:
        return 1, float(name), name
    except ValueError:
        return 0, 0.0, name


def _words(name: str) -> str:
    return name.replace("_", " ")


def _title(about: Mapping[str, Any]) -> str:
    return f"{about['task']} by {about['method']}: {_words(about['selection'])}, {about['budget_words']} a trial"
