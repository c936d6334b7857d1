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
        scores: (G, out, out): the mean over samples of w_i g g^T, summed over places. G is this over `weights`.
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
        weight = self.weights[layer]
        return self.inputs[layer], self.scores[layer] * torch.where(weight > 0, 1 / weight, 0.0)

    def gather(self, layer: str, vector: Tensor) -> Tensor:
        """The part of a flat vector (D,) that belongs to a layer, (G, out, in), the bias in its last column."""
        groups, out = self.scores[layer].shape[:2]
        bias = self.biases.get(layer)
        found = vector[self.place(layer)].reshape(groups, out, -1)
        if bias is None:
            return found
        return torch.cat([found, vector[bias : bias + groups * out].reshape(groups, out, 1)], dim=2)

    def place(self, name: str) -> slice:
        """The slice of a leaf in the flat vector."""
        return slice(self.starts[name], self.starts[name] + self.sizes[name])

    def scatter(self, layer: str, matrix: Tensor, vector: Tensor) -> None:
        """Write what `gather` gave back into a flat vector (D,)."""
        groups, out = self.scores[layer].shape[:2]
        bias = self.biases.get(layer)
        if bias is not None:
            vector[bias : bias + groups * out] = matrix[..., -1].reshape(-1)
            matrix = matrix[..., :-1]
        vector[self.place(layer)] = matrix.reshape(-1)
