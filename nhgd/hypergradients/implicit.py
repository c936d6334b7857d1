"""The implicit formula, once."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import torch
from torch import Tensor
from typing_extensions import override

from nhgd import _tape as tape
from nhgd.data.batch import Batch
from nhgd.errors import InverseWarning, percent
from nhgd.hypergradients.base import AbstractHypergradient, Hypergradient
from nhgd.inverse._learned.learning import learn
from nhgd.inverse.base import POOR, AbstractInverse, SolveStats
from nhgd.inverse.refined import Refined
from nhgd.objective import OracleCalls
from nhgd.oracle import Oracle, OuterGradient
from nhgd.problem import Bilevel
from nhgd.variable import products

VANISHED = 1e-10  # of the squared outer gradient: below it the samples' squared gradients count as vanished
CUT = 10.0  # of x: how long the part of it may be that was left out as rounding error
LONG = 10.0  # the residual from which on the x of a learnt inverse is called too long


class SolveWarnings:
    """Warnings about the solves of a run, each kind given once.

    Attributes:
        patient: whether a large residual is acceptable, because x continues from one outer step to the next.
        tolerated_divergences: how many more solves may diverge without a warning, because the method then lowers its
            step.
    """

    def __init__(self) -> None:
        self.solve_warned = False
        self.gradient_warned = False
        self.patient = False
        self.tolerated_divergences = 0

    def about(self, stats: SolveStats) -> None:
        """Warn about a poor solve, at most once."""
        unsound = stats.notes.get("negative_curvature") or stats.notes.get("diverged") or stats.notes.get("outside")
        if stats.trouble is None or self.solve_warned or (self.patient and not unsound):
            return
        if stats.notes.get("diverged") and self.tolerated_divergences:
            self.tolerated_divergences -= 1
            return
        self.solve_warned = True
        _warn(
            f"{stats.trouble} This warning is given once a run; poor_solves in its stats counts the affected outer"
            " steps."
        )

    def warn(self, message: str | None) -> None:
        """Warn about the hypergradients of a run, at most once."""
        if message is not None and not self.gradient_warned:
            self.gradient_warned = True
            _warn(f"{message} This warning is given once a run.")


def implicit(
    at: Oracle,
    inverse: AbstractInverse,
    state: Any,
    start: Tensor | None = None,
    cross: Callable[[Tensor], list[Tensor]] | None = None,
    outer: OuterGradient | None = None,
    solve_warnings: SolveWarnings | None = None,
    adjust: Callable[[Tensor, Callable[[Tensor], Tensor] | None], Tensor] | None = None,
    solver: Callable[[Tensor], Tensor] | None = None,
) -> Hypergradient:
    """grad Phi(v) = grad_v f - (d2_{theta,v} l)^T x with x = H^{-1} grad_theta f.

    Args:
        at: the point and its oracles.
        inverse: computes x, from `state` and optionally from `start`.
        cross: the transposed cross derivative times x; default: at the point itself.
        outer: the outer gradient, if already known.
        solve_warnings: those of the run; without a run, a poor solve causes a warning at once.
        adjust: a correction of x before it is used; also given what solves for another u, if the inverse has it ready.
        solver: u -> x by that inverse, if it was factorised before.
    """
    outer = at.outer() if outer is None else outer
    if solver is None:
        x, stats = inverse.apply(state, outer.theta, at, start)
    else:
        x, stats = solver(outer.theta), SolveStats(None, hvps=0, converged=True, again=solver)
    x = x if adjust is None else adjust(x, stats.again)
    stats = replace(stats, again=None)  # whose factors would be held for as long as the statistics
    # A number is asked for only once all work is under way: until then a device need not be waited for.
    leaves = [f - c for f, c in zip(outer.v, (cross or at.cross)(x), strict=True)]
    if stats.residual is None and inverse.learner is not None:
        if tape.tape() is None:
            if _vanished(len(x), *products(outer.theta, x).reshape(4).tolist()):
                stats = _with_residual(at, stats, outer.theta, x)
        else:
            tape.defer(_leave_if_vanished, len(x), *map(tape.reading, products(outer.theta, x).reshape(4)))

    def looked_at(stats: SolveStats) -> SolveStats:
        stats = replace(stats, trouble=_trouble(inverse, stats, outer.theta.dtype))
        if solve_warnings is not None:
            solve_warnings.about(stats)
        elif stats.trouble is not None:
            _warn(stats.trouble)
        return stats

    return Hypergradient(at.problem.v.like(leaves), tape.reading(outer.value), tape.defer(looked_at, stats), leaves, x)


def measured(at: Oracle, inverse: AbstractInverse, found: Hypergradient) -> Hypergradient:
    """Statistics with the residual, by one extra uncounted product if the inverse does not know it.

    A method that does not know its residual promises none, so a warning is given only if it learnt next to nothing.
    """
    if found.stats.residual is not None or found.adjoint is None:
        return found
    u = at.outer().theta
    stats = _with_residual(at, found.stats, u, found.adjoint)
    if stats.trouble is None and inverse.learner is not None:
        stats = replace(stats, trouble=_trouble(inverse, stats, u.dtype))
        if stats.trouble is not None:
            _warn(stats.trouble)
    return replace(found, stats=stats)


def _with_residual(at: Oracle, stats: SolveStats, u: Tensor, x: Tensor) -> SolveStats:
    residual = float((at.hvp(x) - u).norm() / u.norm().clamp_min(torch.finfo(u.dtype).tiny))
    return replace(stats, residual=residual, converged=stats.converged and residual <= POOR)


def _vanished(size: int, uu: float, ux: float, xu: float, xx: float) -> bool:
    """Whether a learnt inverse may have learnt from gradients that vanish, so that one product is well spent.

    The mean squared gradient of a sample is the trace of the Fisher matrix. D times the curvature that the inverse
    found along x stands for it, because the default damping is a share of the mean diagonal; beside it stands the
    squared gradient of the outer loss. A large outer loss looks the same, which the product distinguishes.
    """
    return bool(xx > 0 and size * ux / xx < VANISHED * uu)


def _leave_if_vanished(size: int, *lengths: float) -> None:
    if _vanished(size, *lengths):
        raise tape.NotRepeatable(
            "the gradients of the samples may have vanished, which only a Hessian product can show"
        )


def _trouble(inverse: AbstractInverse, stats: SolveStats, dtype: torch.dtype) -> str | None:
    """What is wrong with the x of a solve, and the remedy; None if nothing is."""
    notes, residual = stats.notes, stats.residual
    outside = notes.get("outside", 0.0)
    matrix = (
        "generalised Gauss-Newton matrix"
        if isinstance(inverse, Refined) and inverse.matrix == "ggn"
        else "inner Hessian"
    )
    left = "" if residual is None else f" (residual {residual:.2g})"
    if notes.get("negative_curvature"):
        return (
            f"The {matrix} is not positive definite at this point: {inverse.name} met negative curvature{left}, so"
            " theta is not an inner minimum and the implicit formula does not hold. Train the inner problem further,"
            " add l2, or set damping."
        )
    if notes.get("diverged"):
        return (
            f"{inverse.name} diverged: its residual grew to {residual:.2g}. Its step is too large for the curvature of"
            " this inner problem, or the Hessian is not positive definite. Lower the step, or use cg."
        )
    if outside > torch.finfo(dtype).eps ** 0.5 or notes.get("cut", 0.0) > CUT:
        digits = int(-math.log10(torch.finfo(dtype).eps))
        return (
            f"The {matrix} is singular at this point, to the {digits} digits of {str(dtype).removeprefix('torch.')},"
            f" and {percent(outside)} % of the outer gradient lies outside its range: the outer loss depends on"
            f" directions that the inner problem does not determine, and {inverse.name} ignores them{left}. Add l2,"
            " set damping, or let the products run over more data."
        )
    # A residual that is not a number is an error of its own, elsewhere.
    if residual is not None and residual > LONG and inverse.learner is not None and not stats.hvps:
        return (
            f"{inverse.name} made x far too long (residual {residual:.2g}): it learnt far less curvature than the"
            " inner Hessian has. If a model fits its data, the gradients of the samples vanish, and so does the"
            " empirical Fisher matrix. Add l2, set damping, use fisher='exact', or refine it by Hessian products."
        )
    if residual is not None and residual > POOR and stats.hvps:
        more = "" if inverse.steps_field is None else f" Give it more {inverse.steps_field};"
        other = "" if inverse.name == "refined" else "a preconditioner (refined), "
        return (
            f"{inverse.name} ended with a relative residual of {residual:.2g}: its x does not solve H x = u.{more or ' Then'} use"
            f" {other}l2 or damping where the {matrix} is close to singular, or more data in the products."
        )
    return None


def _warn(trouble: str) -> None:
    """Warn at the line that called the library."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == "nhgd":
        level, frame = level + 1, frame.f_back
    warnings.warn(trouble, InverseWarning, stacklevel=level)


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

    @override
    def estimate(
        self,
        problem: Bilevel,
        inner_batches: Sequence[Batch],
        outer_batch: Batch,
        inverse: AbstractInverse,
        seed: int = 0,
        calls: OracleCalls | None = None,
    ) -> Hypergradient:
        calls = OracleCalls() if calls is None else calls
        state = learn(inverse, problem, inner_batches, seed, calls)
        at = Oracle(problem, inner_batches, outer_batch, seed, calls)
        found = implicit(at, inverse, state)
        return measured(at, inverse, found) if self.measure else found
