"""HOAG: an inner loop and a linear solve to a tolerance that falls, and a step size that adapts."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar, Literal, final

import torch
from torch import Tensor
from typing_extensions import override

from nhgd._validation import counted
from nhgd.algorithm.aid import check_batches
from nhgd.algorithm.base import AbstractAlgorithm
from nhgd.algorithm.vrbo import outer_mean
from nhgd.errors import InputError
from nhgd.inverse import CG
from nhgd.loop.loop import Loop, StepInfo

GROW, SHRINK = 1 / 0.95, 0.5  # of the step size
LEAST = 1e-12  # of the tolerance


@dataclass
class HOAGState:
    """What the next outer step is judged by.

    Attributes:
        tolerance: eps of the next outer step.
        factor: of the solver's outer step size.
        gradient, outer: norms of the first inner and outer gradients, in whose units eps is.
        adjoint: the last x, (D,).
        value: f at the last point.
        moved: how far v went from there.
        before: eps there.
    """

    tolerance: float
    factor: float = 1.0
    gradient: float | None = None
    outer: float | None = None
    adjoint: Tensor | None = None
    value: float = inf
    moved: float = 0.0
    before: float = 0.0


@final
@dataclass(frozen=True)
class HOAG(AbstractAlgorithm):
    """Double loop to a tolerance that falls from one outer step to the next, with a step size that adapts to f.

        repeat: theta <- Pi( theta - eta grad_theta l ), inner_steps times
                until |grad_theta l| <= eps_k |grad_theta l|_first
        x with |H x - grad_theta f| <= eps_k |grad_theta f|_first                 by conjugate gradients from the last x
        with s = |v_k - v_{k-1}|:
            f_k - eps_k <= f_{k-1} + eps_{k-1} (1 + s) - s^2 / (2 alpha c):   c <- c / 0.95
            f_k > f_{k-1} otherwise:                                          c <- c / 2
        v <- Pi( v - alpha c ( grad_v f - (d2_{theta,v} l)^T x ) ),               c = 1 at first
        eps_{k+1} = eps_0 / (k + 1)^2, eps_0 / (k + 1)^3 or 0.9 eps_k

    So early steps, far from the solution, are cheap, and late ones exact: with a summable sequence of tolerances the
    iterates converge to a stationary point. f, the hypergradient and the tests are over `batches`, all data by default:
    with fewer, the inner gradient of a batch need not fall below any tolerance, and what the step size follows is
    noise.

    Args:
        tolerance: eps_0.
        decrease: how eps falls: "quadratic", "cubic" or "exponential".
        rounds: the most repetitions of the inner loop.
        products: the most of the solve.
        batches: inner and outer batches that everything but the inner steps is over, or "all" for one pass over the
            data.
        adaptive: whether the step size adapts; otherwise it is alpha, the solver's outer_lr, throughout. None: if steps
            on v are plain gradient steps, because another optimiser would scale them again.

    >>> HOAG(decrease="quadratic").name
    'hoag'

    References: F. Pedregosa, Hyperparameter optimization with approximate gradient, 2016, algorithm 1, and its section
    on the step size.
    Deviations: 1. inner steps are those of the solver's inner optimiser, tested after every `inner_steps` of them. 2.
    the first step size is the solver's outer_lr, in place of the inverse of the first hypergradient's norm. 3. the
    decrease of f is held against the step that made it, where the author's program takes the one that follows.
    """

    name: ClassVar[str] = "hoag"
    tolerance: float = 0.01
    decrease: Literal["quadratic", "cubic", "exponential"] = "exponential"
    rounds: int = 100
    products: int = 200
    batches: int | str = "all"
    adaptive: bool | None = None

    def __post_init__(self) -> None:
        counted("HOAG", rounds=self.rounds, products=self.products)
        check_batches("HOAG", self.batches)
        if not 0 < self.tolerance < 1:
            raise InputError(f"HOAG: tolerance must lie between 0 and 1, got {self.tolerance}.")

    @override
    def init(self, loop: Loop) -> HOAGState:
        """Refuse an outer optimiser that would undo the step size."""
        if self.adaptive and not loop.v.is_plain:
            raise InputError(
                "HOAG adapts the size of plain gradient steps on v, which another outer optimiser would scale again. Omit"
                " outer_optimizer, or adaptive=True."
            )
        return HOAGState(self.tolerance)

    @override
    def step(self, loop: Loop, state: HOAGState) -> tuple[HOAGState, StepInfo]:
        v, eps = loop.problem.v, state.tolerance
        batches = loop.inner_batches(self.batches)
        first = float(loop.oracle(batches).gradient().norm()) if state.gradient is None else state.gradient
        rounds = 0
        while rounds < self.rounds:
            rounds += 1
            losses = [loop.inner_step() for _ in range(loop.settings.inner_steps)]
            length = float(loop.oracle(batches).gradient().norm())
            if length <= eps * first:
                break
        value, in_theta, in_v = outer_mean(loop, self.batches)
        u = float(in_theta.norm())
        scale = u if state.outer is None else state.outer
        at = loop.oracle(batches)
        relative = min(eps * scale / u, 1.0) if u > 0 else 1.0
        x, stats = CG(self.products, relative).solve(in_theta, at, state.adjoint)
        found = in_v - v.flatten(at.cross(x))
        rate = loop.v.rate(loop.clock)
        factor = self._factor(state, float(value), eps, rate) if self._adapts(loop) else 1.0
        here = v.flat()
        norm = loop.move_v(v.unflatten(factor * found))
        moved = float((v.flat() - here).norm())
        loop.recent.clear()  # its batches may hold shuffled copies of the data
        notes = {
            "tolerance": eps,
            "rounds": rounds,
            "inner_gradient": length,
            "residual": stats.residual,
            "factor": factor,
        }
        after = HOAGState(self._next(eps, loop.clock.k), factor, first, scale, x, float(value), moved, eps)
        return after, StepInfo(float(value), float(torch.stack(losses).mean()), norm / max(factor, LEAST), 0, notes)

    def _adapts(self, loop: Loop) -> bool:
        return loop.v.is_plain if self.adaptive is None else self.adaptive

    def _factor(self, state: HOAGState, value: float, eps: float, rate: float) -> float:
        """c: larger if f fell by what a step of this size promises, smaller if it rose."""
        s = state.moved
        promised = s**2 / (2 * rate * state.factor)
        if value - eps <= state.value + state.before * (1 + s) - promised:
            return state.factor * GROW if state.value < inf else state.factor
        return state.factor * SHRINK if value > state.value else state.factor

    def _next(self, eps: float, k: int) -> float:
        """The tolerance of the outer step after number k, counted from 0."""
        if self.decrease == "exponential":
            return max(0.9 * eps, LEAST)
        return max(self.tolerance / (k + 1) ** (2 if self.decrease == "quadratic" else 3), LEAST)
