"""SAMA: the identity for the inner Hessian, seen through the inner optimiser, and a cross derivative by differences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from typing_extensions import override

from nhgd._validation import positive
from nhgd.algorithm.base import AbstractAlgorithm
from nhgd.hypergradients.update_rules import UpdateRule
from nhgd.loop.loop import Loop, StepInfo


@final
@dataclass(frozen=True)
class SAMA(AbstractAlgorithm):
    """First order, double loop: the identity inverse, preconditioned by the inner optimiser, and differences for the
    cross term.

    With U(g) the step that the inner optimiser makes of a gradient g (theta <- theta - U), T inner steps are followed
    by

        x   = U'(g) grad_theta f,      g the gradient of the last inner step
        eps = radius / ||x||
        c   = ( grad_v l(v, theta + eps x) - grad_v l(v, theta - eps x) ) / (2 eps)   ~   (d2_{theta,v} l)^T x
        v <- Pi( v - alpha ( grad_v f - c ) ),      theta <- theta - nudge eps x

    U' is a diagonal: the step size for SGD, for Adam about the step size over the root of its second moments. So c is
    what one step of the optimiser in use passes on from v: where it is SGD the end is that of `ITD` with one step, and
    of `T1-T2` with the step size in place of H^-1. There is no Hessian product, nothing is differentiated twice, and
    where v only weighs samples the two gradients in v are two forward passes.

    Args:
        radius: how far theta goes to either side for the difference. In bfloat16 the losses have few digits: take about
            1 for large models, as the paper does.
        nudge: how far theta then follows -x, in units of eps; 0: not at all. The paper moves theta so, to keep it near
            where the outer loss is low.

    >>> SAMA(radius=1.0).name
    'sama'

    References: S. K. Choe, S. V. Mehta, H. Ahn, W. Neiswanger, P. Xie, E. Strubell, E. Xing, Making scalable meta
    learning practical, 2023, sections 3.1 to 3.3.
    Deviations: 1. the nudge is off by default. 2. the difference is taken on a fresh inner batch. 3. inner optimisers
    are SGD, with momentum too, Adam and AdamW.
    """

    name: ClassVar[str] = "sama"
    radius: float = 0.01
    nudge: float = 0.0

    def __post_init__(self) -> None:
        positive("SAMA", radius=self.radius)

    @override
    def init(self, loop: Loop) -> None:
        self._rule(loop)

    @override
    def step(self, loop: Loop, state: None) -> tuple[None, StepInfo]:
        theta, lr = loop.problem.theta, 0.0
        losses = []
        for _ in range(loop.settings.inner_steps):
            lr = loop.theta.rate(loop.clock)
            losses.append(loop.inner_step())
        assert loop.last_gradient is not None
        slopes = self._rule(loop).slopes(loop.last_gradient, None if loop.theta.schedule is None else lr)
        batches, outer_batch, seed = loop.inner_batches(1), loop.outer.next(), loop.seed()
        outer = loop.oracle(batches, outer_batch, seed).outer()
        x = theta.flatten([s * u for s, u in zip(slopes, theta.unflatten(outer.theta), strict=True)])
        cross, eps = self._cross(loop, x, batches, seed)
        norm = loop.move_v([f - c for f, c in zip(outer.v, cross, strict=True)])
        if self.nudge:
            theta.assign(theta.flat() - self.nudge * eps * x)
            loop.project_theta()
        return None, StepInfo(float(outer.value), float(torch.stack(losses).mean()), norm)

    def _cross(self, loop: Loop, x: Tensor, batches: list[object], seed: int) -> tuple[list[Tensor], float]:
        """The cross derivative, transposed, times x, one tensor for each leaf of v, and eps."""
        here, length = loop.problem.theta.flat(), float(x.norm())
        if length == 0.0:
            return [torch.zeros_like(leaf) for leaf in loop.problem.v.leaves], 0.0
        eps = self.radius / length
        sides = []
        for sign in (1.0, -1.0):
            with loop.temporarily_at(here + sign * eps * x):
                sides.append(loop.oracle(batches, None, seed).in_v())
        return [(a - b) / (2 * eps) for a, b in zip(*sides, strict=True)], eps

    def _rule(self, loop: Loop) -> UpdateRule:
        return UpdateRule(loop.theta.optimizer, loop.theta.targets, "SAMA")
