"""The two ways a call can end badly: the input was wrong, or the run failed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

MOST = 100  # names that one sentence lists
MOST_PROBLEMS = 20  # that one message lists


class NhgdError(Exception):
    """Anything this library raises on purpose.

    Attributes:
        step: the outer step that it ended, if any.
        checkpoint: which checkpoint is the last good one, as a sentence, where the run was kept. It follows the reason
            in the message.

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
        problems: a sentence for each thing that is wrong, where all of an input was examined before it was refused.
    """

    unknown: str | None = None
    problems: tuple[str, ...] = ()


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


class Problems:
    """Sentences about one input, gathered so that a single error names all that is wrong with it.

    >>> problems = Problems()
    >>> with problems.gathered():
    ...     raise InputError("Row 3 has no label.")
    >>> problems.add("Row 7 is too short.")
    >>> problems.refuse()
    Traceback (most recent call last):
    nhgd.errors.InputError: There are 2 problems.
      Row 3 has no label.
      Row 7 is too short.
    """

    def __init__(self) -> None:
        self.sentences: list[str] = []

    def add(self, sentence: str) -> None:
        """Note one."""
        self.sentences.append(sentence)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Note what a block refuses, and go on after it."""
        try:
            yield
        except InputError as error:
            self.sentences += error.problems or [str(error)]

    def refuse(self) -> None:
        """Raise one error if there are any."""
        if not self.sentences:
            return
        error = InputError("\n  ".join(listed(self.sentences)))
        error.problems = tuple(self.sentences)
        raise error


def listed(problems: Sequence[str]) -> list[str]:
    """The lines of a message about problems: the sentence alone if there is one, else their number and the first ones.

    >>> listed(["a", "b"])
    ['There are 2 problems.', 'a', 'b']
    """
    if len(problems) == 1:
        return list(problems)
    more = len(problems) - MOST_PROBLEMS
    rest = [f"... and {more} more."] if more > 0 else []
    return [f"There are {len(problems)} problems.", *problems[:MOST_PROBLEMS], *rest]


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
