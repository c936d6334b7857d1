"""Broyden's method on the linear system of the inner Hessian."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from typing_extensions import override

from nhgd._validation import counted, not_negative
from nhgd.errors import NonFiniteError
from nhgd.inverse._krylov.curvature import DirectionalCurvature
from nhgd.inverse._krylov.least_residual import GAIN
from nhgd.inverse.base import Iterative, SolveStats, vector_bytes
from nhgd.oracle import Oracle
from nhgd.variable import Variable


@final
@dataclass(frozen=True)
class Broyden(Iterative):
    """Broyden's good method with limited memory, projected updates and the best iterate kept.

    G approximates H^{-1}; it begins as a multiple of the identity, gamma I with gamma = |x| / |H x| at the first x.

        x = u / |u|, or the given start,  r = u - H x,  (s, y) = (x, H x)
        repeat:  G += (s - G y) t^T G / (t . G y)
                 p = G r;  y = H p;  alpha = r.y / y.y;  x += alpha p;  r -= alpha y;  (s, y) = alpha (p, y)

    t is s made orthogonal to the earlier t's in memory. With it G keeps every pair it has seen, G y = s, so that G is
    H^{-1} after D independent steps and `steps` = D gives the solution; without it (t = s, projected=False) the method
    is the classical one, which needs up to 2 D steps. Each step takes one Hessian product.

    Args:
        steps: maximum number of products, in addition to the one or two that measure the first x.
        pairs: how many pairs (s, y) are remembered; the oldest goes first.
        tol: relative residual at which to stop.
        line_search: the alpha above, which minimises |r| and costs no product; otherwise alpha = 1.
        projected: project s on the complement of the earlier ones.
        damping: added to the diagonal of H.

    >>> Broyden(steps=10).products
    12

    References: C. G. Broyden, A class of methods for solving nonlinear simultaneous equations, 1965; D. M. Gay,
    R. B. Schnabel, Solving systems of nonlinear equations by Broyden's method with projected updates, 1978 (D steps);
    D. M. Gay, Some convergence properties of Broyden's method, 1979 (2 D steps on linear systems).
    Deviations: 1. the iterate with the smallest residual is returned, not the last. 2. the first x is itself a pair.
    3. where s lies within 1e-8 of the span of the earlier t's, they are forgotten and the projection begins afresh.
    """

    name: ClassVar[str] = "broyden"
    steps_field: ClassVar[str | None] = "steps"
    steps: int = 30
    pairs: int = 30
    tol: float = 1e-8
    line_search: bool = True
    projected: bool = True
    damping: float = 0.0

    def __post_init__(self) -> None:
        counted("Broyden", steps=self.steps, pairs=self.pairs)
        not_negative("Broyden", tol=self.tol, damping=self.damping)

    @override
    def solve(self, u: Tensor, oracle: Oracle, start: Tensor | None = None) -> tuple[Tensor, SolveStats]:
        """Iterate from `start` if it is better than zero, else from the normalised u."""
        before = oracle.calls.hvps
        size = float(u.norm())
        if size == 0:
            return torch.zeros_like(u), SolveStats(0.0, 0, True, {"iterations": 0})
        x, y = self._first(oracle, u, start)
        r = u - y
        found = _Approximation(x, y, min(self.pairs, self.steps + 1), self.projected)
        found.learn(x, y)
        seen = DirectionalCurvature("Broyden", u.dtype)
        s = x
        best, least = torch.zeros_like(u), size
        sure: tuple[Tensor, float] | None = None
        taken, length = 0, float(r.norm())
        while True:
            if not math.isfinite(length):
                raise NonFiniteError(f"Broyden: the residual is {length} after {taken} steps.")
            seen.positive(s, y, taken)
            if length < least:
                best, least = x, length
            if least <= self.tol * size or taken == self.steps:
                break
            s = found.apply(r)
            y = self._product(oracle, s)
            taken += 1
            squared = float(y.dot(y))
            flat = 100 * seen.eps * seen.largest * float(s.norm())
            if (
                not squared**0.5 > flat and sure is None
            ):  # perhaps nothing is left in the range of H but rounding errors
                sure = best, least
            if squared == 0:
                break
            if self.line_search:
                alpha = float(r.dot(y)) / squared
                s, y = alpha * s, alpha * y
            x, r = x + s, r - y
            length = float(r.norm())
            found.learn(s, y)
        if sure is not None:
            least = float((u - self._product(oracle, best)).norm())
            if not least <= GAIN * sure[1]:
                best, least = sure
        notes = {"iterations": taken, "last": length / size, "negative_curvature": seen.negative}
        return best, SolveStats(least / size, oracle.calls.hvps - before, least <= self.tol * size, notes)

    def _first(self, oracle: Oracle, u: Tensor, start: Tensor | None) -> tuple[Tensor, Tensor]:
        """The first x and H x."""
        if start is not None:
            y = self._product(oracle, start)
            if float((u - y).norm()) < float(u.norm()):
                return start.clone(), y
        x = u / u.norm()
        y = self._product(oracle, x)
        if self.line_search and bool(y.any()):
            alpha = u.dot(y) / y.dot(y)
            x, y = alpha * x, alpha * y
        return x, y

    def _product(self, oracle: Oracle, x: Tensor) -> Tensor:
        found = oracle.hvp(x)
        return found.add_(x, alpha=self.damping) if self.damping else found

    @override
    def memory(self, theta: Variable) -> int:
        """Three vectors for each pair, and x, the best x, r, s, y and the update's own."""
        return vector_bytes(theta, 3 * min(self.pairs, self.steps + 1) + 8)

    @property
    def products(self) -> int | None:
        """The steps, and the first x; a given start that is worse than zero costs one more, and so does a flat
        direction, after which the residual is taken anew."""
        return self.steps + 2


class _Approximation:
    """G = gamma I + sum_i a_i b_i^T, with the directions t_i, of length 1, that its updates were made along."""

    def __init__(self, x: Tensor, y: Tensor, pairs: int, projected: bool) -> None:
        length = float(y.norm())
        self.gamma = float(x.norm()) / length if length > 0 else 1.0
        self.projected = projected
        self.learnt = 0
        self._a, self._b, self._t = (x.new_zeros(pairs, len(x)) for _ in range(3))

    @property
    def _filled(self) -> int:
        return min(self.learnt, len(self._a))

    def apply(self, z: Tensor) -> Tensor:
        """G z."""
        n = self._filled
        return self.gamma * z + self._a[:n].T @ (self._b[:n] @ z)

    def learn(self, s: Tensor, y: Tensor) -> None:
        """Update G so that G y = s."""
        slot, n = self.learnt % len(self._a), self._filled
        for rows in (self._a, self._b, self._t):
            rows[slot] = 0  # the oldest pair goes first
        t = s
        if self.projected:
            for _ in range(2):  # once more, because one projection leaves rounding errors
                t = t - self._t[:n].T @ (self._t[:n] @ t)
            if float(t.norm()) <= 1e-8 * float(s.norm()):
                self._t.zero_()
                t = s
        gy = self.apply(y)
        change = float(t.dot(gy))
        if abs(change) <= torch.finfo(s.dtype).eps * float(t.norm() * gy.norm()):
            return  # the update would not be finite: G stays
        self._b[slot] = self.gamma * t + self._b[:n].T @ (self._a[:n] @ t)  # G^T t
        self._a[slot] = (s - gy) / change
        self._t[slot] = t / t.norm()
        self.learnt += 1
