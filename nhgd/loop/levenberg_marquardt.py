"""Natural inner steps: the curvature that is kept for the hypergradient also preconditions the inner loop."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nhgd._recording.lagged_cross import LaggedCross
from nhgd.errors import InputError
from nhgd.inverse._learned.damping import damped
from nhgd.inverse.capabilities import preconditioner, with_learner
from nhgd.loop.loop import Loop
from nhgd.objective import Objective

TRIES = 3


@dataclass
class LevenbergMarquardt:
    """The damping of natural steps, adapted by how well the quadratic model predicts the loss.

        x     = (F + 2 l2 + damping I)^{-1} g,         theta <- theta - lr x
        ratio = (loss before - loss after) / (lr (1 - lr / 2) g.x)

    A step that does not lower the loss of its batch is undone, the damping multiplied by 4 and another tried, three
    times in all, from the curvature at hand. The damping is doubled below a ratio of 1/4 and divided by 3 above 3/4,
    but kept at `floor` or more: below it the curvature is rounding.

    References: J. Martens, Deep learning via Hessian-free optimization, 2010, section 4.1; J. Martens, R. Grosse, 2015,
    section 6.5. Deviations: 1. steps that raise the loss are taken back, because theta is judged by its inner gradient.
    """

    lr: float = 1.0
    floor: float = 0.0
    damping: float = 0.0
    taken_back: int = 0

    def step(
        self, loop: Loop, objective: Objective | None = None, record: bool = True, cross: LaggedCross | None = None
    ) -> Tensor:
        """One natural step, by default on the next batch, by the curvature at hand or recorded here; the loss before
        it.

        Dropout is that of the objective's seed, the same before and after.
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
        before, here = float(found.value), theta.flat()
        loop.shift_theta(torch.zeros_like(here))
        for _ in range(TRIES):
            at = loop.replay(objective)  # theta must not move while one is in use
            adapted = with_learner(inverse, damped(inverse.learner, self.damping))
            direction = preconditioner(adapted, state, at)(gradient)
            theta.assign(here - self.lr * direction)
            loop.project_theta()
            after = objective.value()
            predicted = self.lr * (1 - self.lr / 2) * float(gradient.dot(direction))
            rounding = 100 * torch.finfo(theta.dtype).eps * abs(before)
            if abs(predicted) <= rounding and abs(after - before) <= rounding:
                break  # at the optimum the ratio is noise
            if after <= before:
                self._adapt((before - after) / predicted if predicted > 0 else -1.0, theta.dtype)
                break
            theta.assign(here)
            self.damping *= 4
            self.taken_back += 1
        return found.value

    def _adapt(self, ratio: float, dtype: torch.dtype) -> None:
        if ratio < 0.25:
            self.damping *= 2
        elif ratio > 0.75:
            self.damping = max(self.damping / 3, self.floor, torch.finfo(dtype).tiny * 1e6)
