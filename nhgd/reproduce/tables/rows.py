"""One method's part of a table, from its runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from nhgd.comparison.bands import band, reached, targets_of
from nhgd.comparison.table import Table
from nhgd.comparison.trial import Run
from nhgd.reproduce.tables.plan import LAST

OURS = "nhgd"  # how the names of the library's own methods begin
LITERAL = "nhgd-paper"


def printed_row(found: Table, label: str, accuracy: str | None) -> dict[str, Any] | None:
    """The averages of the last 50 outer steps, as the paper has them, and what a step costs."""
    runs = [run for run in found.runs if run["method"] == label]
    if not runs:
        return None
    good = [run for run in runs if run["error"] is None]
    row: dict[str, Any] = {"seeds": len(good), "failed": len(runs) - len(good), **_costs(runs)}
    failed = [run for run in runs if run["error"] is not None]
    if failed:
        row |= {"error": failed[0]["error"], "steps": failed[0].get("steps", 0)}
    if good:
        row["steps"] = good[0]["steps"]
        row |= _last(good, "outer_loss", "outer_loss")
        if accuracy is not None:
            row |= _last(good, accuracy, "test_accuracy")
        row["warnings"] = sorted({warning for run in good for warning in run["warnings"]})[:3]
    return row


def _last(runs: Sequence[Run], metric: str, name: str) -> dict[str, Any]:
    """Mean over the last steps and the seeds; the deviation over the seeds, and within the last steps of a run."""
    tails = [[value for point in run["points"][1:] if (value := point.get(metric)) is not None][-LAST:] for run in runs]
    tails = [tail for tail in tails if tail]
    if not tails:
        return {name: None}
    means = [fmean(tail) for tail in tails]
    return {
        name: fmean(means),
        f"{name}_over_seeds": stdev(means) if len(means) > 1 else None,
        f"{name}_within": fmean([stdev(tail) if len(tail) > 1 else 0.0 for tail in tails]),
    }


def fair_row(found: Table, label: str) -> dict[str, Any] | None:
    """Means over the seeds, the settings, and the time to the target."""
    runs = found.chosen.get(label)
    if not runs:
        return None
    good = [run for run in runs if run["error"] is None]
    row: dict[str, Any] = {
        "settings": runs[0]["settings"],
        "seeds": len(good),
        "failed": len(runs) - len(good),
        **_costs(runs),
    }
    if not good:
        return row | {"error": runs[0]["error"]}
    row["metrics"] = {
        one["metric"]: {"mean": one["mean"], "deviation": one["deviation"]}
        for one in found.summary
        if one["method"] == label
    }
    row["steps"] = next(one["steps"] for one in found.costs if one["method"] == label)
    target = found.target
    if target is not None:
        own = next(one for one in target["methods"] if one["method"] == label)
        row["to_target"] = own
    return row


def _costs(runs: Sequence[Run]) -> dict[str, Any]:
    costs = [run["step_cost"]["seconds"] for run in runs if run.get("step_cost")]
    memory = [run["peak_megabytes"] for run in runs if run.get("peak_megabytes") is not None]
    return {
        "milliseconds_per_step": 1e3 * min(costs) if costs else None,
        "peak_megabytes": max(memory) if memory else None,
    }


def first_in_time(found: Table) -> dict[str, Any] | None:
    """Which method reaches the target first, and whether the best of the library's own is within one standard error."""
    target = found.target
    if target is None:
        return None
    metric = target["metric"]
    good = {name: [run for run in runs if run["error"] is None] for name, runs in found.chosen.items()}
    goals = targets_of([run for runs in good.values() for run in runs], metric)
    means: dict[str, tuple[float, float]] = {}
    for name, runs in good.items():
        times = [at["seconds"] for run in runs if (at := reached(run, metric, goals[run["seed"]])) is not None]
        if runs and len(times) == len(runs):
            means[name] = fmean(times), stdev(times) / len(times) ** 0.5 if len(times) > 1 else 0.0
    if not means:
        return {"metric": metric, "first": None, "ours": None, "held": None, "seconds": {}}
    order = sorted(means, key=lambda name: means[name][0])
    best = order[0]
    ours = next((name for name in order if name.startswith(OURS) and not name.startswith(LITERAL)), None)
    held = ours is not None and means[ours][0] <= means[best][0] + max(means[best][1], means[ours][1])
    seconds = {name: {"mean": mean, "standard_error": error} for name, (mean, error) in means.items()}
    return {"metric": metric, "first": best, "ours": ours, "held": held, "seconds": seconds}


def curves(found: Table, metric: str, average: int) -> dict[str, Any]:
    """A metric against seconds: the median of the seeds with its band, each run first averaged over so many steps."""
    made: dict[str, Any] = {}
    for label, runs in found.chosen.items():
        smooth = [run | {"points": _averaged(run["points"], metric, average)} for run in runs]
        one = band(smooth, metric, "seconds")
        if one is not None:
            made[label] = {key: [float(f"{value:.5g}") for value in values] for key, values in one.items()}
    return made


def _averaged(points: Sequence[Mapping[str, Any]], metric: str, average: int) -> list[dict[str, Any]]:
    """Each value replaced by the mean of the last few."""
    known = [point for point in points if point.get(metric) is not None]
    return [
        {**point, metric: fmean([one[metric] for one in known[max(0, nth - average + 1) : nth + 1]])}
        for nth, point in enumerate(known)
    ]
