"""Batches that are filled up to the length of the others, so that work on them has one form."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Places(NamedTuple):
    """The positions in a batch that is filled up, their number, and 0: made once, and not for each batch."""

    positions: Tensor
    number: Tensor
    none: Tensor

    @classmethod
    def of(cls, batch: Iterable[Any], device: torch.device) -> Places:
        """Those of a batch."""
        parts = list(batch)
        dtypes = [t.dtype for t in parts if t.is_floating_point() and t.dtype.itemsize >= 4]
        number = torch.full((), len(parts[0]), dtype=dtypes[0] if dtypes else torch.float32, device=device)
        return cls(torch.arange(len(parts[0]), device=device), number, torch.zeros_like(number))

    def share(self, count: Tensor) -> Tensor:
        """Of each sample, in a mean over all of which the first `count` count."""
        return torch.where(self.positions < count, self.number / count.to(self.number.dtype), self.none)


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
    def of(cls, parts: Iterable[Any], count: Tensor, samples: int, places: Places) -> Padded:
        """A batch, with the number of its samples that count on the device."""
        made = cls(parts)
        made.share = places.share(count)
        made.samples, made.passes = samples, 0
        return made

    @classmethod
    def several(cls, batches: Iterable[Iterable[Any]], counts: Tensor, places: Places) -> list[Padded]:
        """Batches with the numbers of their samples that count, (n, 1)."""
        made = [cls(parts) for parts in batches]
        for batch, share in zip(made, places.share(counts).unbind(), strict=True):
            batch.share, batch.samples, batch.passes = share, len(share), 0
        return made
