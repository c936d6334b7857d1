"""AmIGO: amortised implicit gradient optimisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from typing_extensions import override

from nhgd._validation import counted, positive
from nhgd.algorithm.base import AbstractAlgorithm
from nhgd.hypergradients.base import Hypergradient
from nhgd.hypergradients.implicit import implicit
from nhgd.inverse import QuadraticSGD
from nhgd.inverse._krylov.richardson import safe_step
from nhgd.loop.loop import Loop, StepInfo

HALVINGS = 4  # of a beta that was found here: what more it takes is said aloud


@dataclass
class AmIGOState:
    """The last x, and the step on the quadratic, once it is known."""

    adjoint: Tensor | None
    beta: float | None


@final
@dataclass(frozen=True)
class AmIGO(AbstractAlgorithm):
    """Double loop that warm-starts both theta and x: a few SGD steps on each amortise their cost.

        repeat T times:   theta <- Pi( theta - eta grad_theta l(v, theta, batch) )
        repeat K times:   x <- x - beta ( H_j x - grad_theta f ),      H_j each on a fresh batch, grad_theta f on one
        v <- Pi( v - alpha ( grad_v f - (d2_{theta,v} l)^T x ) ),      the cross derivative on a further batch

    The K steps are SGD on the quadratic 0.5 x.Hx - x.grad_theta f. T is the solver's inner_steps, eta its inner_lr and
    alpha its outer_lr.

    Args:
        K: SGD steps on the quadratic; N in its own paper.
        beta: their size. None: 1 / lambda_max from a power iteration at the first step. Should x diverge all the same,
            beta is halved and x begins at zero again.
        warm_start: x continues from the last outer step; otherwise it starts at zero.

    >>> AmIGO(K=20, beta=0.01).name
    'amigo'

    References: M. Arbel, J. Mairal, Amortized implicit differentiation for stochastic bilevel optimization, 2022,
    algorithms 1 to 3.
    Deviations: 1. beta has a default.
    """

    name: ClassVar[str] = "amigo"
    K: int = 10
    beta: float | None = None
    warm_start: bool = True

    def __post_init__(self) -> None:
        counted("AmIGO", K=self.K)
        if self.beta is not None:
            positive("AmIGO", beta=self.beta)

    @override
    def init(self, loop: Loop) -> AmIGOState:
        """x starts at zero, and approaches a solution over many outer steps."""
        loop.solve_warnings.patient = True
        loop.solve_warnings.tolerated_divergences = HALVINGS if self.beta is None else 0
        return AmIGOState(None, self.beta)

    @override
    def step(self, loop: Loop, state: AmIGOState) -> tuple[AmIGOState, StepInfo]:
        losses = [loop.inner_step() for _ in range(loop.settings.inner_steps)]
        at = loop.oracle(loop.inner_batches(self.K), loop.outer.next())
        beta = state.beta
        if beta is None:
            beta = safe_step(at, loop.problem.theta.flat(), 10)
        batch = loop.inner_batch()

        def cross(x: Tensor) -> list[Tensor]:
            return loop.oracle([batch], None).cross(x)

        start = state.adjoint if self.warm_start else None
        found = implicit(at, QuadraticSGD(steps=self.K, beta=beta), None, start, cross, None, loop.solve_warnings)
        norm = loop.move_v(found.leaves)
        notes = {"beta": beta, "poor_solve": found.stats.notes["diverged"]}
        info = StepInfo(found.value, float(torch.stack(losses).mean()), norm, notes=notes)
        if self.beta is None and _diverges(found, start):
            return AmIGOState(None, beta / 2), info
        return AmIGOState(found.adjoint, beta), info


def _diverges(found: Hypergradient, start: Tensor | None) -> bool:
    """Whether x is ten times worse than zero and still grows. It may do so slowly, over many outer steps."""
    assert found.adjoint is not None
    growing = start is None or float(found.adjoint.norm()) > float(start.norm())
    return growing and not found.stats.notes["last"] <= 10
