"""Functions of the caller that see each outer step of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from nhgd._validation import shown
from nhgd.errors import InputError

OnStep: TypeAlias = Callable[[dict[str, Any]], object] | Sequence[Callable[[dict[str, Any]], object]] | None


class Leading(Protocol):
    """What knows whether this process speaks for all."""

    @property
    def leads(self) -> bool:
        """Whether it does."""


class Callbacks(list[Callable[[dict[str, Any]], object]]):
    """They are called in their order, each with a copy of the step's row of the history; of several processes by one.

    Args:
        given: a function or a list of them; None: none.
        group: the processes of the run.
    """

    def __init__(self, given: Any, group: Leading) -> None:
        found = [] if given is None else [given] if callable(given) else given
        if not isinstance(found, (list, tuple)) or not all(map(callable, found)):
            raise InputError(
                f"on_step takes a function of a row of the history, or a list of them, got {shown(given)}. For"
                " example on_step=print."
            )
        super().__init__(found)
        self._group = group

    def show(self, row: dict[str, Any]) -> None:
        """Call them."""
        if not self._group.leads:
            return
        for function in self:
            function(dict(row))
