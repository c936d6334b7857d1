"""`--seeds 5`, `0-4` and `3,7`."""

from __future__ import annotations

import re
from collections.abc import Iterable

from nhgd._validation import check_seed, shown
from nhgd.errors import InputError

MOST = 10_000


def parsed(text: str) -> list[int]:
    """A count, a range or a list, or ranges in a list.

    >>> parsed("3"), parsed("2-4"), parsed("3,7"), parsed("0-1,9")
    ([0, 1, 2], [2, 3, 4], [3, 7], [0, 1, 9])
    """
    parts = [part.strip() for part in text.split(",")]
    ranges = [re.fullmatch(r"(\d{1,18})(?:\s*-\s*(\d{1,18}))?", part) for part in parts]
    found: list[int] = []
    for part in ranges:
        if part is None or (part[2] is not None and int(part[2]) < int(part[1])):
            raise _refusal(text)
        first = int(part[1])
        last = int(part[2]) if part[2] is not None else first
        if part is ranges[0] and len(ranges) == 1 and part[2] is None:
            first, last = 0, first - 1
        if last - first >= MOST:
            raise InputError(f"--seeds {text} are more than {MOST:,} seeds. Give fewer.")
        found += range(first, last + 1)
    if not found:
        raise _refusal(text)
    return checked(found)


def checked(seeds: Iterable[int] | int) -> list[int]:
    """Seeds from Python, each once: a list of them, or how many."""
    if isinstance(seeds, int) and not isinstance(seeds, bool):
        if not 1 <= seeds <= MOST:
            raise InputError(f"seeds is a number of seeds from 1 to {MOST:,}, or a list of them; got {seeds}.")
        return list(range(seeds))
    if isinstance(seeds, (str, bytes)) or not isinstance(seeds, Iterable):
        raise InputError(f"seeds is a number of seeds or a list of them, got {shown(seeds)}.")
    found = list(dict.fromkeys(seeds))
    for seed in found:
        check_seed(seed)
    if not found:
        raise InputError("seeds is empty. Give at least one, for example seeds=[0].")
    return found


def _refusal(text: str) -> InputError:
    return InputError(
        f"--seeds is a count such as 5, a range such as 0-4 or a list such as 3,7; got {text!r}. A single seed is a range:"
        " --seeds 3-3."
    )
