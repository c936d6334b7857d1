"""BFGS on the linear system of the inner Hessian."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from typing_extensions import override

from nhgd._validation import counted, not_negative
from nhgd.inverse._krylov.curvature import DirectionalCurvature
from nhgd.inverse._krylov.least_residual import LeastResidual
from nhgd.inverse._krylov.pcg import first_iterate
from nhgd.inverse.base import Iterative, SolveStats, vector_bytes
from nhgd.oracle import Oracle
from nhgd.variable import Variable


@final
@dataclass(frozen=True)
class BFGS(Iterative):
    """Limited-memory BFGS: H^{-1} is approximated by what earlier directions have shown of it.

        r = u - H x,  p = r
        repeat:  y = H p;  alpha = r.p / p.y, or 1;  s = alpha p;  x += s;  r -= alpha y
                 G = G_0 updated by the last `pairs` of (s, alpha y),  G_0 = (s.y / y.y) I of the newest;  p = G r

        an update:  G <- (I - s y^T / s.y) G (I - y s^T / s.y) + s s^T / s.y

    Each step takes one Hessian product. With the alpha above, which minimises the quadratic along p, the iterates are
    those of conjugate gradients, whatever the memory, but for rounding, against which the pairs help. With alpha = 1 it
    is the recursion that quasi-Newton methods for bilevel problems run; its first step takes the alpha above, because
    nothing is known before it. G stays positive definite: a pair without positive curvature is left out, and ends the
    iteration.

    Args:
        steps: maximum number of products.
        pairs: how many pairs are remembered; the oldest goes first.
        tol: relative residual at which to stop.
        line_search: the alpha above; otherwise 1, after the first step.
        damping: added to the diagonal of H.

    >>> BFGS(steps=10).products
    10

    References: J. Nocedal, Updating quasi-Newton matrices with limited storage, 1980 (two loops); Z. Ramzi, F. Mannel,
    S. Bai, J.-L. Starck, P. Ciuciu, T. Moreau, SHINE: sharing the inverse estimate from the forward pass for bi-level
    optimization and implicit models, 2022; S. Fang, Y.-J. Liu, W. Yao, C. Yu, J. Zhang, qNBO: quasi-Newton meets
    bilevel optimization, 2025. Deviations: 1. the pairs come from Hessian products on the batches of the solve, as in
    qNBO's second loop, and not from differences of stochastic gradients between inner steps, as in SHINE: those differ
    by their batches too. 2. the residual is watched, and the best iterate returned, as in `CG`.
    """

    name: ClassVar[str] = "bfgs"
    steps_field: ClassVar[str | None] = "steps"
    steps: int = 30
    pairs: int = 20
    tol: float = 1e-8
    line_search: bool = True
    damping: float = 0.0

    def __post_init__(self) -> None:
        counted("BFGS", steps=self.steps, pairs=self.pairs)
        not_negative("BFGS", tol=self.tol, damping=self.damping)

    @override
    def solve(self, u: Tensor, oracle: Oracle, start: Tensor | None = None) -> tuple[Tensor, SolveStats]:
        """Iterate from `start` if it is better than zero, else from zero."""
        before = oracle.calls.hvps
        size = max(float(u.norm()), torch.finfo(u.dtype).tiny)
        x, r = first_iterate(u, lambda x: self._product(oracle, x), start)
        best, seen = LeastResidual(x, r), DirectionalCurvature("BFGS", u.dtype)
        approximation = Pairs(self.pairs)
        length, taken = best.length, 0
        while length > self.tol * size and taken < self.steps:
            p = approximation.apply(r)
            hp = self._product(oracle, p)
            taken += 1
            going = seen.positive(p, hp, taken)
            if seen.vanished:
                best.suspect_rounding()
            if not going:
                break
            if self.line_search or taken == 1:
                alpha = float(r.dot(p)) / seen.last
                p, hp = alpha * p, alpha * hp
            x.add_(p)
            r.sub_(hp)
            length = float(r.norm())
            if best.lost(length):
                break
            best.note(x, r, length)
            approximation.learn(p, hp)
        found, length = (best.x, best.length) if seen.negative else best.unless_sound(x, length, size)
        if seen.vanished and not seen.negative:
            found, length, real = best.confirmed(found, lambda x: u - self._product(oracle, x))
            seen.vanished = not real
        notes = {"iterations": taken, **seen.notes(found, length, size)}
        residual = length / size
        return found, SolveStats(residual, oracle.calls.hvps - before, residual <= self.tol, notes)

    def _product(self, oracle: Oracle, x: Tensor) -> Tensor:
        found = oracle.hvp(x)
        return found.add_(x, alpha=self.damping) if self.damping else found

    @override
    def memory(self, theta: Variable) -> int:
        """Two vectors for each pair, and x, the best x, both residuals, p, Hp and the loops' own."""
        return vector_bytes(theta, 2 * min(self.pairs, self.steps) + 8)

    @property
    def products(self) -> int | None:
        """At most `steps`, one more to try a given start, and one if the curvature is of rounding size."""
        return self.steps


class Pairs:
    """G by its last pairs (s, y), y = H s."""

    def __init__(self, most: int) -> None:
        self._kept: deque[tuple[Tensor, Tensor, float]] = deque(maxlen=most)

    def learn(self, s: Tensor, y: Tensor) -> None:
        """One more pair; it is left out if rounding has taken its curvature."""
        curvature = float(s.dot(y))
        if curvature > 0:
            self._kept.append((s, y, curvature))

    def apply(self, z: Tensor) -> Tensor:
        """G z, by two loops over the pairs; z itself where none is known."""
        if not self._kept:
            return z.clone()
        q, parts = z.clone(), []
        for s, y, curvature in reversed(self._kept):
            parts.append(float(s.dot(q)) / curvature)
            q.sub_(y, alpha=parts[-1])
        _, newest, curvature = self._kept[-1]
        q.mul_(curvature / float(newest.dot(newest)))
        for (s, y, curvature), part in zip(self._kept, reversed(parts), strict=True):
            q.add_(s, alpha=part - float(y.dot(q)) / curvature)
        return q
