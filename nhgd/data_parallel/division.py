"""How the batches of a run are divided among workers, and whether they can be: whether a loss is a mean over
samples.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.data.distributed import DistributedSampler

from nhgd._randomness import Randomness
from nhgd._tree import tensors
from nhgd.data.batch import Batch
from nhgd.data.stream import BatchStream
from nhgd.data_parallel.collectives import AbstractTeam, Team
from nhgd.data_parallel.objective import DividedObjective, DividedOuterObjective
from nhgd.data_parallel.shard import Shard, adopted, divided
from nhgd.errors import InputError
from nhgd.objective import Objective, OuterObjective
from nhgd.problem import Bilevel
from nhgd.schedule import Clock

Level = Literal["inner", "outer"]


class Division:
    """Makes the objectives of a run: those of whole batches, or of this worker's parts of them.

    Args:
        problem: the problem.
        team: the workers.
        inner, outer: where the batches come from.
        clock: of the run: workers draw dropout from separate seeds that depend on the step.

    Attributes:
        found: whether the batches of each level are "divided" or "replicated"; empty for one worker.
    """

    def __init__(
        self, problem: Bilevel, team: AbstractTeam, inner: BatchStream, outer: BatchStream, clock: Clock
    ) -> None:
        self.problem = problem
        self.team = team
        self.clock = clock
        self.found: dict[Level, str] = {}
        self._streams: dict[Level, BatchStream] = {"inner": inner, "outer": outer}
        self._check_shards()
        team.broadcast(self._replicas())

    def _check_shards(self) -> None:
        """Refuse a theta that `fully_shard` has divided over other ranks than the workers."""
        self.problem.theta.check_whole()
        shards = self.problem.theta.shards
        workers = self.team.ranks if isinstance(self.team, Team) else ()
        if shards is not None and len(shards.ranks) > 1 and sorted(shards.ranks) != sorted(workers):
            raise InputError(
                f"theta is divided by fully_shard over {len(shards.ranks)} ranks, and the inner batches over"
                f" {max(1, len(workers))}. Let the same ranks share both:"
                " execution=nhgd.execution.Inline(team=nhgd.data_parallel.Team.of()), or"
                " Distributed(curvature_ranks=0), and a mesh of all of them."
            )

    @property
    def workers(self) -> int:
        """How many there are."""
        return self.team.size

    def agreed(self, number: float) -> float:
        """The first worker's number, so that all workers make the same decision."""
        return self.team.agreed(number)

    def objective(self, batch: Batch, seed: int | None = None) -> Objective:
        """The inner objective on a batch that all workers drew."""
        return self._objective(*self._divided("inner", batch), seed)

    def objectives(self, batches: Sequence[Batch], seed: int) -> list[Objective]:
        """The inner objectives on several batches, each with a seed of its own. All are sums over the workers, or
        none is.
        """
        found = [self._divided("inner", batch) for batch in batches]
        if any(shard is not None for _, shard in found) and isinstance(self.team, Team):
            replica = Shard(None, self.team)
            found = [(batch, shard or replica) for batch, shard in found]
        return [self._objective(batch, shard, seed + 1 + index) for index, (batch, shard) in enumerate(found)]

    def _objective(self, batch: Batch, shard: Shard | None, seed: int | None) -> Objective:
        if shard is None:
            return Objective(self.problem, batch, seed)
        return DividedObjective(self.problem, batch, seed, shard)

    def outer(self, batch: Batch, seed: int) -> OuterObjective:
        """The outer loss on a batch that all workers drew."""
        own, shard = self._divided("outer", batch)
        if shard is None:
            return OuterObjective(self.problem, own, seed)
        return DividedOuterObjective(self.problem, own, seed, shard)

    def summed(self, in_v: list[Tensor]) -> list[Tensor]:
        """Tensors shaped like the leaves of v, summed over the workers."""
        return self.team.sparse_sum(in_v) if isinstance(self.team, Team) else in_v

    def assert_equal(self) -> None:
        """Stop the run when the workers no longer hold the same."""
        if self.team.size > 1:
            problem = self.problem
            self.team.assert_equal(
                v=problem.v.leaves,
                theta=problem.theta.leaves,
                buffers=[buffer for variable in (problem.theta, problem.v) for buffer, _ in variable.buffers()],
            )

    def _replicas(self) -> list[Tensor]:
        """What every worker holds a copy of."""
        variables = (self.problem.theta, self.problem.v)
        tensors = [leaf.detach() for variable in variables for leaf in variable.leaves]
        return tensors + [buffer for variable in variables for buffer, _ in variable.buffers()]

    def _divided(self, level: Level, batch: Batch) -> tuple[Batch, Shard | None]:
        """This worker's part of a batch, or all of it if there is one worker or the loss is not a mean over samples."""
        team = self.team
        if not isinstance(team, Team) or batch is None:
            return batch, None
        if isinstance(getattr(self._streams[level].source, "sampler", None), DistributedSampler):
            self.found[level] = "divided"
            return batch, adopted(batch, team, self.clock.total)
        if self.found.get(level) == "replicated":
            return batch, None
        own, shard = divided(batch, team, self.clock.total)
        if shard is None:
            return batch, None
        if level not in self.found:
            team.assert_equal(**{f"the first {level} batch": tensors(batch)})
            mean = is_mean_of_parts(self.problem, level, batch, own, shard)
            self.found[level] = "divided" if mean else "replicated"
            if level == "inner" and not mean and team.rank == 0:
                warnings.warn(
                    "The inner loss of a batch is not the mean over its samples (batch statistics, or a sum), so"
                    " every worker computes all of it and a team gains nothing. Return one loss for each sample.",
                    stacklevel=2,
                )
        return (own, shard) if self.found[level] == "divided" else (batch, None)


def is_mean_of_parts(problem: Bilevel, level: Level, batch: Batch, own: Batch, shard: Shard) -> bool:
    """Whether the loss on a batch, and its gradients, are the means of those on the workers' parts, up to rounding.

    A sum over samples, a ratio or batch statistics are not. Where random numbers enter, two passes differ anyway, and
    the user is trusted, but for BatchNorm in training mode. All workers get the same answer.
    """
    for root in (problem.theta.root, problem.v.root):
        for module in root.modules() if root is not None else ():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
                return False
    wrt = (*problem.theta.leaves, *problem.v.leaves)

    def measured(given: Batch) -> list[Tensor]:
        with torch.enable_grad():
            value = problem.losses(given).mean() if level == "inner" else problem.outer_value(given)
            found = problem.scaling.grad(value, wrt, allow_unused=True) if value.requires_grad else [None] * len(wrt)
        return [value.detach(), *(torch.zeros_like(p) if g is None else g for p, g in zip(wrt, found, strict=True))]

    with Randomness(0, problem.theta.device).scope(), problem.guarded():
        before = torch.get_rng_state()
        whole = measured(batch)
        random = not torch.equal(before, torch.get_rng_state())
        here = measured(own)
    share = shard.share
    # A sum may cancel, so errors are measured by the size of its terms.
    sizes = torch.stack([t.double().norm() * share for t in here])
    *summed, sizes = shard.sum([*(t * share for t in here), sizes])
    differs = not random and any(
        not float((a - b).double().norm()) <= _tolerance(a) * max(float(size), torch.finfo(torch.float64).tiny)
        for a, b, size in zip(whole, summed, sizes, strict=True)
    )
    return not shard.any(differs)


def _tolerance(tensor: Tensor) -> float:
    """Far above rounding and far below the difference that a loss of another kind makes."""
    eps: float = torch.finfo(tensor.dtype).eps
    return math.pow(eps, 0.6)
