"""The ridge of one layer if it differs within the layer, and the solve with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from nhgd.inverse._learned.eigenbasis import Basis, Solve, eigenvalues

ITERATIONS = 50  # of conjugate gradients at most
RANGE = 1e3  # between the entries of a ridge: above it, conjugate gradients need its scale in the preconditioner
# In multiplications of a matrix product on a CPU, by the prices of `nhgd._prices`: an eigendecomposition of n rows
# takes CUBE n^3 + SQUARE n^2, and the operations of an iteration take so many before they compute anything.
CUBE, SQUARE, CALLS = 4, 1000, 1.5e7


def tolerance(dtype: torch.dtype) -> float:
    """The relative residual at which a solve ends."""
    return 1e-6 if dtype is torch.float64 else 1e-4


@dataclass(frozen=True)
class LayerRidge:
    """Ridge and damping of one layer, R, with its factorisation into a row and a column.

        R_ij = level * rows_i * columns_j        if `separable`; otherwise the nearest such product, in logarithms

    A ridge for each input feature, with another for the bias, has rows of 1, and one for each output columns of 1.

    Attributes:
        entries: R, (G, out, in).
        level: (G, 1, 1).
        rows: (G, out, 1).
        columns: (G, 1, in).
        even_rows, even_columns: whether all rows, or all columns, are 1.
        separable: whether the product is R, up to rounding.
    """

    entries: Tensor
    level: Tensor
    rows: Tensor
    columns: Tensor
    even_rows: bool
    even_columns: bool
    separable: bool

    @classmethod
    def of(cls, entries: Tensor) -> LayerRidge | float:
        """The ridge of a layer; or one number, if it is even.

        >>> LayerRidge.of(torch.full((1, 2, 3), 0.5))
        0.5
        >>> found = LayerRidge.of(torch.tensor([[[1.0, 2.0], [1.0, 2.0]]]))
        >>> found.separable, found.even_rows, found.columns.tolist()
        (True, True, [[[1.0, 2.0]]])
        """
        level, rows, columns = entries[:, :1, :1], entries[:, :, :1], entries[:, :1]
        product = (rows / level) * (columns / level) * level
        near = (entries - product).abs() <= 16 * torch.finfo(entries.dtype).eps * entries
        flags = [entries == entries[0, 0, 0], entries == columns, entries == rows, near, entries > 0]
        found = [*(flag.all().double() for flag in flags), entries[0, 0, 0].double()]
        even, same_rows, same_columns, is_product, positive, first = torch.stack(
            found
        ).tolist()  # the device is asked once
        if even:
            return float(first)
        if is_product and positive:
            return cls(entries, level, rows / level, columns / level, bool(same_rows), bool(same_columns), True)
        logs = _floored(entries).log()
        level = logs.mean((1, 2), keepdim=True)
        rows, columns = (logs.mean(d, keepdim=True) - level for d in (2, 1))
        return cls(entries, level.exp(), rows.exp(), columns.exp(), False, False, False)

    @cached_property
    def scale(self) -> Tensor:
        """S: one over the root of the product, (G, out, in)."""
        return (self.level * self.rows * self.columns).rsqrt()

    @property
    def is_wide(self) -> bool:
        """Whether its entries are far apart."""
        return not float(self.entries.amin()) * RANGE >= float(self.entries.amax())

    @property
    def mean(self) -> float:
        """The mean entry."""
        return float(self.entries.mean())

    def pays(self, iterations: int) -> bool:
        """Whether decomposing the factors that it scales costs no more than this many iterations."""
        out, columns = self.entries.shape[1:]
        sizes = [n for n, even in ((out, self.even_rows), (columns, self.even_columns)) if not even]
        return pays(sizes, out, columns, iterations)

    def scaled(self, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """The factors of S F S for F = A (x) G: C^-1/2 A C^-1/2, and D^-1/2 G D^-1/2 / level, C the columns and D
        the rows.
        """
        c, d = self.columns.rsqrt(), self.rows.rsqrt()
        return c.mT * a * c, d * g * d.mT / self.level

    def basis(self, layer: str, a: Tensor, g: Tensor, kept: Basis | None = None) -> Basis:
        """The eigendecompositions of the scaled factors. Where all rows or all columns are 1, that which is kept
        serves.
        """
        scaled_a, scaled_g = self.scaled(a, g)
        if kept is not None and self.even_columns:
            inputs = kept.input_values, kept.input_vectors
        else:
            inputs = eigenvalues(layer, scaled_a)
        if kept is not None and self.even_rows:
            scores = kept.score_values / self.level[:, 0], kept.score_vectors
        else:
            scores = eigenvalues(layer, scaled_g)
        return Basis(inputs[1], inputs[0].clamp_min(0), scores[1], scores[0].clamp_min(0))

    def diagonal(self, basis: Basis, old: Basis, values: Tensor) -> Tensor:
        """The diagonal of S F S in its `basis`, (G, out, in), given the values of F in an old one."""
        r_a = (old.input_vectors.mT * self.columns.rsqrt()) @ basis.input_vectors
        r_g = (old.score_vectors.mT * (self.level * self.rows).rsqrt().mT) @ basis.score_vectors
        return r_g.square().mT @ values @ r_a.square()

    def solver(self, basis: Basis, values: Tensor) -> Solve:
        """b -> (F + R)^{-1} b for matrices b, (G, out, in), where S F S has these values in its `basis`, and R is
        separable.

        With S = `scale`, so that S R S = I:

            X = S * Q_G [ (Q_G^T (S * B) Q_A) / (values + 1) ] Q_A^T
        """
        return lambda b: self.scale * basis.back(basis.rotate(self.scale * b) / (values + 1))


def pays(sizes: Sequence[int], out: int, columns: int, iterations: int) -> bool:
    """Whether decomposing factors of these sizes costs no more than this many iterations of conjugate gradients on a
    layer.

    >>> pays([31], 16, 31, iterations=1), pays([785], 10, 785, iterations=50)
    (True, False)
    """
    turned = out * columns**2 + out**2 * columns
    return sum(CUBE * n**3 + SQUARE * n**2 for n in sizes) <= iterations * (4 * turned + CALLS)


@dataclass(frozen=True)
class Uneven:
    """F + R of one layer, where F is diagonal in a basis, but the ridge R is not.

    Solved by conjugate gradients in the basis. Each iteration takes four pairs of matrix products, as large as the
    layer; no gradient and no data. With d the diagonal of F, rho the geometric mean of R and W = rho / (d + rho), the
    preconditioner

        M^{-1} = W Q^T R^{-1} Q W + d / (d + rho)^2

    is 1 / (d + R) for constant R, near R^{-1} along flat directions of F and near F^{-1} along steep ones.

    Args:
        basis: the eigenvectors Q.
        values: d, (G, out, in).
        entries: R, (G, out, in).
        scale: S, if the matrix is S (F + R) S.
        precondition: another M^{-1}, in the basis.
    """

    basis: Basis
    values: Tensor
    entries: Tensor
    scale: Tensor | None = None
    precondition: Solve | None = None

    def product(self, y: Tensor) -> Tensor:
        """(F + R) y, in the basis."""
        return self.values * y + self.basis.rotate(self.entries * self.basis.back(y))

    def blended(self) -> Solve:
        """M^{-1} as above."""
        ridge = _floored(self.entries)
        rho = ridge.log().mean((1, 2), keepdim=True).exp()
        flat, steep = rho / (self.values + rho), self.values / (self.values + rho).square()
        return lambda y: flat * self.basis.rotate(self.basis.back(flat * y) / ridge) + steep * y

    def solver(self, averaged: Callable[[], Solve], iterations: int, notes: dict[str, Any]) -> Solve:
        """b -> x, (G, out, in). Without convergence, x is at least as good as the averaged ridge's.

        Nearer is meant in the norm of the matrix that is solved, and of multiples of `averaged` the best is taken.

        Args:
            averaged: makes the solver for the mean of the ridge.
            notes: receives the iterations and the relative residual, the largest over layers.
        """
        precondition = self.precondition or self.blended()

        def solve(b: Tensor) -> Tensor:
            x, left, taken = self._conjugate(b, precondition, iterations)
            if left > tolerance(b.dtype):
                x, left = self._nearer(b, x, averaged()(b))
            notes["ridge_iterations"] = max(taken, notes.get("ridge_iterations", 0))
            notes["ridge_residual"] = max(left, notes.get("ridge_residual", 0.0))
            return x

        return solve

    def _conjugate(self, b: Tensor, precondition: Solve, iterations: int) -> tuple[Tensor, float, int]:
        """x, its relative residual and the iterations taken. Each group has step lengths of its own."""
        r = self._into(b)
        y, size, taken = torch.zeros_like(r), float(b.norm()), 0
        z = precondition(r)
        p, rz = z, _dot(r, z)
        while taken < iterations and size != 0:
            hp = self.product(p)
            taken += 1
            curvature = _dot(p, hp)
            alpha = torch.where(curvature > 0, rz / curvature, 0.0)
            y, r = y + alpha * p, r - alpha * hp
            if not self._length(r) > tolerance(b.dtype) * size:
                break
            z = precondition(r)
            old, rz = rz, _dot(r, z)
            p = z + torch.where(old > 0, rz / old, 0.0) * p
        # The residual is recomputed: the recursion does not see its own rounding errors.
        left = self._length(self._into(b) - self.product(y)) / size if size != 0 else 0.0
        return self._out_of(y), left, taken

    def _nearer(self, b: Tensor, x: Tensor, other: Tensor) -> tuple[Tensor, float]:
        """x, or the best multiple of another guess if that is closer, for each group; and its relative residual."""
        target = self._into(b)
        y, w = (self.basis.rotate(t if self.scale is None else t / self.scale) for t in (x, other))
        hy, hw = self.product(y), self.product(w)
        curvature = _dot(w, hw)
        alpha = torch.where(curvature > 0, _dot(w, target) / curvature, 0.0)
        nearer = _dot(y, hy) / 2 - _dot(y, target) > -alpha * _dot(w, target) / 2
        y, hy = torch.where(nearer, alpha * w, y), torch.where(nearer, alpha * hw, hy)
        return self._out_of(y), self._length(target - hy) / float(b.norm())

    def _into(self, b: Tensor) -> Tensor:
        return self.basis.rotate(b if self.scale is None else self.scale * b)

    def _out_of(self, y: Tensor) -> Tensor:
        x = self.basis.back(y)
        return x if self.scale is None else self.scale * x

    def _length(self, r: Tensor) -> float:
        """Of a residual, as it is outside of the basis."""
        return float((r if self.scale is None else self.basis.back(r) / self.scale).norm())


def _floored(entries: Tensor) -> Tensor:
    """The same with the smallest entry above 0 in place of those that are 0: something to divide by."""
    return entries.clamp_min(torch.where(entries > 0, entries, entries.amax()).amin())


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Of each group, (G, 1, 1)."""
    return (a * b).sum((1, 2), keepdim=True)
