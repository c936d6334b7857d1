"""Times and intervals as people write them: 30, "60s", "5m", "1h"."""

from __future__ import annotations

import re

from nhgd._validation import fitted, number, shown
from nhgd.errors import InputError

_UNITS = {"s": 1, "m": 60, "h": 3600, None: 1}


def seconds(duration: str | float) -> float:
    """A duration in seconds, from a number or from "60s", "5m", "1h".

    >>> seconds("1.5m")
    90.0
    """
    duration = number(duration)
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(s|m|h)?\s*", duration) if isinstance(duration, str) else None
    if match:
        found = float(match[1]) * _UNITS[match[2]]
    else:
        found = float(duration) if fitted(duration, float) is duration else 0.0
    if not 0 < found < float("inf"):
        raise InputError(f"A budget is a time such as 30, '60s', '5m' or '1h', got {duration!r}.")
    return found


def checkpoint_interval(given: int | str | None) -> tuple[int | None, float | None]:
    """Outer steps, or seconds, between two checkpoints.

    >>> checkpoint_interval(100), checkpoint_interval("5m"), checkpoint_interval(None)
    ((100, None), (None, 300.0), (None, None))
    """
    given = number(given)
    if given is None or (isinstance(given, int) and not isinstance(given, bool) and 1 <= given < 2**63):
        return given, None
    if isinstance(given, str) and given.strip().isdecimal() and int(given) >= 1:
        return int(given), None
    if isinstance(given, str) and given.strip()[-1:] in ("s", "m", "h"):
        return None, seconds(given)
    raise InputError(
        f"checkpoint_every is a whole number of outer steps, at least 1, or a time such as '60s' or '5m', got {shown(given)}."
    )
