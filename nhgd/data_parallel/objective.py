"""The objectives of a batch that is divided among workers: each finds a term, and the sum over the workers is the
answer.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor
from typing_extensions import override

from nhgd._randomness import Randomness
from nhgd._surroundings import library_settings
from nhgd.data.batch import Batch
from nhgd.data_parallel.shard import Shard
from nhgd.errors import InputError
from nhgd.objective import Objective, OuterObjective, Pass, Tap
from nhgd.problem import Bilevel

STEP_SEED = 0x9E3779B1  # odd: torch's generator on a CPU takes the low 32 bits of a seed, and they differ at every step


@final
class DividedObjective(Objective):
    """The inner objective on a batch, of which this worker evaluates b of B samples. With N workers its term is

        (b / B) mean_i( w_i l_i ) + (1 / N) sum( l2 * theta^2 )

    and the sum of the terms over the workers is the objective on the whole batch. All workers must ask the same
    questions in the same order.

    Args:
        problem, seed: as of `Objective`.
        batch: the samples of this worker.
        shard: which they are of the whole batch.
    """

    def __init__(self, problem: Bilevel, batch: Batch, seed: int | None, shard: Shard) -> None:
        self.shard = shard
        self.share = shard.share
        self.reduction = None if shard.parts is None else shard
        super().__init__(problem, batch, seed)

    @override
    def total(self, samples: int | None) -> int | None:
        """The samples of all workers."""
        return samples if self.shard.parts is None else sum(self.shard.parts)

    @override
    def summed(self, terms: Sequence[Tensor], in_v: Sequence[Tensor] = ()) -> list[Tensor]:
        return self.shard.sum(terms, in_v)

    @override
    def anywhere(self, flag: bool) -> bool:
        return self.shard.any(flag)

    @override
    def term(self, theta: Sequence[Tensor] | None = None) -> Tensor:
        return self.share * self.losses(theta).mean() + self.problem.ridge(theta) / self.shard.team.size

    @contextmanager
    @override
    def drawing(self, live: bool = False, twice: bool = True) -> Iterator[None]:
        problem, device = self.problem, self.problem.theta.device
        with library_settings(), self.shard.drawing(self.seed or 0, device) as seed, problem.guarded(seed, live, twice):
            yield

    @contextmanager
    @override
    def stepping(self) -> Iterator[None]:
        """The same for an inner step; without a seed, from one that follows from the common generator and the step."""
        if self.seed is not None:
            torch.manual_seed(self.seed)
        seed = self._seed_of_step() if self.seed is None else self.seed
        with Randomness(self.shard.team.seed(seed), self.problem.theta.device).scope():
            yield

    def _seed_of_step(self) -> int:
        before = torch.get_rng_state()
        seed = int(torch.randint(2**31 - 1, ()))
        torch.set_rng_state(before)
        return seed + STEP_SEED * self.shard.step

    @override
    def passed(self, tap: Tap) -> Pass:
        """The pass of an inner step on this worker's samples, its value and gradient summed over the workers."""
        found = super().passed(tap)
        if self.shard.parts is None:
            return found
        leaves, share = self.problem.theta.leaves, self.share
        terms = [torch.zeros_like(p) if g is None else g * share for g, p in zip(found.data, leaves, strict=True)]
        *summed, value, news = self._summed_step(terms, found)
        found.value, found.data = value.to(found.value.dtype), list(summed)
        if float(news) > 0:
            tap.agree(self.shard)
        return found

    def _summed_step(self, gradient: Sequence[Tensor], found: Pass) -> list[Tensor]:
        """A gradient, the mean loss, and how many workers have news, summed over the workers in one message.

        All workers must have used the same layers, or their sums would not match.
        """
        mark = float(zlib.crc32(" ".join(found.layers).encode()) % 2**16)
        scalars = torch.tensor([0.0, mark, mark**2, float(found.news)], dtype=torch.float64, device=found.value.device)
        scalars[0] = found.value * self.share
        *summed, scalars = self.shard.sum([*gradient, scalars])
        if self.shard.team.size * float(scalars[2]) != float(scalars[1]) ** 2:
            raise InputError(
                "The workers' parts of a batch used different layers, so their curvature cannot be summed. Use"
                " fisher_window with records='sample', or one worker."
            )
        return [*summed, scalars[0], scalars[3]]


@final
class DividedOuterObjective(OuterObjective):
    """The outer loss on a batch, of which this worker evaluates b of B samples: its term is b / B times their mean.

    Args:
        problem, seed: as of `OuterObjective`.
        batch: the samples of this worker.
        shard: which they are of the whole batch.
    """

    def __init__(self, problem: Bilevel, batch: Batch, seed: int, shard: Shard) -> None:
        super().__init__(problem, batch, seed)
        self.shard = shard

    @contextmanager
    @override
    def drawing(self) -> Iterator[None]:
        problem, device = self.problem, self.problem.theta.device
        with library_settings(), self.shard.drawing(self.seed, device) as seed, problem.guarded(seed, twice=False):
            yield

    @override
    def term(self, theta: Sequence[Tensor] | None = None) -> Tensor:
        return self.shard.share * super().term(theta)

    @override
    def summed(self, terms: Sequence[Tensor], in_v: Sequence[Tensor] = ()) -> list[Tensor]:
        return self.shard.sum(terms, in_v)
