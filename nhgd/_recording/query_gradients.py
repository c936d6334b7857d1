"""Gradients of the outer loss of one sample at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from nhgd._tree import map_tensors, named_tensors
from nhgd.data.batch import Batch, common_length
from nhgd.problem import Bilevel

TOGETHER = 64  # samples whose passes are vectorised


class QueryGradients:
    """Evaluates the outer function on batches of one sample, several of them at once through torch.func.vmap.

    Where vmap cannot follow the outer function, each sample has a pass of its own. A batch that does not show its
    samples is a single query.
    """

    def __init__(self, problem: Bilevel) -> None:
        self.problem = problem
        self.slow = False

    def of(self, batch: Batch, most: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Outer losses, (q,), and their gradients in theta, (q, D), of at most so many samples at a time."""
        samples = common_length(batch)
        for first in range(0, samples or 1, most):
            some = batch if samples is None else cut(batch, first, min(first + most, samples))
            yield self._found(some, samples is None, seed)

    def _found(self, batch: Batch, alone: bool, seed: int) -> tuple[Tensor, Tensor]:
        with self.problem.guarded(seed):
            if not (self.slow or alone):
                try:
                    return self._vectorised(batch)
                except (RuntimeError, ValueError, NotImplementedError):  # a loop tells whether the function is at fault
                    self.slow = True
            pairs = [self._single(batch)] if alone else [self._single(one) for one in ones(batch)]
        return torch.stack([value for value, _ in pairs]), torch.stack([gradient for _, gradient in pairs])

    def _single(self, batch: Batch) -> tuple[Tensor, Tensor]:
        theta = self.problem.theta
        with torch.enable_grad():
            value = self.problem.outer_value(batch)
            found: Sequence[Tensor | None] = [None] * len(theta.leaves)
            if value.requires_grad:
                found = torch.autograd.grad(value, theta.leaves, allow_unused=True)
        return value.detach(), theta.flatten(found)

    def _vectorised(self, batch: Batch) -> tuple[Tensor, Tensor]:
        theta, v = self.problem.theta, [leaf.detach() for leaf in self.problem.v.leaves]
        tensors = dict(named_tensors(batch))

        def loss(leaves: list[Tensor], rows: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            values = iter(rows[path].unsqueeze(0) for path in tensors)
            value = self.problem.outer_value(map_tensors(lambda _: next(values), batch), leaves, v)
            return value, value

        per_sample = torch.func.vmap(
            torch.func.grad(loss, has_aux=True), in_dims=(None, 0), randomness="different", chunk_size=TOGETHER
        )
        gradients, values = per_sample([leaf.detach() for leaf in theta.leaves], tensors)
        return values.detach(), torch.cat([g.reshape(len(values), -1).to(theta.dtype) for g in gradients], dim=1)


def cut(batch: Batch, first: int, stop: int) -> Batch:
    """Some samples of a batch, in their order."""
    return map_tensors(lambda t: t[first:stop] if t.ndim else t, batch)


def ones(batch: Batch) -> Iterator[Batch]:
    """Every sample as a batch of its own."""
    for i in range(common_length(batch) or 0):
        yield cut(batch, i, i + 1)
