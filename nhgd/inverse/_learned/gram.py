"""Rows of a tall matrix R, kept in two ways, and the three products that a solve in row space needs.

Row (n, k) is the gradient of root k of sample n. Parameters outside layers keep their part of every row as it is. A
layer keeps its inputs a and scores g, from which the part of a row is sum_t g_t outer a_t; then

    (R R^T)_{nk,ml} = sum_{t,u} (a_nt . a_mu) (g_nkt . g_mlu)

and no gradient is formed. All products are in float64, whatever dtype is stored, in pieces of bounded size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar, final

import torch
from torch import Tensor
from typing_extensions import override

PIECE = 2**23  # float64 numbers in one temporary array: 64 MiB

STRIP = 512  # rows of a symmetric product that are computed together, up to the diagonal

B = TypeVar("B", bound="AbstractBlock")


def pieces(length: int, width: int) -> Iterator[slice]:
    """Slices of range(length) such that `width` numbers for each of its members fit in one piece."""
    step = max(1, PIECE // max(1, width))
    for first in range(0, length, step):
        yield slice(first, min(first + step, length))


@dataclass(frozen=True)
class AbstractBlock(ABC):
    """The part of R that belongs to some of the parameters, for n samples with K rows each."""

    @abstractmethod
    def take(self: B, which: Tensor | slice) -> B:
        """The same for some of the samples."""

    @abstractmethod
    def gram(self: B, other: B, metric: Tensor | None = None) -> Tensor:
        """R diag(metric) R_other^T, (n, K, m, K). The metric, (D,), is of all parameters; None means 1."""

    def own_gram(self) -> Tensor:
        """R R^T, (n, K, n, K)."""
        return self.gram(self)

    def for_solve(self: B) -> B:
        """The same in the form that is best multiplied several times."""
        return self

    @abstractmethod
    def times(self, vector: Tensor) -> Tensor:
        """R times a vector (D,): (n, K)."""

    @abstractmethod
    def add_adjoint(self, coefficients: Tensor, out: Tensor) -> None:
        """Add R^T times coefficients (n, K) to a vector (D,)."""


@final
@dataclass(frozen=True)
class Rows(AbstractBlock):
    """Gradients as they are, (n, K, d), of the d parameters from `start` on."""

    start: int
    rows: Tensor

    @override
    def take(self, which: Tensor | slice) -> Rows:
        return Rows(self.start, self.rows[which])

    def _columns(self, count: int) -> Iterator[tuple[slice, slice]]:
        """The slices of a piece here and in the flat vector."""
        for piece in pieces(self.rows.shape[2], count * self.rows.shape[1]):
            yield piece, slice(self.start + piece.start, self.start + piece.stop)

    @override
    def gram(self, other: Rows, metric: Tensor | None = None) -> Tensor:
        """One product of (n K, d) by (d, m K)."""
        n, k, _ = self.rows.shape
        m = len(other.rows)
        total = torch.zeros(n * k, m * k, dtype=torch.float64, device=self.rows.device)
        for here, there in self._columns(n + m):
            left = self.rows[:, :, here].flatten(0, 1).double()
            if metric is not None:
                left = left * metric[there]
            total.addmm_(left, other.rows[:, :, here].flatten(0, 1).double().T)
        return total.reshape(n, k, m, k)

    @override
    def own_gram(self) -> Tensor:
        """What lies above its diagonal, but for blocks on it, is copied from below."""
        n, k, _ = self.rows.shape
        size = n * k
        strips = [slice(first, min(first + STRIP, size)) for first in range(0, size, STRIP)]
        total = torch.zeros(size, size, dtype=torch.float64, device=self.rows.device)
        for here, _ in self._columns(n):
            part = self.rows[:, :, here].flatten(0, 1).double()
            for strip in strips:
                total[strip, : strip.stop].addmm_(part[strip], part[: strip.stop].T)
        for strip in strips:
            total[: strip.start, strip] = total[strip, : strip.start].T
        return total.reshape(n, k, n, k)

    @override
    def times(self, vector: Tensor) -> Tensor:
        n, k, _ = self.rows.shape
        total = torch.zeros(n * k, dtype=torch.float64, device=self.rows.device)
        for here, there in self._columns(n):
            total.addmv_(self.rows[:, :, here].flatten(0, 1).double(), vector[there])
        return total.reshape(n, k)

    @override
    def add_adjoint(self, coefficients: Tensor, out: Tensor) -> None:
        for here, there in self._columns(len(self.rows)):
            out[there].addmv_(self.rows[:, :, here].flatten(0, 1).double().T, coefficients.flatten())


@final
@dataclass(frozen=True)
class Factors(AbstractBlock):
    """Inputs (n, T, G, in) and scores (n, K, T, G, out) of a layer; with a bias, the last input is 1.

    `weight` and `bias` say where the parameters begin in the flat vector.
    """

    weight: int
    bias: int | None
    inputs: Tensor
    scores: Tensor

    @override
    def take(self, which: Tensor | slice) -> Factors:
        return Factors(self.weight, self.bias, self.inputs[which], self.scores[which])

    def _parts(self, vector: Tensor) -> tuple[Tensor, Tensor | None]:
        """Views of a vector (D,): the weight's (G, out, in) and the bias's (G, out)."""
        groups, out = self.scores.shape[3:]
        width = self.inputs.shape[3] - (self.bias is not None)
        size = groups * out * width
        weight = vector[self.weight : self.weight + size].view(groups, out, width)
        bias = None if self.bias is None else vector[self.bias : self.bias + groups * out].view(groups, out)
        return weight, bias

    def _matrix(self, vector: Tensor) -> Tensor:
        """(G, out, in) with the bias as last column."""
        weight, bias = self._parts(vector)
        return weight if bias is None else torch.cat([weight, bias[..., None]], dim=2)

    @override
    def gram(self, other: Factors, metric: Tensor | None = None) -> Tensor:
        """A product of inputs times a product of scores, summed over pairs of places."""
        n, k, places, groups, _ = self.scores.shape
        m, other_places = other.inputs.shape[:2]
        inputs, scores = self.inputs.double(), self.scores.double()
        if metric is not None:
            matrix = self._matrix(metric)
            if not bool((matrix == matrix[:, :1]).all()):
                return self._explicit_gram(other, matrix)
            inputs = inputs * matrix[:, 0]
        total = torch.empty(n, k, m, k, dtype=torch.float64, device=inputs.device)
        for piece in pieces(m, n * k * k * places * other_places * groups):
            near = torch.einsum("ntgi,mugi->gntmu", inputs, other.inputs[piece].double())
            both = torch.einsum("nktgo,mlugo->gnktmlu", scores, other.scores[piece].double())
            both *= near[:, :, None, :, :, None]
            alone = places == other_places == groups == 1
            total[:, :, piece] = both.reshape(n, k, -1, k) if alone else both.sum(dim=(0, 3, 6))
        return total

    @override
    def own_gram(self) -> Tensor:
        once = self.for_solve()
        return once.gram(once)

    @override
    def for_solve(self) -> Factors:
        """In float64, if that is little memory."""
        if self.inputs.numel() + self.scores.numel() > PIECE:
            return self
        return Factors(self.weight, self.bias, self.inputs.double(), self.scores.double())

    def _explicit_gram(self, other: Factors, metric: Tensor) -> Tensor:
        """A metric that differs between outputs does not split into factors: form the rows, some outputs at a time."""
        n, k, _, groups, out = self.scores.shape
        m, width = other.inputs.shape[0], self.inputs.shape[3]
        total = torch.zeros(n * k, m * k, dtype=torch.float64, device=self.inputs.device)
        for piece in pieces(out, (n + m) * k * groups * width):
            left = self._gradients(piece).mul_(metric[:, piece]).flatten(2).flatten(0, 1)
            total.addmm_(left, other._gradients(piece).flatten(2).flatten(0, 1).T)
        return total.reshape(n, k, m, k)

    def _gradients(self, outputs: slice) -> Tensor:
        """(n, K, G, out, in) for some of the outputs."""
        return torch.einsum("nktgo,ntgi->nkgoi", self.scores[..., outputs].double(), self.inputs.double())

    def _samples(self) -> Iterator[slice]:
        return pieces(len(self.inputs), (self.inputs.numel() + self.scores.numel()) // max(1, len(self.inputs)))

    @override
    def times(self, vector: Tensor) -> Tensor:
        matrix = self._matrix(vector)
        found = []
        for piece in self._samples():
            pushed = torch.einsum("ntgi,goi->ntgo", self.inputs[piece].double(), matrix)
            found.append(torch.einsum("nktgo,ntgo->nk", self.scores[piece].double(), pushed))
        return torch.cat(found)

    @override
    def add_adjoint(self, coefficients: Tensor, out: Tensor) -> None:
        weight, bias = self._parts(out)
        for piece in self._samples():
            mixed = torch.einsum("nk,nktgo->ntgo", coefficients[piece], self.scores[piece].double())
            found = torch.einsum("ntgo,ntgi->goi", mixed, self.inputs[piece].double())
            weight.add_(found if bias is None else found[..., :-1])
            if bias is not None:
                bias.add_(found[..., -1])
