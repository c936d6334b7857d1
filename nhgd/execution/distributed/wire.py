"""Tensors and records as bytes: no pickles, only shapes in JSON and the numbers themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from nhgd._tree import tensors as tensors_of
from nhgd._tree.encoding import Decoder, Encoder, expected
from nhgd.inverse._learned.state import State
from nhgd.record import BatchGradient, InnerRecord, LayerRecord, LayerStatistics, PerSampleGradients

S = TypeVar("S", bound=State)
Shapes = list[Any]  # [dtype, shape] for each tensor


def shapes(tensors: Sequence[Tensor]) -> Shapes:
    """What is to be known of tensors to read them back from their bytes."""
    return [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]


def to_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """A copy of all numbers in one array of bytes, the widest first so that each stands where its kind may stand."""
    kinds = {t.dtype for t in tensors}
    if len(kinds) == 1:  # as a rule, and in the inner loop
        return torch.cat([t.reshape(-1) for t in tensors]).view(torch.uint8)
    order = sorted(kinds, key=lambda kind: (-kind.itemsize, str(kind)))
    parts = [torch.cat([t.reshape(-1) for t in tensors if t.dtype == kind]).view(torch.uint8) for kind in order]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def from_bytes(found: Shapes, data: Tensor) -> list[Tensor]:
    """The tensors that gave these bytes, as views of them.

    >>> kept = [torch.tensor(1.5), torch.arange(3), torch.zeros(0)]
    >>> [t.tolist() for t in from_bytes(shapes(kept), to_bytes(kept))]
    [1.5, [0, 1, 2], []]
    """
    kinds = [getattr(torch, name) for name, _ in found]
    order = sorted(range(len(found)), key=lambda i: (-kinds[i].itemsize, str(kinds[i]), i))
    made: dict[int, Tensor] = {}
    at = 0
    for i in order:
        shape = found[i][1]
        size = kinds[i].itemsize * torch.Size(shape).numel()
        made[i] = data[at : at + size].view(kinds[i]).reshape(shape)
        at += size
    return [made[i] for i in range(len(found))]


def size_of(found: Shapes) -> int:
    """How many bytes they take."""
    return sum(getattr(torch, name).itemsize * torch.Size(shape).numel() for name, shape in found)


def unpacked(record: InnerRecord) -> tuple[tuple[Any, ...], list[Tensor]]:
    """All of a record but its tensors, as plain values, and the tensors an inverse needs of it.

    The third value says whether the record is of one worker's part of a batch, which those of the other workers complete.
    """
    if isinstance(record, BatchGradient):
        return ("batch", record.samples, False, record.row is not None), tensors_of(record)
    if isinstance(record, PerSampleGradients):
        return ("sample", record.samples, record.parts is not None), [record.rows]
    found: list[Tensor] = []
    layers = []
    for layer in record.layers:
        found += layer.raw_inputs
        for call in layer.raw_scores:
            found += call
        found.append(layer.scale)
        columns = len(layer.raw_scores[0]) if layer.raw_scores else 0
        geometry = _geometry(layer.module)
        layers.append((layer.weight, layer.bias, tuple(layer.shape), len(layer.raw_inputs), columns, geometry))
    found += [t for t in (record.other_rows, record.weights) if t is not None]
    others = record.other_names, record.other_rows is not None, record.weights is not None
    return ("layer", record.samples, record.parts is not None, tuple(layers), *others), found


def packed(form: Sequence[Any], tensors: Sequence[Tensor]) -> InnerRecord:
    """The record that `unpacked` took apart."""
    rest = iter(tensors)
    if form[0] == "batch":
        only = next(rest)
        return BatchGradient(only, None, form[1]) if form[3] else BatchGradient(None, only, form[1])
    if form[0] == "sample":
        return PerSampleGradients(next(rest), form[1])
    _, samples, _, layers, other_names, has_others, has_weights = form
    made = tuple(_layer(layer, rest) for layer in layers)
    rows = next(rest) if has_others else None
    return LayerStatistics(made, tuple(other_names), rows, next(rest) if has_weights else None, samples)


def _layer(form: Sequence[Any], rest: Iterator[Tensor]) -> LayerRecord:
    weight, bias, shape, calls, columns, geometry = form
    inputs = tuple(next(rest) for _ in range(calls))
    scores = tuple(tuple(next(rest) for _ in range(columns)) for _ in range(calls))
    module = nn.Identity() if geometry is None else _convolution(json.dumps(geometry))
    return LayerRecord(weight, bias, torch.Size(shape), module, inputs, scores, next(rest))


def _geometry(module: nn.Module) -> tuple[Any, ...] | None:
    """What a record needs of a layer's module: nothing of a Linear, all but the numbers of a convolution."""
    if not isinstance(module, nn.Conv2d):
        return None
    m = module
    sides = m.kernel_size, m.stride, m.padding, m.dilation
    return (m.in_channels, m.out_channels, *sides, m.groups, False, m.padding_mode)


@cache
def _convolution(geometry: str) -> nn.Conv2d:
    given: list[Any] = [tuple(part) if isinstance(part, list) else part for part in json.loads(geometry)]
    with torch.device("meta"):
        return nn.Conv2d(*given)


def joined(shards: Sequence[InnerRecord]) -> InnerRecord:
    """The record of one step whose samples were divided over several processes."""
    first = shards[0]
    if len(shards) == 1:
        return first
    samples = sum(shard.samples for shard in shards)
    if isinstance(first, BatchGradient):
        return first  # the gradient of a batch is that of all workers already
    if isinstance(first, PerSampleGradients):
        rows = [s.rows for s in shards if isinstance(s, PerSampleGradients)]
        return PerSampleGradients(_side_by_side(rows, [s.samples for s in shards]), samples)
    records = [s for s in shards if isinstance(s, LayerStatistics)]
    by_name = [{layer.weight: layer for layer in record.layers} for record in records]
    layers = tuple(_joined_layer([named[layer.weight] for named in by_name]) for layer in first.layers)
    rows = [r.other_rows for r in records if r.other_rows is not None]
    weights = [r.weights for r in records if r.weights is not None]
    return LayerStatistics(
        layers,
        first.other_names,
        _side_by_side(rows, [r.samples for r in records]) if rows else None,
        torch.cat(weights) if weights else None,
        samples,
    )


def _joined_layer(layers: Sequence[LayerRecord]) -> LayerRecord:
    first = layers[0]
    inputs = tuple(torch.cat(parts) for parts in zip(*(layer.raw_inputs for layer in layers), strict=True))
    scores = tuple(
        tuple(torch.cat(parts) for parts in zip(*calls, strict=True))
        for calls in zip(*(layer.raw_scores for layer in layers), strict=True)
    )
    scale = torch.cat([layer.scale for layer in layers])
    return LayerRecord(first.weight, first.bias, first.shape, first.module, inputs, scores, scale)


def _side_by_side(rows: Sequence[Tensor], samples: Sequence[int]) -> Tensor:
    """Rows (K B_r, d) of several shards as (K B, d), the rows of one k together."""
    split = [part.reshape(-1, count, part.shape[1]) for part, count in zip(rows, samples, strict=True)]
    return torch.cat(split, dim=1).flatten(0, 1)


def to_message(tree: State) -> tuple[dict[str, Any], list[Tensor]]:
    """A state as text and tensors."""
    encoder = Encoder()
    return {"tree": encoder.encode(tree, ""), "names": list(encoder.tensors)}, list(encoder.tensors.values())


def from_message(text: dict[str, Any], tensors: Sequence[Tensor], like: S, device: torch.device) -> S:
    """The state that `to_message` took apart, of the class of `like`."""
    named = dict(zip(text["names"], tensors, strict=False))  # a message without tensors has its bytes, none, as one
    found = Decoder(named, expected(like), device).decode(text["tree"])
    assert isinstance(found, type(like))
    return found
