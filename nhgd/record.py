"""What an inner step yields: its gradient, and a record of its computation.

Scale. With the objective mean_i( w_i l_i ) the empirical Fisher matrix is F = mean_i w_i s_i s_i^T, where s_i is the
gradient of l_i. All records hold rows that satisfy F = (1/B) rows^T rows, the ridge left out. For the exact and the
sampled Fisher matrix s_i s_i^T becomes sum_k s_ik s_ik^T with s_ik = J_i^T r_ik, the roots r_ik of the likelihood
pulled back by K further backward passes; a record then holds K rows for each sample.

A record may cover only some samples of a batch, with the rest on other workers. Its `reduction` then turns means over
these samples into means over the batch. An inverse that takes all its means by `batch_mean` need not know more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Literal, NamedTuple, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

RecordKind: TypeAlias = Literal["batch", "raw", "sample", "layer"]
FisherKind: TypeAlias = Literal["empirical", "exact", "sampled", "auto"]
BATCH_OBJECTIVE = "of the batch objective"  # statistics, where BatchNorm in training mode couples the samples


class Pool(Protocol):
    """A group of workers that hold the same numbers and divide independent work on them; all must request the same
    work.
    """

    def map(self, likes: Sequence[Tensor], costs: Sequence[float], make: Callable[[int], Tensor]) -> list[Tensor]:
        """Tensor i, shaped as `likes[i]`, from `make(i)`: each is made once, and all have it."""

    def map_rows(self, count: int, make: Callable[[slice], Tensor]) -> Tensor:
        """A tensor of `count` rows from `make` of some of them: each is made once, and all have it."""


class Reduction(ABC):
    """How results of the samples of a record become those of the whole batch, if other workers hold the rest."""

    @property
    @abstractmethod
    def pool(self) -> Pool:
        """The workers with the other samples."""

    @abstractmethod
    def total(self, samples: int) -> int:
        """The samples of the batch, from those here."""

    @abstractmethod
    def mean(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Means over the batch, from those over the samples here."""

    @abstractmethod
    def chosen(self, samples: Tensor) -> tuple[Tensor, int, Reduction]:
        """Of some samples of the batch, by rising numbers: those here, how many come before them, and the reduction
        of these alone.
        """

    @abstractmethod
    def extremes(self, low: float, high: float) -> tuple[float, float]:
        """The least and the largest of a number in the batch, from those here."""

    @abstractmethod
    def union(self, names: set[str], known: Sequence[str]) -> set[str]:
        """Every name that was met in the batch, out of those known."""

    @abstractmethod
    def gathered(self, record: InnerRecord) -> InnerRecord:
        """The record of the whole batch, in the order of its samples."""


@dataclass(frozen=True)
class BatchGradient:
    """The mean gradient of one batch as one row.

    `row` (D,) is sqrt(B / w) times the gradient without the ridge, so that its outer product estimates F near an inner
    optimum; `raw` (D,) is the gradient as the optimiser saw it, ridge included and unscaled. A record of kind "batch"
    has `row` alone, which needs equal weights; one of kind "raw" has `raw`, whatever the weights.
    """

    row: Tensor | None
    raw: Tensor | None
    samples: int


@dataclass(frozen=True)
class PerSampleGradients:
    """Rows sqrt(w_i) s_i, (B, D), or sqrt(w_i) s_ik, (K B, D)."""

    rows: Tensor
    samples: int
    reduction: Reduction | None = field(default=None, repr=False, compare=False)


class Convolution(NamedTuple):
    """How a Conv2d layer cuts its input into what each place of its output sees.

    `border` is added around the input in the way of `mode`; `padding` is zeros beyond that.
    """

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]
    border: tuple[int, ...] | None
    mode: str
    groups: int

    @classmethod
    def of(cls, module: nn.Module) -> Convolution | None:
        """The geometry of a Conv2d; None for other layers."""
        if not isinstance(module, nn.Conv2d):
            return None
        zeros = module.padding_mode == "zeros"
        has_border = not zeros or module.padding == "same"
        border = tuple(module._reversed_padding_repeated_twice) if has_border else None
        padding = (0, 0) if has_border or isinstance(module.padding, str) else module.padding
        mode = "constant" if zeros else module.padding_mode
        return cls(module.kernel_size, module.stride, module.dilation, padding, border, mode, module.groups)

    def patches(self, x: Tensor) -> Tensor:
        """What each place of the output sees, (B, G, in/G * kernel, places)."""
        if self.border is not None:
            x = F.pad(x, self.border, mode=self.mode)
        found = F.unfold(x, self.kernel_size, dilation=self.dilation, padding=self.padding, stride=self.stride)
        split: Tensor = found.unflatten(1, (self.groups, -1))
        return split


@dataclass(frozen=True)
class LayerRecord:
    """One Linear or Conv2d layer in one inner step.

    A layer that is called several times, on sequences or on images adds to a sample's gradient at T places:

        s_ik = sum_t scores[k, i, t] outer inputs[i, t]

    (K = 1 for the empirical Fisher matrix) and a grouped convolution does so for each of its G groups separately.
    """

    weight: str
    bias: str | None
    convolution: Convolution | None = field(repr=False)
    raw_inputs: tuple[Tensor, ...] = field(repr=False)  # one for each call of the layer
    raw_scores: tuple[tuple[Tensor, ...], ...] = field(repr=False)  # K for each call
    scale: Tensor = field(repr=False)  # (B,): turns what the backward pass gave into sqrt(w_i) times a score

    @property
    def groups(self) -> int:
        """How many independent blocks the weight has."""
        return 1 if self.convolution is None else self.convolution.groups

    @cached_property
    def dtype(self) -> torch.dtype:
        """Of inputs and scores: at least float32. Under autocast a layer's output has fewer digits than its input."""
        found = torch.float32
        for tensor in (*self.raw_inputs, *(score for call in self.raw_scores for score in call)):
            found = torch.promote_types(found, tensor.dtype)
        return found

    @cached_property
    def inputs(self) -> Tensor:
        """(B, T, G, in) or, with a bias, (B, T, G, in + 1) whose last column is 1."""
        parts = [self._places(x.to(self.dtype), is_input=True) for x in self.raw_inputs]
        found = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return found if self.bias is None else F.pad(found, (0, 1), value=1.0)

    @cached_property
    def scores(self) -> Tensor:
        """(K, B, T, G, out): sqrt(w_i) times the derivative of l_i, or of r_ik . z_i, in the layer's output."""
        parts = [
            torch.stack([self._places(g.to(self.dtype), is_input=False) for g in call]) for call in self.raw_scores
        ]
        found = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        return found * self.scale.to(self.dtype)[:, None, None, None]

    def _places(self, tensor: Tensor, is_input: bool) -> Tensor:
        if self.convolution is None:
            return tensor.reshape(tensor.shape[0], prod(tensor.shape[1:-1]), 1, tensor.shape[-1])
        by_group = (self.groups, -1)
        split = self.convolution.patches(tensor) if is_input else tensor.flatten(2).unflatten(1, by_group)
        return split.permute(0, 3, 1, 2)  # from (B, G, in or out, T)

    @property
    def origin(self) -> Hashable:
        """What is the same for layers that were given the same tensors, and so have the same inputs, while they are
        held.
        """
        memory = tuple((x.data_ptr(), x.shape, x.stride(), x.dtype) for x in self.raw_inputs)
        return memory, self.bias is not None, self.convolution

    def rows(self) -> tuple[Tensor, Tensor | None]:
        """Rows of the weight, (K B, weight.numel()), and of the bias, (K B, out)."""
        found = torch.einsum("kbtgo,btgi->kbgoi", self.scores, self.inputs).flatten(0, 1)
        if self.bias is None:
            return found.flatten(1), None
        return found[..., :-1].flatten(1), found[..., -1].flatten(1)


@dataclass(frozen=True)
class FoldedLayer:
    """What an inverse wants of a layer, made where its score arrived: its inputs and scores are gone.

    `sums` are means over the samples of the record, as its `fold` gave them.
    """

    weight: str
    bias: str | None
    sums: tuple[Tensor, ...]


@dataclass(frozen=True)
class LayerStatistics:
    """Inputs and scores of every Linear and Conv2d layer, and rows (K B, D_other) of the parameters outside.

    `folded` are layers of which only what the inverse wants of them is left; `layers` is empty then.
    """

    layers: tuple[LayerRecord, ...]
    other_names: tuple[str, ...]
    other_rows: Tensor | None
    weights: Tensor | None  # (B,)
    samples: int
    reduction: Reduction | None = field(default=None, repr=False, compare=False)
    # Whether BatchNorm in training mode couples the samples: scores are of the batch objective
    batch_objective: bool = False
    folded: tuple[FoldedLayer, ...] = ()


InnerRecord: TypeAlias = BatchGradient | PerSampleGradients | LayerStatistics


def joined(shards: Sequence[InnerRecord]) -> InnerRecord:
    """The record of one step whose samples were divided, over several processes or into micro-batches."""
    first = shards[0]
    if len(shards) == 1:
        return first
    samples = sum(shard.samples for shard in shards)
    if isinstance(first, BatchGradient):
        return first  # the gradient of a batch already includes all workers
    if isinstance(first, PerSampleGradients):
        rows = [s.rows for s in shards if isinstance(s, PerSampleGradients)]
        return PerSampleGradients(_side_by_side(rows, [s.samples for s in shards]), samples)
    records = [s for s in shards if isinstance(s, LayerStatistics)]
    by_name = [{layer.weight: layer for layer in record.layers} for record in records]
    known: dict[tuple[int, ...], Tensor] = {}
    layers = tuple(_joined_layer([named[layer.weight] for named in by_name], known) for layer in first.layers)
    rows = [r.other_rows for r in records if r.other_rows is not None]
    weights = [r.weights for r in records if r.weights is not None]
    return LayerStatistics(
        layers,
        first.other_names,
        _side_by_side(rows, [r.samples for r in records]) if rows else None,
        torch.cat(weights) if weights else None,
        samples,
        batch_objective=first.batch_objective,
        folded=_joined_folds(records),
    )


def _joined_folds(records: Sequence[LayerStatistics]) -> tuple[FoldedLayer, ...]:
    """Means over the samples of all records, from those over the samples of each."""
    shares = [record.samples / sum(r.samples for r in records) for record in records]
    found, known = [], dict[tuple[int, ...], Tensor]()

    def mean(parts: Sequence[Tensor]) -> Tensor:
        key = tuple(map(id, parts))  # layers that share their input share what was made of it
        if key not in known:
            known[key] = torch.stack([t * share for t, share in zip(parts, shares, strict=True)]).sum(0)
        return known[key]

    for layers in zip(*(record.folded for record in records), strict=True):
        sums = zip(*(layer.sums for layer in layers), strict=True)
        found.append(replace(layers[0], sums=tuple(map(mean, sums))))
    return tuple(found)


def _joined_layer(layers: Sequence[LayerRecord], known: dict[tuple[int, ...], Tensor]) -> LayerRecord:
    """One layer of all records. `known`: inputs joined already, by their parts, because layers may share them."""
    first = layers[0]

    def together(parts: Sequence[Tensor]) -> Tensor:
        key = tuple(map(id, parts))
        if key not in known:
            known[key] = torch.cat(list(parts))
        return known[key]

    inputs = tuple(together(parts) for parts in zip(*(layer.raw_inputs for layer in layers), strict=True))
    scores = tuple(
        tuple(torch.cat(parts) for parts in zip(*calls, strict=True))
        for calls in zip(*(layer.raw_scores for layer in layers), strict=True)
    )
    scale = torch.cat([layer.scale for layer in layers])
    return replace(first, raw_inputs=inputs, raw_scores=scores, scale=scale)


def _side_by_side(rows: Sequence[Tensor], samples: Sequence[int]) -> Tensor:
    """Rows (K B_r, d) of several shards as (K B, d), the rows of one k together."""
    split = [part.reshape(-1, count, part.shape[1]) for part, count in zip(rows, samples, strict=True)]
    return torch.cat(split, dim=1).flatten(0, 1)


def batch_samples(record: InnerRecord) -> int:
    """The samples of the batch that a record is of."""
    reduction = reduction_of(record)
    return record.samples if reduction is None else reduction.total(record.samples)


def batch_mean(record: InnerRecord, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Means over a record's samples as means over its batch."""
    reduction = reduction_of(record)
    return list(tensors) if reduction is None else reduction.mean(tensors)


def gathered(record: InnerRecord) -> InnerRecord:
    """The record of the whole batch."""
    reduction = reduction_of(record)
    return record if reduction is None else reduction.gathered(record)


def reduction_of(record: InnerRecord) -> Reduction | None:
    """The reduction of a record of samples; the gradient of a batch needs none."""
    return None if isinstance(record, BatchGradient) else record.reduction


def pool_of(record: InnerRecord) -> Pool | None:
    """The pool that divides the work on a record; None for a single worker."""
    reduction = reduction_of(record)
    return None if reduction is None else reduction.pool


@dataclass(frozen=True)
class InnerStep:
    """The gradient of the inner objective on a batch, one tensor a leaf, its value, and the record asked for."""

    gradient: list[Tensor]
    value: Tensor
    record: InnerRecord | None
