"""Stochastic gradient descent on the quadratic whose minimiser is H^{-1} u."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import cycle, islice
from typing import ClassVar, final

import torch
from torch import Tensor
from typing_extensions import override

from nhgd._validation import counted, not_negative, positive
from nhgd.inverse._krylov.richardson import richardson, safe_step
from nhgd.inverse.base import POOR, Iterative, SolveStats, vector_bytes
from nhgd.oracle import Oracle
from nhgd.variable import Variable


@final
@dataclass(frozen=True)
class QuadraticSGD(Iterative):
    """SGD on 0.5 x.Hx - x.u, each step on the next of the point's inner batches.

        x <- x - beta (H_j x - u),      H_j the Hessian on batch j = 0, 1, ..., again from 0 when they are used up

    It begins at `start`, whatever its residual, or at zero. With one batch it is gradient descent, with the error
    (I - beta H)^steps of the start's. It has no stopping test: a step knows the residual on its own batch only. The
    residual it reports is the mean of those over the last walk through the batches, which lags a little behind x; where
    the steps are fewer than the batches it reports none.

    Args:
        steps: products.
        beta: the step. None: 1 / lambda_max of the mean Hessian from a power iteration.
        power_steps: products of that power iteration.
        damping: added to the diagonal of H.

    >>> QuadraticSGD(steps=20, beta=0.1).products
    20

    References: M. Arbel, J. Mairal, Amortized implicit differentiation for stochastic bilevel optimization, 2022,
    algorithm 3; R. Grazzi, L. Franceschi, M. Pontil, S. Salzo, On the iteration complexity of hypergradient
    computation, 2020.
    Deviations: 1. beta has a default.
    """

    name: ClassVar[str] = "sgd"
    steps_field: ClassVar[str | None] = "steps"
    steps: int = 40
    beta: float | None = None
    power_steps: int = 10
    damping: float = 0.0

    def __post_init__(self) -> None:
        counted("QuadraticSGD", steps=self.steps, power_steps=self.power_steps)
        not_negative("QuadraticSGD", damping=self.damping)
        if self.beta is not None:
            positive("QuadraticSGD", beta=self.beta)

    @override
    def solve(self, u: Tensor, oracle: Oracle, start: Tensor | None = None) -> tuple[Tensor, SolveStats]:
        """Take all steps from `start`, or from zero."""
        before = oracle.calls.hvps
        beta = safe_step(oracle, u, self.power_steps, self.damping) if self.beta is None else self.beta
        walk = len(oracle.inner_batches)
        batches = cycle(range(walk))

        def residual_of(x: Tensor) -> Tensor:
            return u - oracle.hvp_on(next(batches), x) - self.damping * x

        x = torch.zeros_like(u) if start is None else start.clone()
        first = r = residual_of(x)
        mean = torch.zeros_like(u) if walk > 1 else u  # of the residuals over the last walk
        iterates = richardson(x, first, beta, lambda x, r: residual_of(x))
        for step, (iterate, r) in enumerate(islice(iterates, self.steps)):
            x = iterate
            if walk > 1 and step >= self.steps - walk:
                mean.add_(r, alpha=1 / walk)
        x = x + beta * r
        size = max(float(u.norm()), torch.finfo(u.dtype).tiny)
        last = float(r.norm()) / size
        diverged = not (math.isfinite(last) and last <= 10 * max(float(first.norm()) / size, 1.0))
        residual = None
        if diverged or walk == 1:
            residual = last
        elif self.steps >= walk:
            residual = float(mean.norm()) / size
        notes = {"beta": beta, "last": last, "diverged": diverged}
        converged = not diverged and (residual is None or residual <= POOR)
        return x, SolveStats(residual, oracle.calls.hvps - before, converged, notes)

    @override
    def memory(self, theta: Variable) -> int:
        """x, the residual, the first one, their mean, a product."""
        return vector_bytes(theta, 5)

    @property
    def products(self) -> int | None:
        """The steps and the power iteration, whose products run over all batches."""
        return self.steps + (self.power_steps if self.beta is None else 0)
