"""Batches that are filled up to the length of the others, so that work on them has one form."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Padded(tuple[Any, ...]):
    """A batch of B samples of which the first n count, while the others repeat one of them.

    Their weights are multiplied by `share`, which is B / n for those that count and 0 for the others. So a mean over B
    of anything that is weighted is the mean over n.

    Attributes:
        share: (B,).
        samples: n, in the step that is rehearsed.
        passes: how many gradients were taken of the batch.
    """

    share: Tensor
    samples: int
    passes: int

    @classmethod
    def of(cls, parts: Iterable[Any], count: Tensor, samples: int) -> Padded:
        """A batch, with the number of its samples that count on the device."""
        made = cls(parts)
        dtypes = [t.dtype for t in made if t.is_floating_point() and t.dtype.itemsize >= 4]
        size = len(made[0])
        scale = size / count.to(dtypes[0] if dtypes else torch.float32)
        made.share = torch.where(torch.arange(size, device=count.device) < count, scale, torch.zeros_like(scale))
        made.samples, made.passes = samples, 0
        return made
