"""A second inner variable beside theta, moved by an optimiser like theta's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from nhgd.loop.loop import Loop
from nhgd.schedule import Clock


@dataclass
class Companion:
    """Where a second inner variable is, (D,), and the moments of its own optimiser, by leaf of theta.

    It takes the steps of the inner optimiser, whatever it is, with its settings and schedule, as if it had been made
    for it.
    """

    theta: Tensor
    moments: dict[str, dict[str, Any]] = field(default_factory=dict)

    def moved(self, loop: Loop, direction: Tensor, clock: Clock, factor: float = 1.0) -> Companion:
        """After one projected step along a direction, (D,), of `factor` times theta's step size by that clock."""
        variable, mover = loop.problem.theta, loop.theta
        if mover.is_plain:
            step = factor * mover.rate(clock)
            return Companion(loop.projected(self.theta - step * direction), self.moments)
        with loop.temporarily_at(self.theta):
            moments = mover.move_as_other(variable.unflatten(direction), clock, self.moments, factor)
            loop.project_theta()
            return Companion(variable.flat(), moments)
