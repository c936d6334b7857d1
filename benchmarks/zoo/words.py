"""Lists given on the command line."""

from __future__ import annotations


def words(text: str) -> list[str]:
    """What stands between commas.

    >>> words("a,b")
    ['a', 'b']
    """
    return [word.strip() for word in text.split(",") if word.strip()]


def numbers(text: str) -> list[int]:
    """Whole numbers and ranges of them.

    >>> numbers("0-2,7")
    [0, 1, 2, 7]
    """
    found: list[int] = []
    for word in words(text):
        first, _, last = word.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def rates(text: str) -> list[float]:
    """Step sizes.

    >>> rates("0.01,0.1")
    [0.01, 0.1]
    """
    return [float(word) for word in words(text)]
