"""How the batches of a run are divided among workers, and whether they can be: whether a loss is a mean over samples."""

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
from nhgd.data.loader import Stream
from nhgd.data_parallel import AbstractTeam, Shard, Team, adopted, divided
from nhgd.objective import Objective, OuterObjective
from nhgd.part import WHOLE, Part
from nhgd.problem import Bilevel
from nhgd.schedule import Clock

Level = Literal["inner", "outer"]


class Division:
    """Makes the objectives of a run: those of whole batches, or of this worker's parts of them.

    Args:
        problem: what is solved.
        team: the workers.
        inner, outer: where the batches come from.
        clock: of the run: workers draw the dropout of a step from a seed of their own, which follows the steps.

    Attributes:
        found: what the team found out about each level: "divided" or "replicated"; nothing where there is one worker.
    """

    def __init__(self, problem: Bilevel, team: AbstractTeam, inner: Stream, outer: Stream, clock: Clock) -> None:
        self.problem = problem
        self.team = team
        self.clock = clock
        self.found: dict[Level, str] = {}
        self._streams: dict[Level, Stream] = {"inner": inner, "outer": outer}
        team.broadcast(self._replicas())

    @property
    def workers(self) -> int:
        """How many there are."""
        return self.team.size

    def agreed(self, number: float) -> float:
        """The first worker's number: what a clock or a user decides, all decide alike."""
        return self.team.agreed(number)

    def objective(self, batch: Batch, seed: int | None = None) -> Objective:
        """The inner objective on a batch that all workers drew."""
        own, part = self._divided("inner", batch)
        return Objective(self.problem, own, seed, part)

    def objectives(self, batches: Sequence[Batch], seed: int) -> list[Objective]:
        """The inner objectives on several batches, each with a seed of its own. All are sums over the workers, or none is."""
        found = [self.objective(batch, seed + 1 + index) for index, batch in enumerate(batches)]
        if any(objective.part.parts is not None for objective in found) and isinstance(self.team, Team):
            replica = Shard(None, self.team)
            for objective in found:
                objective.part = replica if objective.part.parts is None else objective.part
        return found

    def outer(self, batch: Batch, seed: int) -> OuterObjective:
        """The outer loss on a batch that all workers drew."""
        own, part = self._divided("outer", batch)
        return OuterObjective(self.problem, own, seed, part)

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

    def _divided(self, level: Level, batch: Batch) -> tuple[Batch, Part]:
        """This worker's part of a batch, or all of it: of one worker, and where the loss is not a mean over samples."""
        team = self.team
        if not isinstance(team, Team) or batch is None:
            return batch, WHOLE
        if isinstance(getattr(self._streams[level].source, "sampler", None), DistributedSampler):
            self.found[level] = "divided"
            return batch, adopted(batch, team, self.clock.total)
        if self.found.get(level) == "replicated":
            return batch, WHOLE
        own, part = divided(batch, team, self.clock.total)
        if part is None:
            return batch, WHOLE
        if level not in self.found:
            team.assert_equal(**{f"the first {level} batch": tensors(batch)})
            mean = is_mean_of_parts(self.problem, level, batch, own, part)
            self.found[level] = "divided" if mean else "replicated"
            if level == "inner" and not mean and team.rank == 0:
                warnings.warn(
                    "The inner loss of a batch is not the mean over its samples (batch statistics, or a sum), so every worker"
                    " computes all of it and nothing is gained by a team. Return one loss for each sample.",
                    stacklevel=2,
                )
        return (own, part) if self.found[level] == "divided" else (batch, WHOLE)


def is_mean_of_parts(problem: Bilevel, level: Level, batch: Batch, own: Batch, part: Shard) -> bool:
    """Whether the loss on a batch, and its gradients, are the means of those on the workers' parts, up to rounding.

    A sum over samples, a ratio or batch statistics are not. Where random numbers enter, two passes differ anyway, and the
    user is trusted, but for BatchNorm in training mode. All workers get the same answer.
    """
    for root in (problem.theta.root, problem.v.root):
        for module in root.modules() if root is not None else ():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
                return False
    wrt = (*problem.theta.leaves, *problem.v.leaves)

    def measured(given: Batch) -> list[Tensor]:
        with torch.enable_grad():
            value = problem.losses(given).mean() if level == "inner" else problem.outer_value(given)
            found = torch.autograd.grad(value, wrt, allow_unused=True) if value.requires_grad else [None] * len(wrt)
        return [value.detach(), *(torch.zeros_like(p) if g is None else g for p, g in zip(wrt, found, strict=True))]

    with Randomness(0, problem.theta.device).scope(), problem.guarded():
        before = torch.get_rng_state()
        whole = measured(batch)
        random = not torch.equal(before, torch.get_rng_state())
        here = measured(own)
    share = part.share
    # A sum may cancel, so errors are measured by the size of its terms.
    sizes = torch.stack([t.double().norm() * share for t in here])
    *summed, sizes = part.sum([*(t * share for t in here), sizes])
    differs = not random and any(
        not float((a - b).double().norm()) <= _tolerance(a) * max(float(size), torch.finfo(torch.float64).tiny)
        for a, b, size in zip(whole, summed, sizes, strict=True)
    )
    return not part.any(differs)


def _tolerance(tensor: Tensor) -> float:
    """Far above rounding and far below the difference that a loss of another kind makes."""
    eps: float = torch.finfo(tensor.dtype).eps
    return math.pow(eps, 0.6)
