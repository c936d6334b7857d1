"""A worker's part of a batch.

Every worker holds the same theta and v, draws the same batch from the same random numbers, and keeps its own slice of
it: a `Shard`. Means over the batch are computed on the slice, scaled by its share of the batch, and summed over the
workers, so that N workers with slices of B / N give the result of one worker with B. A batch that cannot be divided is
computed in full by every worker, which is correct, but no faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from typing_extensions import override

from nhgd._randomness import Randomness
from nhgd._tree import map_tensors, tensors
from nhgd.data.batch import Batch, common_length
from nhgd.data_parallel.collectives import Team
from nhgd.errors import InputError
from nhgd.record import BatchGradient, InnerRecord, Reduction


@dataclass(frozen=True)
class Shard(Reduction):
    """This worker's part of a batch, and the reductions that turn its results into those of the whole batch.

    Attributes:
        parts: how many samples each worker has, by rank; None if every worker evaluates the whole batch.
        team: the workers.
        step: inner steps of the run so far; a worker draws dropout for its own samples at each step.
    """

    parts: tuple[int, ...] | None
    team: Team = field(repr=False)
    step: int = 0

    @property
    def share(self) -> float:
        """The factor of a mean over the samples here in the mean over the whole batch."""
        return 1 / self.team.size if self.parts is None else self.parts[self.team.rank] / sum(self.parts)

    @property
    @override
    def pool(self) -> Team:
        return self.team

    @override
    def total(self, samples: int) -> int:
        """The samples of the whole batch."""
        return samples if self.parts is None else sum(self.parts)

    @contextmanager
    def drawing(self, seed: int, device: torch.device) -> Iterator[int | None]:
        """Dropout of this worker's samples, from a seed of its own; the global generators do not move.

        What is yielded is the seed that is left to be set inside.
        """
        if self.parts is None:
            yield seed
            return
        with Randomness(self.team.seed(seed), device).scope():
            yield None

    @override
    def mean(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(tensors) if self.parts is None else self.team.mean(tensors, self.parts)

    @override
    def chosen(self, samples: Tensor) -> tuple[Tensor, int, Shard]:
        """Of some samples of the batch: this worker's, how many earlier workers have, and the shard of these alone."""
        if self.parts is None:
            return samples, 0, self
        ends = list(accumulate(self.parts, initial=0))
        own = [samples[(samples >= a) & (samples < b)] - a for a, b in pairwise(ends)]
        parts = tuple(map(len, own))
        rank = self.team.rank
        return own[rank], sum(parts[:rank]), replace(self, parts=parts)

    def sum(self, terms: Sequence[Tensor], in_v: Sequence[Tensor] = ()) -> list[Tensor]:
        """The terms summed over the workers. Few entries of v may be touched by a batch."""
        return self.team.sum(terms) + (self.team.sparse_sum(in_v) if in_v else [])

    def any(self, flag: bool) -> bool:
        """Whether it holds on some worker."""
        return self.team.any(flag)

    @override
    def union(self, names: set[str], known: Sequence[str]) -> set[str]:
        return self.team.union(names, known)

    @override
    def extremes(self, low: float, high: float) -> tuple[float, float]:
        ends = self.team.gather([torch.tensor([[low, high]], dtype=torch.float64)], [1] * self.team.size)[0]
        return float(ends.min()), float(ends.max())

    @override
    def gathered(self, record: InnerRecord) -> InnerRecord:
        """The record of the whole batch, on every worker, in the order of the samples."""
        if isinstance(record, BatchGradient) or self.parts is None:
            return record
        samples, alone = record.samples, replace(record, reduction=None)
        # Rows come root by root, (K B, ...): the samples are brought to the front, and back.
        found = iter(self.team.gather([_by_sample(t, samples) for t in tensors(alone)], self.parts))
        whole = map_tensors(lambda t: _by_root(next(found), len(t) // samples), alone)
        return replace(whole, samples=sum(self.parts), reduction=replace(self, parts=None))


def divided(batch: Batch, team: Team, step: int = 0) -> tuple[Batch, Shard | None]:
    """This worker's slice of a batch that all workers drew.

    A batch whose tensors do not agree on the number of samples, or with fewer samples than workers, is returned as it
    is, without a shard: every worker computes all of it.
    """
    total = common_length(batch)
    if total is None or total < team.size:
        return batch, None
    parts = team.parts(total)
    place = team.place(parts)
    return map_tensors(lambda t: t[place] if t.ndim else t, batch), Shard(parts, team, step)


def adopted(batch: Batch, team: Team, step: int = 0) -> Shard:
    """A batch that is this worker's part already, as a DistributedSampler yields it."""
    samples = common_length(batch)
    if samples is None:
        raise InputError(
            "The tensors of a batch have different lengths, so it is unclear how many samples this worker has. Every sample"
            " needs one row in each."
        )
    return Shard(tuple(team.counts(samples)), team, step)


def _by_sample(tensor: Tensor, samples: int) -> Tensor:
    """(K B, ...) -> (B, K, ...)."""
    return tensor.reshape(-1, samples, *tensor.shape[1:]).transpose(0, 1)


def _by_root(tensor: Tensor, roots: int) -> Tensor:
    """(B, K, ...) -> (K B, ...)."""
    assert tensor.shape[1] == roots
    return tensor.transpose(0, 1).flatten(0, 1)
