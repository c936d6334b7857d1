"""Eigendecompositions of Kronecker factors, and solving with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from nhgd.errors import NonFiniteError
from nhgd.inverse._learned.kronecker_state import KroneckerState
from nhgd.inverse._learned.statistics import check_invertible
from nhgd.record import Pool

Solver: TypeAlias = Callable[[Tensor], Tensor]


class Basis(NamedTuple):
    """Eigenvectors, in columns, and eigenvalues of the two factors of one layer, for each of its G groups."""

    input_vectors: Tensor  # (G, in, in)
    input_values: Tensor  # (G, in)
    score_vectors: Tensor  # (G, out, out)
    score_values: Tensor  # (G, out)

    def rotate(self, matrix: Tensor) -> Tensor:
        """A gradient of the layer, (G, out, in), in the eigenbasis."""
        return self.score_vectors.mT @ matrix @ self.input_vectors

    def back(self, matrix: Tensor) -> Tensor:
        """The way back from the eigenbasis."""
        return self.score_vectors @ matrix @ self.input_vectors.mT

    def solver(self, owner: str, layer: str, values: Tensor, extra: float) -> Solver:
        """b -> (F + extra I)^{-1} b for matrices b, (G, out, in), where F has these eigenvalues, (G, out, in), in this basis."""
        shifted = values + extra
        if not extra > 0:
            check_invertible(owner, layer, shifted)
        return lambda b: self.back(self.rotate(b) / shifted)


@torch.no_grad()
def decomposed(state: KroneckerState, layer: str) -> Basis:
    """The eigendecompositions of a layer's current factors."""
    (a, q_a), (g, q_g) = (eigenvalues(layer, factor) for factor in state.factors(layer))
    return Basis(q_a, a.clamp_min(0), q_g, g.clamp_min(0))  # below zero is rounding


def decompositions(state: KroneckerState, layers: Iterable[str], pool: Pool | None) -> dict[str, Basis]:
    """`decomposed` for several layers. A pool divides the factors, by the cube of their size."""
    names = list(layers)
    if pool is None:
        return {layer: decomposed(state, layer) for layer in names}
    named = [(layer, factor) for layer in names for factor in state.factors(layer)]
    for layer, factor in named:
        check_finite(layer, factor)  # here, where all of the pool see it

    def packed(i: int) -> Tensor:
        values, vectors = eigenvalues(*named[i])
        return torch.cat([values.clamp_min(0)[:, None], vectors], dim=1)  # (G, 1 + n, n)

    likes = [factor.new_empty(len(factor), 1 + factor.shape[1], factor.shape[2]) for _, factor in named]
    costs = [len(factor) * float(factor.shape[1]) ** 3 for _, factor in named]
    found = [(t[:, 1:].contiguous(), t[:, 0].contiguous()) for t in pool.map(likes, costs, packed)]
    return {name: Basis(*found[2 * i], *found[2 * i + 1]) for i, name in enumerate(names)}


def block_solver(owner: str, name: str, block: Tensor, extra: Tensor) -> Solver:
    """b -> (F + diag(extra))^{-1} b for a parameter outside the layers, F dense, (n, n), or diagonal, (n,)."""
    lowest = extra.min()
    if block.ndim == 1:
        entries = block + extra
        if not lowest > 0:
            check_invertible(owner, name, entries)
        return lambda b: b / entries
    values, vectors = eigenvalues(name, block + torch.diag(extra))
    if not lowest > 0:
        check_invertible(owner, name, values)
    values = values.clamp_min(lowest)  # below it is rounding
    return lambda b: vectors @ ((vectors.T @ b) / values)


def check_finite(name: str, matrix: Tensor) -> None:
    """Refuse to decompose what holds nan or inf."""
    if not bool(torch.isfinite(matrix).all()):
        raise NonFiniteError(f"The statistics of {name!r} hold nan or inf, so an inner step did. Lower its step size.")


def eigenvalues(name: str, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of symmetric statistics."""
    check_finite(name, matrix)
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except RuntimeError:
        # A GPU's solver can fail on many equal eigenvalues, such as those of pixels that are always the same.
        values, vectors = (t.to(matrix) for t in torch.linalg.eigh(matrix.double().cpu()))
    return values, vectors.contiguous()  # column by column as LAPACK leaves them, they could not be saved
