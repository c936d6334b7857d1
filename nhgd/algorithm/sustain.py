"""SUSTAIN: momentum on both levels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from typing_extensions import override

from nhgd.algorithm.base import AbstractAlgorithm
from nhgd.loop.loop import Loop, StepInfo
from nhgd.loop.neumann_estimate import Estimator, check_series
from nhgd.loop.storm import Trail, both_levels, check_momentum, set_out
from nhgd.schedule import Schedule


@final
@dataclass(frozen=True)
class SUSTAIN(AbstractAlgorithm):
    """Single loop, one time scale: recursive momentum on both levels, a randomised Neumann series in between.

        g(theta, v) = grad_theta l(v, theta, batch)
        F(theta, v) = grad_v f - (d2_{theta,v} l)^T x,      x = K phi (I - phi H_p) ... (I - phi H_1) grad_theta f
        h_theta <- g(theta, v) + (1 - eta_theta) ( h_theta - g(theta_last, v_last) )
        h_v     <- F(theta, v) + (1 - eta_v) ( h_v - F(theta_last, v_last) )
        theta <- Pi( theta - beta h_theta ),    v <- Pi( v - alpha h_v )

    p is uniform on 0 .. K - 1 and every H_q, the cross derivative, f and g have fresh batches of their own, the same
    ones at both points. The first step has no momentum. One outer step is one such iteration: `inner_steps` is not
    used. beta is the solver's inner_lr and alpha its outer_lr; the paper takes both as Power(lr, 1/3), from
    `nhgd.schedule`, and eta proportional to alpha^2, so Power(c, 2/3).

    Args:
        K: terms of the series; p, the products at each of both points, is (K - 1) / 2 on average.
        phi: the scale of the series, 1 / L in the paper. None: 1 / lambda_max from a power iteration at the first step,
            halved whenever the series grows.
        inner_momentum: eta_theta, above 0 and at most 1, a number or a schedule. 1: no momentum.
        outer_momentum: eta_v, likewise.
        estimator: "randomised", or "sum" for the whole series: the same mean, less noise, twice the products.

    >>> SUSTAIN(K=5, outer_momentum=0.9).name
    'sustain'

    References: P. Khanduri, S. Zeng, M. Hong, H.-T. Wai, Z. Wang, Z. Yang, A near-optimal algorithm for stochastic
    bilevel optimization via double-momentum, 2021, algorithm 1.
    Deviations: 1. phi has a default. 2. the sum is offered beside the randomised estimate. 3. when phi is halved, the
    momentum of v begins again.
    """

    name: ClassVar[str] = "sustain"
    K: int = 10
    phi: float | None = None
    inner_momentum: float | Schedule = 0.5
    outer_momentum: float | Schedule = 0.5
    estimator: Estimator = "randomised"

    def __post_init__(self) -> None:
        check_series("SUSTAIN", self.K, self.phi)
        check_momentum("SUSTAIN", inner_momentum=self.inner_momentum, outer_momentum=self.outer_momentum)

    @override
    def init(self, loop: Loop) -> Trail:
        return set_out(loop, self.phi)

    @override
    def step(self, loop: Loop, state: Trail) -> tuple[Trail, StepInfo]:
        return both_levels(loop, state, self.estimator, self.K - 1, self.phi, self.inner_momentum, self.outer_momentum)
