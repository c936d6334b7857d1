"""The cross derivative from the passes of inner steps, along a vector that is known before them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nhgd import _tape as tape
from nhgd._recording.weighing import CrossTap, Weighing
from nhgd.losses import unpadded
from nhgd.objective import Objective, OracleCalls

PART = 3  # lagged products that cost as much as one: each takes one of the three products of a gradient with a layer


class LaggedCross:
    """The mean cross derivative of the inner steps of one loop along a vector that is known before them.

    Args:
        weighing: how v enters.
        x: the vector, (D,).
        workers: how many share each batch.
    """

    def __init__(self, weighing: Weighing, x: Tensor, workers: int = 1) -> None:
        problem = weighing.problem
        self.weighing = weighing
        self.along = problem.theta.unflatten(x)
        self.workers = workers
        self.steps = 0
        self._pending: list[tuple[Tensor, Tensor, tape.Overlap]] = []
        self._total = [torch.zeros_like(leaf) for leaf in problem.v.leaves]
        self._theta = [torch.zeros_like(leaf) for leaf in problem.theta.leaves] if callable(problem.l2) else None

    def tap(self, recording: bool, whole: bool = True) -> CrossTap:
        """For the next inner step, or for a part of one."""
        return CrossTap(self.weighing, self.along, recording, whole and self.workers == 1)

    def take(
        self, objective: Objective, tap: CrossTap, calls: OracleCalls | None = None, part: float | None = None
    ) -> None:
        """Add what the tap found in a step on this objective, before theta moves.

        part: the share of the samples of a step that is taken in several passes, and counted beforehand.
        """
        weighing = self.weighing
        if calls is not None and (tap.source != "scores" or self.steps % PART == 0):
            calls.cross += 1
        if part is None:
            self.steps += 1
        terms = tap.terms
        if tap.pending is not None:
            self._pending.append(tap.pending)
            terms = list[Tensor | None]()
        if terms is None:
            with objective.drawing():
                terms = weighing.from_graph(objective, self.along)
        if tap.source != "scores":
            objective.count(calls)
        # A batch that is not divided, all workers have.
        share = 1 / self.workers if objective.reduction is None else objective.share
        share *= 1.0 if part is None else part
        for total, term in zip(self._total, terms, strict=False):
            if term is not None:
                total.add_(term, alpha=share)
        if self._theta is not None:
            for total, leaf in zip(self._theta, weighing.problem.theta.leaves, strict=True):
                total.add_(leaf.detach(), alpha=1.0 if part is None else part)

    def _pull(self) -> None:
        """Take the derivatives of weights that were waited with: of those that v was merely indexed by, all at once."""
        pending, self._pending = self._pending, []
        for _, _, work in pending:
            work.join()
        own = [unpadded(weights) for weights, _, _ in pending]
        indices = [self.weighing.index_of(weights) for weights, _ in own]
        known = [index for index in indices if index is not None]
        if pending and len(known) == len(pending):
            self._total[0].index_put_((torch.cat(known),), _along(own, [p for _, p, _ in pending]), accumulate=True)
            return
        for weights, products, _ in pending:
            for total, term in zip(self._total, self.weighing.pulled(weights, products), strict=True):
                if term is not None:
                    total.add_(term)

    def mean(self, summed: Callable[[list[Tensor]], list[Tensor]]) -> list[Tensor]:
        """Over the steps; `summed` adds the terms of all workers."""
        self._pull()
        found = [total / self.steps for total in summed(self._total)]
        if self._theta is None:
            return found
        ridge = self.weighing.ridge([total / self.steps for total in self._theta], self.along)
        return [f if r is None else f + r for f, r in zip(found, ridge, strict=True)]


def _along(weights: Sequence[tuple[Tensor, Tensor | None]], products: Sequence[Tensor]) -> Tensor:
    """(1/B) <s_i, x> of all samples of several batches, each with its share if batches were filled up."""
    sizes, shares = {w.shape[0] for w, _ in weights}, [share for _, share in weights]
    given = [share for share in shares if share is not None]
    if len(sizes) == 1 and len(given) in (0, len(shares)):  # by few operations
        together = torch.cat([p.to(w.dtype) for (w, _), p in zip(weights, products, strict=True)])
        return (together * torch.cat(given) if given else together) / sizes.pop()
    return torch.cat(
        [
            p.to(w.dtype) / w.shape[0] if share is None else p.to(w.dtype) * share / w.shape[0]
            for (w, share), p in zip(weights, products, strict=True)
        ]
    )
