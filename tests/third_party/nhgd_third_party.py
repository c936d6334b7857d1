"""A method and an inverse that nhgd does not know of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from nhgd.algorithm import AbstractAlgorithm, Stage, StepInfo
from nhgd.hypergradients import implicit
from nhgd.inverse import AbstractInverse, SolveStats
from nhgd.point import Point
from nhgd.variable import Variable


@dataclass(frozen=True)
class Halved(AbstractInverse):
    """The Hessian taken as twice the identity."""

    name: ClassVar[str] = "halved"

    def solve(self, state: Any, u: Tensor, at: Point, start: Tensor | None = None) -> tuple[Tensor, SolveStats]:
        """Half of u."""
        return u / 2, SolveStats(residual=None, hvps=0, converged=True)

    def memory(self, theta: Variable) -> int:
        """Nothing is held."""
        return 0


@dataclass(frozen=True)
class Signed(AbstractAlgorithm):
    """Move v by the sign of a crude hypergradient."""

    name: ClassVar[str] = "signed"
    scale: float = 1.0

    def init(self, stage: Stage) -> None:
        """There is no state."""

    def step(self, stage: Stage, state: None) -> tuple[None, StepInfo]:
        """One outer step."""
        losses = [stage.inner_step() for _ in range(stage.settings.inner_steps)]
        found = implicit(stage.point(stage.inner_batches(1), stage.outer.next()), Halved(), None)
        norm = stage.move_v([self.scale * leaf.sign() for leaf in found.leaves])
        return None, StepInfo(found.value, float(torch.stack(losses).mean()), norm)
