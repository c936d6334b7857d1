"""VRBO: variance reduction at both levels."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from typing_extensions import override

from nhgd._validation import counted
from nhgd.algorithm.aid import check_batches
from nhgd.algorithm.base import AbstractAlgorithm
from nhgd.data.batch import Batch, move, sizes
from nhgd.errors import InverseWarning, NonFiniteError
from nhgd.inverse._krylov.richardson import safe_step
from nhgd.loop.loop import Loop, StepInfo
from nhgd.loop.neumann_estimate import check_series, draw, estimate


@dataclass
class VRBOState:
    """The two directions, (D,) and (P,), and the scale of the series, once they are known."""

    in_theta: Tensor | None
    in_v: Tensor | None
    phi: float | None


@final
@dataclass(frozen=True)
class VRBO(AbstractAlgorithm):
    """Double loop in which both directions are corrected at every inner step by how the same samples saw the last
    point.

        g(theta, v) = grad_theta l(v, theta, batch)
        F(theta, v) = grad_v f - (d2_{theta,v} l)^T phi sum_{k=0}^{K} (I - phi H_k) ... (I - phi H_1) grad_theta f

        every q outer steps:   h_theta = g(theta, v),  h_v = F(theta, v),      on large batches
        v <- Pi( v - alpha h_v )
        repeat T + 1 times, on fresh samples:
            h_theta <- h_theta + g(theta, v) - g(theta_last, v_last)
            h_v     <- h_v + F(theta, v) - F(theta_last, v_last)
            theta   <- Pi( theta - beta h_theta ),                    but for the last time

    The first correction follows the move of v, the others the moves of theta; "last" is the point one move ago. H_k,
    the cross derivative, f and g have batches of their own, the same ones at both points. T is the solver's
    inner_steps, beta its inner_lr and alpha its outer_lr. An outer step takes 2 K (T + 1) Hessian products.

    Args:
        K: products of the series; Q in the paper.
        phi: its scale; eta in the paper. None: 1 / lambda_max from a power iteration at the first step, halved whenever
            the series grows on the large batches.
        q: outer steps between two large batches.
        large: how many batches make a large one, at either level, or "all" for one pass over the data.

    >>> VRBO(q=3).name
    'vrbo'

    References: J. Yang, K. Ji, Y. Liang, Provably faster algorithms for bilevel optimization, 2021, algorithm 2; C.
    Fang, C. J. Li, Z. Lin, T. Zhang, SPIDER: near-optimal non-convex optimization via stochastic path-integrated
    differential estimator, 2018.
    Deviations: 1. phi has a default. 2. the correction after the last inner step is left out when large batches follow,
    because they replace it.
    """

    name: ClassVar[str] = "vrbo"
    K: int = 10
    phi: float | None = None
    q: int = 10
    large: int | str = "all"

    def __post_init__(self) -> None:
        counted("VRBO", K=self.K, q=self.q)
        check_series("VRBO", self.K, self.phi)
        check_batches("VRBO", self.large, "large")

    @override
    def init(self, loop: Loop) -> VRBOState:
        return VRBOState(None, None, self.phi)

    @override
    def step(self, loop: Loop, state: VRBOState) -> tuple[VRBOState, StepInfo]:
        theta, v = loop.problem.theta, loop.problem.v
        in_theta, in_v, phi = state.in_theta, state.in_v, state.phi
        if loop.clock.k % self.q == 0 or in_theta is None or in_v is None or phi is None:
            in_theta, in_v, phi = self._afresh(loop, phi)
        before = theta.flat(), v.flat()
        norm = loop.move_v(v.unflatten(in_v))
        losses: list[Tensor] = []
        value = torch.zeros(())
        steps = loop.settings.inner_steps
        for t in range(steps + 1):
            if t == steps and (loop.clock.k + 1) % self.q == 0:
                break
            # Release the batch of the last correction: it may hold a shuffled copy of the data.
            loop.recent.clear()
            objective = loop.objective(loop.inner_batch(), loop.seed() + 1)
            found = loop.gradient(objective, record=False)
            sample = draw(loop, "sum", self.K)
            here = estimate(loop, sample, phi)
            with loop.temporarily_at(*before):
                there = estimate(loop, sample, phi)
                last = loop.replay(objective).inner_gradients(in_v=False).theta
            in_theta = in_theta + theta.flatten(found.gradient) - last
            in_v = in_v + v.flatten(here.leaves) - v.flatten(there.leaves)
            losses.append(found.value)
            value = here.value
            if t < steps:
                before = theta.flat(), v.flat()
                loop.move_theta(theta.unflatten(in_theta))
        if not math.isfinite(float(in_v.norm())):
            raise NonFiniteError("the hypergradient")
        info = StepInfo(float(value), float(torch.stack(losses).mean()), norm, notes={"phi": phi})
        return VRBOState(in_theta, in_v, phi), info

    def _afresh(self, loop: Loop, phi: float | None) -> tuple[Tensor, Tensor, float]:
        """Both directions on large batches, and the scale."""
        at = loop.oracle(loop.inner_batches(self.large), None)
        _, u, in_v = outer_mean(loop, self.large)
        if phi is None:
            phi = safe_step(at, u, 10)
        for _ in range(8):
            total = term = u
            for _ in range(self.K):
                factor = at if self.large == "all" else loop.oracle(loop.inner_batches(self.large), None)
                term = term - phi * factor.hvp(term)
                total = total + term
            grew = not float(term.norm()) <= 1.001 * float(u.norm())
            if self.phi is not None or not grew:
                break
            phi /= 2
        if grew:
            warnings.warn(
                f"The Neumann series of VRBO grows with phi = {phi:.3g}: it is above 2 / lambda_max of the inner Hessian, or"
                " the Hessian is not positive definite. Lower phi, or add l2.",
                InverseWarning,
                stacklevel=2,
            )
        return at.gradient(), in_v - loop.problem.v.flatten(at.cross(phi * total)), phi


def outer_mean(loop: Loop, large: int | str) -> tuple[Tensor, Tensor, Tensor]:
    """f, grad_theta f and grad_v f, 0-dimensional, (D,) and (P,), as means over so many batches, or "all"."""
    v = loop.problem.v
    batches: list[Batch]
    if large == "all":
        batches = [move(batch, loop.problem.theta.device) for batch in loop.outer.source]
    else:
        batches = [loop.outer.next() for _ in range(int(large))]
    counts = sizes(batches, loop.outer.name)
    found = [loop.oracle([None], batch).outer() for batch in batches]
    shares = [count / sum(counts) for count in counts]
    value = torch.stack([share * f.value for share, f in zip(shares, found, strict=True)]).sum()
    in_theta = torch.stack([share * f.theta for share, f in zip(shares, found, strict=True)]).sum(0)
    in_v = torch.stack([share * v.flatten(f.v) for share, f in zip(shares, found, strict=True)]).sum(0)
    return value, in_theta, in_v
