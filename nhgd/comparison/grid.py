"""Settings of a comparison: each may have several values, and every combination is run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any, TypeAlias

from nhgd._experiment.changes import parse
from nhgd.errors import InputError

Settings: TypeAlias = dict[str, Any]  # of one run, by key
Grid: TypeAlias = dict[str, list[Any]]  # the values of each key; METHOD:key is for one method alone


def parsed(pairs: Sequence[str] | None) -> Grid:
    """key=v1,v2 texts as lists of values. Brackets keep a value together: project_v=(0,1),(0,2) are two.

    >>> parsed(["outer_lr=0.1,0.3", "project_v=(0,1)", "nhgd:inverse.damping=none"])
    {'outer_lr': [0.1, 0.3], 'project_v': ['(0,1)'], 'nhgd:inverse.damping': ['none']}
    """
    return {
        key: [number(value) for value in apart(f"--set {key}", text)] for key, text in parse(pairs, once=True).items()
    }


def of_python(settings: Mapping[str, Any] | None) -> Grid:
    """The same from Python, where a list has several values and anything else is one."""
    found: Grid = {}
    for key, value in (settings or {}).items():
        found[str(key)] = list(value) if isinstance(value, list) else [value]
        if not found[str(key)]:
            raise InputError(f"The setting {key} is an empty list. Give it values, or omit it.")
    return found


def check_prefixes(grid: Grid, methods: Iterable[str]) -> None:
    """Refuse a setting of a method that is not compared."""
    known = list(methods)
    for key in grid:
        method, colon, _ = key.rpartition(":")
        if colon and method not in known:
            raise InputError(
                f"The setting {key} is for the method {method}, which is not compared here; compared are {', '.join(known)}."
            )


def combinations(grid: Grid, method: str) -> list[Settings]:
    """The settings of every run of a method: all combinations of what applies to it.

    >>> combinations({"a": [1, 2], "soba:b": [3], "nhgd:b": [4]}, "soba")
    [{'a': 1, 'b': 3}, {'a': 2, 'b': 3}]
    """
    own: Grid = {}
    for key, values in grid.items():
        prefix, colon, name = key.rpartition(":")
        if not colon or prefix == method:
            own[name if colon else key] = values
    return [dict(zip(own, chosen, strict=True)) for chosen in product(*own.values())]


def axis(key: str, best: Settings, tried: Iterable[Settings]) -> list[float]:
    """The numbers of one setting that were tried with all others as they are in the best, in order."""
    others = {name: value for name, value in best.items() if name != key}
    values = {
        settings[key]
        for settings in tried
        if key in settings and {name: value for name, value in settings.items() if name != key} == others
    }
    if not all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        return []
    return sorted(float(value) for value in values)


def edge(key: str, best: Settings, tried: Iterable[Settings]) -> str | None:
    """Which end of its axis the best value is, "smallest" or "largest"; None inside, or where there is no axis.

    >>> edge("lr", {"lr": 0.3}, [{"lr": 0.1}, {"lr": 0.3}, {"lr": 0.2}])
    'largest'
    """
    values = axis(key, best, tried)
    if len(values) < 2:
        return None
    return "smallest" if best[key] == values[0] else "largest" if best[key] == values[-1] else None


def beyond(key: str, best: Settings, tried: Iterable[Settings]) -> float | None:
    """The next value past the end of an axis at which the best lies, by the ratio of the last two.

    >>> beyond("lr", {"lr": 0.3}, [{"lr": 0.1}, {"lr": 0.3}]), beyond("lr", {"lr": 0.1}, [{"lr": 0.1}, {"lr": 0.3}])
    (0.9, 0.0333333)
    """
    values = axis(key, best, tried)
    if len(values) < 2 or values[0] <= 0:
        return None
    if best[key] == values[0]:
        return float(f"{values[0] ** 2 / values[1]:.6g}")
    if best[key] == values[-1]:
        return float(f"{values[-1] ** 2 / values[-2]:.6g}")
    return None


def apart(option: str, text: str) -> list[str]:
    """A text at its commas, but for those inside brackets; `option` is how the user writes what comes before it."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    parts = [part.strip() for part in parts]
    if depth or not all(parts):
        raise InputError(
            f"{option}={text} is not a list of values. Write {option}=0.1,0.3, and a value with commas in brackets."
        )
    return parts


def number(text: str) -> Any:
    """A number where the text is one, so that values can be ordered."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
