"""Whether a loss can be divided among workers: whether it is a mean over samples."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from nhgd._randomness import Randomness
from nhgd.data.batch import Batch
from nhgd.data_parallel import Shard
from nhgd.problem import Bilevel

Level = Literal["inner", "outer"]


def is_mean_of_parts(problem: Bilevel, level: Level, batch: Batch, part: Shard) -> bool:
    """Whether the loss on a batch, and its gradients, are the means of those on the workers' parts, up to rounding.

    A sum over samples, a ratio or batch statistics are not. Where random numbers enter, two passes differ anyway, and the
    user is trusted, but for BatchNorm in training mode. All workers get the same answer.
    """
    for root in (problem.theta.root, problem.v.root):
        for module in root.modules() if root is not None else ():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
                return False
    leaves = (*problem.theta.leaves, *problem.v.leaves)

    def measured(given: Batch) -> list[Tensor]:
        with torch.enable_grad():
            value = problem.losses(given).mean() if level == "inner" else problem.outer_value(given)
            found = (
                torch.autograd.grad(value, leaves, allow_unused=True) if value.requires_grad else [None] * len(leaves)
            )
        return [value.detach(), *(torch.zeros_like(p) if g is None else g for p, g in zip(leaves, found, strict=True))]

    with Randomness(0, problem.theta.device).scope(), problem.guarded():
        before = torch.get_rng_state()
        whole = measured(batch)
        random = not torch.equal(before, torch.get_rng_state())
        own = measured(part.batch)
    share = part.share
    # A sum may cancel, so errors are measured by the size of its terms.
    sizes = torch.stack([t.double().norm() * share for t in own])
    *summed, sizes = part.team.sum([*(t * share for t in own), sizes])
    differs = not random and any(
        not float((a - b).double().norm()) <= _tolerance(a) * max(float(size), torch.finfo(torch.float64).tiny)
        for a, b, size in zip(whole, summed, sizes, strict=True)
    )
    return not part.team.any(differs)


def _tolerance(tensor: Tensor) -> float:
    """Far above rounding and far below the difference that a loss of another kind makes."""
    eps: float = torch.finfo(tensor.dtype).eps
    return math.pow(eps, 0.6)
