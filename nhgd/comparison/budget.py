"""What every run of a comparison may spend: seconds, or derivatives."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from nhgd._duration import seconds
from nhgd._validation import shown
from nhgd.errors import InputError
from nhgd.stop import AbstractStop, Budget, Gradients


@dataclass(frozen=True)
class Allowance:
    """An amount of seconds ("s") or of gradient-equivalents ("g").

    >>> Allowance.read("2m"), Allowance.read("500g")
    (Allowance(amount=120.0, unit='s'), Allowance(amount=500.0, unit='g'))
    """

    amount: float
    unit: str

    @classmethod
    def read(cls, text: str | float) -> Allowance:
        """From "60s", "5m", "1h" or seconds as a number, or from "500g"."""
        found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*g\s*", text) if isinstance(text, str) else None
        if found and float(found[1]) > 0:
            return cls(float(found[1]), "g")
        try:
            return cls(seconds(text), "s")
        except InputError:
            raise InputError(
                "The budget of a run is a time such as '10s', '5m' or '1h', or a number of gradient-equivalents such as '500g',"
                f" got {shown(text)}."
            ) from None

    def __str__(self) -> str:
        return f"{self.amount:g}{self.unit}"

    @property
    def words(self) -> str:
        """For a reader.

        >>> Allowance(500.0, "g").words
        '500 gradient-equivalents'
        """
        return f"{self.amount:g} {'s' if self.unit == 's' else 'gradient-equivalents'}"

    def rule(self) -> AbstractStop[Any]:
        """The stop rule of a run."""
        return Budget(self.amount) if self.unit == "s" else Gradients(self.amount)

    def steps(self, cost: dict[str, float]) -> float:
        """About how many outer steps it pays for, by what one costs."""
        return self.amount / max(cost["seconds" if self.unit == "s" else "gradients"], 1e-9)
