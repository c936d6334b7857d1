"""Runs of several seeds as one curve with a band, and the time that each took to a target."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from nhgd.comparison.trial import Run

AXES = ("seconds", "gradients", "step")
LOW, HIGH = 0.2, 0.8  # the band's quantiles
PLACES = 120  # of a curve
PART = 0.9  # of the way from the start to the best, which counts as reached
RISING = ("accuracy", "f1", "auc", "precision", "recall")

Band: TypeAlias = dict[str, list[float]]  # x, median, low, high


def rises(metric: str) -> bool:
    """Whether a higher value of a metric is the better one, by its name.

    >>> rises("final_test_accuracy"), rises("outer_loss")
    (True, False)
    """
    return metric.endswith(RISING)


def quantile(values: Iterable[float], q: float) -> float:
    """By linear interpolation between sorted values.

    >>> quantile([3.0, 1.0], 0.5), quantile([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], 0.2)
    (2.0, 1.0)
    """
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    below = min(int(place), len(ordered) - 2) if len(ordered) > 1 else 0
    share = place - below
    if not share:
        return ordered[below]  # the next one may be infinite
    return ordered[below] * (1 - share) + ordered[min(below + 1, len(ordered) - 1)] * share


def band(runs: Sequence[Run], metric: str, axis: str) -> Band | None:
    """Median and band of a metric over an axis; a run keeps its last value until its next evaluation.

    The curve ends where the first run ends, so that each of its points is of the same runs.
    """
    curves = [curve for run in runs if (curve := _curve(run, metric, axis))]
    if not curves:
        return None
    end = min(curve[-1][0] for curve in curves)
    knots = sorted({x for curve in curves for x, _ in curve if x <= end})
    xs = [knots[round(i * (len(knots) - 1) / (PLACES - 1))] for i in range(PLACES)] if len(knots) > PLACES else knots
    values = [[_at(curve, x) for curve in curves] for x in xs]
    return {
        "x": xs,
        "median": [quantile(column, 0.5) for column in values],
        "low": [quantile(column, LOW) for column in values],
        "high": [quantile(column, HIGH) for column in values],
    }


def targets_of(runs: Iterable[Run], metric: str) -> dict[int, float]:
    """For each seed, because it decides the data: nine tenths of the way from its start to the best that a run
    reached.
    """
    starts: dict[int, float] = {}
    bests: dict[int, float] = {}
    better = max if rises(metric) else min
    for run in runs:
        values = [point[metric] for point in run["points"] if point.get(metric) is not None]
        if values:
            seed = run["seed"]
            starts.setdefault(seed, values[0])
            bests[seed] = better([*values, bests.get(seed, values[0])])
    return {seed: start + PART * (bests[seed] - start) for seed, start in starts.items()}


def reached(run: Run, metric: str, target: float) -> dict[str, float] | None:
    """The first evaluation at which a run was at least as good as a target, on all axes."""
    for point in run["points"]:
        value = point.get(metric)
        if value is not None and (value >= target if rises(metric) else value <= target):
            return {axis: point[axis] for axis in AXES}
    return None


def to_target(runs: Sequence[Run], metric: str, targets: Mapping[int, float]) -> dict[str, Any]:
    """How many of the runs reached it, and the median of when; None where less than half did."""
    found = [reached(run, metric, targets[run["seed"]]) if run["seed"] in targets else None for run in runs]
    times = [one for one in found if one is not None]
    most = 2 * len(times) > len(runs)
    infinite = [float("inf")] * (len(runs) - len(times))
    medians = {axis: quantile([*(one[axis] for one in times), *infinite], 0.5) if most else None for axis in AXES}
    return {"reached": len(times), "runs": len(runs)} | medians


def _curve(run: Run, metric: str, axis: str) -> list[tuple[float, float]]:
    return [(point[axis], point[metric]) for point in run["points"] if point.get(metric) is not None]


def _at(curve: list[tuple[float, float]], x: float) -> float:
    before = [y for place, y in curve if place <= x]
    return before[-1] if before else curve[0][1]
