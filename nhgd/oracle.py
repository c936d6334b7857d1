"""Where derivatives are taken: a point (theta, v) with the batches that define the objective there.

An `Oracle` answers the questions a linear solve may ask (Hessian products, the outer gradient, the cross derivative)
and counts the answers. It never forms a D x D array unless asked for `dense()`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from nhgd import _tape as tape
from nhgd.data.batch import Batch
from nhgd.data.padding import Padded
from nhgd.errors import InputError
from nhgd.objective import Objective, OracleCalls, OuterObjective
from nhgd.problem import Bilevel
from nhgd.ridge import Ridge


@dataclass(frozen=True)
class OuterGradient:
    """The outer loss at a point, its gradient in theta, (D,), and in v, one tensor a leaf."""

    value: Tensor
    theta: Tensor
    v: list[Tensor]


@dataclass(frozen=True)
class InnerGradients:
    """The inner objective at a point, its gradient in theta, (D,), and in v at fixed theta, one tensor a leaf."""

    value: Tensor
    theta: Tensor
    v: list[Tensor]


class Oracle:
    """The current theta and v of a problem, with inner batches and an outer batch.

    Args:
        problem: its theta and v must not move while the oracle is in use.
        inner_batches: products are means over these, weighted by their sizes.
        outer_batch: where the outer loss is taken.
        seed: dropout is drawn from it, the same in every product of one batch.
        calls: counters to add to; default: new ones.

    Objectives that evaluate only some samples of their batches sum their results: all answers are those on whole
    batches.
    """

    def __init__(
        self,
        problem: Bilevel,
        inner_batches: Sequence[Batch],
        outer_batch: Batch = None,
        seed: int = 0,
        calls: OracleCalls | None = None,
    ) -> None:
        objectives = [Objective(problem, batch, seed + 1 + index) for index, batch in enumerate(inner_batches)]
        self._ask(objectives, OuterObjective(problem, outer_batch, seed), calls)

    @classmethod
    def over(
        cls, objectives: Sequence[Objective], outer: OuterObjective | None = None, calls: OracleCalls | None = None
    ) -> Oracle:
        """The mean of given objectives, each with its own seed."""
        made = cls.__new__(cls)
        made._ask(objectives, outer, calls)
        return made

    def _ask(self, objectives: Sequence[Objective], outer: OuterObjective | None, calls: OracleCalls | None) -> None:
        if not objectives:
            raise InputError("A point needs at least one inner batch.")
        self.objectives = list(objectives)
        self.problem = self.objectives[0].problem
        self.calls = OracleCalls() if calls is None else calls
        self._outer = OuterObjective(self.problem, None) if outer is None else outer
        self._sum = self.objectives[0].summed
        self.damping = 0.0  # of the horizon: added to the diagonal of every matrix that is asked for here
        self._kept: tuple[Tensor, ...] | None = None
        self._value: Tensor | None = None  # of the batch whose graph was made last

    @cached_property
    def shares(self) -> list[float]:
        """The part of each inner batch in the whole, by samples."""
        if len(self.objectives) == 1:
            return [1.0]
        if tape.tape() is not None and any(isinstance(objective.batch, Padded) for objective in self.objectives):
            raise tape.NotRepeatable("batches that are filled up are weighted by their sizes")
        if any(objective.samples is None for objective in self.objectives):
            found = self.problem.sizes([objective.batch for objective in self.objectives])
            for objective, samples in zip(self.objectives, found, strict=True):
                objective.samples = samples if objective.samples is None else objective.samples
        sizes = [objective.samples or 1 for objective in self.objectives]
        return [n / sum(sizes) for n in sizes]

    @property
    def inner_batches(self) -> list[Batch]:
        """The batches, or the parts of them that are evaluated here."""
        return [objective.batch for objective in self.objectives]

    @property
    def numel(self) -> int:
        """D, the number of inner parameters."""
        return self.problem.theta.numel

    @property
    def seed(self) -> int:
        """What random choices at this point may be drawn from."""
        return self._outer.seed

    @cached_property
    def ridge(self) -> Ridge:
        """The ridge's Hessian here, the damping of the horizon added."""
        number = self.problem.ridge_number()
        return Ridge(self.problem.ridge_diagonal() if number is None else number).plus(self.damping)

    def damp(self, damping: float) -> None:
        """Add damping / 2 |theta - theta_now|^2 to the inner objective of all products here."""
        self.damping = damping
        self.__dict__.pop("ridge", None)  # that of before

    def _damped(self, product: Tensor, vector: Tensor) -> Tensor:
        if not self.damping:
            return product
        damping = tape.on_device(self.damping)
        if isinstance(damping, Tensor):
            return product.addcmul_(vector, damping.to(vector.dtype))
        return product.add_(vector, alpha=damping)

    def outer(self) -> OuterGradient:
        """The outer loss and its two gradients."""
        theta, v = self.problem.theta, self.problem.v
        with self._outer.drawing(), torch.enable_grad():
            value = self._outer.term()
            found: Sequence[Tensor | None] = [None] * (len(theta.leaves) + len(v.leaves))
            if value.requires_grad:
                found = self.problem.scaling.grad(value, (*theta.leaves, *v.leaves), allow_unused=True)
        self.calls.outer_gradients += 1
        split = len(theta.leaves)
        in_v = [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found[split:], v.leaves, strict=True)]
        value, in_theta, *in_v = self._outer.summed([value.detach(), theta.flatten(found[:split])], in_v)
        return OuterGradient(value, in_theta, in_v)

    @torch.no_grad()
    def outer_loss(self, theta: Sequence[Tensor] | None = None) -> Tensor:
        """The outer loss alone, here or at another theta, one tensor a leaf, for the record: no derivative and no
        count.
        """
        with self._outer.drawing():
            value = self._outer.term(theta)
        return self._outer.summed([value])[0]

    def outer_value(self) -> float:
        """The same as a number."""
        return float(self.outer_loss())

    @torch.no_grad()
    def inner_value(self) -> float:
        """The inner objective alone, ridge included: no derivative and no count."""
        theta = self.problem.theta
        value = torch.zeros((), dtype=theta.dtype, device=theta.device)
        for objective, share in zip(self.objectives, self.shares, strict=True):
            with objective.drawing(twice=False):
                value.add_(objective.term(), alpha=share)
        return float(self._sum([value])[0])

    def inner_gradients(self, in_v: bool = True) -> InnerGradients:
        """The inner objective, ridge included, and its two first derivatives, which methods without products use.

        One pass a batch gives both; with in_v=False the one in v is left out, as zeros.
        """
        theta, v = self.problem.theta, self.problem.v
        wrt = (*theta.leaves, *v.leaves) if in_v else theta.leaves
        value = torch.zeros((), dtype=theta.dtype, device=theta.device)
        total = [torch.zeros_like(leaf) for leaf in (*theta.leaves, *v.leaves)]
        for objective, share in zip(self.objectives, self.shares, strict=True):
            with objective.drawing(twice=False), torch.enable_grad():
                term = objective.term()
                found = self.problem.scaling.grad(term, wrt, allow_unused=True)
            objective.count(self.calls)
            value.add_(term.detach(), alpha=share)
            for t, f in zip(total, found, strict=False):
                if f is not None:
                    t.add_(f, alpha=share)
        split = len(theta.leaves)
        value, in_theta, *rest = self._sum([value, theta.flatten(total[:split])], total[split:] if in_v else ())
        return InnerGradients(value, in_theta, rest if in_v else total[split:])

    def in_v(self) -> list[Tensor]:
        """The derivative of the inner objective in v at fixed theta, one tensor a leaf; no graph in theta is made."""
        theta, v = [leaf.detach() for leaf in self.problem.theta.leaves], self.problem.v.leaves
        total = [torch.zeros_like(leaf) for leaf in v]
        for objective, share in zip(self.objectives, self.shares, strict=True):
            with objective.drawing(twice=False), torch.enable_grad():
                term = objective.term(theta)
                found = (
                    self.problem.scaling.grad(term, v, allow_unused=True) if term.requires_grad else (None,) * len(v)
                )
            objective.count(self.calls)
            for t, f in zip(total, found, strict=True):
                if f is not None:
                    t.add_(f, alpha=share)
        return self._sum([], total)

    def _graph(self, objective: Objective) -> tuple[Tensor, ...]:
        """The inner gradient on one batch with its graph, ridge included. Kept when there is one batch only."""
        if self._kept is not None:
            return self._kept
        self._value, gradient = objective.graph(self.calls)
        if len(self.objectives) == 1:
            self._kept = gradient
        return gradient

    def _pull_back(self, vector: Tensor, wrt: Sequence[Tensor]) -> list[Tensor]:
        """Mean over the batches of d(gradient . vector)/d(wrt)."""
        parts = self.problem.theta.unflatten(vector)
        total = [torch.zeros_like(t) for t in wrt]
        for objective, share in zip(self.objectives, self.shares, strict=True):
            for t, f in zip(total, self._pull_back_on(objective, parts, wrt), strict=True):
                if f is not None:
                    t.add_(f, alpha=share)
        return total

    def _pull_back_on(
        self, objective: Objective, parts: Sequence[Tensor], wrt: Sequence[Tensor], several: bool = False
    ) -> Sequence[Tensor | None]:
        """d(gradient . vector)/d(wrt) on one batch, the vector, or `several` stacked ones, given one part a leaf."""
        with objective.drawing():
            graph = self._graph(objective)
            return objective.pull_back(graph, parts, wrt, self._kept is not None, several)

    def hvp(self, vector: Tensor) -> Tensor:
        """The inner Hessian, ridge included, times a vector (D,)."""
        self.calls.hvps += len(self.objectives)
        theta = self.problem.theta
        return self._damped(self._sum([theta.flatten(self._pull_back(vector, theta.leaves))])[0], vector)

    def hvp_on(self, index: int, vector: Tensor) -> Tensor:
        """The same on one of the inner batches alone, for methods that walk over them."""
        self.calls.hvps += 1
        theta = self.problem.theta
        found = self._pull_back_on(self.objectives[index], theta.unflatten(vector), theta.leaves)
        return self._damped(self._sum([theta.flatten(found)])[0], vector)

    def hvps(self, vectors: Tensor) -> Tensor:
        """`hvp` of every row of (m, D): one forward pass and one vectorised backward pass for each batch.

        Rows are taken one by one where the vectorised pass fails: an operation may not support it, or memory may run
        out.
        """
        theta = self.problem.theta
        total = torch.zeros_like(vectors)
        parts = [torch.stack(rows) for rows in zip(*map(theta.unflatten, vectors), strict=True)]
        try:
            for objective, share in zip(self.objectives, self.shares, strict=True):
                found = self._pull_back_on(objective, parts, theta.leaves, several=True)
                for place, f in zip(theta.slices().values(), found, strict=True):
                    if f is not None:
                        total[:, place].add_(f.reshape(len(vectors), -1), alpha=share)
            failed = False
        except RuntimeError:
            failed = True
        if self.objectives[0].anywhere(failed):
            return torch.stack([self.hvp(vector) for vector in vectors])
        self.calls.hvps += len(vectors) * len(self.objectives)
        return self._damped(self._sum([total])[0], vectors)

    def prepare(self) -> None:
        """Prepare the next product as far as it does not need the vector, if one batch allows it."""
        if len(self.objectives) == 1:
            with self.objectives[0].drawing():
                self._graph(self.objectives[0])

    def cross(self, vector: Tensor) -> list[Tensor]:
        """The cross derivative, transposed, times a vector (D,): one tensor for each leaf of v."""
        self.calls.cross += len(self.objectives)
        return self._sum([], self._pull_back(vector, self.problem.v.leaves))

    def products(self, vector: Tensor) -> tuple[Tensor, list[Tensor]]:
        """`hvp` and `cross` of one vector, from one backward pass."""
        theta, v = self.problem.theta, self.problem.v
        self.calls.hvps += len(self.objectives)
        self.calls.cross += len(self.objectives)
        found = self._pull_back(vector, (*theta.leaves, *v.leaves))
        in_theta, *in_v = self._sum([theta.flatten(found[: len(theta.leaves)])], found[len(theta.leaves) :])
        return self._damped(in_theta, vector), in_v

    def live_gradient(self) -> tuple[Tensor, list[Tensor]]:
        """The inner loss and its gradient, one tensor a leaf, as an inner step takes them: buffers follow.

        With one batch the products taken afterwards share its graph, so that a method whose inner step, Hessian product
        and cross product fall on one point pays for one forward pass.
        """
        theta = self.problem.theta
        value = torch.zeros((), dtype=theta.dtype, device=theta.device)
        total = [torch.zeros_like(leaf) for leaf in theta.leaves]
        for objective, share in zip(self.objectives, self.shares, strict=True):
            with objective.drawing(live=True):
                gradient = self._graph(objective)
            assert self._value is not None
            value.add_(self._value, alpha=share)
            for t, g in zip(total, gradient, strict=True):
                t.add_(g.detach(), alpha=share)
        value, *total = self._sum([value, *total])
        return value, total

    def gradient(self) -> Tensor:
        """The inner gradient, ridge included, (D,)."""
        theta = self.problem.theta
        total = torch.zeros(theta.numel, dtype=theta.dtype, device=theta.device)
        for objective, share in zip(self.objectives, self.shares, strict=True):
            with objective.drawing():
                total.add_(theta.flatten([g.detach() for g in self._graph(objective)]), alpha=share)
        return self._sum([total])[0]

    def dense(self) -> Tensor:
        """The inner Hessian as an array (D, D), symmetrised: D products."""
        eye = torch.eye(self.numel, dtype=self.problem.theta.dtype, device=self.problem.theta.device)
        hessian = torch.stack([self.hvp(row) for row in eye])
        return (hessian + hessian.T) / 2

    def empirical_fisher(self, vector: Tensor) -> Tensor:
        """The empirical Fisher matrix plus the ridge's Hessian, times a vector (D,): (1/B) J^T W J x + 2 l2 x."""
        terms = (objective.fisher(vector) for objective in self.objectives)
        return self._damped(self._mean_of(terms) + self.problem.ridge_diagonal() * vector, vector)

    def ggn(self, vector: Tensor) -> Tensor:
        """The generalised Gauss-Newton matrix plus the ridge's Hessian, times a vector (D,).

        (1/B) sum_i w_i J_i^T (d2 l_i / d z_i^2) J_i x + 2 l2 x, as `Objective.ggn` has it.
        """
        self.calls.hvps += len(self.objectives)
        terms = (objective.ggn(vector) for objective in self.objectives)
        return self._damped(self._mean_of(terms) + self.problem.ridge_diagonal() * vector, vector)

    def _mean_of(self, terms: Iterable[Tensor]) -> Tensor:
        """The mean over the batches of means over the samples here."""
        total = torch.zeros(self.numel, dtype=self.problem.theta.dtype, device=self.problem.theta.device)
        for objective, share, term in zip(self.objectives, self.shares, terms, strict=True):
            total.add_(term, alpha=share * objective.share)
        return self._sum([total])[0]
