"""Differentiating through the inner loop itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from typing_extensions import override

from nhgd._validation import counted, positive
from nhgd.data.batch import Batch
from nhgd.errors import InputError
from nhgd.hypergradients.base import AbstractHypergradient, Hypergradient
from nhgd.hypergradients.update_rules import UpdateRule
from nhgd.inverse._krylov.richardson import safe_step
from nhgd.inverse.base import AbstractInverse, SolveStats
from nhgd.objective import Objective, OracleCalls, twice_differentiable
from nhgd.oracle import Oracle
from nhgd.problem import Bilevel
from nhgd.schedule import Learnt


@dataclass(frozen=True)
class Unrolling:
    """What differentiating through gradient steps gives.

    Attributes:
        theta: where the steps ended, (D,).
        losses: the inner objective before each step.
        value: the outer loss at the end.
        v: its derivative in v along all paths, one tensor a leaf.
    """

    theta: Tensor
    losses: list[Tensor]
    value: Tensor
    v: list[Tensor]


def through(
    problem: Bilevel,
    start: Sequence[Tensor],
    batches: Sequence[Batch],
    rates: Sequence[float | None] | Learnt,
    outer_batch: Batch,
    seed: int,
    calls: OracleCalls,
    radius: float | None = None,
    rule: UpdateRule | None = None,
) -> Unrolling:
    """Take a step on each batch, and differentiate the outer loss at the end through all of them.

        theta_{t+1} = Pi( theta_t - rate_t grad_theta l(v, theta_t, batch_t) ),      d/dv f(v, theta_n(v))

    The graph of all steps is held until the end, and no longer. The way back through a step is one product with the
    cross derivative and, but for the first, one with the Hessian; they are counted as such.

    Args:
        start: theta_0, one tensor a leaf, taken as a constant.
        rates: the size of each step, or of all of them as a function of v, which is differentiated too. None: the
            rule's.
        seed: of the dropout of the outer pass; that of the steps comes from the current generator.
        radius: of the ball Pi projects onto; None for no projection.
        rule: of an optimiser that takes the steps, its moments differentiated too; None: gradient steps as above.
    """
    variable = problem.theta
    theta = [leaf.detach().requires_grad_() for leaf in start]
    losses = []
    with problem.guarded(live=True), torch.enable_grad():
        sizes: Sequence[float | Tensor | None] = (
            rates if not isinstance(rates, Learnt) else [problem.rate(rates)] * len(batches)
        )
        for batch, rate in zip(batches, sizes, strict=True):
            objective = Objective(problem, batch)
            value = objective.term(theta)
            gradient = problem.scaling.grad(value, theta, create_graph=True, materialize_grads=True)
            if rule is not None:
                theta = rule.step(theta, gradient, rate)
            elif rate is not None:
                theta = [p - rate * g for p, g in zip(theta, gradient, strict=True)]
            if radius is not None:
                norm = torch.stack([p.norm().to(variable.dtype) for p in theta]).norm()
                shrink = (radius / norm.clamp_min(torch.finfo(norm.dtype).tiny)).clamp_max(1.0)
                theta = [p * shrink.to(p.dtype) for p in theta]
            losses.append(value.detach())
            objective.count(calls)
        with problem.guarded(seed):
            value = problem.outer_value(outer_batch, theta)
            with twice_differentiable():
                found = problem.scaling.grad(value, problem.v.leaves, materialize_grads=True)
    calls.outer_gradients += 1
    calls.cross += len(losses)
    calls.hvps += max(len(losses) - 1, 0)
    return Unrolling(variable.flatten([p.detach() for p in theta]), losses, value.detach(), list(found))


@final
@dataclass(frozen=True)
class Unrolled(AbstractHypergradient):
    """Iterative differentiation: `steps` gradient steps from the current theta, differentiated in v.

        theta_{t+1} = theta_t - lr * grad_theta l(v, theta_t),      grad Phi ~ d/dv f(v, theta_T(v))

    Memory grows with the number of steps differentiated. With `truncate=k` only the last k are, and the steps before
    them count as constants. theta itself does not move.

    Args:
        steps: T.
        lr: the step size: a number, or `nhgd.schedule.Learnt(function of v)`. None: 1 / lambda_max(H) from a power
            iteration at the current point.
        truncate: how many of the last steps to differentiate; None for all of them.

    >>> Unrolled(steps=30, truncate=5).truncate
    5

    References: J. Domke, Generic methods for optimization-based modeling, 2012, section 3; A. Shaban, C.-A. Cheng,
    N. Hatch, B. Boots, Truncated back-propagation for bilevel optimization, 2019, equation 5.
    Deviations: 1. the inverse is not used. 2. plain gradient steps only, whatever optimiser trains theta.
    """

    name: ClassVar[str] = "unrolled"
    inverts: ClassVar[bool] = False
    steps: int = 50
    lr: float | Learnt | None = None
    truncate: int | None = None

    def __post_init__(self) -> None:
        counted("Unrolled", steps=self.steps)
        if isinstance(self.lr, float):
            positive("Unrolled", lr=self.lr)
        if self.truncate is not None and not 1 <= self.truncate <= self.steps:
            raise InputError(f"Unrolled: truncate must lie between 1 and steps ({self.steps}), got {self.truncate}.")

    @property
    @override
    def learnt_rate(self) -> Learnt | None:
        return self.lr if isinstance(self.lr, Learnt) else None

    @override
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
        learnt = self.learnt_rate
        lr = problem.rate(self.lr).item() if isinstance(self.lr, Learnt) else self.lr
        if lr is None:
            at = Oracle(problem, inner_batches, seed=seed, calls=calls)
            lr = safe_step(at, problem.theta.flat(), 20)
        kept = self.steps if self.truncate is None else self.truncate
        order = [inner_batches[t % len(inner_batches)] for t in range(self.steps)]
        first, last = order[: self.steps - kept], order[self.steps - kept :]
        theta = [leaf.detach().requires_grad_() for leaf in problem.theta.leaves]
        with problem.guarded(seed + 1), torch.enable_grad():
            for batch in first:
                objective = Objective(problem, batch)
                gradient = problem.scaling.grad(objective.term(theta), theta, materialize_grads=True)
                theta = [(p - lr * g).detach().requires_grad_() for p, g in zip(theta, gradient, strict=True)]
                objective.count(calls)
            found = through(problem, theta, last, learnt or [lr] * kept, outer_batch, seed, calls)
        stats = SolveStats(residual=None, hvps=kept - 1, converged=True, notes={"lr": lr, "differentiated": kept})
        return Hypergradient(problem.v.like(found.v), float(found.value), stats, found.v)
