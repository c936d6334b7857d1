"""Natural inner steps: the curvature that is kept for the hypergradient also preconditions the inner loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

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

    The device decides, so that a step can be captured. The host reads one number of it: whether another try is due.

    Attributes:
        damping, taken_back: numbers at the start, then tensors without dimensions.

    References: J. Martens, Deep learning via Hessian-free optimization, 2010, section 4.1; J. Martens, R. Grosse, 2015,
    section 6.5. Deviations: 1. steps that raise the loss are taken back, because theta is judged by its inner gradient.
    """

    lr: float = 1.0
    floor: float = 0.0
    damping: float | Tensor = 0.0
    taken_back: int | Tensor = 0

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
        if not isinstance(self.damping, Tensor) and self.damping == 0.0:
            # A first guess in the units of the curvature: a tenth of what it is along the gradient.
            at = loop.replay(objective)
            first = preconditioner(inverse, state, at)(gradient)
            guess = 0.1 * float(gradient.norm()) / max(float(first.norm()), torch.finfo(first.dtype).tiny)
            self.damping = max(guess, self.floor)
        tried = Try(
            theta.flat(),
            torch.as_tensor(self.damping, dtype=torch.float64, device=theta.device),
            torch.as_tensor(self.taken_back, dtype=torch.int64, device=theta.device),
        )
        loop.shift_theta(torch.zeros_like(tried.theta))
        move = partial(self._tried, loop, inverse, state, objective, found.value, tried.theta, gradient)
        first_try = move(tried)

        def others() -> tuple[Tensor, Tensor, Tensor]:
            tried = first_try
            with tape.taping(None, tape.repeatable()):
                for _ in range(TRIES - 1):
                    if not bool(tried.failed):
                        break
                    tried = move(tried)
            return tried.theta, tried.damping, tried.taken_back

        reached, self.damping, self.taken_back = tape.eager(others)
        if tape.tape() is not None:
            theta.assign(reached)
        return found.value

    def notes(self) -> dict[str, Any]:
        """For the row of the history."""
        assert isinstance(self.damping, Tensor)
        assert isinstance(self.taken_back, Tensor)
        return {
            "damping": tape.reading(self.damping),
            "taken_back": tape.defer(int, tape.reading(self.taken_back)),
        }

    def _tried(
        self,
        loop: Loop,
        inverse: AbstractInverse,
        state: Any,
        objective: Objective,
        value: Tensor,
        here: Tensor,
        gradient: Tensor,
        last: Try,
    ) -> Try:
        """Take a step from `here`, where the loss is `value`, with the damping that the last try left; undo it if it
        fails.
        """
        theta, damping, dtype = loop.problem.theta, last.damping, loop.problem.theta.dtype
        at = loop.replay(objective)  # theta must not move while one is in use
        direction = _damped(inverse, state, at, damping)(gradient)
        theta.assign(here - self.lr * direction)
        loop.project_theta()
        before, after = value.double(), objective.loss().double()
        predicted = self.lr * (1 - self.lr / 2) * gradient.dot(direction).double()
        rounding = 100 * torch.finfo(dtype).eps * before.abs()
        settled = (predicted.abs() <= rounding) & ((after - before).abs() <= rounding)  # there the ratio is noise
        failed = ~settled & ~(after <= before)
        ratio = torch.where(predicted > 0, (before - after) / predicted, -1.0)
        lowered = (damping / 3).clamp_min(max(self.floor, torch.finfo(dtype).tiny * 1e6))
        adapted = torch.where(ratio < 0.25, damping * 2, torch.where(ratio > 0.75, lowered, damping))
        adapted = torch.where(settled, damping, torch.where(failed, damping * 4, adapted))
        reached = torch.where(failed, here, theta.flat())
        theta.assign(reached)
        return Try(reached, adapted, last.taken_back + failed, failed)


class Try(NamedTuple):
    """Where a try has led: theta (D,), the next damping, how many were taken back in the run, whether this one was."""

    theta: Tensor
    damping: Tensor
    taken_back: Tensor
    failed: Tensor | None = None


def _damped(inverse: AbstractInverse, state: Any, at: Oracle, damping: Tensor) -> Callable[[Tensor], Tensor]:
    """u -> (F + 2 l2 + damping)^{-1} u."""
    assert inverse.learner is not None
    if tape.tape() is None:
        adapted = with_learner(inverse, damped(inverse.learner, float(damping)))
    else:  # the damping stays on the device, and comes with the ridge
        adapted = with_learner(inverse, damped(inverse.learner, 0.0))
        at.damp(damping)
    return preconditioner(adapted, state, at)
