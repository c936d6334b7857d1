"""Differentiating through the inner loop itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from nhgd.data.batch import Batch
from nhgd.errors import InputError, positive
from nhgd.hypergradients.base import AbstractHypergradient, Hypergradient
from nhgd.inverse.base import AbstractInverse, SolveStats
from nhgd.inverse.spectrum import largest_eigenvalue
from nhgd.point import OracleCalls, Point
from nhgd.problem import Bilevel


@final
@dataclass(frozen=True)
class Unrolled(AbstractHypergradient):
    """Iterative differentiation: `steps` gradient steps from the current theta, differentiated in v.

        theta_{t+1} = theta_t - lr * grad_theta l(v, theta_t),      grad Phi ~ d/dv f(v, theta_T(v))

    Memory grows with the number of steps differentiated. With `truncate=k` only the last k are, and the steps before
    them count as constants. theta itself does not move.

    Args:
        steps: T.
        lr: the step size. None: 1 / lambda_max(H) from a power iteration at the current point.
        truncate: how many of the last steps to differentiate; None for all of them.

    >>> Unrolled(steps=30, truncate=5).truncate
    5

    References: J. Domke, Generic methods for optimization-based modeling, 2012, section 3; A. Shaban, C.-A. Cheng,
    N. Hatch, B. Boots, Truncated back-propagation for bilevel optimization, 2019, equation 5.
    Deviations: 1. the inverse is not used. 2. plain gradient steps only, whatever optimiser trains theta.
    """

    name: ClassVar[str] = "unrolled"
    steps: int = 50
    lr: float | None = None
    truncate: int | None = None

    def __post_init__(self) -> None:
        positive("Unrolled", steps=self.steps)
        if self.lr is not None:
            positive("Unrolled", lr=self.lr)
        if self.truncate is not None and not 1 <= self.truncate <= self.steps:
            raise InputError(f"Unrolled: truncate must lie between 1 and steps ({self.steps}), got {self.truncate}.")

    def estimate(
        self,
        problem: Bilevel,
        inner_batches: Sequence[Batch],
        outer_batch: Batch,
        inverse: AbstractInverse,
        seed: int = 0,
        calls: OracleCalls | None = None,
    ) -> Hypergradient:
        """Run the loop on the batches in turn, and differentiate its end."""
        calls = OracleCalls() if calls is None else calls
        lr = self.lr
        if lr is None:
            top = largest_eigenvalue(Point(problem, inner_batches, seed=seed, calls=calls), problem.theta.flat(), 20)
            lr = 1.0 / top if top > 0 else 1.0
        kept = self.steps if self.truncate is None else self.truncate
        theta: list[Tensor] = [leaf.detach().requires_grad_() for leaf in problem.theta.leaves]
        with problem.guarded(seed), torch.enable_grad():
            for t in range(self.steps):
                differentiate = t >= self.steps - kept
                objective = problem.objective(inner_batches[t % len(inner_batches)], theta)
                gradient = torch.autograd.grad(objective, theta, create_graph=differentiate, materialize_grads=True)
                theta = [p - lr * g for p, g in zip(theta, gradient, strict=True)]
                if not differentiate:
                    theta = [p.detach().requires_grad_() for p in theta]
            value = problem.outer_value(outer_batch, theta)
            leaves = list(torch.autograd.grad(value, problem.v.leaves, materialize_grads=True))
        calls.inner_gradients += self.steps
        calls.outer_gradients += 1
        stats = SolveStats(residual=None, hvps=0, converged=True, notes={"lr": lr, "differentiated": kept})
        return Hypergradient(problem.v.like(leaves), float(value.detach()), stats, leaves)
