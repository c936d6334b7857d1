"""Both step sizes of every method, one after the other: a sweep of each, the first once more where the second has
moved.

A grid of five values of each has 25 runs; this takes about ten, and every sweep is continued while its best value lies
at an end. What it finds is the best along both axes through it, which a grid would be too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from nhgd.comparison import choice
from nhgd.comparison.table import Table
from nhgd.comparison.trial import Run
from nhgd.reproduce.tables.plan import Stage

Staged: TypeAlias = Callable[[Stage], Table | None]


def tuned(stage: Stage, staged: Staged) -> Table | None:
    """All runs of the search as one table, whose `chosen` are the step sizes found.

    Args:
        stage: with a list for the inner and for the outer step size; a method may have one value of its own for either.
        staged: runs a stage, as far as the time allows.
    """
    if not stage.alternating:
        return staged(stage)
    axes = {key: values for key, values in stage.settings.items() if isinstance(values, list)}
    inner, outer = axes
    middle = axes[inner][len(axes[inner]) // 2]
    found = staged(_along(stage, {label: {outer: axes[outer], inner: middle} for label in stage.methods}))
    if found is None:
        return None
    runs = list(found.runs)
    best = _best(runs, found.about["selection"])
    for key, other, values in ((inner, outer, axes[inner]), (outer, inner, None)):
        free = {
            label: {other: chosen[other], key: _around(chosen[key], axes[key]) if values is None else values}
            for label, chosen in best.items()
            if f"{label}:{inner}" not in stage.settings and (values is not None or chosen[inner] != middle)
        }
        if not free:
            continue
        more = staged(_along(stage, free))
        runs += [] if more is None else more.runs
        best = _best(runs, found.about["selection"])
    return Table(found.about | {"settings": dict(stage.settings)}, _once(runs))


def _along(stage: Stage, settings: Mapping[str, Mapping[str, Any]]) -> Stage:
    """The same stage with the settings of each method given apart; its own stay as they are."""
    rest = {key: value for key, value in stage.settings.items() if not isinstance(value, list)}
    own = {f"{label}:{key}": value for label, some in settings.items() for key, value in some.items()}
    rest = {key: value for key, value in rest.items() if ":" not in key or key.rpartition(":")[0] in settings}
    return replace(stage, methods={label: stage.methods[label] for label in settings}, settings=own | rest)


def _around(value: float, values: Sequence[float]) -> list[float]:
    """A value and its neighbours, which may lie beyond what was listed."""
    if value in values[1:-1]:
        at = values.index(value)
        return list(values[at - 1 : at + 2])
    ratio = values[1] / values[0] if value <= values[0] else values[-1] / values[-2]
    return [float(f"{value / ratio:.6g}"), value, float(f"{value * ratio:.6g}")]


def _best(runs: Sequence[Run], selection: str) -> dict[str, dict[str, Any]]:
    return {
        label: choice.chosen(own, selection)[0]["settings"]
        for label, own in choice.by_method(_once(runs)).items()
        if choice.score(choice.chosen(own, selection), selection)[1] < float("inf")
    }


def _once(runs: Sequence[Run]) -> list[Run]:
    """Runs that two sweeps share count once."""
    found = {json.dumps([run["method"], run["seed"], run["settings"]], sort_keys=True): run for run in runs}
    return list(found.values())
