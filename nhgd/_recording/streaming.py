"""Scores that are used where they arrive in the backward pass, and dropped: nothing is held for the whole model.

A function in front of each layer's node of the graph sees the score of every sample just before the layer's own
backward pass runs, while its input is there anyway. What is wanted of the two is made then and there: a part of a
record, and the part of <s_i, x> that belongs to the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nhgd import _tape as tape
from nhgd._kernels import narrow_is_slow
from nhgd._recording.accounting import Call, LayerCall, shared_inputs
from nhgd._recording.leaf_call import LeafCall
from nhgd._recording.sampling import Drawn
from nhgd._recording.taps import TappedPass, Taps
from nhgd._scaling import NOT_SCALED, Scaling
from nhgd.record import FoldedLayer, LayerRecord

Taken = LayerRecord | FoldedLayer
Taker = Callable[[int, Tensor], None]  # of the score of a call, by its number
# Of a layer, the weights of the samples, how many there are, and what was made of a layer with the same inputs
Fold: TypeAlias = Callable[[LayerRecord, "Tensor | None", int, "tuple[Tensor, ...] | None"], tuple[Tensor, ...]]
CHUNK = 2**24  # numbers of an output that are multiplied with its score at a time


class Products:
    """<s_i, x> times the seeds, (B,), added up over calls.

    Args:
        found: the pass.
        along: x, one part for each parameter by name.
    """

    def __init__(self, found: TappedPass, along: Mapping[str, Tensor]) -> None:
        # Not the pass itself, which holds this object: only the garbage collector would let go of its graph.
        self.calls, self.leaf_calls, self.first_leaf = found.calls, found.leaf_calls, found.of_leaves.start
        self.along = along
        self.like = found.losses.values.detach()
        self._parts: dict[int, Tensor] = {}
        self.coarse = False  # whether a score was of float16, in which the least seeds vanish

    def take(self, position: int, score: Tensor) -> None:
        """Add the part of one call."""
        samples = len(self.like)
        self.coarse |= score.dtype is torch.float16
        if position < len(self.calls):
            part = product(self.calls[position], score, self.along)
        else:
            call = self.leaf_calls[position - self.first_leaf]
            part = call.products(score, self.along, samples)
        self._parts[position] = part.to(self.like.dtype)

    @property
    def total(self) -> Tensor:
        """Over all calls, in their own order: whether scores were held, and so when they arrived, changes no bit."""
        parts = [self._parts[position] for position in sorted(self._parts)]
        if not parts:
            return torch.zeros_like(self.like)
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


class LayerParts:
    """What a record takes of each layer: a few samples and places, or what an inverse's `fold` makes of all.

    Args:
        accounted: whether each call is all of its weight's and bias's gradient; others are not taken.
        scale: what turns a score of the pass into sqrt(w_i) times a score, (B,).
        drawn: which samples and places; None: all, and `fold` says what is kept.
    """

    def __init__(
        self,
        taps: Taps,
        calls: Sequence[Call],
        accounted: Sequence[bool],
        scale: Tensor,
        weights: Tensor | None,
        drawn: Drawn | None,
        fold: Fold | None,
    ) -> None:
        self.taps, self.calls, self.scale, self.weights = taps, calls, scale, weights
        self.drawn, self.fold = drawn, fold
        chosen = [i for i, good in enumerate(accounted) if good]
        self._numbers = {position: number for number, position in enumerate(chosen)}
        self._taken: dict[int, Taken] = {}
        self._first = shared_inputs(calls)
        self._of_inputs: dict[int, Taken] = {}  # the layer taken first of those with the same inputs

    def take(self, position: int, score: Tensor | None) -> None:
        """Take the part of one call."""
        if position not in self._numbers:
            return
        (layer,) = self.taps.layer_records([self.calls[position]], [[score]], self.scale)
        like = self._of_inputs.get(self._first[position])
        if self.drawn is not None:
            found: Taken = self.drawn.layer(layer, self._numbers[position])
            if isinstance(found, LayerRecord) and isinstance(like, LayerRecord):
                found = replace(found, raw_inputs=like.raw_inputs)
        else:
            assert self.fold is not None
            known = like.sums if isinstance(like, FoldedLayer) else None
            found = FoldedLayer(layer.weight, layer.bias, self.fold(layer, self.weights, len(self.scale), known))
        self._of_inputs.setdefault(self._first[position], found)
        self._taken[position] = found

    def tensors(self) -> list[Tensor]:
        """What was taken so far."""
        whole = [t for x in self._taken.values() if isinstance(x, LayerRecord) for g in x.raw_scores for t in g]
        return whole + [t for x in self._taken.values() if isinstance(x, FoldedLayer) for t in x.sums]

    def layers(self) -> tuple[list[LayerRecord], list[FoldedLayer]]:
        """The layers in the order of their calls, whole or folded. A score that did not come is 0."""
        for position in self._numbers:
            if position not in self._taken:
                self.take(position, None)
        found = [self._taken[position] for position in self._numbers]
        whole = [layer for layer in found if isinstance(layer, LayerRecord)]
        return whole, [layer for layer in found if isinstance(layer, FoldedLayer)]


def product(call: LayerCall, score: Tensor, along: Mapping[str, Tensor]) -> Tensor:
    """sum_t <score_it, X a_it + x_b> of every sample, (B,), for a layer.

    Outputs and scores of few digits, as under autocast, are multiplied with X in as few, on the units made for that;
    the sum is at least of float32. Of a Linear that has more outputs than inputs, X^T score_it is multiplied with a_it
    instead.
    """
    a, given = call.input, call.placed(score)
    wide = torch.promote_types(torch.promote_types(a.dtype, given.dtype), torch.float32)
    dtype = given.dtype if given.dtype is torch.bfloat16 else wide
    weight, bias = along[call.weight].to(dtype), None if call.bias is None else along[call.bias].to(dtype)
    convolution = call.module if isinstance(call.module, nn.Conv2d) else None
    narrow = convolution is None and weight.shape[0] > weight.shape[1]
    each = max(1, CHUNK // max(1, min(a[:1].numel(), given[:1].numel()) if narrow else given[:1].numel()))
    found = []
    for some in range(0, len(given), each):
        x, g = a[some : some + each].to(dtype), given[some : some + each].to(dtype)
        if convolution is not None:
            found.append(_summed(nn.Conv2d._conv_forward(convolution, x, weight, bias), g, wide))
        elif x.ndim == 2 and tape.tape() is None and wide is dtype and narrow_is_slow(x, weight):
            # Samples last; a captured step makes one product of this and the layer's own.
            turned = torch.mm(weight, x.T) if bias is None else torch.addmm(bias[:, None], weight, x.T)
            found.append((turned * g.T).sum(0))
        elif not narrow:
            found.append(_summed(F.linear(x, weight, bias), g, wide))
        else:
            part = _summed(F.linear(g, weight.T), x, wide)
            places = g.reshape(len(g), -1, g.shape[-1])
            found.append(part if bias is None else part + places.sum(1, dtype=wide) @ along[call.bias or ""].to(wide))
    return found[0] if len(found) == 1 else torch.cat(found)


def _summed(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """sum of a * b of every sample; a is no longer needed."""
    return a.mul_(b).flatten(1).sum(1, dtype=dtype)


class Arrivals:
    """The calls of a pass whose scores are used where they arrive.

    Args:
        found: the pass.
        positions: of these calls among all places of the pass.
        takers: what uses each score, in order.
        all_needed: whether the gradient of every parameter is taken, so that the node of each of these calls runs.
        drop: whether inputs are dropped with their scores.
        scaling: of the pass.
    """

    def __init__(
        self,
        found: TappedPass,
        positions: Sequence[int],
        takers: Sequence[Taker],
        all_needed: bool = True,
        drop: bool = True,
        scaling: Scaling = NOT_SCALED,
    ) -> None:
        self.found = found
        self.scaling = scaling
        self.takers = takers
        self.drop = drop
        self.positions = set(positions)
        places = [*found.calls, *found.norms, *found.leaf_calls]
        # The node of a call that no other call comes before runs for its parameters alone.
        known = set() if all_needed else {edge.node for edge in found.edges}
        first = {i for i in self.positions if not all_needed and not _leads_on(places[i], known)}
        self.asked = [i for i in range(len(places)) if i not in self.positions or i in first]
        self._hooked = self.positions - first

    @property
    def edges(self) -> list[torch.autograd.graph.GradientEdge]:
        """The edges whose scores are asked for and kept."""
        every = self.found.edges
        return [every[i] for i in self.asked]

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Inside, scores that arrive are used."""
        edges, handles = self.found.edges, []
        for i in sorted(self._hooked):
            handles.append(edges[i].node.register_prehook(partial(self._arrive, i, edges[i].output_nr)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _arrive(self, position: int, output: int, scores: Sequence[Tensor | None]) -> None:
        score = scores[output]
        if score is not None:
            self._use(position, self.scaling.unscaled(score.detach()))

    def _use(self, position: int, score: Tensor) -> None:
        with torch.no_grad():
            for take in self.takers:
                take(position, score.detach())
        if self.drop and position < len(self.found.calls):
            call = self.found.calls[position]
            call.input = call.input.new_empty(0)

    def kept(self, given: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The scores of all places, None for those that were used; the ones asked for are given."""
        scores: list[Tensor | None] = [None] * len(self.found.edges)
        for i, score in zip(self.asked, given, strict=True):
            if i not in self.positions:
                scores[i] = score
            elif score is not None:
                self._use(i, score)
        return scores


def _leads_on(call: object, known: set[Any]) -> bool:
    """Whether the graph of what a call was given reaches another call, which a backward pass has then to get to."""
    sources = call.sources if isinstance(call, LeafCall) else (getattr(call, "source", None),)
    waiting: list[Any] = [source.node for source in sources if source is not None]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node in known:
            return True
        if node not in seen:
            seen.add(node)
            waiting.extend(child for child, _ in node.next_functions if child is not None)
    return False
