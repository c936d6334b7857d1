"""Which process keeps the curvature of which parameters, and what it needs of a record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from nhgd.errors import InputError
from nhgd.inverse._learned.kronecker import AbstractKronecker
from nhgd.inverse._learned.layers import layer_shapes
from nhgd.inverse._learned.state import State
from nhgd.inverse.base import Learned
from nhgd.record import InnerRecord, LayerStatistics
from nhgd.variable import Variable

S = TypeVar("S", bound=State)
LAYOUT = ("starts", "sizes")  # the slice of each parameter in the flat vector: every rank knows all of them


class Assignment:
    """Layers assigned to curvature ranks by the cost of their eigendecompositions; a single rank gets everything.

    Args:
        inverse: the inverse to divide, which must be Kronecker-factored.
        theta: the parameters.
        parts: how many ranks there are.
    """

    def __init__(self, inverse: Learned[Any], theta: Variable, parts: int) -> None:
        self.parts = parts
        self._places = theta.slices()
        self._sizes = dict(zip(theta.names, theta.sizes, strict=True))
        self._numel = theta.numel
        self.owner = dict.fromkeys(theta.names, 0)
        if parts == 1:
            return
        if not isinstance(inverse, AbstractKronecker):
            raise InputError(
                f"{inverse.name} keeps one state for all parameters, which cannot be divided over {parts} curvature ranks. Use"
                " curvature_ranks=1, or kfac or ekfac, which are divided by layers."
            )
        layers = layer_shapes(theta)
        if theta.root is None or len(layers) < parts:
            raise InputError(
                f"There are {parts} curvature ranks and {len(layers) if theta.root is not None else 0} Linear or Conv2d layers"
                " to divide among them. Use fewer curvature ranks."
            )
        costs = {names: groups * (out**3 + columns**3) for names, (groups, out, columns) in layers.items()}
        loads = [0] * parts
        for names in sorted(costs, key=lambda names: -costs[names]):
            part = loads.index(min(loads))
            loads[part] += costs[names]
            self.owner.update(dict.fromkeys(names, part))

    def part_of(self, record: InnerRecord, part: int) -> InnerRecord:
        """What one rank needs of a record."""
        if self.parts == 1 or not isinstance(record, LayerStatistics):
            return record
        layers = tuple(layer for layer in record.layers if self.owner[layer.weight] == part)
        folded = tuple(layer for layer in record.folded if self.owner[layer.weight] == part)
        names = tuple(name for name in record.other_names if self.owner[name] == part)
        rows = None
        if record.other_rows is not None and names:
            sizes = [self._sizes[name] for name in record.other_names]
            pieces = dict(zip(record.other_names, record.other_rows.split(sizes, dim=1), strict=True))
            rows = torch.cat([pieces[name] for name in names], dim=1)
        return replace(record, layers=layers, folded=folded, other_names=names, other_rows=rows)

    def gather(self, vector: Tensor, part: int) -> Tensor:
        """The coordinates of a vector (D,) that a rank keeps."""
        if self.parts == 1:
            return vector
        own = [vector[place] for name, place in self._places.items() if self.owner[name] == part]
        return torch.cat(own) if own else vector[:0]

    def scatter(self, pieces: Sequence[Tensor]) -> Tensor:
        """A vector (D,) from what `gather` gave for every rank."""
        if self.parts == 1:
            return pieces[0]
        found = torch.zeros(self._numel, dtype=pieces[0].dtype, device=pieces[0].device)
        for part, piece in enumerate(pieces):
            self.spread(piece, part, found)
        return found

    def spread(self, piece: Tensor, part: int, into: Tensor) -> Tensor:
        """Write what `gather` gave for a rank into a vector (D,)."""
        if self.parts == 1:
            return into.copy_(piece)
        places = [place for name, place in self._places.items() if self.owner[name] == part]
        for place, values in zip(places, piece.split([p.stop - p.start for p in places]), strict=True):
            into[place] = values
        return into

    def own(self, state: S, part: int) -> S:
        """The part of a state that a rank keeps: of values by parameter name, those of its own parameters."""
        if self.parts == 1:
            return state
        kept = {
            field: {name: item for name, item in values.items() if self.owner.get(name, 0) == part}
            for field, values in _by_name(state).items()
        }
        return replace(state, **kept)

    def whole(self, states: Sequence[S]) -> S:
        """The state that `own` has divided."""
        by_name = [_by_name(state) for state in states]
        united = {field: {name: item for some in by_name for name, item in some[field].items()} for field in by_name[0]}
        return replace(states[0], **united)


def _by_name(state: State) -> dict[str, dict[str, Any]]:
    """The fields of a state that hold something for each parameter, by its name."""
    values = {field.name: getattr(state, field.name) for field in fields(state) if field.name not in LAYOUT}
    return {name: value for name, value in values.items() if isinstance(value, dict)}
