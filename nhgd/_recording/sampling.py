"""A few samples and places of a record in place of all: unbiased, and chosen by the number of the step alone."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from nhgd import _tape as tape
from nhgd.record import Convolution, LayerRecord, LayerStatistics, Reduction

Counts: TypeAlias = "list[int]"  # places of each call of a layer


class Sampling(NamedTuple):
    """How many samples of a batch, and how many of each sample's places at a layer, a record takes; None: all.

    Samples are drawn uniformly without replacement, so a mean over them estimates the mean over the batch without bias;
    scores are scaled so that sums over places do, too. The draws depend on the seed alone: a resumed run repeats them,
    the run's own random numbers do not change, and the workers of a team take their parts of one draw.
    """

    samples: int | None
    places: int | None
    seed: int

    def of(self, record: LayerStatistics) -> LayerStatistics:
        """That much of the record of a batch, or of some samples of one."""
        counts = [counts_of(layer.convolution, [call[0].shape for call in layer.raw_scores]) for layer in record.layers]
        origins: dict[Hashable, int] = {}
        first = [origins.setdefault(layer.origin, i) for i, layer in enumerate(record.layers)]
        drawn = self.drawn(record.samples, record.reduction, counts, first)
        thinned: list[LayerRecord] = []
        for i, layer in enumerate(record.layers):
            found = drawn.layer(layer, i)
            thinned.append(found if first[i] == i else replace(found, raw_inputs=thinned[first[i]].raw_inputs))
        return drawn.rest(replace(record, layers=tuple(thinned)))

    def drawn(
        self, samples: int, reduction: Reduction | None, counts: Sequence[Counts], first: Sequence[int] | None = None
    ) -> Drawn:
        """Draw for a record of so many samples here, whose layers have so many places.

        first: for each layer the first one with the same inputs; they are taken at the same places.
        """
        total = samples if reduction is None else reduction.total(samples)
        generator = torch.Generator()
        wanted = total if self.samples is None else min(self.samples, total)

        def some() -> Tensor:
            generator.manual_seed(int(tape.now(self.seed)))
            if wanted == total:
                return torch.arange(total)
            return torch.randperm(total, generator=generator)[:wanted].sort().values

        chosen = tape.index(some)
        rows, before = chosen, 0
        if reduction is not None:
            rows, before, reduction = reduction.chosen(chosen)

        def places(wanted: int, count: int) -> Tensor:
            return tape.index(lambda: torch.randint(count, (len(chosen), wanted), generator=generator))[
                before : before + len(rows)
            ]

        taken: list[list[Tensor] | None] = []
        for i, calls in enumerate(counts):
            wanted_places = 0 if self.places is None or not calls else -(-self.places // len(calls))
            # Several calls use the same places; grouped convolutions are rare, and their patches small.
            if self.places is None or len(set(calls)) != 1 or wanted_places >= calls[0]:
                taken.append(None)
            elif first is not None and first[i] < i and counts[first[i]] == calls:
                taken.append(taken[first[i]])
            else:
                taken.append([places(wanted_places, count) for count in calls])
        return Drawn(None if len(rows) == samples else rows, taken, reduction)


class Drawn(NamedTuple):
    """Which samples a record takes, and which places of each at each call of each layer; None: all of them."""

    rows: Tensor | None
    places: list[list[Tensor] | None]
    reduction: Reduction | None

    def layer(self, layer: LayerRecord, position: int) -> LayerRecord:
        """That much of a layer."""
        inputs, scores, scale = layer.raw_inputs, layer.raw_scores, layer.scale
        if self.rows is not None:
            at = self.rows.to(scale.device)
            inputs, scale = tuple(x[at] for x in inputs), scale[at]
            scores = tuple(tuple(s[at] for s in call) for call in scores)
        layer = replace(layer, raw_inputs=inputs, raw_scores=scores, scale=scale)
        chosen = self.places[position]
        if chosen is None:
            return layer
        taken = [
            _at_places(layer.convolution, x, s, at.to(x.device), _places(layer.convolution, s[0].shape))
            for x, s, at in zip(inputs, scores, chosen, strict=True)
        ]
        return replace(
            layer, convolution=None, raw_inputs=tuple(x for x, _ in taken), raw_scores=tuple(s for _, s in taken)
        )

    def rest(self, record: LayerStatistics) -> LayerStatistics:
        """That much of everything else, given the layers."""
        if self.rows is None:
            return record
        others, weights = record.other_rows, record.weights
        if others is not None:
            at = self.rows.to(others.device)
            others = others.unflatten(0, (-1, record.samples))[:, at].flatten(0, 1)
        return replace(
            record,
            other_rows=others,
            weights=None if weights is None else weights[self.rows.to(weights.device)],
            samples=len(self.rows),
            reduction=self.reduction,
        )


def counts_of(convolution: Convolution | None, shapes: Sequence[torch.Size]) -> Counts:
    """How many places each call of a layer has, by the shapes of its outputs; none of grouped convolutions."""
    if convolution is not None and convolution.groups != 1:
        return []
    return [_places(convolution, shape) for shape in shapes]


def _places(convolution: Convolution | None, shape: torch.Size) -> int:
    """How many places a call has for each sample, by the shape of its output."""
    return prod(shape[2:]) if convolution is not None else prod(shape[1:-1])


def _at_places(
    convolution: Convolution | None, x: Tensor, scores: Sequence[Tensor], places: Tensor, count: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The inputs of a call, (B, S, in), and its scores, (B, S, out), at these places of each sample, (B, S)."""
    sample = torch.arange(len(x), device=x.device)[:, None]
    factor = (count / places.shape[1]) ** 0.5  # the factor of scores sums over places
    if convolution is None:
        seen = x.reshape(len(x), count, x.shape[-1])[sample, places]
        return seen, tuple(s.reshape(len(s), count, s.shape[-1])[sample, places] * factor for s in scores)
    width = scores[0].shape[3]
    seen = _patches(convolution, x, places // width, places % width)
    return seen, tuple(s.flatten(2).mT[sample, places] * factor for s in scores)


def _patches(convolution: Convolution, x: Tensor, top: Tensor, left: Tensor) -> Tensor:
    """The patches at these rows and columns of the output, (B, S, in * kernel), without unfolding any other."""
    if convolution.border is not None:
        x = F.pad(x, convolution.border, mode=convolution.mode)
    if any(convolution.padding):
        down, right = convolution.padding
        x = F.pad(x, (right, right, down, down))
    (high, wide), (stride_y, stride_x), (dilation_y, dilation_x) = (
        convolution.kernel_size,
        convolution.stride,
        convolution.dilation,
    )
    y = (top * stride_y)[..., None] + dilation_y * torch.arange(high, device=x.device)  # (B, S, kh)
    z = (left * stride_x)[..., None] + dilation_x * torch.arange(wide, device=x.device)  # (B, S, kw)
    sample = torch.arange(len(x), device=x.device)[:, None, None, None]
    found = x.permute(0, 2, 3, 1)[sample, y[..., :, None], z[..., None, :]]  # (B, S, kh, kw, in)
    return found.permute(0, 1, 4, 2, 3).flatten(2)
