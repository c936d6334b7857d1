"""How often curvature is refreshed, so that it takes no more than a share of the inner step's time."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from math import ceil, sqrt
from typing import Any, TypeVar

from nhgd._validation import not_negative, positive
from nhgd.errors import InputError
from nhgd.inverse.base import Learned
from nhgd.record import RecordKind

S = TypeVar("S")
P = TypeVar("P", bound="Periodic[Any]")


@dataclass(frozen=True)
class Periodic(Learned[S]):
    """Running means of layer statistics, learnt every so many steps, as it is told or as an `overhead` allows.

    Each layer, or each parameter, has a block of its own.
    """

    @property
    def records(self) -> RecordKind:
        """Inputs and scores of the layers."""
        return "layer"

    @property
    def reduces(self) -> bool:
        """Means over samples are all it takes of a batch."""
        return True

    @property
    def couples(self) -> bool:
        """No product of two blocks is taken."""
        return False

    @property
    @abstractmethod
    def factor_every(self) -> int:
        """Inner steps from one record to the next."""

    @property
    @abstractmethod
    def overhead(self) -> float | None:
        """The share of an inner step's time that curvature may take; None: the periods are given."""

    def needs_record(self, step: int) -> bool:
        """Every `factor_every`-th step."""
        return step % self.factor_every == 0

    @abstractmethod
    def with_periods(self: P, inner_seconds: float, factor_seconds: float, invert_seconds: float) -> P:
        """A copy whose periods keep within `overhead`, which is then None, so that the copy can be given again.

        Args:
            inner_seconds: what an inner step takes without a record.
            factor_seconds: what a record and its `observe` add to it, decompositions left out.
            invert_seconds: what `decompose` takes.
        """

    @abstractmethod
    def decompose(self, state: S) -> None:
        """Make all decompositions of a state once, to see how long they take."""


def check_overhead(owner: str, overhead: float | None, inner: float, factor: float, invert: float) -> float:
    """The seconds of an inner step that may be spent; what was measured must be times."""
    if overhead is None:
        raise InputError(f"{owner}: with_periods needs overhead, the share of an inner step that may be spent.")
    positive(owner, inner_seconds=inner)
    not_negative(owner, factor_seconds=factor, invert_seconds=invert)
    return overhead * inner


def two_periods(allowed: float, factor_seconds: float, invert_seconds: float) -> tuple[int, int]:
    """factor_every and invert_every, the two with the least sum, up to rounding, that keep within

        factor_seconds / factor_every + invert_seconds / invert_every <= allowed

    >>> two_periods(0.5, factor_seconds=1.0, invert_seconds=4.0)
    (6, 12)
    """
    both = sqrt(factor_seconds * invert_seconds)
    factor_every = max(1, ceil((factor_seconds + both) / allowed))
    while factor_seconds / factor_every >= allowed and factor_seconds > 0 and invert_seconds > 0:
        factor_every += 1  # rounding left nothing for the decompositions
    left = allowed - factor_seconds / factor_every
    invert_every = max(1, ceil(invert_seconds / left)) if invert_seconds > 0 else 1
    while invert_seconds > 0 and factor_seconds / factor_every + invert_seconds / invert_every > allowed:
        invert_every += 1
    return factor_every, invert_every
