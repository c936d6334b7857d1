"""BSA: bilevel stochastic approximation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from typing_extensions import override

from nhgd._validation import counted, not_negative
from nhgd.algorithm.base import AbstractAlgorithm
from nhgd.loop.loop import Loop, StepInfo
from nhgd.loop.neumann_estimate import Estimator, check_series, draw, scaled


@dataclass
class BSAState:
    """theta at the start, and the scale of the series, once it is known."""

    theta: Tensor
    phi: float | None


@final
@dataclass(frozen=True)
class BSA(AbstractAlgorithm):
    """Double loop, the inner one ever longer: one random product of the Neumann series in place of its sum.

        theta <- theta_0
        repeat t_k times:   theta <- Pi( theta - beta_t grad_theta l(v, theta, batch) )
        x  = K phi (I - phi H_p) ... (I - phi H_1) grad_theta f,      p uniform on 0 .. K - 1, H_j each on a fresh batch
        v <- Pi( v - alpha_k ( grad_v f - (d2_{theta,v} l)^T x ) ),   the cross derivative on a further batch

        t_k = T (k + 1)^growth, rounded up, with T the solver's inner_steps

    The mean of x over p is phi sum_{j<K} (I - phi H)^j grad_theta f, so K sets the bias and costs (K - 1) / 2 products.
    Every inner loop begins at the same theta_0, which is why it must grow. beta_t is the solver's inner_lr, for which
    the analysis takes a decaying one (`nhgd.schedule.Strong`), and alpha_k its outer_lr.

    Args:
        K: terms of the series; b in the paper.
        phi: its scale, 1 / L in the paper. None: 1 / lambda_max from a power iteration at the first step, halved
            whenever the product grows.
        estimator: "randomised", or "sum" for the mean of x over p: K - 1 products and less noise.
        growth: of the inner loops: 1/2 for a nonconvex outer problem, 0 for a constant length.
        warm_start: theta continues from the last outer step instead.

    >>> [BSA().inner_steps(10, k) for k in (0, 1, 3)], BSA(growth=0.0).inner_steps(10, 99)
    ([10, 15, 20], 10)

    References: S. Ghadimi, M. Wang, Approximation methods for bilevel programming, 2018: the bilevel stochastic
    approximation method and its approximation of the Hessian inverse, section 3.
    Deviations: 1. K is constant, where the paper lets it grow like log k. 2. T scales the length of the inner loops;
    the paper's is T = 1. 3. phi has a default. 4. warm_start and "sum" are not in the paper.
    """

    name: ClassVar[str] = "bsa"
    K: int = 10
    phi: float | None = None
    estimator: Estimator = "randomised"
    growth: float = 0.5
    warm_start: bool = False

    def __post_init__(self) -> None:
        counted("BSA", K=self.K)
        check_series("BSA", self.K, self.phi)
        not_negative("BSA", growth=self.growth)

    def inner_steps(self, T: int, k: int) -> int:
        """t_k."""
        return math.ceil(T * math.pow(k + 1, self.growth) - 1e-9)

    @override
    def init(self, loop: Loop) -> BSAState:
        return BSAState(loop.problem.theta.flat(), self.phi)

    @override
    def step(self, loop: Loop, state: BSAState) -> tuple[BSAState, StepInfo]:
        if not self.warm_start:
            loop.problem.theta.assign(state.theta)
        count = self.inner_steps(loop.settings.inner_steps, loop.clock.k)
        losses = []
        for _ in range(count):
            losses.append(loop.inner_step())
            # Only the latest batches are kept for diagnosis: the loops grow without bound, and memory must not.
            while len(loop.recent) > loop.settings.inner_steps:
                loop.recent.popleft()
        sample = draw(loop, self.estimator, self.K - 1, hold=False)
        found, phi = scaled(loop, sample, self.phi, state.phi)
        norm = loop.move_v(found.leaves)
        notes = {"inner_steps": count, "products": sample.products, "phi": phi}
        info = StepInfo(float(found.value), float(torch.stack(losses).mean()), norm, notes=notes)
        return BSAState(state.theta, phi), info
