"""Whether the functions of a problem draw random numbers, which captured work cannot do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nhgd._randomness import state_bytes
from nhgd.problem import Bilevel


class RandomDraws:
    """A context in which calls of inner() and outer() are watched.

    Attributes:
        seen: which function drew, as a clause; None if neither did.
    """

    def __init__(self, problem: Bilevel) -> None:
        self._problem = problem
        self._inner, self._outer = problem.inner, problem.outer
        self.seen: str | None = None

    def __enter__(self) -> RandomDraws:
        self._problem.inner = self._watched(self._inner, "inner()")
        self._problem.outer = self._watched(self._outer, "outer()")
        return self

    def __exit__(self, *_: object) -> None:
        self._problem.inner, self._problem.outer = self._inner, self._outer

    def _watched(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        device = self._problem.theta.device

        def call(*arguments: Any) -> Any:
            before = state_bytes(device)
            found = function(*arguments)
            if state_bytes(device) != before:
                self.seen = f"{name} draws random numbers, such as those of dropout"
            return found

        return call
