"""MRBO: recursive momentum with a whole Neumann series."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from typing_extensions import override

from nhgd.algorithm.base import AbstractAlgorithm
from nhgd.loop.loop import Loop, StepInfo
from nhgd.loop.neumann_estimate import check_series
from nhgd.loop.storm import Trail, both_levels, check_momentum, set_out
from nhgd.schedule import Schedule


@final
@dataclass(frozen=True)
class MRBO(AbstractAlgorithm):
    """Single loop: recursive momentum on both levels, the hypergradient by a Neumann series over fresh batches.

        g(theta, v) = grad_theta l(v, theta, batch)
        F(theta, v) = grad_v f - (d2_{theta,v} l)^T x
        x           = phi sum_{q=0}^{K} (I - phi H_q) ... (I - phi H_1) grad_theta f,      H_q each on a fresh batch
        h_theta <- g(theta, v) + (1 - eta_theta) ( h_theta - g(theta_last, v_last) )
        h_v     <- F(theta, v) + (1 - eta_v) ( h_v - F(theta_last, v_last) )
        theta <- Pi( theta - lambda h_theta ),    v <- Pi( v - gamma h_v )

    Both evaluations of g, and both of F, are on the same samples. The first step has no momentum. One outer step is one
    such iteration: `inner_steps` is not used. lambda is the solver's inner_lr and gamma its outer_lr; the paper takes
    both as Power(lr, 1/3, offset=m), from `nhgd.schedule`, and eta proportional to their square, so Power(c, 2/3,
    offset=m).

    Args:
        K: products of the series, at both points; Q in the paper.
        phi: its scale. None: 1 / lambda_max from a power iteration at the first step, halved whenever the series grows.
        inner_momentum: eta_theta, above 0 and at most 1, a number or a schedule. 1: no momentum.
        outer_momentum: eta_v, likewise.

    >>> MRBO(K=5).name
    'mrbo'

    References: J. Yang, K. Ji, Y. Liang, Provably faster algorithms for bilevel optimization, 2021, algorithm 1 and the
    estimator of its equation 3.
    Deviations: 1. phi has a default. 2. when phi is halved, the momentum of v begins again.
    """

    name: ClassVar[str] = "mrbo"
    K: int = 10
    phi: float | None = None
    inner_momentum: float | Schedule = 0.5
    outer_momentum: float | Schedule = 0.5

    def __post_init__(self) -> None:
        check_series("MRBO", self.K, self.phi)
        check_momentum("MRBO", inner_momentum=self.inner_momentum, outer_momentum=self.outer_momentum)

    @override
    def init(self, loop: Loop) -> Trail:
        return set_out(loop, self.phi)

    @override
    def step(self, loop: Loop, state: Trail) -> tuple[Trail, StepInfo]:
        return both_levels(loop, state, "sum", self.K, self.phi, self.inner_momentum, self.outer_momentum)
