"""What every run of a comparison may spend: seconds, derivatives, or outer steps."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from nhgd._duration import seconds
from nhgd._validation import shown
from nhgd.errors import InputError
from nhgd.stop import AbstractStop, Budget, Gradients, Steps

WORDS = {"s": "s", "g": "gradient-equivalents", " steps": "outer steps"}


@dataclass(frozen=True)
class Allowance:
    """An amount of seconds ("s"), of gradient-equivalents ("g") or of outer steps (" steps").

    >>> Allowance.read("2m"), Allowance.read("500g"), Allowance.read("20 steps")
    (Allowance(amount=120.0, unit='s'), Allowance(amount=500.0, unit='g'), Allowance(amount=20.0, unit=' steps'))
    """

    amount: float
    unit: str

    @classmethod
    def read(cls, text: str | float) -> Allowance:
        """From "60s", "5m", "1h" or seconds as a number, from "500g", or from "20 steps"."""
        counted = re.fullmatch(r"\s*([1-9][0-9]{0,11})\s*steps?\s*", text) if isinstance(text, str) else None
        if counted:
            return cls(float(counted[1]), " steps")
        found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*g\s*", text) if isinstance(text, str) else None
        if found and float(found[1]) > 0:
            return cls(float(found[1]), "g")
        try:
            return cls(seconds(text), "s")
        except InputError:
            raise InputError(
                "The budget of a run is a time such as '10s', '5m' or '1h', a number of gradient-equivalents such as '500g', or a"
                f" number of outer steps such as '20 steps'; got {shown(text)}."
            ) from None

    def __str__(self) -> str:
        return f"{self.amount:g}{self.unit}"

    @property
    def words(self) -> str:
        """For a reader.

        >>> Allowance(500.0, "g").words
        '500 gradient-equivalents'
        """
        return f"{self.amount:g} {WORDS[self.unit]}"

    def rule(self) -> AbstractStop[Any]:
        """The stop rule of a run."""
        if self.unit == " steps":
            return Steps(int(self.amount))
        return Budget(self.amount) if self.unit == "s" else Gradients(self.amount)

    def steps(self, cost: dict[str, float]) -> float:
        """About how many outer steps it pays for, by what one costs."""
        if self.unit == " steps":
            return self.amount
        return self.amount / max(cost["seconds" if self.unit == "s" else "gradients"], 1e-9)
