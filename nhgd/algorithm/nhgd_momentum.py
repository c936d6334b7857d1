"""NHGD with variance reduction: recursive momentum on both levels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, final

from torch import Tensor
from typing_extensions import override

from nhgd.algorithm.aid import check_batches
from nhgd.algorithm.base import AbstractAlgorithm
from nhgd.errors import InputError
from nhgd.hypergradients.implicit import implicit
from nhgd.inverse._learned.automatic import completed
from nhgd.inverse.base import AbstractInverse
from nhgd.inverse.capabilities import follows_horizon
from nhgd.inverse.fisher_dense import FisherDense
from nhgd.loop.calibration import calibrate
from nhgd.loop.horizon import Horizon
from nhgd.loop.loop import Loop, StepInfo
from nhgd.loop.storm import Trail, check_momentum, momentum_at, set_out
from nhgd.oracle import Oracle
from nhgd.problem import Bilevel
from nhgd.schedule import Schedule


@dataclass
class NHGDMomentumState:
    """The last point and the directions that were taken from it, the adjoint there, (D,), and the horizon."""

    trail: Trail
    adjoint: Tensor | None = None
    horizon: Horizon | None = None


@final
@dataclass(frozen=True)
class NHGDMomentum(AbstractAlgorithm):
    """Single-loop natural hypergradient descent with variance reduction: recursive momentum on both levels.

        g(theta, v) = grad_theta l(v, theta, batch)
        A          <- update of A by what g computed                  (the inverse, on any executor)
        F(theta, v) = grad_v f - (d2_{theta,v} l)^T A grad_theta f
        h_theta    <- g(theta, v) + (1 - eta_theta) ( h_theta - g(theta_last, v_last) )
        h_v        <- F(theta, v) + (1 - eta_v) ( h_v - F(theta_last, v_last) )
        theta <- Pi( theta - lambda h_theta ),    v <- Pi( v - gamma h_v )

    Both evaluations of g, and both of F, are on the same samples and with the same A: what A learns in between is no
    noise of the samples, and would stay in h_v. A learns from the plain gradients of the batches, because the
    momentum's direction is no gradient of any batch. The first step has no momentum. One outer step is one such
    iteration: `inner_steps` is not used.

    It is `mrbo` with the learnt inverse in place of its Neumann series, so no Hessian product is taken. The paper
    leaves variance reduction to future work; no rate is claimed here. Where it comes to rest is where `nhgd_single`
    does.

    Args:
        inverse: what learns; None: K-FAC where theta has Linear or Conv2d layers, else the window. Of FisherDense take
            warm="accumulate", or warm="prior" with a large t0.
        batches: fresh inner batches for the cross derivative, or "all" for one pass over the data.
        inner_momentum: eta_theta, above 0 and at most 1, a number or a schedule. 1: no momentum.
        outer_momentum: eta_v, likewise.

    >>> NHGDMomentum(outer_momentum=0.2).name
    'nhgd_momentum'

    References: Natural Hypergradient Descent, its conclusion on future work; J. Yang, K. Ji, Y. Liang, Provably faster
    algorithms for bilevel optimization, 2021, algorithm 1 (the momentum); A. Cutkosky, F. Orabona, Momentum-based
    variance reduction in non-convex SGD, 2019, algorithm 1.
    Deviations: 1. A is the same at both points.
    """

    name: ClassVar[str] = "nhgd_momentum"
    inverse: AbstractInverse | None = None
    batches: int | str = 1
    inner_momentum: float | Schedule = 0.5
    outer_momentum: float | Schedule = 0.5

    def __post_init__(self) -> None:
        check_batches("NHGDMomentum", self.batches)
        check_momentum("NHGDMomentum", inner_momentum=self.inner_momentum, outer_momentum=self.outer_momentum)
        learner = None if self.inverse is None else self.inverse.learner
        if isinstance(learner, FisherDense) and learner.warm == "reset":
            raise InputError(
                "NHGDMomentum makes one observation for each outer step, so an inverse that is reset at each, such as"
                " FisherDense(warm='reset'), never uses more than one. Use warm='accumulate' or warm='prior'."
            )

    @override
    def prepared(self, problem: Bilevel) -> NHGDMomentum:
        return replace(self, inverse=completed(self.inverse, 0, problem.theta))

    @property
    @override
    def online(self) -> AbstractInverse | None:
        return self.inverse

    @override
    def init(self, loop: Loop) -> NHGDMomentumState:
        """Decide how much of the inner steps the curvature takes: ten of them count as an inner loop."""
        calibrate(loop, steps=10)
        return NHGDMomentumState(set_out(loop, None), horizon=loop.horizon())

    @override
    def step(self, loop: Loop, state: NHGDMomentumState) -> tuple[NHGDMomentumState, StepInfo]:
        theta, v, trail = loop.problem.theta, loop.problem.v, state.trail
        eta_theta, eta_v = momentum_at(self.inner_momentum, loop.clock), momentum_at(self.outer_momentum, loop.clock)
        objective = loop.objective(loop.inner_batch(), loop.seed() + 1)
        found = loop.gradient(objective)
        in_theta = theta.flatten(found.gradient)
        batches, outer, seed = loop.inner_batches(self.batches), loop.outer.next(), loop.seed()
        inverse, curvature, lag = loop.executor.curvature()
        at = loop.oracle(batches, outer, seed)
        damping = self._damping(loop, state.horizon, at)
        here = implicit(at, inverse, curvature, state.adjoint, solve_warnings=loop.solve_warnings)
        in_v = v.flatten(here.leaves)
        with loop.temporarily_at(trail.theta, trail.v):
            if eta_theta < 1:
                there = loop.replay(objective).inner_gradients(in_v=False).theta
                in_theta = in_theta + (1 - eta_theta) * (trail.in_theta - there)
            if eta_v < 1:
                last = loop.oracle(batches, outer, seed)
                if damping is not None:
                    last.damp(damping)
                old = implicit(last, inverse, curvature, state.adjoint)
                in_v = in_v + (1 - eta_v) * (trail.in_v - v.flatten(old.leaves))
        if damping is not None and state.horizon is not None and here.adjoint is not None:
            state.horizon.observe(here.adjoint)
            state.horizon.read(loop.clock.k)
        trail = Trail(theta.flat(), v.flat(), in_theta, in_v)
        loop.move_theta(theta.unflatten(in_theta))
        norm = loop.move_v(v.unflatten(in_v))
        notes = {"inverse": inverse.name, "residual": here.stats.residual, "poor_solve": here.stats.trouble is not None}
        info = StepInfo(float(here.value), float(found.value), norm, lag, notes)
        return NHGDMomentumState(trail, here.adjoint, state.horizon), info

    def _damping(self, loop: Loop, horizon: Horizon | None, at: Oracle) -> float | None:
        """That of the horizon, for an inverse that follows it."""
        if horizon is None or not follows_horizon(loop.inverse):
            return None
        damping = horizon.damping(loop.theta.travelled(), at.ridge.positive)
        at.damp(damping)
        return damping
