"""The exact solution that inverses are compared with, or why there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nhgd.data.batch import Batch
from nhgd.errors import InputError
from nhgd.inverse import AbstractInverse, Identity, Refined
from nhgd.inverse._krylov.minimal_residuals import minimal_residuals, range_tolerance
from nhgd.inverse._learned.automatic import automatic
from nhgd.inverse._learned.learning import learn
from nhgd.inverse.exact import Factorised, dense
from nhgd.oracle import Oracle


def tolerance(dtype: torch.dtype) -> float:
    """The residual, within the range of H, up to which a solution may be compared with."""
    return min(0.1, max(1e-6, 1e3 * torch.finfo(dtype).eps))


@dataclass(frozen=True)
class ReferenceSolution:
    """The shortest x with the least |H x - u|.

    Attributes:
        x: (D,), or None where none was found.
        residual: |H x - u| / |u|.
        outside: the part of u, of its length, that lies outside of the range of H; the residual is no less.
        error: |H x - u| / |u| within the range of H.
    """

    x: Tensor | None
    residual: float
    outside: float
    error: float


class Reference(Protocol):
    """Solves H x = u as well as it can be done at a point.

    Attributes:
        method: how, in words.
        negative, singular: whether H has clearly negative eigenvalues, and some of rounding size; None: not known.
        null: how many of those there are; None: not known.
        smallest, largest: eigenvalues, if known.
    """

    method: str
    negative: bool | None
    singular: bool | None
    null: int | None
    smallest: float | None
    largest: float

    def solve(self, u: Tensor) -> ReferenceSolution:
        """The solution for one right-hand side."""
        ...

    def damped(self, damping: float) -> Reference:
        """Solves (H + damping I) x = u at the same point."""
        ...


def reference(
    at: Oracle, batches: Sequence[Batch], seed: int, dense_below: int, tick: Callable[[float], None]
) -> Reference:
    """By the dense Hessian up to so many parameters, else by products."""
    size = at.problem.theta.numel
    if size <= dense_below:
        return Dense(dense(at, tick), at.problem.theta.dtype)
    return ByProducts(at, batches, seed, tick, min(20 * size, 5000))


class Dense:
    """By the eigenvalues of the dense Hessian, or by Cholesky where it is clearly positive definite."""

    method = "dense solve"

    def __init__(self, hessian: Tensor, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._found = Factorised(hessian, dtype)
        self.negative: bool | None = self._found.negative
        self.singular: bool | None = self._found.null > 0
        self.null: int | None = self._found.null
        self.smallest = self._found.smallest
        self.largest = self._found.largest

    def solve(self, u: Tensor) -> ReferenceSolution:
        """Of the right-hand side's part within the range."""
        x, residual, outside = self._found.solve(u)
        error = max(residual**2 - outside**2, 0.0) ** 0.5
        return ReferenceSolution(x if error <= tolerance(u.dtype) else None, residual, outside, error)

    def damped(self, damping: float) -> Dense:
        """With the same Hessian, which is not formed again."""
        hessian = self._found.matrix.clone()
        hessian.diagonal().add_(damping)
        return Dense(hessian, self._dtype)


class ByProducts:
    """By preconditioned conjugate gradients; where those meet curvature that is not positive, by minimal residuals.

    The first are begun again from where they stood until the true residual falls no further. The second find a solution
    with the least residual r, which then lies outside of the range of H, and from there the shortest solution for u -
    r.

    Args:
        steps: products at most, for each of the two.
    """

    def __init__(
        self, at: Oracle, batches: Sequence[Batch], seed: int, tick: Callable[[float], None], steps: int
    ) -> None:
        self.method = "preconditioned conjugate gradients"
        self._at, self._steps, self._tick = at, steps, tick
        self._batches, self._seed = batches, seed
        self._inverse = self._preconditioned(batches, seed)
        self._state = learn(self._inverse, at.problem, batches, seed)
        self.negative: bool | None = None
        self.singular: bool | None = None
        self.null: int | None = None
        self.smallest: float | None = None
        self.largest = 0.0

    def _preconditioned(self, batches: Sequence[Batch], seed: int) -> AbstractInverse:
        """CG preconditioned by what can be learnt of this problem, or by nothing where that is refused."""
        made = Refined(automatic(self._at.problem.theta), steps=self._steps, tol=1e-11)
        try:
            learn(made, self._at.problem, batches[:1], seed)
        except InputError:
            return Refined(Identity(), steps=self._steps, tol=1e-11)
        return made

    def solve(self, u: Tensor) -> ReferenceSolution:
        """By the one or the other way, with the true residual."""
        size = max(float(u.norm()), torch.finfo(u.dtype).tiny)
        if not bool(u.any()):
            return ReferenceSolution(torch.zeros_like(u), 0.0, 0.0, 0.0)
        if not self.negative and not self.singular:
            x, best = torch.zeros_like(u), 1.0
            for _ in range(10):
                found, stats = self._inverse.apply(self._state, u, self._at, x)
                self._tick(0.5)
                self.negative = self.negative or stats.notes["negative_curvature"] or None
                residual = float((u - self._at.hvp(found)).norm()) / size
                gained = residual < 0.5 * best
                if residual < best:
                    x, best = found, residual
                if best <= 1e-10 or not gained:
                    break
            if best <= tolerance(u.dtype):
                return ReferenceSolution(x, best, 0.0, best)
        return self._by_minimal_residuals(u, size)

    def damped(self, damping: float) -> ByProducts:
        """At an oracle of its own, because that is damped."""
        at = Oracle.over(self._at.objectives, calls=self._at.calls)
        at.damp(damping)
        return ByProducts(at, self._batches, self._seed, self._tick, self._steps)

    def _by_minimal_residuals(self, u: Tensor, size: float) -> ReferenceSolution:
        self.method = "minimal residuals"
        first = minimal_residuals(self._at.hvp, u, 1e-10, self._steps)
        self.largest = max(self.largest, first.largest)
        r = u - self._at.hvp(first.x)
        residual = float(r.norm()) / size
        if residual <= tolerance(u.dtype):
            return ReferenceSolution(first.x, residual, 0.0, residual)
        # At a least residual H r = 0.
        if not float(self._at.hvp(r).norm()) <= 10 * range_tolerance(u.dtype) * self.largest * float(r.norm()):
            return ReferenceSolution(None, residual, 0.0, residual)
        self.singular = True
        within = u - r
        second = minimal_residuals(self._at.hvp, within, 1e-10, self._steps)
        left = u - self._at.hvp(second.x)
        error = float((left - r).norm()) / size
        return ReferenceSolution(
            second.x if error <= tolerance(u.dtype) else None, float(left.norm()) / size, residual, error
        )
