"""Iterative differentiation: the inner loop itself is differentiated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor
from typing_extensions import override

from nhgd.algorithm.base import AbstractAlgorithm
from nhgd.errors import InputError
from nhgd.hypergradients.unrolled import through
from nhgd.hypergradients.update_rules import UpdateRule
from nhgd.loop.loop import Loop, StepInfo


@dataclass
class ITDState:
    """theta at the start."""

    theta: Tensor


@final
@dataclass(frozen=True)
class ITD(AbstractAlgorithm):
    """Differentiate through the inner steps of this outer step, or through the last few of them.

        repeat K times:
            for t = 0 .. T-1:   theta_{t+1} = Pi( theta_t - eta_t grad_theta l(v, theta_t, batch_t) )
            v <- Pi( v - alpha d/dv f(v, theta_T(v)) ),      theta_0, or theta_{T-k} when truncated, held constant

    The graph of the differentiated steps lives until v has moved, so memory grows with their number. With a warm start
    theta_T tends to theta*(v), and what is then computed is the implicit formula with a sum of as many terms as there
    are differentiated steps, here n of size eta, in place of the inverse:

        S_n = eta sum_{t<n} (I - eta H)^t = (I - (I - eta H)^n) H^{-1}

    so the method ends near the solution, the closer the longer it differentiates. eta may be a function of v too,
    `inner_lr=nhgd.schedule.Learnt(function)`, and is learnt by its part in the differentiated steps.

    The inner optimiser may be SGD, with momentum too, Adam or AdamW. What is differentiated is then its step in place
    of the plain one, with its moments, which are constants where differentiation begins. Adam divides by the size of
    its gradients: where those vanish, at theta*(v), its derivative is a large number of little meaning.

    Args:
        truncate: differentiate only this many last steps; None, or more than there are: all of them.
        warm_start: theta continues from the last outer step; otherwise each inner loop starts where the first one did,
            with no moments.

    >>> ITD.presets()["truncated"]
    ITD(truncate=5, warm_start=True)

    References: L. Franceschi, M. Donini, P. Frasconi, M. Pontil, Forward and reverse gradient-based hyperparameter
    optimization, 2017, algorithm 1; K. Ji, J. Yang, Y. Liang, Bilevel optimization: convergence analysis and enhanced
    design, 2021, algorithm 1 (ITD-BiO); A. Shaban, C.-A. Cheng, N. Hatch, B. Boots, Truncated back-propagation for
    bilevel optimization, 2019, equation 5.
    Deviations: 1. steps of other optimisers than plain SGD are differentiated, too. 2. each step has its own batch
    where those papers take full gradients. 3. a projection onto a ball is differentiated too.
    """

    name: ClassVar[str] = "itd"
    plain: ClassVar[bool] = True
    unrolls: ClassVar[bool] = True
    truncate: int | None = None
    warm_start: bool = True

    def __post_init__(self) -> None:
        if self.truncate is not None and (not isinstance(self.truncate, int) or self.truncate < 1):
            raise InputError(f"ITD: truncate must be a whole number of at least 1 or None, got {self.truncate!r}.")

    @classmethod
    @override
    def presets(cls) -> dict[str, AbstractAlgorithm]:
        return {"truncated": cls(truncate=5)}

    @override
    def init(self, loop: Loop) -> ITDState:
        """Refuse what cannot be differentiated, and note the start of theta."""
        self._rule(loop)
        if loop.division.workers > 1:
            raise InputError(
                "ITD differentiates through its inner steps, which cannot be divided among workers. Run it on one worker, or"
                " use a method with an implicit hypergradient, such as nhgd or aid-cg."
            )
        if callable(loop.settings.project):
            raise InputError(
                "ITD differentiates through its steps, but a projection function changes theta in place. Pass a"
                " radius as project, or omit it."
            )
        return ITDState(loop.problem.theta.flat())

    @override
    def step(self, loop: Loop, state: ITDState) -> tuple[ITDState, StepInfo]:
        problem, steps, radius = loop.problem, loop.settings.inner_steps, loop.settings.project
        learnt = loop.learnt_rate
        notes: dict[str, Any] = (
            {} if learnt is None else {"inner_lr": problem.rate(learnt).item()}
        )  # checked before theta moves
        if not self.warm_start:
            problem.theta.assign(state.theta)
            loop.theta.optimizer.state.clear()
        last = steps if self.truncate is None else min(self.truncate, steps)
        losses = [loop.inner_step() for _ in range(steps - last)]
        batches, rates, rule = loop.inner_batches(last), list[float | None](), self._rule(loop)
        own = rule is not None and loop.theta.schedule is None  # each group of parameters has its own step size
        for _ in range(last):
            rates.append(None if own else loop.theta.rate(loop.clock))
            loop.tick()
        found = through(
            problem,
            problem.theta.leaves,
            batches,
            learnt or rates,
            loop.outer.next(),
            loop.seed(),
            loop.calls,
            radius if isinstance(radius, (int, float)) else None,
            rule,
        )
        problem.theta.assign(found.theta)
        if rule is not None:
            rule.write()
        norm = loop.move_v(found.v)
        losses += found.losses
        notes["differentiated"] = last
        return state, StepInfo(float(found.value), float(torch.stack(losses).mean()), norm, 0, notes)

    def _rule(self, loop: Loop) -> UpdateRule | None:
        """How the inner optimiser steps; None for plain gradient steps."""
        return None if loop.theta.is_plain else UpdateRule(loop.theta.optimizer, loop.theta.targets, "ITD")
