"""How far the gradient of the outer loss is off because there are no more outer samples."""

from __future__ import annotations

import torch
from torch import Tensor

from nhgd import _tape as tape
from nhgd._tree import map_tensors
from nhgd.data.batch import Batch, common_length
from nhgd.data.padding import Padded
from nhgd.loop.horizon import Horizon
from nhgd.loop.loop import Loop


def half_of(loop: Loop, batch: Batch, horizon: Horizon | None) -> tuple[Batch, float] | None:
    """A random half of the outer batch whose gradient is to be compared with the whole one's at this outer step, and
    the factor of their squared difference that estimates the squared error of the whole; None where nothing is.

    It is measured where the outer samples do not determine v and come in one batch, as often as x is.
    """
    if horizon is None or horizon.determined or loop.outer.batches != 1 or isinstance(batch, Padded):
        return None
    samples = common_length(batch)
    steps = loop.clock.t
    due = horizon.due(loop.clock.k, steps, loop.records(loop.clock.total - steps, steps))
    if samples is None or samples < 2 or not due:
        return None
    count = samples // 2

    def some() -> Tensor:
        generator = torch.Generator("cpu").manual_seed(loop.clock.k)
        return torch.randperm(samples, generator=generator, device="cpu")[:count].sort().values

    chosen = tape.index(some)
    half: Batch = map_tensors(lambda t: t[chosen.to(t.device)] if t.ndim else t, batch)
    return half, count / (samples - count)


def by_leaf(difference: Tensor, loop: Loop) -> Tensor:
    """The squared lengths of the parts of a vector (D,) that belong to each leaf of theta, (leaves,)."""
    parts = loop.problem.theta.unflatten(difference)
    return torch.stack([part.square().sum() for part in parts])
