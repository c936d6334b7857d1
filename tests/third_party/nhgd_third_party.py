"""A method, an inverse and a task that nhgd does not know of."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from nhgd.algorithm import AbstractAlgorithm, Loop, StepInfo
from nhgd.hypergradients import implicit
from nhgd.inverse import Iterative, SolveStats
from nhgd.oracle import Oracle
from nhgd.problem import Bilevel
from nhgd.task import AbstractTask, Instance


@dataclass(frozen=True)
class Halved(Iterative):
    """The Hessian taken as twice the identity."""

    name: ClassVar[str] = "halved"

    def solve(self, u: Tensor, oracle: Oracle, start: Tensor | None = None) -> tuple[Tensor, SolveStats]:
        """Half of u."""
        return u / 2, SolveStats(residual=None, hvps=0, converged=True)


@dataclass(frozen=True)
class Steepest(Iterative):
    """Some steps of steepest descent on the quadratic whose minimiser is the solution."""

    name: ClassVar[str] = "steepest"
    steps: int = 3

    def solve(self, u: Tensor, oracle: Oracle, start: Tensor | None = None) -> tuple[Tensor, SolveStats]:
        """Each step goes to the minimum along the residual."""
        x, rest = torch.zeros_like(u), u
        for _ in range(self.steps):
            along = oracle.hvp(rest)
            length = (rest @ rest) / (rest @ along)
            x, rest = x + length * rest, rest - length * along
        return x, SolveStats(residual=float(rest.norm() / u.norm()), hvps=self.steps, converged=True)


@dataclass(frozen=True)
class Signed(AbstractAlgorithm):
    """Move v by the sign of a crude hypergradient."""

    name: ClassVar[str] = "signed"
    scale: float = 1.0

    def init(self, loop: Loop) -> None:
        """There is no state."""

    def step(self, loop: Loop, state: None) -> tuple[None, StepInfo]:
        """One outer step."""
        losses = [loop.inner_step() for _ in range(loop.settings.inner_steps)]
        found = implicit(loop.oracle(loop.inner_batches(1), loop.outer.next()), Halved(), None)
        norm = loop.move_v([self.scale * leaf.sign() for leaf in found.leaves])
        return None, StepInfo(found.value, float(torch.stack(losses).mean()), norm)


@dataclass(frozen=True)
class Drawn(AbstractTask):
    """A problem drawn from the global generators of torch, NumPy and Python."""

    name: ClassVar[str] = "drawn"
    size: int = 3

    def build(self, seed: int, device: torch.device, data: str | Path | None = None) -> Instance:
        """Draw a goal."""
        goal = torch.randn(self.size) + float(np.random.rand()) + random.random()  # noqa: NPY002
        problem = Bilevel(
            lambda theta, v, x: (theta - v).square().sum().expand(len(x)),
            lambda theta, v, x: (theta - goal).square().sum(),
            torch.zeros(self.size),
            torch.zeros(self.size),
        )
        batch = [torch.zeros(4)]
        return DrawnInstance(
            problem=problem,
            inner_data=batch,
            outer_data=batch,
            full_inner=batch[0],
            full_outer=batch[0],
            method="aid",
            steps=2,
        )


class DrawnInstance(Instance):
    """The problem, which has no metrics of its own."""

    def solver_settings(self) -> dict[str, Any]:
        """Those of everyone."""
        return {}

    def solve_inner(self) -> float:
        """Nothing is left to do."""
        return 0.0
