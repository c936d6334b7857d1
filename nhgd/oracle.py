"""Where derivatives are taken: a point (theta, v) with the batches that define the objective there.

A `Oracle` answers the questions a linear solve may ask (Hessian products, the outer gradient, the cross derivative) and
counts the answers. It never forms a D x D array unless asked for `dense()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

from nhgd._autocast import set_aside
from nhgd._randomness import Randomness
from nhgd.data.batch import Batch, common_length
from nhgd.data_parallel import Shard, Team
from nhgd.errors import InputError
from nhgd.problem import Bilevel, Losses


@dataclass
class OracleCalls:
    """How often each derivative was asked for; one call is one batch.

    One gradient is one backward pass over a batch, with or without a forward pass of its own. So an inner step counts once for
    its gradient; each root of the exact or the sampled Fisher matrix is one more; so are, once or for each root, the rows of
    parameters outside Linear and Conv2d, which a pass of their own gives, or as many as there are samples where dropout is
    to be that of the inner step. What is done once to look at a model, before the first step or in it, does not count.
    `samples` are those of all inner gradients.
    """

    inner_gradients: int = 0
    outer_gradients: int = 0
    hvps: int = 0
    cross: int = 0
    samples: int = 0

    @property
    def gradients(self) -> int:
        """First derivatives of either level."""
        return self.inner_gradients + self.outer_gradients

    def as_dict(self) -> dict[str, int]:
        """All counters by name, with their total of first derivatives."""
        return {"gradients": self.gradients} | {f.name: getattr(self, f.name) for f in fields(self)}


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


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """Where a gradient is differentiated: a sentence in place of torch's, where it has no second derivative of something."""
    try:
        yield
    except NotImplementedError as error:
        raise InputError(
            f"torch cannot differentiate the inner loss twice ({str(error).splitlines()[0].rstrip('.')}). Replace that"
            " operation (nn.EmbeddingBag by nn.Embedding and a mean, for example), or use a method of first derivatives alone:"
            " f2sa or bome."
        ) from error


class Oracle:
    """The current theta and v of a problem, with inner batches and an outer batch.

    Args:
        problem: its theta and v are taken as they are now and must not move while the point is in use.
        inner_batches: products are means over these, weighted by their sizes.
        outer_batch: where the outer loss is taken.
        seed: dropout is drawn from it, the same in every product of one batch.
        calls: counters to add to; default: new ones.

    A batch may be a worker's `Shard` of one. Every answer is then the sum over the workers of what each finds on

        (b / B) mean_i( w_i l_i ) + (1 / N) sum( l2 * theta^2 )      over its b of B samples, with N workers

    which is the answer on the whole batch, and all workers must ask the same questions in the same order.
    """

    def __init__(
        self,
        problem: Bilevel,
        inner_batches: Sequence[Batch | Shard],
        outer_batch: Batch | Shard = None,
        seed: int = 0,
        calls: OracleCalls | None = None,
    ) -> None:
        if not inner_batches:
            raise InputError("A point needs at least one inner batch.")
        self.problem = problem
        self.inner_batches = list(inner_batches)
        self.outer_batch = outer_batch
        self.seed = seed
        self.calls = OracleCalls() if calls is None else calls
        # What a batch does not show is known when its losses are.
        self._sizes = [b.total if isinstance(b, Shard) else common_length(b) for b in self.inner_batches]
        self._kept: tuple[Tensor, ...] | None = None
        self._value: Tensor | None = None  # of the batch whose graph was made last
        shards = [b for b in self.inner_batches if isinstance(b, Shard)]
        self._inner_team = shards[0].team if shards else None
        self._outer_team = outer_batch.team if isinstance(outer_batch, Shard) else None

    @cached_property
    def _shares(self) -> list[float]:
        """The part of each inner batch in the whole, by samples."""
        if len(self.inner_batches) == 1:
            return [1.0]
        if None in self._sizes:
            found = self.problem.sizes([b.batch if isinstance(b, Shard) else b for b in self.inner_batches])
            self._sizes = [m if n is None else n for m, n in zip(found, self._sizes, strict=True)]
        sizes = [n or 1 for n in self._sizes]
        return [n / sum(sizes) for n in sizes]

    def _losses(self, index: int) -> Losses:
        """The losses of one batch, or of this worker's part of it."""
        batch = self.inner_batches[index]
        own = batch.batch if isinstance(batch, Shard) else batch
        losses = self.problem.losses(own)
        self.problem.heed(losses)
        if not isinstance(batch, Shard):
            self._sizes[index] = losses.samples(own)
        return losses

    def _count(self, index: int) -> None:
        """One inner gradient on a batch whose losses are known."""
        self.calls.inner_gradients += 1
        self.calls.samples += self._sizes[index] or 1

    @property
    def numel(self) -> int:
        """D, the number of inner parameters."""
        return self.problem.theta.numel

    @property
    def team(self) -> Team | None:
        """Whose workers are all at this point, each with a part of its batches."""
        return self._inner_team or self._outer_team

    @contextmanager
    def _drawing(self, batch: Batch | Shard, seed: int, live: bool = False) -> Iterator[None]:
        """The setting of one pass. A worker draws dropout for its own samples, and the common generators stand still."""
        if not isinstance(batch, Shard):
            with set_aside(), self.problem.guarded(seed, live):
                yield
            return
        own = Randomness(batch.team.seed(seed), self.problem.theta.device)
        with set_aside(), own.scope(), self.problem.guarded(live=live):
            yield

    def _objective(self, index: int) -> Tensor:
        """The inner objective on one batch, ridge included, or this worker's term of it."""
        problem, batch, team = self.problem, self.inner_batches[index], self._inner_team
        mean = self._losses(index).mean()
        if team is None:
            return mean + problem.ridge()
        share = batch.share if isinstance(batch, Shard) else 1 / team.size
        return share * mean + problem.ridge() / team.size

    def _summed(self, tensors: Sequence[Tensor], in_v: Sequence[Tensor] = ()) -> list[Tensor]:
        """What depends on the inner batches, summed over the workers. Few entries of v may be touched by a batch."""
        if self._inner_team is None:
            return [*tensors, *in_v]
        return self._inner_team.sum(tensors) + (self._inner_team.sparse_sum(in_v) if in_v else [])

    def outer(self) -> OuterGradient:
        """The outer loss and its two gradients."""
        theta, v = self.problem.theta, self.problem.v
        with self._drawing(self.outer_batch, self.seed), torch.enable_grad():
            value = self._outer_term()
            found: Sequence[Tensor | None] = [None] * (len(theta.leaves) + len(v.leaves))
            if value.requires_grad:
                found = torch.autograd.grad(value, (*theta.leaves, *v.leaves), allow_unused=True)
        self.calls.outer_gradients += 1
        split = len(theta.leaves)
        in_v = [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found[split:], v.leaves, strict=True)]
        value, in_theta = value.detach(), theta.flatten(found[:split])
        if self._outer_team is not None:
            value, in_theta = self._outer_team.sum([value, in_theta])
            in_v = self._outer_team.sparse_sum(in_v)
        return OuterGradient(value, in_theta, in_v)

    def _outer_term(self) -> Tensor:
        """The outer loss, or this worker's term of it."""
        batch = self.outer_batch
        if isinstance(batch, Shard):
            return batch.share * self.problem.outer_value(batch.batch)
        return self.problem.outer_value(batch)

    @torch.no_grad()
    def outer_value(self) -> float:
        """The outer loss alone, for the record: no derivative and no count."""
        with self._drawing(self.outer_batch, self.seed):
            value = self._outer_term()
        return float(value if self._outer_team is None else self._outer_team.sum([value])[0])

    @torch.no_grad()
    def inner_value(self) -> float:
        """The inner objective alone, ridge included: no derivative and no count."""
        theta = self.problem.theta
        value = torch.zeros((), dtype=theta.dtype, device=theta.device)
        for index, share in enumerate(self._shares):
            with self._pass(index):
                value.add_(self._objective(index), alpha=share)
        return float(self._summed([value])[0])

    def _pass(self, index: int, live: bool = False) -> AbstractContextManager[None]:
        """The setting of a pass over one of the inner batches."""
        return self._drawing(self.inner_batches[index], self.seed + 1 + index, live)

    def inner_gradients(self, in_v: bool = True) -> InnerGradients:
        """The inner objective, ridge included, and its two first derivatives, which methods without products use.

        One pass a batch gives both; with in_v=False the one in v is left out, as zeros.
        """
        theta, v = self.problem.theta, self.problem.v
        wrt = (*theta.leaves, *v.leaves) if in_v else theta.leaves
        value = torch.zeros((), dtype=theta.dtype, device=theta.device)
        total = [torch.zeros_like(leaf) for leaf in (*theta.leaves, *v.leaves)]
        for index, share in enumerate(self._shares):
            with self._pass(index), torch.enable_grad():
                objective = self._objective(index)
                found = torch.autograd.grad(objective, wrt, allow_unused=True)
            self._count(index)
            value.add_(objective.detach(), alpha=share)
            for t, f in zip(total, found, strict=False):
                if f is not None:
                    t.add_(f, alpha=share)
        split = len(theta.leaves)
        value, in_theta, *rest = self._summed([value, theta.flatten(total[:split])], total[split:] if in_v else ())
        return InnerGradients(value, in_theta, rest if in_v else total[split:])

    def _graph(self, index: int) -> tuple[Tensor, ...]:
        """The inner gradient on one batch with its graph, ridge included. Kept when there is one batch only."""
        if self._kept is not None:
            return self._kept
        problem = self.problem
        with torch.enable_grad():
            objective = self._objective(index)
            with twice_differentiable():
                gradient = torch.autograd.grad(
                    objective, problem.theta.leaves, create_graph=True, materialize_grads=True
                )
        self._value = objective.detach()
        self._count(index)
        if len(self.inner_batches) == 1:
            self._kept = gradient
        return gradient

    def _pull_back(self, vector: Tensor, wrt: Sequence[Tensor]) -> list[Tensor]:
        """Mean over the batches of d(gradient . vector)/d(wrt)."""
        parts = self.problem.theta.unflatten(vector)
        total = [torch.zeros_like(t) for t in wrt]
        for index, share in enumerate(self._shares):
            for t, f in zip(total, self._pull_back_on(index, parts, wrt), strict=True):
                if f is not None:
                    t.add_(f, alpha=share)
        return total

    def _pull_back_on(
        self, index: int, parts: Sequence[Tensor], wrt: Sequence[Tensor], several: bool = False
    ) -> Sequence[Tensor | None]:
        """d(gradient . vector)/d(wrt) on one batch, the vector, or `several` stacked ones, given one part a leaf."""
        with self._pass(index):
            gradient = self._graph(index)
            pairs = [(g, p) for g, p in zip(gradient, parts, strict=True) if g.requires_grad]
            if not pairs:
                return [None] * len(wrt)
            with twice_differentiable():
                return torch.autograd.grad(
                    [g for g, _ in pairs],
                    wrt,
                    [p for _, p in pairs],
                    retain_graph=self._kept is not None,
                    allow_unused=True,
                    is_grads_batched=several,
                )

    def hvp(self, vector: Tensor) -> Tensor:
        """The inner Hessian, ridge included, times a vector (D,)."""
        self.calls.hvps += len(self.inner_batches)
        theta = self.problem.theta
        return self._summed([theta.flatten(self._pull_back(vector, theta.leaves))])[0]

    def hvp_on(self, index: int, vector: Tensor) -> Tensor:
        """The same on one of the inner batches alone, for methods that walk over them."""
        self.calls.hvps += 1
        theta = self.problem.theta
        return self._summed([theta.flatten(self._pull_back_on(index, theta.unflatten(vector), theta.leaves))])[0]

    def hvps(self, vectors: Tensor) -> Tensor:
        """`hvp` of every row of (m, D): one forward pass and one vectorised backward pass for each batch.

        Rows are taken one by one where the vectorised pass fails: an operation may not support it, or memory may run out.
        """
        theta = self.problem.theta
        total = torch.zeros_like(vectors)
        parts = [torch.stack(rows) for rows in zip(*map(theta.unflatten, vectors), strict=True)]
        try:
            for index, share in enumerate(self._shares):
                found = self._pull_back_on(index, parts, theta.leaves, several=True)
                for place, f in zip(theta.slices().values(), found, strict=True):
                    if f is not None:
                        total[:, place].add_(f.reshape(len(vectors), -1), alpha=share)
            failed = False
        except RuntimeError:
            failed = True
        if failed if self._inner_team is None else self._inner_team.any(failed):
            return torch.stack([self.hvp(vector) for vector in vectors])
        self.calls.hvps += len(vectors) * len(self.inner_batches)
        return self._summed([total])[0]

    def prepare(self) -> None:
        """All of the next product that does not need its vector, where one batch allows to keep it."""
        if len(self.inner_batches) == 1:
            with self._pass(0):
                self._graph(0)

    def cross(self, vector: Tensor) -> list[Tensor]:
        """The cross derivative, transposed, times a vector (D,): one tensor for each leaf of v."""
        self.calls.cross += len(self.inner_batches)
        return self._summed([], self._pull_back(vector, self.problem.v.leaves))

    def products(self, vector: Tensor) -> tuple[Tensor, list[Tensor]]:
        """`hvp` and `cross` of one vector, from one backward pass."""
        theta, v = self.problem.theta, self.problem.v
        self.calls.hvps += len(self.inner_batches)
        self.calls.cross += len(self.inner_batches)
        found = self._pull_back(vector, (*theta.leaves, *v.leaves))
        in_theta, *in_v = self._summed([theta.flatten(found[: len(theta.leaves)])], found[len(theta.leaves) :])
        return in_theta, in_v

    def live_gradient(self) -> tuple[Tensor, list[Tensor]]:
        """The inner loss and its gradient, one tensor a leaf, as an inner step takes them: buffers follow.

        With one batch the products taken afterwards share its graph, so that a method whose inner step, Hessian product and
        cross product fall on one point pays for one forward pass.
        """
        theta = self.problem.theta
        value = torch.zeros((), dtype=theta.dtype, device=theta.device)
        total = [torch.zeros_like(leaf) for leaf in theta.leaves]
        for index, share in enumerate(self._shares):
            with self._pass(index, live=True):
                gradient = self._graph(index)
            assert self._value is not None
            value.add_(self._value, alpha=share)
            for t, g in zip(total, gradient, strict=True):
                t.add_(g.detach(), alpha=share)
        value, *total = self._summed([value, *total])
        return value, total

    def gradient(self) -> Tensor:
        """The inner gradient, ridge included, (D,)."""
        theta = self.problem.theta
        total = torch.zeros(theta.numel, dtype=theta.dtype, device=theta.device)
        for index, share in enumerate(self._shares):
            with self._pass(index):
                total.add_(theta.flatten([g.detach() for g in self._graph(index)]), alpha=share)
        return self._summed([total])[0]

    def dense(self) -> Tensor:
        """The inner Hessian as an array (D, D), symmetrised: D products."""
        eye = torch.eye(self.numel, dtype=self.problem.theta.dtype, device=self.problem.theta.device)
        hessian = torch.stack([self.hvp(row) for row in eye])
        return (hessian + hessian.T) / 2

    def empirical_fisher(self, vector: Tensor) -> Tensor:
        """The empirical Fisher matrix plus the ridge's Hessian, times a vector (D,): (1/B) J^T W J x + 2 l2 x.

        J holds the per-sample gradients; J x comes from differentiating J^T c in c, so no (B, D) array is formed.
        """
        theta = self.problem.theta

        def product(losses: Losses) -> Tensor:
            scores = self._push_forward(losses.values, vector)  # (B,)
            weights = 1.0 if losses.weights is None else losses.weights.detach()
            found = torch.autograd.grad(losses.values, theta.leaves, weights * scores / len(scores), allow_unused=True)
            return theta.flatten(found)

        return self._mean_of(product) + self.problem.ridge_diagonal() * vector

    def ggn(self, vector: Tensor) -> Tensor:
        """The generalised Gauss-Newton matrix plus the ridge's Hessian, times a vector (D,).

        (1/B) sum_i w_i J_i^T (d2 l_i / d z_i^2) J_i x + 2 l2 x, with z the model's outputs and the curvature in z taken
        from the loss itself. It never has negative curvature when the loss is convex in z.
        """
        theta = self.problem.theta

        def product(losses: Losses) -> Tensor:
            outputs = losses.outputs_for("The GGN")
            pushed = self._push_forward(outputs, vector)  # J x, shaped like z
            slope = losses.slope("The GGN")
            bent = (
                torch.autograd.grad(slope, outputs, pushed, retain_graph=True)[0] if slope.requires_grad else 0 * pushed
            )
            if losses.weights is not None:
                bent = bent * losses.weights.detach().reshape(-1, *[1] * (bent.ndim - 1))
            found = torch.autograd.grad(outputs, theta.leaves, bent / len(losses.values), allow_unused=True)
            return theta.flatten(found)

        self.calls.hvps += len(self.inner_batches)
        return self._mean_of(product) + self.problem.ridge_diagonal() * vector

    def _push_forward(self, outputs: Tensor, vector: Tensor) -> Tensor:
        """J x for J = d outputs / d theta, by differentiating J^T c in c."""
        theta = self.problem.theta
        probe = torch.zeros_like(outputs, requires_grad=True)
        pulled = torch.autograd.grad(outputs, theta.leaves, probe, create_graph=True, materialize_grads=True)
        pairs = [(p, x) for p, x in zip(pulled, theta.unflatten(vector), strict=True) if p.requires_grad]
        return torch.autograd.grad([p for p, _ in pairs], probe, [x for _, x in pairs], retain_graph=True)[0]

    def _mean_of(self, product: Callable[[Losses], Tensor]) -> Tensor:
        total = torch.zeros(self.numel, dtype=self.problem.theta.dtype, device=self.problem.theta.device)
        for index, (batch, share) in enumerate(zip(self.inner_batches, self._shares, strict=True)):
            if isinstance(batch, Shard):
                share = share * batch.share
            elif self._inner_team is not None:
                share = share / self._inner_team.size
            with self._pass(index), torch.enable_grad():
                losses = self._losses(index)
                if not losses.per_sample:
                    raise InputError(
                        "The Fisher matrix needs per-sample losses, but inner() returned a scalar."
                        " Return losses of shape (B,)."
                    )
                total.add_(product(losses), alpha=share)
        return self._summed([total])[0]
