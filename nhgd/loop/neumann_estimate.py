"""Stochastic Neumann hypergradients: every factor of the series has a batch of its own.

With H_q the inner Hessian on the q-th of these batches, u = grad_theta f and the scale phi,

    sum:        x = phi sum_{q=0}^{Q} (I - phi H_q) ... (I - phi H_1) u
    randomised: x = T phi (I - phi H_p) ... (I - phi H_1) u,      p uniform on 0 .. T - 1
    both:       grad_v f - (d2_{theta,v} l)^T x,                  the cross derivative on a further batch

The second has the mean of the first with Q = T - 1, costs half as many products, and is noisier.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nhgd._validation import counted, positive
from nhgd.data.batch import Batch
from nhgd.errors import InverseWarning
from nhgd.inverse._krylov.richardson import safe_step
from nhgd.loop.loop import Loop

Estimator = Literal["sum", "randomised"]


@dataclass(frozen=True)
class Sample:
    """What one estimate was drawn from, so that it can be taken again at another point.

    Attributes:
        outer: the batch of the outer loss.
        cross: the inner batch of the cross derivative.
        factors: one inner batch for each factor, or how many of them to draw as they are needed, where the estimate is
            not taken again: the batches of a long series need not be held together then.
        terms: T of a randomised estimate, None for a sum.
        seed: of dropout.
    """

    outer: Batch
    cross: Batch
    factors: Sequence[Batch] | int
    terms: int | None
    seed: int

    @property
    def products(self) -> int:
        """How many factors there are."""
        return self.factors if isinstance(self.factors, int) else len(self.factors)


@dataclass(frozen=True)
class NeumannEstimate:
    """The outer loss, the hypergradient, one tensor a leaf of v, and whether the series grew instead of shrinking."""

    value: Tensor
    leaves: list[Tensor]
    grew: bool


def draw(loop: Loop, estimator: Estimator, products: int, hold: bool = True) -> Sample:
    """Draw the batches of a sum with this many products, or of a randomised estimate with the same mean.

    Without `hold` those of the factors are drawn by `estimate`, one at a time.
    """
    terms = None if estimator == "sum" else products + 1
    count = products if terms is None else int(torch.randint(terms, ()))
    outer, cross = loop.outer.next(), loop.inner_batch()
    return Sample(outer, cross, loop.inner_batches(count) if hold else count, terms, loop.seed())


def estimate(loop: Loop, sample: Sample, phi: float) -> NeumannEstimate:
    """The hypergradient at the current theta and v."""
    at = loop.oracle([sample.cross], sample.outer, sample.seed)
    outer = at.outer()
    term = outer.theta
    total = term.clone()
    factors = sample.factors
    known = len(loop.recent)
    for index in range(sample.products):
        batch = loop.inner_batch() if isinstance(factors, int) else factors[index]
        while len(loop.recent) > known:
            loop.recent.popleft()  # kept for diagnosis, where the latest will do
        # A separate point, so that its graph is freed before that of the next factor is built.
        term = term - phi * loop.oracle([batch], None, sample.seed + 2 + index).hvp(term)
        if sample.terms is None:
            total += term
    x = phi * total if sample.terms is None else sample.terms * phi * term
    # (I - phi H) never lengthens a vector when 0 <= H <= 2 / phi. Written so that nan counts as growth.
    grew = sample.products > 0 and not float(term.norm()) <= 1.001 * float(outer.theta.norm())
    leaves = [f - c for f, c in zip(outer.v, at.cross(x), strict=True)]
    return NeumannEstimate(outer.value, leaves, grew)


def scaled(
    loop: Loop, sample: Sample, given: float | None, last: float | None, power_steps: int = 10
) -> tuple[NeumannEstimate, float]:
    """The hypergradient with the scale that was given, or with one that is found, and that scale.

    A scale that is not given is 1 / lambda_max by a power iteration, on the batch of the cross derivative of the first
    step. It is kept in `last` from then on, and halved for good whenever the series grows.
    """
    phi = last if given is None else given
    if phi is None:
        at = loop.oracle([sample.cross], None, sample.seed)
        phi = safe_step(at, loop.problem.theta.flat(), power_steps)
    found = estimate(loop, sample, phi)
    for _ in range(8):
        if given is not None or not found.grew:
            break
        phi /= 2
        found = estimate(loop, sample, phi)
    if found.grew:
        warnings.warn(
            f"The Neumann series grows with phi = {phi:.3g}: it is above 2 / lambda_max of the inner Hessian, or the Hessian"
            " is not positive definite. Lower phi, or add l2.",
            InverseWarning,
            stacklevel=4,
        )
    return found, phi


def check_series(owner: str, K: int, phi: float | None) -> None:
    """Refuse settings that describe no Neumann series."""
    counted(owner, K=K)
    if phi is not None:
        positive(owner, phi=phi)
