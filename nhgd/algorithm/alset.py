"""ALSET: alternating stochastic gradient descent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from typing_extensions import override

from nhgd._validation import counted
from nhgd.algorithm.base import AbstractAlgorithm
from nhgd.loop.loop import Loop, StepInfo
from nhgd.loop.neumann_estimate import Estimator, check_series, draw, scaled


@dataclass
class ALSETState:
    """The scale of the series, once it is known."""

    phi: float | None


@final
@dataclass(frozen=True)
class ALSET(AbstractAlgorithm):
    """Double loop that alternates: T inner steps from the last theta, then one outer step, all on small batches.

        repeat T times:   theta <- Pi( theta - beta_k grad_theta l(v, theta, batch) )
        x  = K phi (I - phi H_p) ... (I - phi H_1) grad_theta f,      p uniform on 0 .. K - 1, H_j each on a fresh batch
        v <- Pi( v - alpha_k ( grad_v f - (d2_{theta,v} l)^T x ) ),   the cross derivative on a further batch

    The mean of x over p is phi sum_{j<K} (I - phi H)^j grad_theta f. T is the solver's inner_steps and may be 1; beta_k
    is its inner_lr and alpha_k its outer_lr, both of the order of 1 / sqrt(outer steps) in the analysis. It differs
    from BSA by the warm start, with which a constant T suffices.

    Args:
        K: terms of the series; N in the paper.
        phi: its scale, 1 / l_{g,1} in the paper. None: 1 / lambda_max from a power iteration at the first step, halved
            whenever the product grows.
        estimator: "randomised", or "sum" for the mean of x over p: K - 1 products instead of (K - 1) / 2 and less
            noise.

    >>> ALSET(K=5).name
    'alset'

    References: T. Chen, Y. Sun, W. Yin, Closing the gap: tighter analysis of alternating stochastic gradient methods
    for bilevel problems, 2021, algorithm 1.
    Deviations: 1. phi has a default. 2. "sum" is not in the paper.
    """

    name: ClassVar[str] = "alset"
    K: int = 10
    phi: float | None = None
    estimator: Estimator = "randomised"

    def __post_init__(self) -> None:
        counted("ALSET", K=self.K)
        check_series("ALSET", self.K, self.phi)

    @override
    def init(self, loop: Loop) -> ALSETState:
        """The scale is found at the first step, unless it was given."""
        return ALSETState(self.phi)

    @override
    def step(self, loop: Loop, state: ALSETState) -> tuple[ALSETState, StepInfo]:
        losses = [loop.inner_step() for _ in range(loop.settings.inner_steps)]
        sample = draw(loop, self.estimator, self.K - 1, hold=False)
        found, phi = scaled(loop, sample, self.phi, state.phi)
        norm = loop.move_v(found.leaves)
        notes = {"products": sample.products, "phi": phi}
        info = StepInfo(float(found.value), float(torch.stack(losses).mean()), norm, notes=notes)
        return ALSETState(phi), info
