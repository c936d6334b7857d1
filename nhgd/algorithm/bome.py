"""BOME: descend in theta and v together, with a barrier that keeps theta near the inner optimum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from typing_extensions import override

from nhgd._validation import positive
from nhgd.algorithm.base import AbstractAlgorithm
from nhgd.loop.companion import Companion
from nhgd.loop.loop import Loop, StepInfo
from nhgd.schedule import Constant, Power, Rate, Schedule, as_schedule

Barrier = Literal["gradient", "gap"]


@dataclass
class BOMEState:
    """The inner variable that the outer loss pulls."""

    pulled: Companion


@final
@dataclass(frozen=True)
class BOME(AbstractAlgorithm):
    """First order, one loop in (v, theta): the outer loss descends while the inner gap shrinks.

    In addition to `theta`, which takes inner steps alone, there is `pulled`, which the outer loss moves too:

        repeat K times:
            theta = pulled;   repeat T times:  theta <- Pi( theta - eta_t grad_theta l(v, theta, batch) )
            q(v, p)    = l(v, p) - l(v, theta),                                       theta held constant
            multiplier = max( ( barrier - <grad f, grad q> ) / ||grad q||^2, 0 ),     both gradients at (v, pulled)
            (v, pulled) <- Pi( (v, pulled) - alpha ( grad f + multiplier grad q ) )

    with barrier = strength ||grad q||^2, or strength q. While the multiplier is above 0 the direction lowers q at the
    rate of the barrier: <direction, grad q> = barrier.

    There is no second derivative, and T biases the end as it does that of `ITD`: where pulled comes near theta*(v),
    both parts of the direction vanish at grad_v f = X^T S_T grad_theta f with S_T = (I - (I - eta H)^T) H^{-1}. A
    constant alpha adds a bias of its own, of the order of alpha: the multiplier cannot outgrow 2 / (alpha ||d2 q||),
    and v ends near where a penalty with that multiplier does. So a step that is given as a number falls like 1/k, and
    no faster, or the steps would sum up to too little:

        alpha_k = alpha h / (k + h),      pulled moves by min( alpha_k, eta h / (k + h) ),      h = halved_after

    An alpha that suits v may be far too long for `pulled`, whose curvature is that of the inner loss; hence the bound
    eta. theta takes its steps by any inner optimiser, whose moments go on although theta begins anew. If it is not
    plain SGD, `pulled` moves by one like it along its direction, with a step size of eta h / (k + h), or pulled_lr.
    With noisy batches the end moves, because the multiplier divides by a noisy size, which no step size mends: take
    large batches.

    Args:
        strength: how fast the barrier closes the gap, eta in the paper.
        barrier: "gradient" for strength ||grad q||^2, or "gap" for strength q.
        pulled_lr: the step of `pulled`: a number, a function of the outer step or a schedule, each taken as it is;
            None: as above.
        halved_after: the outer steps after which outer_lr has fallen to half of the number it was given as; None: it
            does not fall. An outer_lr that is a schedule or a function, or the own step of an optimiser, is taken as it
            is.

    >>> BOME(strength=0.1).barrier
    'gradient'

    References: B. Liu, M. Ye, S. Wright, P. Stone, Q. Liu, BOME! Bilevel optimization made easy: a simple first-order
    approach, 2022, algorithm 1.
    Deviations: 1. f and q are taken on one fresh batch each, the two terms of q on the same one, where the paper takes
    full gradients. 2. what a run hands back is the theta that took inner steps alone, and its outer loss is reported,
    so that both can be compared with those of other methods. 3. the optimiser of v may be any; then alpha is its step
    size. 4. v and pulled have a step each, as in the authors' own code, and both fall; the paper has one constant step,
    which depends on how many outer steps there will be. It is halved_after=None with pulled_lr that of v.
    """

    name: ClassVar[str] = "bome"
    plain: ClassVar[bool] = True
    strength: float = 0.5
    barrier: Barrier = "gradient"
    pulled_lr: Rate | None = None
    halved_after: float | None = 40.0

    def __post_init__(self) -> None:
        positive("BOME", strength=self.strength)
        if self.halved_after is not None:
            positive("BOME", halved_after=self.halved_after)
        if self.pulled_lr is not None:
            as_schedule(self.pulled_lr, "pulled_lr")

    @override
    def init(self, loop: Loop) -> BOMEState:
        """Both inner variables start equal, and a constant step size of v starts to decay."""
        alpha, own = loop.v.schedule, isinstance(loop.settings.outer_lr, Schedule)
        if self.halved_after is not None and isinstance(alpha, Constant) and not own:
            loop.v.schedule = Power(alpha.lr, 1.0, offset=self.halved_after)
        return BOMEState(Companion(loop.problem.theta.flat()))

    @override
    def step(self, loop: Loop, state: BOMEState) -> tuple[BOMEState, StepInfo]:
        problem = loop.problem
        problem.theta.assign(state.pulled.theta)
        losses = [loop.inner_step() for _ in range(loop.settings.inner_steps)]
        batches, outer_batch, seed = loop.inner_batches(1), loop.outer.next(), loop.seed()
        here = loop.oracle(batches, outer_batch, seed)
        trained = here.inner_gradients()
        with loop.temporarily_at(state.pulled.theta):
            at = loop.oracle(batches, outer_batch, seed)
            f, q = at.outer(), at.inner_gradients()
        q_v = [a - b for a, b in zip(q.v, trained.v, strict=True)]
        size = float(q.theta.dot(q.theta)) + sum(float(g.square().sum()) for g in q_v)
        along = float(f.theta.dot(q.theta)) + sum(float((a * b).sum()) for a, b in zip(f.v, q_v, strict=True))
        gap = float(q.value - trained.value)
        barrier = self.strength * (size if self.barrier == "gradient" else gap)
        multiplier = max((barrier - along) / size, 0.0) if size > 0 else 0.0
        eta = loop.theta.rate(loop.clock)
        direction = f.theta + multiplier * q.theta
        pulled = state.pulled.moved(loop, direction, loop.clock, self._pulled_rate(loop, eta) / eta)
        outer_loss = here.outer_value()
        norm = loop.move_v([a + multiplier * b for a, b in zip(f.v, q_v, strict=True)])
        notes = {"multiplier": multiplier, "gap": gap}
        return BOMEState(pulled), StepInfo(outer_loss, float(torch.stack(losses).mean()), norm, 0, notes)

    def _pulled_rate(self, loop: Loop, bound: float) -> float:
        """How far `pulled` moves along its direction."""
        clock = loop.clock
        if self.pulled_lr is not None:
            return as_schedule(self.pulled_lr, "pulled_lr").rate(clock)
        if self.halved_after is not None:
            bound = Power(bound, 1.0, offset=self.halved_after).rate(clock)
        return min(loop.v.rate(clock), bound) if loop.theta.is_plain else bound
