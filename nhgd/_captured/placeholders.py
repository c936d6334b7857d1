"""What a step has told by placeholders, once its numbers are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nhgd import _tape as tape
from nhgd._nonfinite import check_losses
from nhgd._tree import map_leaves
from nhgd.algorithm import StepInfo


class Known:
    """The numbers of one step.

    Args:
        values: of its readings.
        told: what the host found out in the middle of it.

    Attributes:
        doubts: why steps of the run cannot be captured any more, as far as this one shows.
    """

    def __init__(self, values: Sequence[float], told: Sequence[Any]) -> None:
        self._values, self._told = values, told
        self._made: dict[int, Any] = {}
        self.doubts: list[str] = []

    def of(self, tree: Any) -> Any:
        """A tree with what its placeholders stand for."""
        return map_leaves(self._leaf, tree)

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, tape.Reading):
            return self._values[leaf.place]
        if isinstance(leaf, tape.Told):
            return self._told[leaf.place]
        if isinstance(leaf, tape.Later):
            if id(leaf) not in self._made:
                self._made[id(leaf)] = leaf.make(*self.of(leaf.arguments))
            return self._made[id(leaf)]
        return leaf

    def info(self, info: StepInfo, laters: Sequence[tape.Later]) -> StepInfo:
        """What the step tells, after all that the host does with its numbers, in order. It may raise what the step would have."""
        for later in laters:
            try:
                self.of(later)
            except tape.NotRepeatable as doubt:
                self._made[id(later)] = None
                self.doubts.append(str(doubt))
        found: StepInfo = self.of(info)
        notes: dict[str, Any] = {}
        for name, note in found.notes.items():
            notes |= note if name == tape.MORE else {name: note}
        found = replace(found, notes=notes)
        check_losses(found)
        return found
