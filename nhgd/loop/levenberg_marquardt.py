"""Natural inner steps: the curvature that is kept for the hypergradient also preconditions the inner loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nhgd import _tape as tape
from nhgd._recording.lagged_cross import LaggedCross
from nhgd.errors import InputError
from nhgd.inverse._learned.damping import damped
from nhgd.inverse.base import AbstractInverse
from nhgd.inverse.capabilities import preconditioner, with_learner
from nhgd.loop.loop import Loop
from nhgd.objective import Objective
from nhgd.oracle import Oracle

TRIES = 3


@dataclass
class LevenbergMarquardt:
    """The damping of natural steps, adapted by how well the quadratic model predicts the loss.

        x     = (F + 2 l2 + damping I)^{-1} g,         theta <- theta - lr x
        ratio = (loss before - loss after) / (lr (1 - lr / 2) g.x)

    A step that does not lower the loss of its batch is undone, the damping multiplied by 4 and another tried, three
    times in all, from the curvature at hand. The damping is doubled below a ratio of 1/4 and divided by 3 above 3/4,
    but kept at `floor` or more: below it the curvature is rounding.

    A step reads three numbers of the device, to decide on another try. In a captured step the host does so between two
    graphs, and takes further tries eagerly.

    References: J. Martens, Deep learning via Hessian-free optimization, 2010, section 4.1; J. Martens, R. Grosse, 2015,
    section 6.5. Deviations: 1. steps that raise the loss are taken back, because theta is judged by its inner gradient.
    """

    lr: float = 1.0
    floor: float = 0.0
    damping: float = 0.0
    taken_back: int = 0

    def step(
        self,
        loop: Loop,
        objective: Objective | None = None,
        record: bool = True,
        cross: LaggedCross | None = None,
        beside: Callable[[Any, Oracle], None] | None = None,
    ) -> Tensor:
        """One natural step, by default on the next batch, by the curvature at hand or recorded here; the loss before
        it.

        Dropout is that of the objective's seed, the same before and after. `beside` is handed the curvature and the
        point before the step is taken.
        """
        theta = loop.problem.theta
        inverse = loop.inverse
        executor = loop.executor
        if inverse is None or inverse.learner is None or executor.name != "inline" or not executor.holds_all:
            raise InputError(
                "inner='natural' needs the whole curvature of the step before it: use execution='inline', undivided."
            )
        if objective is None:
            objective = loop.objective(loop.inner_batch(), loop.seed())
        found = loop.gradient(objective, record, cross=cross)
        gradient = theta.flatten(found.gradient)
        state, _ = executor.state()
        if self.damping == 0.0:
            # A first guess in the units of the curvature: a tenth of what it is along the gradient.
            at = loop.replay(objective)
            first = preconditioner(inverse, state, at)(gradient)
            guess = 0.1 * float(gradient.norm()) / max(float(first.norm()), torch.finfo(first.dtype).tiny)
            self.damping = max(guess, self.floor)
        if beside is not None:
            beside(state, loop.replay(objective))
        here = theta.flat()
        loop.project_theta()
        loop.tick()
        move = partial(self._move, loop, inverse, state, objective, here, gradient)
        numbers = move(found.value)
        theta.assign(
            tape.decided(
                numbers,
                theta.flat(),
                lambda found: self._settles(found, theta.dtype),
                lambda: self._tried_again(loop, move, here, found.value),
            )
        )
        return found.value

    def _move(
        self,
        loop: Loop,
        inverse: AbstractInverse,
        state: Any,
        objective: Objective,
        here: Tensor,
        gradient: Tensor,
        before: Tensor,
    ) -> Tensor:
        """Take a step from `here` with the damping as it stands; returns the loss before it and after it, and g.x."""
        theta = loop.problem.theta
        at = loop.replay(objective)  # theta must not move while one is in use
        direction = self._preconditioner(inverse, state, at)(gradient)
        theta.assign(torch.sub(here, direction, alpha=self.lr))
        loop.project_theta()
        return torch.stack([t.double() for t in (before, objective.loss(), gradient.dot(direction))])

    def _preconditioner(self, inverse: AbstractInverse, state: Any, at: Oracle) -> Callable[[Tensor], Tensor]:
        """u -> (F + 2 l2 + damping I)^{-1} u."""
        assert inverse.learner is not None
        if tape.tape() is None:
            return preconditioner(with_learner(inverse, damped(inverse.learner, self.damping)), state, at)
        at.damp(tape.number(lambda: self.damping))
        return preconditioner(with_learner(inverse, damped(inverse.learner, 0.0)), state, at)

    def _tried_again(self, loop: Loop, move: Callable[[Tensor], Tensor], here: Tensor, before: Tensor) -> Tensor:
        """Where theta ends, (D,), if the first try has failed."""
        with tape.taping(None, tape.repeatable()):
            for _ in range(TRIES - 1):
                if self._settles(move(before).tolist(), loop.problem.theta.dtype):
                    return loop.problem.theta.flat()
        return here

    def _settles(self, numbers: list[float], dtype: torch.dtype) -> bool:
        """Whether a step is kept, given the loss before it and after it, and g.x. The damping is adapted."""
        before, after, slope = numbers
        predicted = self.lr * (1 - self.lr / 2) * slope
        rounding = 100 * torch.finfo(dtype).eps * abs(before)
        if abs(predicted) <= rounding and abs(after - before) <= rounding:
            return True  # at the optimum the ratio is noise
        if after <= before:
            self._adapt((before - after) / predicted if predicted > 0 else -1.0, dtype)
            return True
        self.damping *= 4
        self.taken_back += 1
        return False

    def _adapt(self, ratio: float, dtype: torch.dtype) -> None:
        if ratio < 0.25:
            self.damping *= 2
        elif ratio > 0.75:
            self.damping = max(self.damping / 3, self.floor, torch.finfo(dtype).tiny * 1e6)
