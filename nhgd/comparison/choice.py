"""Which settings of each method are shown: those that its evaluation chose; and whether they lie inside what was
tried.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from nhgd.comparison.grid import Settings, axis, edge
from nhgd.comparison.trial import Run


def by_method(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of each method, in the order in which methods were named."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run["method"], []).append(run)
    return found


def by_settings(runs: Sequence[Run]) -> list[tuple[Settings, list[Run]]]:
    """Runs of one method, apart by their settings."""
    found: dict[str, tuple[Settings, list[Run]]] = {}
    for run in runs:
        found.setdefault(json.dumps(run["settings"], sort_keys=True), (run["settings"], []))[1].append(run)
    return list(found.values())


def score(runs: Sequence[Run], selection: str) -> tuple[int, float]:
    """What settings are chosen by, lower first: the number of failed seeds, then the mean of the selection metric."""
    values = [value_of(run, selection) for run in runs]
    known = [value for value in values if value is not None]
    return len(values) - len(known), fmean(known) if known else float("inf")


def value_of(run: Run, metric: str) -> float | None:
    """A metric of a run that ended well, from its summary, else from its last evaluation."""
    if run["error"] is not None:
        return None
    value = run["metrics"].get(metric)
    if value is None and run["points"]:
        value = run["points"][-1].get(metric)
    return None if value is None else float(value)


def chosen(runs: Sequence[Run], selection: str) -> list[Run]:
    """Of the runs of one method those with the best settings."""
    return min(by_settings(runs), key=lambda pair: score(pair[1], selection))[1]


def tried(runs: Sequence[Run], selection: str) -> list[dict[str, Any]]:
    """Every setting of every method with its score, and which of them was chosen."""
    rows = []
    for method, own in by_method(runs).items():
        groups = by_settings(own)
        best = chosen(own, selection)[0]["settings"]
        for settings, some in groups:
            failed, mean = score(some, selection)
            row = {"method": method, "settings": settings, "selection": mean if mean < float("inf") else None}
            rows.append(row | {"failed": failed, "runs": len(some), "chosen": settings == best})
    return rows


def edges(runs: Sequence[Run], selection: str) -> list[dict[str, Any]]:
    """Where the chosen value of a setting is the smallest or the largest that was tried."""
    found = []
    for method, own in by_method(runs).items():
        best = chosen(own, selection)
        if score(best, selection)[1] == float("inf"):
            continue
        settings = best[0]["settings"]
        everything = [run["settings"] for run in own]
        for key in settings:
            which = edge(key, settings, everything)
            if which is not None:
                values = axis(key, settings, everything)
                found.append({"method": method, "key": key, "value": settings[key], "edge": which, "tried": values})
    return found


def edge_sentence(at: Mapping[str, Any]) -> str:
    """For a reader of the table."""
    values = ", ".join(f"{value:g}" for value in at["tried"])
    return (
        f"{at['method']}: the best {at['key']}, {at['value']:g}, is the {at['edge']} of {values}. The optimum may lie beyond;"
        " widen the grid."
    )
