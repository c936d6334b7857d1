"""The implicit formula, once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from nhgd.data.batch import Batch
from nhgd.errors import InverseWarning
from nhgd.hypergradients.base import AbstractHypergradient, Hypergradient
from nhgd.inverse.base import AbstractInverse
from nhgd.inverse.learning import learn
from nhgd.point import OracleCalls, OuterGradient, Point
from nhgd.problem import Bilevel


def implicit(
    at: Point,
    inverse: AbstractInverse,
    state: Any,
    start: Tensor | None = None,
    cross: Callable[[Tensor], list[Tensor]] | None = None,
    outer: OuterGradient | None = None,
) -> Hypergradient:
    """grad Phi(v) = grad_v f - (d2_{theta,v} l)^T x with x = H^{-1} grad_theta f.

    Args:
        at: the point and its oracles.
        inverse: how x is found, from `state` and perhaps from `start`.
        cross: the transposed cross derivative times x; default: at the point itself.
        outer: the outer gradient, where it is known already.
    """
    outer = at.outer() if outer is None else outer
    x, stats = inverse.solve(state, outer.theta, at, start)
    if stats.notes.get("negative_curvature"):
        left = "" if stats.residual is None else f" (residual {stats.residual:.2g})"
        warnings.warn(
            f"The inner Hessian is not positive definite at this point, so {inverse.name} stopped at its last safe"
            f" iterate{left}. Train the inner problem further, add l2, or set damping.",
            InverseWarning,
            stacklevel=3,
        )
    elif stats.notes.get("diverged"):
        warnings.warn(
            f"{inverse.name} diverged: its residual grew to {stats.residual:.2g}. Its step is too large for the curvature of"
            " this inner problem, or the Hessian is not positive definite. Lower the step, or use cg.",
            InverseWarning,
            stacklevel=3,
        )
    leaves = [f - c for f, c in zip(outer.v, (cross or at.cross)(x), strict=True)]
    return Hypergradient(at.problem.v.like(leaves), float(outer.value), stats, leaves, x)


@final
@dataclass(frozen=True)
class Implicit(AbstractHypergradient):
    """The implicit function theorem: one linear solve, one cross product.

        grad Phi(v) = grad_v f - (d2_{theta,v} l)^T H^{-1} grad_theta f

    It is exact where theta minimises the inner objective. No D x D array is formed and no graph of the inner loop is
    kept: the cross product is one derivative of (grad_theta l) . x in v.

    Args:
        measure: spend one extra product on the residual when the inverse does not know it.

    >>> Implicit().name
    'implicit'
    """

    name: ClassVar[str] = "implicit"
    measure: bool = True

    def estimate(
        self,
        problem: Bilevel,
        inner_batches: Sequence[Batch],
        outer_batch: Batch,
        inverse: AbstractInverse,
        seed: int = 0,
        calls: OracleCalls | None = None,
    ) -> Hypergradient:
        """Learn the inverse from the batches if it learns, then apply the formula."""
        calls = OracleCalls() if calls is None else calls
        state = learn(inverse, problem, inner_batches, seed, calls)
        at = Point(problem, inner_batches, outer_batch, seed, calls)
        found = implicit(at, inverse, state)
        if not self.measure or found.stats.residual is not None or found.adjoint is None:
            return found
        # The residual is for the reader's eyes and is not counted as work of the inverse.
        u = at.outer().theta
        size = u.norm().clamp_min(torch.finfo(u.dtype).tiny)
        residual = float((at.hvp(found.adjoint) - u).norm() / size)
        return replace(found, stats=replace(found.stats, residual=residual))
