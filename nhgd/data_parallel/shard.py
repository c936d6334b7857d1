"""A worker's part of a batch.

Every worker holds the same theta and v, draws the same batch from the same random numbers, and keeps its own slice of
it: a `Shard`. What is a mean over the batch is computed on the slice, scaled by the slice's part of the batch, and summed
over the workers, so that N workers with slices of B / N do what one worker does with B. A batch that cannot be divided is
computed in full by every worker, which is right too, and no faster.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nhgd._randomness import Randomness
from nhgd._tree import map_tensors
from nhgd.data.batch import Batch, common_length
from nhgd.data_parallel.collectives import Team
from nhgd.errors import InputError

STEP_SEED = 0x9E3779B1  # odd: torch's generator on a CPU takes the low 32 bits of a seed, and they differ at every step


@dataclass(frozen=True)
class Shard:
    """The part of a batch that this worker evaluates. What it finds is one term of a sum over the workers:

        (b / B) mean_i( w_i l_i ) + (1 / N) sum( l2 * theta^2 )      over its b of B samples, with N workers

    Attributes:
        parts: how many samples each worker has, by rank; None where every worker evaluates all of the batch.
        team: who the others are.
        step: inner steps of the run so far; a worker draws dropout for its own samples, anew at each step.
    """

    parts: tuple[int, ...] | None
    team: Team = field(repr=False)
    step: int = 0

    @property
    def share(self) -> float:
        """The factor of a mean over the samples here in the mean over the whole batch."""
        return 1 / self.team.size if self.parts is None else self.parts[self.team.rank] / sum(self.parts)

    def total(self, samples: int | None) -> int | None:
        """The samples of the whole batch."""
        return samples if self.parts is None else sum(self.parts)

    def term(self, mean: Tensor, ridge: Tensor) -> Tensor:
        """What this worker adds to the objective of the whole batch."""
        return self.share * mean + ridge / self.team.size

    @contextmanager
    def drawing(self, seed: int, device: torch.device) -> Iterator[int | None]:
        """Dropout for the samples of this worker, from a seed of its own; the common generators stand still."""
        if self.parts is None:
            yield seed
            return
        with Randomness(self.team.seed(seed), device).scope():
            yield None

    @contextmanager
    def stepping(self, seed: int | None, device: torch.device) -> Iterator[None]:
        """The same for an inner step; without a seed, one that follows from the common generator and the step."""
        if seed is not None:
            torch.manual_seed(seed)
        with Randomness(self.team.seed(self._seed_of_step() if seed is None else seed), device).scope():
            yield

    def _seed_of_step(self) -> int:
        before = torch.get_rng_state()
        seed = int(torch.randint(2**31 - 1, ()))
        torch.set_rng_state(before)
        return seed + STEP_SEED * self.step

    def sum(self, terms: Sequence[Tensor], in_v: Sequence[Tensor] = ()) -> list[Tensor]:
        """The terms summed over the workers. Few entries of v may be touched by a batch."""
        return self.team.sum(terms) + (self.team.sparse_sum(in_v) if in_v else [])

    def any(self, flag: bool) -> bool:
        """Whether it holds on some worker."""
        return self.team.any(flag)

    def whole_step(
        self, value: Tensor, gradient: Sequence[Tensor], layers: Sequence[str], news: bool
    ) -> tuple[Tensor, list[Tensor], bool]:
        """A mean loss and its gradient summed over the workers, and whether any of them has news.

        All workers must have met the same layers, or what they sum would not fit together.
        """
        mark = float(zlib.crc32(" ".join(layers).encode()) % 2**16)
        scalars = torch.tensor([0.0, mark, mark**2, float(news)], dtype=torch.float64, device=value.device)
        scalars[0] = value * self.share
        *summed, scalars = self.team.sum([*gradient, scalars])
        if self.team.size * float(scalars[2]) != float(scalars[1]) ** 2:
            raise InputError(
                "The workers' parts of a batch went through different layers, so their curvature cannot be summed. Use"
                " fisher_window with records='sample', or one worker."
            )
        return scalars[0].to(value.dtype), list(summed), float(scalars[3]) > 0

    def union(self, names: set[str], known: Sequence[str]) -> set[str]:
        """Every name that some worker has."""
        return self.team.union(names, known)

    def extremes(self, low: float, high: float) -> tuple[float, float]:
        """The least and the largest of all workers' numbers."""
        ends = self.team.gather([torch.tensor([[low, high]], dtype=torch.float64)], [1] * self.team.size)[0]
        return float(ends.min()), float(ends.max())


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
    """What a batch is that is this worker's part already, as a DistributedSampler gives it."""
    samples = common_length(batch)
    if samples is None:
        raise InputError(
            "The tensors of a batch have different lengths, so it is unclear how many samples this worker has. Every sample"
            " needs one row in each."
        )
    return Shard(tuple(team.counts(samples)), team, step)
