"""What of a gradient can be told from its sampling error: positive-part James-Stein shrinkage."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def shrunk(entries: Tensor, variances: Tensor | float) -> Tensor:
    """Each entry e with a sampling error of variance s^2 as e max(0, 1 - s^2 / e^2).

    >>> shrunk(torch.tensor([4.0, -2.0, 1.0]), torch.tensor([4.0, 1.0, 2.0])).tolist()
    [3.0, -1.5, 0.0]
    """
    squares = entries.square().clamp_min(torch.finfo(entries.dtype).tiny)
    return entries * (1 - variances / squares).clamp_min(0)


def shrunk_as_one(part: Tensor, error: Tensor) -> Tensor:
    """The same of a whole part of a vector, whose squared length has this error: all of it by one factor."""
    return part * (1 - error / part.square().sum().clamp_min(torch.finfo(part.dtype).tiny)).clamp_min(0)


def shrunk_by_leaf(vector: Tensor, error: Tensor, places: Mapping[str, slice]) -> Tensor:
    """A vector (D,), each leaf of theta by one factor; `error` has the squared one of each leaf, (leaves,)."""
    pieces = [shrunk_as_one(vector[place], e) for place, e in zip(places.values(), error, strict=True)]
    return torch.cat(pieces)
