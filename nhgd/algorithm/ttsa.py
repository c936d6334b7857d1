"""TTSA: two time scales."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, final

from typing_extensions import override

from nhgd._validation import counted
from nhgd.algorithm.base import AbstractAlgorithm
from nhgd.loop.loop import Loop, StepInfo
from nhgd.loop.neumann_estimate import Estimator, check_series, draw, scaled

Growth = Literal["sqrt", "log", "none"]


@dataclass
class TTSAState:
    """The scale of the series, once it is known."""

    phi: float | None


@final
@dataclass(frozen=True)
class TTSA(AbstractAlgorithm):
    """Single loop on two time scales: an inner step, then an outer step along a truncated Neumann series.

        theta <- Pi( theta - beta_k grad_theta l(v, theta, batch) )
        x      = phi sum_{q=0}^{Q_k} (I - phi H_q) ... (I - phi H_1) grad_theta f,      H_q each on a fresh batch
        v     <- Pi( v - alpha_k ( grad_v f - (d2_{theta,v} l)^T x ) ),                 at the new theta

        Q_k = K sqrt(1 + epoch),  epoch = k / epoch_steps,      both rounded down

    With estimator="randomised" the sum is replaced by the paper's own estimate, T phi (I - phi H_p) ... (I - phi H_1)
    grad_theta f with T = Q_k + 1 and p uniform on 0 .. T - 1: the same mean, half the products, more noise.

    One outer step is one such iteration: `inner_steps` is not used. beta_k is the solver's inner_lr and alpha_k its
    outer_lr; the two time scales of the paper are inner_lr=Power(lr, 2/5) and outer_lr=Power(lr, 3/5), from
    `nhgd.schedule`. With growth="sqrt" the cost of a step grows without bound; set epoch_steps to slow it down.

    Args:
        K: products of the series at the start.
        phi: its scale, between 0 and 2 / lambda_max(H). None: 1 / lambda_max from a power iteration at the first step,
            halved whenever the series grows.
        estimator: "sum", or "randomised" for the original.
        growth: of the number of products: "sqrt" as above, "log" for K (1 + log(1 + epoch)), "none".
        epoch_steps: outer steps in an epoch.

    >>> TTSA(K=10).products(3), TTSA(growth="none").products(99), TTSA(epoch_steps=100).products(99)
    (20, 10, 10)

    References: M. Hong, H.-T. Wai, Z. Wang, Z. Yang, A two-timescale stochastic algorithm framework for bilevel
    optimization: complexity analysis and application to actor-critic, 2023, algorithm 1, the estimator of its section
    2; Natural Hypergradient Descent, appendix on experiments (K sqrt(1 + epoch) terms with the scale phi).
    Deviations: 1. the default is the sum with growing length of the latter; the original, whose length grows like log
    k, is the preset "ttsa-original". 2. phi has a default. 3. an epoch is an outer step unless told otherwise: neither
    paper defines it.
    """

    name: ClassVar[str] = "ttsa"
    K: int = 10
    phi: float | None = None
    estimator: Estimator = "sum"
    growth: Growth = "sqrt"
    epoch_steps: int = 1

    def __post_init__(self) -> None:
        check_series("TTSA", self.K, self.phi)
        counted("TTSA", epoch_steps=self.epoch_steps)

    @classmethod
    @override
    def presets(cls) -> dict[str, AbstractAlgorithm]:
        """The estimator of the paper that introduced the method."""
        return {"ttsa-original": cls(estimator="randomised", growth="log")}

    def products(self, k: int) -> int:
        """Q_k, the products of a sum at outer step k."""
        epoch = k // self.epoch_steps
        factor = {"sqrt": math.sqrt(1 + epoch), "log": 1 + math.log(1 + epoch), "none": 1.0}[self.growth]
        return int(self.K * factor)

    @override
    def init(self, loop: Loop) -> TTSAState:
        """The scale is found at the first step, unless it was given."""
        return TTSAState(self.phi)

    @override
    def step(self, loop: Loop, state: TTSAState) -> tuple[TTSAState, StepInfo]:
        loss = loop.inner_step()
        sample = draw(loop, self.estimator, self.products(loop.clock.k), hold=False)
        found, phi = scaled(loop, sample, self.phi, state.phi)
        norm = loop.move_v(found.leaves)
        loop.recent.clear()  # many batches, and none of them bad
        notes = {"products": sample.products, "phi": phi}
        return TTSAState(phi), StepInfo(float(found.value), float(loss), norm, notes=notes)
