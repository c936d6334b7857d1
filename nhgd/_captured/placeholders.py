"""What the placeholders of a captured step stand for, once its numbers are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nhgd import _tape as tape
from nhgd._nonfinite import check_losses
from nhgd._tree import map_leaves
from nhgd.algorithm import StepInfo


class StepValues:
    """The numbers of one step.

    Args:
        values: of its readings.
        host_values: what the host computed during the step.

    Attributes:
        refusals: why further steps cannot be captured, if this one showed it.
    """

    def __init__(self, values: Sequence[float], host_values: Sequence[Any]) -> None:
        self._values, self._host_values = values, host_values
        self._made: dict[int, Any] = {}
        self.refusals: list[str] = []

    def of(self, tree: Any) -> Any:
        """The tree with its placeholders replaced."""
        return map_leaves(self._leaf, tree)

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, tape.Reading):
            return self._values[leaf.place]
        if isinstance(leaf, tape.HostValue):
            return self._host_values[leaf.place]
        if isinstance(leaf, tape.Deferred):
            if id(leaf) not in self._made:
                self._made[id(leaf)] = leaf.make(*self.of(leaf.arguments))
            return self._made[id(leaf)]
        return leaf

    def info(self, info: StepInfo, deferred: Sequence[tape.Deferred]) -> StepInfo:
        """What the step reports, after the deferred work of the host, in order. It raises what an eager step would
        have.
        """
        for later in deferred:
            try:
                self.of(later)
            except tape.NotRepeatable as refusal:
                self._made[id(later)] = None
                self.refusals.append(str(refusal))
        found: StepInfo = self.of(info)
        notes: dict[str, Any] = {}
        for name, note in found.notes.items():
            notes |= note if name == tape.MORE else {name: note}
        found = replace(found, notes=notes)
        check_losses(found)
        return found
