"""The two ways a call can end badly: the input was wrong, or the run failed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from numbers import Integral, Real

MOST = 100  # names that one sentence lists


class NhgdError(Exception):
    """Anything this library raises on purpose.

    Attributes:
        step: the outer step that it ended, where it ended one.
        checkpoint: which checkpoint is the last good one, as a sentence, where the run was kept. It follows the reason in the
            message.

    >>> error = NhgdError("The disk is full.")
    >>> error.checkpoint = "The last good checkpoint is runs/a, outer step 7."
    >>> str(error)
    'The disk is full. The last good checkpoint is runs/a, outer step 7.'
    """

    step: int | None = None
    checkpoint: str = ""

    @property
    def reason(self) -> str:
        """The message without the checkpoint."""
        return super().__str__()

    def __str__(self) -> str:
        return f"{self.reason} {self.checkpoint}" if self.checkpoint else self.reason


class InputError(NhgdError, ValueError):
    """What was given cannot be used. The message says what was wrong and what to do; the command line exits with 2.

    Attributes:
        unknown: the kind of thing that has no such name, such as "inverse", where that is what was wrong.
    """

    unknown: str | None = None


class RunError(NhgdError, RuntimeError):
    """A run that started well could not go on. The command line exits with 1."""


class NonFiniteError(RunError):
    """A number became infinite or undefined. The message names the step and the quantity."""


class PeerError(RunError):
    """Another process of the run failed, was lost, or did not answer in time.

    Attributes:
        rank: of that process; None where it is not known which of them it was.
        role: "inner" or "curvature".
        silent: the seconds for which it did not answer; None where its connection was closed.
    """

    def __init__(
        self, sentence: str, rank: int | None = None, role: str | None = None, silent: float | None = None
    ) -> None:
        super().__init__(sentence)
        self.rank = rank
        self.role = role
        self.silent = silent


class InverseWarning(UserWarning):
    """A linear solve did not do what its name promises, for example on negative curvature."""


def unknown(kind: str, name: str, known: Iterable[str]) -> InputError:
    """The error for a name nobody has heard of, with the nearest known one.

    >>> raise unknown("inverse", "cgg", ["cg", "exact"])
    Traceback (most recent call last):
    nhgd.errors.InputError: There is no inverse called 'cgg'. Did you mean 'cg'? Known: cg, exact.
    """
    names = sorted(known)
    by_case = {known.casefold(): known for known in reversed(names)}
    near = difflib.get_close_matches(name.casefold(), by_case, n=1, cutoff=0.5)
    hint = f" Did you mean '{by_case[near[0]]}'?" if near else ""
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    error = InputError(f"There is no {kind} called '{name}'.{hint} Known: {', '.join(names[:MOST])}{more}.")
    error.unknown = kind
    return error


def positive(owner: str, **values: float) -> None:
    """Refuse values that are not finite and above zero.

    >>> positive("Strong", mu=0.0)
    Traceback (most recent call last):
    nhgd.errors.InputError: Strong: mu must be above 0, got 0.0.
    """
    for name, value in values.items():
        if not _number(value) or not 0 < value < float("inf"):
            raise InputError(f"{owner}: {name} must be {_finite(value)}above 0, got {value!r}.")


def not_negative(owner: str, **values: float) -> None:
    """Refuse values that are negative, infinite or undefined.

    >>> not_negative("CG", damping=-1.0)
    Traceback (most recent call last):
    nhgd.errors.InputError: CG: damping must be 0 or more, got -1.0.
    """
    for name, value in values.items():
        if not _number(value) or not 0 <= value < float("inf"):
            raise InputError(f"{owner}: {name} must be {_finite(value)}0 or more, got {value!r}.")


def counted(owner: str, **values: int) -> None:
    """Refuse what is not a whole number of at least 1.

    >>> counted("CG", steps=2.5)
    Traceback (most recent call last):
    nhgd.errors.InputError: CG: steps must be a whole number of at least 1, got 2.5.
    """
    for name, value in values.items():
        if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
            raise InputError(f"{owner}: {name} must be a whole number of at least 1, got {value!r}.")


def check_seed(seed: int) -> None:
    """Refuse a seed that not every random generator takes.

    >>> check_seed(2**64)
    Traceback (most recent call last):
    nhgd.errors.InputError: seed must be a whole number from 0 to 2^63 - 1, got 18446744073709551616.
    """
    if not isinstance(seed, Integral) or isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise InputError(f"seed must be a whole number from 0 to 2^63 - 1, got {seed!r}.")


def _number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _finite(value: object) -> str:
    """A word more for what is above everything."""
    return "finite and " if value == float("inf") else ""


def percent(share: float) -> str:
    """A share in percent, to two digits, or whole where it has more.

    >>> percent(0.00123), percent(0.5), percent(1.0), percent(4.7)
    ('0.12', '50', '100', '470')
    """
    value = 100 * share
    return f"{value:.0f}" if 99.5 <= value < 1e5 else f"{value:.2g}"
