"""What the cost of an inverse depends on: the layers of theta, its other leaves, and the samples of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from nhgd.inverse._learned.layers import layer_shapes
from nhgd.inverse._learned.splitting import split
from nhgd.variable import Variable

Unevenness = Literal["even", "columns", "rows", "uneven"]


class Layer(NamedTuple):
    """A Linear or Conv2d layer: (G, out, in) of its weight, the column of a bias included, and the places it sees a
    sample.

    Its ridge is the same everywhere, or differs between its columns, its rows, or in another way.
    """

    groups: int
    out: int
    columns: int
    places: int = 1
    ridge: Unevenness = "even"

    @property
    def numel(self) -> int:
        """How many parameters it has."""
        return self.groups * self.out * self.columns


@dataclass(frozen=True)
class Shape:
    """Everything the cost of an inverse depends on: the layers of theta, its other leaves, and the samples of a batch.

    Attributes:
        outputs: numbers the model gives for a sample, for fisher="exact".
    """

    numel: int
    samples: int
    layers: tuple[Layer, ...] = ()
    others: tuple[int, ...] = ()
    outputs: int = 1
    itemsize: int = 4

    def in_blocks(self, most: int | None) -> Shape:
        """The same with the blocks of layers whose factors are split."""
        return replace(self, layers=tuple(Layer(*split(x[:3], most), x.places, x.ridge) for x in self.layers))

    @classmethod
    def of(
        cls,
        theta: Variable,
        samples: int,
        places: Mapping[str, int] | None = None,
        coefficients: Sequence[Tensor | float] | None = None,
    ) -> Shape:
        """The shape of theta. `places` gives the places of each layer by its weight, 1 if unknown.

        `coefficients` are those of the ridge for the leaves of theta; without them it counts as even.
        """
        found = layer_shapes(theta)
        names = {name for pair in found for name in pair}
        seen = {} if places is None else places
        ridges = dict(zip(theta.names, coefficients or [0.0] * len(theta.names), strict=True))
        ranks = {name: leaf.ndim for name, leaf in zip(theta.names, theta.leaves, strict=True)}
        layers = tuple(
            Layer(*shape, seen.get(pair[0], 1), unevenness(ranks[pair[0]], *(ridges[name] for name in pair)))
            for pair, shape in found.items()
        )
        others = tuple(n for name, n in zip(theta.names, theta.sizes, strict=True) if name not in names)
        size = torch.promote_types(theta.dtype, torch.float32).itemsize
        return cls(theta.numel, samples, layers, others, layers[-1].out if layers else 1, size)


def unevenness(rank: int, weight: Tensor | float, bias: Tensor | float | None = None) -> Unevenness:
    """How the ridge of a layer may differ within it, by the shapes of its coefficients: their values move with v.

    Args:
        rank: dimensions of the weight itself, to which its coefficient broadcasts.

    >>> unevenness(2, torch.ones(30), torch.ones(())), unevenness(2, 0.1, 0.1), unevenness(2, torch.ones(5, 1))
    ('columns', 'even', 'rows')
    """
    shape = weight.shape if isinstance(weight, Tensor) else torch.Size()
    rows, columns = len(shape) == rank and shape[0] > 1, any(n > 1 for n in shape[-(rank - 1) :])
    if bias is not None and bias is not weight and (isinstance(weight, Tensor) or isinstance(bias, Tensor)):
        columns = True
        rows = rows or (isinstance(bias, Tensor) and bias.numel() > 1)
    if rows and columns:
        return "uneven"
    return "rows" if rows else "columns" if columns else "even"
