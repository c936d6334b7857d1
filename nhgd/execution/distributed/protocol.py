"""The words that inner and curvature ranks use."""

from __future__ import annotations

from enum import IntEnum

from nhgd.errors import InputError, NhgdError, NonFiniteError, RunError


class Tag(IntEnum):
    """Lanes between an inner and a curvature rank."""

    RECORDS = 1  # one way, in order: everything that changes the state
    REQUESTS = 2  # of the first inner rank; they may overtake records
    REPLIES = 3


class Word(IntEnum):
    """Kinds of messages."""

    START = 1
    BEGIN = 2
    RECORD = 3
    RESTORE = 4
    FINISH = 5
    SOLVE = 11  # x for u
    DRAIN = 12  # an answer when everything sent so far is in the state
    MARK = 13  # keep the state as it stands for the solves that follow
    KEEP = 14  # the state itself
    DIAGONAL = 15  # this rank's part of the mean diagonal
    REPLY = 21
    ERROR = 22
    CREDIT = 23  # so many records are in the state


ERRORS: dict[str, type[NhgdError]] = {cls.__name__: cls for cls in (InputError, RunError, NonFiniteError)}


def told(error: NhgdError) -> dict[str, str]:
    """An error as text."""
    kind = next(name for name, cls in reversed(ERRORS.items()) if isinstance(error, cls) or cls is InputError)
    return {"kind": kind, "sentence": str(error)}


def heard(text: dict[str, str]) -> NhgdError:
    """The error that was told.

    >>> heard(told(NonFiniteError("no number")))
    NonFiniteError('no number')
    """
    return ERRORS[text["kind"]](text["sentence"])
