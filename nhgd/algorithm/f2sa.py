"""F2SA: two inner variables, with and without the outer loss, whose difference is the hypergradient."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from typing_extensions import override

from nhgd._validation import not_negative, positive
from nhgd.algorithm.base import AbstractAlgorithm
from nhgd.loop.companion import Companion
from nhgd.loop.loop import Loop, StepInfo


@dataclass
class F2SAState:
    """The inner variable that the outer loss pulls."""

    pulled: Companion


@final
@dataclass(frozen=True)
class F2SA(AbstractAlgorithm):
    """First order, double loop: theta with and without the outer loss; a multiplier times their difference in l.

    In addition to `theta`, which takes plain inner steps, there is `pulled`, which minimises l + f / multiplier:

        for k = 0 .. K-1:   multiplier = first (k + 1)^growth
            repeat T times:
                theta  <- Pi( theta - eta_t grad_theta l(v, theta, batch) )
                pulled <- Pi( pulled - pace eta_t ( grad_theta l(v, pulled, batch') + grad_theta f(v, pulled) /
                multiplier ) )
            v <- Pi( v - alpha ( grad_v f(v, pulled) + multiplier ( grad_v l(v, pulled) - grad_v l(v, theta) ) ) )

    At a finite multiplier it ends where a hypergradient vanishes that has H + d2_theta f / multiplier in place of H
    (exactly so where f is quadratic in theta), whatever T is: both variables go on from step to step.

    Both take the steps of the inner optimiser, each with moments of its own. One that divides by the size of gradients,
    such as Adam, keeps stepping by about its step size near the optimum, and the multiplier magnifies the difference
    that remains: let its step size fall, and take `shared`.

    Args:
        first: the multiplier of the first outer step.
        growth: the power it grows with; 0 for a constant one. The paper's rates have 1/7 with noise in both levels, 1/5
            with noise in the outer alone, 1/3 without any. A growing multiplier magnifies noise: let alpha fall with
            it.
        pace: the step of `pulled` in units of theta's.
        shared: take both inner gradients of a step, and both gradients in v, on the same batch. Their noise then
            cancels in part where the multiplier would magnify it.

    >>> F2SA(first=2.0, growth=1.0).multiplier(k=4)
    10.0

    References: J. Kwon, D. Kwon, S. Wright, R. Nowak, A fully first-order method for stochastic bilevel optimization,
    2023, algorithm 1: its y is `pulled`, its z is `theta`, its alpha_k is pace eta / multiplier and its xi alpha_k is
    our alpha. Deviations: 1. the paper's analysis has pace 1/2; here it is 1, because variables that move at one pace
    lag behind a moving v by the same, which cancels in their difference. 2. the multiplier is a power of k, not a sum
    of increments.
    3. what a run hands back is `theta`, and its outer loss is reported, so that both can be compared with those of
      other
    methods. 4. the paper has plain gradient steps; here the inner optimiser may be any but LBFGS.
    """

    name: ClassVar[str] = "f2sa"
    plain: ClassVar[bool] = True
    first: float = 10.0
    growth: float = 1 / 7
    pace: float = 1.0
    shared: bool = False

    def __post_init__(self) -> None:
        positive("F2SA", first=self.first, pace=self.pace)
        not_negative("F2SA", growth=self.growth)

    @classmethod
    @override
    def presets(cls) -> dict[str, AbstractAlgorithm]:
        return {"f2sa-shared": cls(shared=True)}

    def multiplier(self, k: int) -> float:
        """The weight of the inner objective at outer step k, from 0."""
        return self.first * float((k + 1) ** self.growth)

    @override
    def init(self, loop: Loop) -> F2SAState:
        """Both inner variables start equal."""
        return F2SAState(Companion(loop.problem.theta.flat()))

    @override
    def step(self, loop: Loop, state: F2SAState) -> tuple[F2SAState, StepInfo]:
        multiplier, pulled = self.multiplier(loop.clock.k), state.pulled
        losses = []
        for _ in range(loop.settings.inner_steps):
            batch, clock = loop.inner_batch(), replace(loop.clock)
            losses.append(loop.inner_step(loop.objective(batch)))
            with loop.temporarily_at(pulled.theta):
                at = loop.oracle([self._other(loop, batch)], loop.outer.next())
                direction = at.inner_gradients(in_v=False).theta + at.outer().theta / multiplier
            pulled = pulled.moved(loop, direction, clock, self.pace)
        batch, outer_batch, seed = loop.inner_batch(), loop.outer.next(), loop.seed()
        here = loop.oracle([batch], outer_batch, seed)
        l_theta = here.inner_gradients()
        with loop.temporarily_at(pulled.theta):
            at = loop.oracle([self._other(loop, batch)], outer_batch, seed)
            f, l_pulled = at.outer(), at.inner_gradients()
        outer_loss = here.outer_value()
        apart = zip(f.v, l_pulled.v, l_theta.v, strict=True)
        norm = loop.move_v([a + multiplier * (b - c) for a, b, c in apart])
        distance = float((pulled.theta - loop.problem.theta.flat()).norm())
        notes = {"multiplier": multiplier, "distance": distance}
        return F2SAState(pulled), StepInfo(outer_loss, float(torch.stack(losses).mean()), norm, 0, notes)

    def _other(self, loop: Loop, batch: object) -> object:
        return batch if self.shared else loop.inner_batch()
