"""The two ways a call can end badly: the input was wrong, or the run failed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MOST = 100  # names that one sentence lists


class NhgdError(Exception):
    """Anything this library raises on purpose.

    Attributes:
        step: the outer step that it ended, if any.
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
    """Invalid input. The message says what is wrong and how to fix it; the command line exits with 2.

    Attributes:
        unknown: the kind of object whose name is unknown, such as "inverse".
    """

    unknown: str | None = None


class RunError(NhgdError, RuntimeError):
    """A run that started well could not go on. The command line exits with 1."""


class NonFiniteError(RunError):
    """A number became infinite or undefined. The message names the step and the quantity."""


class PeerError(RunError):
    """Another process of the run failed, was lost, or did not answer in time.

    Attributes:
        rank: of that process; None if unknown.
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
    """The error for an unknown name, with the nearest known one.

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


def percent(share: float) -> str:
    """A share in percent, with two digits, or rounded to an integer if it has more.

    >>> percent(0.00123), percent(0.5), percent(1.0), percent(4.7)
    ('0.12', '50', '100', '470')
    """
    value = 100 * share
    return f"{value:.0f}" if 99.5 <= value < 1e5 else f"{value:.2g}"
