"""What K-FAC and EKFAC have learnt: two factors for each layer, and a block for each parameter outside."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from nhgd.inverse._learned.state import State


@dataclass
class KroneckerState(State):
    """Running means of the observations. A layer goes by the name of its weight.

    Attributes:
        starts, sizes: where each leaf of theta lies in the flat vector.
        mass: the total weight of the batches in the running means.
        observed: how many records were taken.
        inputs: A, (G, in, in): the mean over samples and places of w_i a a^T.
        scores: (G, out, out): the mean over samples of w_i g g^T, summed over places. G is this over `weights`. Of a
            layer that is split, blocks on the diagonals of its two factors; every pair of them is a group.
        weights: the mean of w_i, 0-dimensional.
        biases: where the bias of a layer starts in the flat vector; a layer without bias has no entry.
        blocks: the Fisher matrix of each parameter outside the layers, (n, n), or its diagonal, (n,).
        bases: eigendecompositions, by layer and by field of `Basis`.
        batch_objective: whether some record was of the batch objective, because of BatchNorm in training mode.
    """

    starts: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    mass: float = 0.0
    observed: int = 0
    inputs: dict[str, Tensor] = field(default_factory=dict)
    scores: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    biases: dict[str, int] = field(default_factory=dict)
    blocks: dict[str, Tensor] = field(default_factory=dict)
    bases: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    batch_objective: bool = False

    def factors(self, layer: str) -> tuple[Tensor, Tensor]:
        """A, (G, in, in), and G, (G, out, out), which is 0 where all weights were 0."""
        a, g = self.blocks_of(layer)
        return self.paired(layer, a, g) if self.is_split(layer) else (a, g)

    def blocks_of(self, layer: str) -> tuple[Tensor, Tensor]:
        """The same of a layer that is split, each block once."""
        weight = self.weights[layer]
        return self.inputs[layer], self.scores[layer] * torch.where(weight > 0, 1 / weight, 0.0)

    def paired(self, layer: str, of_inputs: Tensor, of_scores: Tensor) -> tuple[Tensor, Tensor]:
        """Something of each block of A and of G, for each group; of a layer that is not split, as it is."""
        if not self.is_split(layer):
            return of_inputs, of_scores
        columns, rows = len(of_inputs), len(of_scores)
        return of_inputs.repeat(rows, *[1] * (of_inputs.ndim - 1)), of_scores.repeat_interleave(columns, 0)

    def traces(self, layer: str) -> tuple[Tensor, Tensor]:
        """The traces of A and G, (G,) each, without a copy of either."""
        weight = self.weights[layer]
        a, g = (f.diagonal(dim1=1, dim2=2).sum(1) for f in (self.inputs[layer], self.scores[layer]))
        return self.paired(layer, a, g * torch.where(weight > 0, 1 / weight, 0.0))

    def is_split(self, layer: str) -> bool:
        """Whether the factors of a layer are blocks of larger ones, and not those of the groups of a convolution."""
        a, g = self.inputs[layer], self.scores[layer]
        if len(a) == len(g) == 1:
            return False
        return len(a) != len(g) or len(g) * g.shape[1] * (a.shape[1] - (layer in self.biases)) != self.sizes[layer]

    def gather(self, layer: str, vector: Tensor) -> Tensor:
        """The part of a flat vector (D,) that belongs to a layer, (G, out, in), the bias in its last column."""
        groups, out = self.scores[layer].shape[:2]
        bias, split = self.biases.get(layer), self.is_split(layer)
        rows = (1, groups * out) if split else (groups, out)
        found = vector[self.place(layer)].reshape(*rows, -1)
        if bias is not None:
            found = torch.cat([found, vector[bias : bias + groups * out].reshape(*rows, 1)], dim=2)
        if not split:
            return found
        columns, width = self.inputs[layer].shape[:2]
        return into_blocks(found, columns, width, groups)

    def place(self, name: str) -> slice:
        """The slice of a leaf in the flat vector."""
        return slice(self.starts[name], self.starts[name] + self.sizes[name])

    def scatter(self, layer: str, matrix: Tensor, vector: Tensor) -> None:
        """Write what `gather` gave back into a flat vector (D,)."""
        groups, out = self.scores[layer].shape[:2]
        bias = self.biases.get(layer)
        if self.is_split(layer):
            columns = self.sizes[layer] // (groups * out) + (bias is not None)
            blocks = len(self.inputs[layer])
            matrix = (
                matrix.unflatten(0, (groups, blocks)).permute(0, 2, 1, 3).flatten(2).flatten(0, 1)[None, :, :columns]
            )
        if bias is not None:
            vector[bias : bias + groups * out] = matrix[..., -1].reshape(-1)
            matrix = matrix[..., :-1]
        vector[self.place(layer)] = matrix.reshape(-1)


def into_blocks(matrix: Tensor, columns: int, width: int, rows: int) -> Tensor:
    """A matrix (1, out, in) as blocks (rows * columns, out / rows, width), its last column repeated where they are
    wider.
    """
    wider = columns * width - matrix.shape[2]
    padded = torch.cat([matrix, matrix[..., -1:].expand(-1, -1, wider)], dim=2) if wider else matrix
    split: Tensor = padded[0].unflatten(1, (columns, width)).unflatten(0, (rows, -1))
    return split.transpose(1, 2).flatten(0, 1)
