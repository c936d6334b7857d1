"""A ring of the last samples: what `FisherWindow` keeps, and how the rows of a record fit into it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from nhgd.errors import InputError
from nhgd.inverse._learned.gram import AbstractBlock, Factors, Rows
from nhgd.inverse._learned.state import State
from nhgd.record import LayerStatistics


@dataclass
class WindowState(State):
    """A ring of the last samples and the Gram matrix of their rows.

    Attributes:
        starts, sizes: where each leaf of theta lies in the flat vector.
        observed: how many records were taken.
        position, filled: where in the ring the next sample goes, and how many places hold one.
        stamps, shares: the step of each sample, (W,), and 1 / the samples kept of that step, (W,).
        gram: R R^T, (W K, W K), row n K + k for root k of the sample in place n.
        rows: gradients (W, K, d) by where their parameters begin.
        inputs, scores: (W, T, G, in) and (W, K, T, G, out) by the layer's weight; `biases`: where its bias begins.
    """

    starts: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    observed: int = 0
    position: int = 0
    filled: int = 0
    stamps: Tensor | None = None
    shares: Tensor | None = None
    gram: Tensor | None = None
    rows: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    scores: dict[str, Tensor] = field(default_factory=dict)
    biases: dict[str, int] = field(default_factory=dict)

    def blocks(self) -> Iterator[AbstractBlock]:
        """R, in an order that does not depend on how the state was stored."""
        for start in sorted(self.rows):
            yield Rows(int(start), self.rows[start])
        for name in sorted(self.inputs):
            yield Factors(self.starts[name], self.biases.get(name), self.inputs[name], self.scores[name])


@dataclass(frozen=True)
class NewRows:
    """What one record adds to the ring: (B, K, d) by start, (B, T, G, in) and (B, K, T, G, out) by weight."""

    samples: int
    roots: int
    rows: dict[str, Tensor]
    inputs: dict[str, Tensor] = field(default_factory=dict)
    scores: dict[str, Tensor] = field(default_factory=dict)
    biases: dict[str, int] = field(default_factory=dict)


def factors_pay(places: int, roots: int, width: int, out: int) -> bool:
    """Whether a product of two samples costs less from inputs and scores than from gradients; then they are smaller
    too.
    """
    return places**2 * (width + roots**2 * out) <= roots**2 * width * out


def by_sample(rows: Tensor, samples: int) -> Tensor:
    """(K B, d) -> (B, K, d)."""
    return rows.reshape(len(rows) // samples, samples, rows.shape[1]).transpose(0, 1)


def layer_rows(state: WindowState, record: LayerStatistics) -> NewRows:
    """The rows of a record's layers: inputs and scores if they are cheaper, gradients otherwise."""
    plain: list[tuple[int, Tensor]] = []
    inputs: dict[str, Tensor] = {}
    scores: dict[str, Tensor] = {}
    biases: dict[str, int] = {}
    roots = 1
    for layer in record.layers:
        roots, _, places, _, out = layer.scores.shape
        first = state.gram is None and factors_pay(places, roots, layer.inputs.shape[-1], out)
        if first or layer.weight in state.inputs:
            inputs[layer.weight] = layer.inputs
            scores[layer.weight] = layer.scores.transpose(0, 1)
            if layer.bias is not None:
                biases[layer.weight] = state.starts[layer.bias]
        else:
            for name, rows in zip((layer.weight, layer.bias), layer.rows(), strict=True):
                if name is not None and rows is not None:
                    plain.append((state.starts[name], by_sample(rows, record.samples)))
    if record.other_rows is not None:
        roots = record.other_rows.shape[0] // record.samples
        parts = record.other_rows.split([state.sizes[name] for name in record.other_names], dim=1)
        for name, rows in zip(record.other_names, parts, strict=True):
            plain.append((state.starts[name], by_sample(rows, record.samples)))
    return NewRows(record.samples, roots, _neighbours_joined(plain), inputs, scores, biases)


def _neighbours_joined(plain: list[tuple[int, Tensor]]) -> dict[str, Tensor]:
    """Merge arrays that are adjacent in the flat vector, by their starts."""
    runs: list[tuple[int, list[Tensor]]] = []
    end = -1
    for start, rows in sorted(plain, key=lambda pair: pair[0]):
        if start == end:
            runs[-1][1].append(rows)
        else:
            runs.append((start, [rows]))
        end = start + rows.shape[2]
    return {str(start): torch.cat(rows, dim=2) if len(rows) > 1 else rows[0] for start, rows in runs}


def pairs(state: WindowState, news: NewRows) -> Iterator[tuple[Tensor, Tensor]]:
    """Each array of the ring with its new rows, padded to the same length."""
    for name, tensor in news.rows.items():
        yield state.rows[name], tensor
    for name in news.inputs:
        places = state.inputs[name].shape[1]
        yield state.inputs[name], _lengthened(news.inputs[name], places, dim=1)
        yield state.scores[name], _lengthened(news.scores[name], places, dim=2)


def fit(state: WindowState, news: NewRows) -> None:
    """Make room for longer sequences, and refuse a record with other parts than the ring."""
    same = state.rows.keys() == news.rows.keys() and state.inputs.keys() == news.inputs.keys()
    same = same and all(stored.shape[1:] == news.rows[name].shape[1:] for name, stored in state.rows.items())
    same = same and all(stored.shape[1] == news.roots for stored in state.scores.values())
    if not same:
        raise InputError(
            "FisherWindow: the layers that inner() calls, or the number of outputs, changed between inner steps. Use"
            " records='sample' for the former; keep the number of outputs fixed."
        )
    for name, tensor in news.inputs.items():
        places = tensor.shape[1]
        if places > state.inputs[name].shape[1]:
            state.inputs[name] = _lengthened(state.inputs[name], places, dim=1)
            state.scores[name] = _lengthened(state.scores[name], places, dim=2)


def _lengthened(tensor: Tensor, places: int, dim: int) -> Tensor:
    """Zeros for missing places, which add nothing to any product."""
    missing = places - tensor.shape[dim]
    return F.pad(tensor, (0, 0, 0, 0, 0, missing)) if missing else tensor
