"""Whether the shorter batches of a run may be filled up, so that its steps are of fewer kinds."""

from __future__ import annotations

import torch
from torch import Tensor

from nhgd._captured.random_draws import RandomDraws
from nhgd._randomness import generators_restored
from nhgd.algorithm import AbstractAlgorithm, Loop
from nhgd.data.loader import Data


def can_fill(algorithm: AbstractAlgorithm, loop: Loop) -> bool:
    """Whether a batch that is filled up with samples of no weight has the objective of those that count.

    It has where the losses of samples do not depend on each other, which the derivatives of one such batch show, at a
    point near theta that has no symmetry. An inverse in which every sample counts the same would count them too.
    """
    stream, source, problem = loop.inner, loop.inner.source, loop.problem
    if not isinstance(source, Data) or stream.is_constant or source.samples % source.batch == 0:
        return False
    if getattr(algorithm, "batches", 1) != 1:  # which are weighted by their sizes
        return False
    learner = algorithm.online.learner if algorithm.online is not None else None
    if getattr(learner, "beta", 0.0) is None or problem.theta.named_buffers():
        return False
    count = source.samples % source.batch
    index = torch.arange(source.batch + 1)
    index[count:] = 0
    index[-1] = count
    device = problem.theta.device
    here = problem.theta.flat()
    nearby = here + 0.1 * torch.arange(len(here), device=device, dtype=here.dtype).cos()
    try:
        with generators_restored(device), loop.temporarily_at(nearby), RandomDraws(problem) as draws:
            filled, short = (_derivatives(loop, i.to(device)) for i in (index, index[:count]))
    except Exception:  # of the user's function; the run's own steps report what they meet
        return False
    if draws.seen is not None:
        return False
    eps = max(torch.finfo(t.dtype).eps for t in short)
    return all(bool((a - b).norm() <= 1e3 * eps * b.norm()) for a, b in zip(filled, short, strict=True))


def _derivatives(loop: Loop, index: Tensor) -> list[Tensor]:
    """The objective of a batch, and its derivatives in theta and in v."""
    problem = loop.problem
    objective = loop.objective(loop.inner.gathered(index), seed=0)
    with objective.drawing(twice=False), torch.enable_grad():
        term = objective.losses().mean()
        wanted = [*problem.theta.leaves, *problem.v.leaves]
        found = torch.autograd.grad(term, wanted, allow_unused=True)
    problem.lowest_weight()
    return [term.detach(), *(t for t in found if t is not None)]
