"""A space against the settings it is for: each of its ends is tried out, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nhgd.comparison.trial import Trial
from nhgd.errors import InputError
from nhgd.tuning.space import Range, Space


def fitted(first: Trial, space: Space) -> Space:
    """The space with ranges of whole numbers where a setting takes nothing else; its ends are tried out."""
    found: Space = {}
    for key, part in space.items():
        if isinstance(part, Range) and not _takes(first, key, part.low + 0.5 * (part.high - part.low) + 1e-3):
            if part.low != int(part.low) or part.high != int(part.high):
                _experiment(first, {key: part.low})
            part = Range(part.low, part.high, part.log, whole=True, points=part.points)
        for value in part.ends():
            _experiment(first, {**({k: p.ends()[0] for k, p in found.items()}), key: value})
        found[key] = part
    return found


def _takes(first: Trial, key: str, value: float) -> bool:
    try:
        _experiment(first, {key: value})
    except InputError as error:
        return error.unknown == "setting"  # which is said later, about the user's own value
    return True


def _experiment(first: Trial, more: Mapping[str, Any]) -> None:
    """Refuse what can be refused without data."""
    replace(first, settings={**first.settings, **more}).experiment()
