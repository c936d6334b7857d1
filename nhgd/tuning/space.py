"""What a sweep searches: ranges of numbers, and choices, by the key of a setting."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from nhgd._experiment import Built
from nhgd._experiment.changes import parse
from nhgd._validation import shown
from nhgd.comparison.grid import apart, number
from nhgd.errors import InputError

POINTS = 5  # of a range in a grid
OUTER, INNER = (30.0, 30.0), (30.0, 3.0)  # how far below and above the task's own step sizes a sweep looks
DAMPINGS = (1e-4, 1e-3, 1e-2, 1e-1)
_RANGE = re.compile(r"(?P<low>[^.:]*(?:\.\d[^.:]*)?)\.\.(?P<high>[^:]+?)(?P<log>:log)?(?::(?P<points>\d+))?")


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included.

    Attributes:
        log: whether each factor is as likely as any other.
        whole: whether they are whole numbers.
        points: how many of them a grid has.

    >>> Range(0.01, 1.0, log=True, points=3).grid(), Range(1, 4, whole=True).grid()
    ([0.01, 0.1, 1.0], [1, 2, 3, 4])
    """

    low: float
    high: float
    log: bool = False
    whole: bool = False
    points: int = POINTS

    def suggested(self, key: str, trial: Any) -> float:
        """A value for one of Optuna's trials."""
        if self.whole:
            return int(trial.suggest_int(key, int(self.low), int(self.high), log=self.log))
        return float(trial.suggest_float(key, self.low, self.high, log=self.log))

    def grid(self) -> list[Any]:
        """Values at equal distances."""
        if self.whole and self.high - self.low < self.points:
            return list(range(int(self.low), int(self.high) + 1))
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        values = [low + nth * (high - low) / max(self.points - 1, 1) for nth in range(self.points)]
        values = [float(f"{math.exp(value) if self.log else value:.6g}") for value in values]
        return list(dict.fromkeys(round(value) for value in values)) if self.whole else values

    def holds(self, value: Any) -> bool:
        """Whether a value lies in it."""
        known = isinstance(value, (int, float)) and not isinstance(value, bool) and self.low <= value <= self.high
        return known and (not self.whole or value == int(value))

    def ends(self) -> list[Any]:
        """Values to try out before a sweep."""
        return [int(value) if self.whole else value for value in (self.low, self.high)]

    def __str__(self) -> str:
        return f"{self.low:g}..{self.high:g}{':log' if self.log else ''}"


@dataclass(frozen=True)
class Choices:
    """Some values."""

    values: tuple[Any, ...]

    def suggested(self, key: str, trial: Any) -> Any:
        """A value for one of Optuna's trials."""
        return trial.suggest_categorical(key, list(self.values))

    def grid(self) -> list[Any]:
        """All of them."""
        return list(self.values)

    def holds(self, value: Any) -> bool:
        """Whether a value is one of them."""
        return value in self.values

    def ends(self) -> list[Any]:
        """Values to try out before a sweep."""
        return list(self.values)

    def __str__(self) -> str:
        return ",".join(f"{value:g}" if isinstance(value, float) else str(value) for value in self.values)


Space: TypeAlias = dict[str, Range | Choices]


def parsed(pairs: Sequence[str] | None) -> Space:
    """Texts as a user gives them.

    >>> {key: str(part) for key, part in parsed(["outer_lr=0.01..1:log", "inverse=cg,neumann"]).items()}
    {'outer_lr': '0.01..1:log', 'inverse': 'cg,neumann'}
    """
    return {key: _read(key, text) for key, text in parse(pairs, "--space", "outer_lr=0.01..1:log", once=True).items()}


def of_python(space: Mapping[str, Any] | None) -> Space:
    """From Python: a tuple (low, high) or (low, high, "log") is a range, a list has choices; texts as on the command
    line.

    >>> of_python({"inner_steps": (5, 40), "inverse": ["cg", "neumann"]})["inner_steps"]
    Range(low=5.0, high=40.0, log=False, whole=False, points=5)
    """
    return {str(key): _of_python(str(key), given) for key, given in (space or {}).items()}


def default(built: Built) -> Space:
    """Around the task's own step sizes; for a method with an inverse that takes a damping, its damping too."""
    found: Space = {}
    for key, (below, above) in (("outer_lr", OUTER), ("inner_lr", INNER)):
        middle = starts(built).get(key)
        if middle is not None:
            found[key] = Range(_rounded(middle / below), _rounded(middle * above), log=True)
    own = starts(built).get("inverse.damping", ...)
    if own is not ... and built.algorithm.online is not None:
        found["inverse.damping"] = Choices((own, *(value for value in DAMPINGS if value != own)))
    return found


def starts(built: Built) -> dict[str, Any]:
    """The task's own values of numbers that may be searched; of a schedule, the one at its start."""
    found: dict[str, Any] = {}
    settings = built.described()["solver"]
    for key in ("outer_lr", "inner_lr"):
        value = getattr(settings.get(key), "lr", settings.get(key))
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
            found[key] = float(value)
    inverse: Any = getattr(built.algorithm, "inverse", None)
    if hasattr(inverse, "damping"):
        found["inverse.damping"] = inverse.damping
    return found


def _read(key: str, text: str) -> Range | Choices:
    if ".." not in text:
        return _choices(key, [number(value) for value in apart(f"--space {key}", text)])
    whole = _RANGE.fullmatch(text.strip())
    try:
        if whole is not None:
            low, high = float(whole["low"]), float(whole["high"])
            return _range(key, low, high, whole["log"] is not None, int(whole["points"] or POINTS))
    except ValueError as error:
        if isinstance(error, InputError):
            raise
    raise InputError(
        f"--space {key}={text} is no range. Write --space {key}=0.01..1, 0.01..1:log, or 0.01..1:log:7 for seven points"
        " of a grid."
    )


def _of_python(key: str, given: Any) -> Range | Choices:
    if isinstance(given, (Range, Choices)):
        return given
    if isinstance(given, str):
        return _read(key, given)
    if isinstance(given, list):
        return _choices(key, given)
    numbers = isinstance(given, tuple) and all(isinstance(end, (int, float)) for end in given[:2])
    if numbers and len(given) in (2, 3) and given[2:] in ((), ("log",)):
        return _range(key, float(given[0]), float(given[1]), len(given) == 3, POINTS)
    raise InputError(
        f"The space of {key} is a range such as (0.01, 1.0) or (0.01, 1.0, 'log'), or a list of choices; got {shown(given)}."
    )


def _range(key: str, low: float, high: float, log: bool, points: int) -> Range:
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise InputError(f"The range of {key} goes from {low:g} to {high:g}. Its first end must be below the second.")
    if log and low <= 0:
        raise InputError(f"The range of {key} starts at {low:g}, which has no logarithm. Start above 0, or omit :log.")
    if points < 2:
        raise InputError(f"A grid over a range needs at least 2 points; {key} has {points}.")
    return Range(low, high, log, points=points)


def _choices(key: str, values: Sequence[Any]) -> Choices:
    if not values or not all(value is None or isinstance(value, (bool, int, float, str)) for value in values):
        raise InputError(f"The choices of {key} are numbers, words, True, False or None; got {shown(list(values))}.")
    if len(set(map(repr, values))) < len(values):
        raise InputError(f"The choices of {key} name a value twice. Name each once.")
    return Choices(tuple(values))


def _rounded(value: float) -> float:
    return float(f"{value:.2g}")


def sizes(space: Space) -> int:
    """The number of points of the grid.

    >>> sizes({"a": Choices((1, 2, 3)), "b": Range(0.0, 1.0)})
    15
    """
    return math.prod(len(part.grid()) for part in space.values())
