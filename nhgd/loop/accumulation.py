"""Micro-batches: one inner step whose batch is passed over in several parts, for its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from nhgd._recording.streaming import Fold
from nhgd._tree import map_tensors
from nhgd.data.batch import Batch, common_length
from nhgd.errors import InputError
from nhgd.record import FoldedLayer, InnerRecord, InnerStep, LayerStatistics, joined


def micro_batches(batch: Batch, count: int) -> list[Batch]:
    """A batch in `count` parts, as equal as they can be; fewer if it has fewer samples, and one of no batch.

    >>> [part.tolist() for part in micro_batches(torch.arange(5), 2)]
    [[0, 1, 2], [3, 4]]
    """
    if count == 1 or batch is None:
        return [batch]
    samples = common_length(batch)
    if samples is None:
        raise InputError(
            "accumulate divides batches into micro-batches, and needs tensors that all have the samples as first dimension."
        )
    edges = [-(-samples * i // count) for i in range(count + 1)]

    def part(first: int, last: int) -> Batch:
        found: Batch = map_tensors(lambda t: t[first:last], batch)
        return found

    return [part(a, b) for a, b in pairwise(edges) if b > a]


def accumulated(
    parts: Sequence[Batch], take: Callable[[Batch, float], InnerStep], fold: Fold | None = None
) -> InnerStep:
    """One step from those on its parts: means over all samples.

    Args:
        take: the step on a part, given its share of the samples.
        fold: what is kept of each layer that a part has in full, as the others may have done where scores arrived.
    """
    sizes = [common_length(part) or 1 for part in parts]
    total, gradient, value, records = sum(sizes), list[torch.Tensor](), None, []
    for part, size in zip(parts, sizes, strict=True):
        share = size / total
        step = take(part, share)
        if value is None:
            gradient, value = [g * share for g in step.gradient], step.value * share
        else:
            torch._foreach_add_(gradient, list(step.gradient), alpha=share)
            value = value + step.value * share
        if step.record is not None:
            records.append(step.record if fold is None else _folded(step.record, fold))
    assert value is not None
    return InnerStep(gradient, value, joined(records) if records else None)


def _folded(record: InnerRecord, fold: Fold) -> InnerRecord:
    if not isinstance(record, LayerStatistics):
        return record
    own = [
        FoldedLayer(layer.weight, layer.bias, fold(layer, record.weights, record.samples, None))
        for layer in record.layers
    ]
    return replace(record, layers=(), folded=(*record.folded, *own))
