"""Which parameters layers account for: whether a layer's inputs and scores give the whole gradient of its weight and
bias.

They do if the layer is called and its weight is used nowhere else. The autograd graph shows this: it is walked from the
losses to the parameters at each record, because control flow may change from batch to batch. The walk skips a call of a
plain Linear or Conv2d and continues at its input; a parameter that is still reached is also used elsewhere. The
computation of a subclass is unknown, so its scores are compared with the gradient itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from nhgd._recording.leaf_call import SHAPES, LeafCall
from nhgd.errors import InputError
from nhgd.record import Convolution, LayerRecord

Scores: TypeAlias = "Sequence[Tensor | None]"
# The node at which a graph ends in a parameter has no public name. A view has a grad_fn, despite its annotation.
_LEAF: type[Any] = type(torch.zeros((), requires_grad=True).expand(1).grad_fn.next_functions[0][0])  # type: ignore[union-attr]

_NORM = "BatchNorm"


@dataclass
class LayerCall:
    """One call of a Linear or Conv2d: its input, and the shape of its output, samples first.

    `swapped`: the output had the places of a sequence as its first dimension, and samples as its second.
    """

    module: nn.Module
    weight: str
    bias: str | None
    input: Tensor
    output_shape: torch.Size
    swapped: bool = field(default=False, kw_only=True)

    def fits_samples(self, samples: int) -> bool:
        """Whether the samples are the first dimension of input and output."""
        shape = self.output_shape
        return len(shape) > 1 and shape[0] == samples and self.input.shape[0] == samples

    def placed(self, score: Tensor) -> Tensor:
        """A score of the output, samples first."""
        if not self.swapped:
            return score.reshape(self.output_shape)
        samples, places, *rest = self.output_shape
        return score.reshape(places, samples, *rest).transpose(0, 1)


@dataclass
class Call(LayerCall):
    """A call, and where in the graph its input and its output were made."""

    source: GradientEdge | None
    edge: GradientEdge

    def without_places(self) -> LayerCall:
        """The call alone, which holds no graph."""
        return LayerCall(self.module, self.weight, self.bias, self.input, self.output_shape, swapped=self.swapped)

    @property
    def is_plain(self) -> bool:
        """Whether the module computes what its class defines, so that a layer record applies."""
        module, kind = self.module, type(self.module)
        if "forward" in vars(module):
            return False
        if isinstance(module, nn.Linear):
            return kind.forward is nn.Linear.forward
        plain = kind.forward is nn.Conv2d.forward and "_conv_forward" not in vars(module)
        return plain and kind._conv_forward is nn.Conv2d._conv_forward  # type: ignore[attr-defined]  # a Conv2d


def shared_inputs(calls: Sequence[LayerCall]) -> list[int]:
    """For each call the position of the first one that was given the same tensor in the same way, as attention's
    separate projections are.

    A tensor is known by where the graph made it, or by its memory where no graph did.
    """
    first: dict[Hashable, int] = {}

    def key(call: LayerCall) -> Hashable:
        source, x = getattr(call, "source", None), call.input
        made = (x.data_ptr(), x.stride()) if source is None else (source.node, source.output_nr)
        return made, x.shape, x.dtype, call.bias is not None, Convolution.of(call.module), call.swapped

    return [first.setdefault(key(call), i) for i, call in enumerate(calls)]


class Graph(NamedTuple):
    """How often each parameter is used outside calls of plain layers, a mark of the graph's form, and the nodes that
    use what some calls gave.
    """

    uses: Counter[str]
    form: int
    parents: dict[Any, list[Any]]


def held(module: nn.Module, name: str) -> Tensor | None:
    """A tensor that a module holds under a name, without asking for it: a parametrised one would be computed."""
    found = module._parameters.get(name)
    found = vars(module).get(name) if found is None else found
    return found if isinstance(found, Tensor) else None


def as_saved(given: Tensor, output: Tensor) -> Tensor:
    """The input of a plain Linear or Conv2d, as its backward pass holds it: under autocast a copy in fewer digits.

    Held beside that copy, the original would take twice as much again. It is kept where hooks of saved tensors, such as
    those of activation checkpointing, would have to make the copy first.
    """
    node: Any = output.grad_fn
    if output.dtype == given.dtype or node is None or torch._C._autograd._top_saved_tensors_default_hooks(False):
        return given.detach()
    if type(node).__name__ in ("UnsafeViewBackward0", "ViewBackward0"):
        node = node.next_functions[0][0]
    for name in ("_saved_mat1", "_saved_self", "_saved_input"):
        saved = getattr(node, name, None)
        if isinstance(saved, Tensor) and saved.dtype == output.dtype and saved.numel() == given.numel():
            return saved.detach().reshape(given.shape)
    return given.detach()


def walked(
    roots: Iterable[Tensor | None],
    calls: Sequence[Call],
    names: Mapping[int, str],
    leaf_calls: Sequence[LeafCall] = (),
) -> Graph:
    """Walk the graph of some tensors; `names` are the leaves of theta, by identity."""
    plain: dict[Any, Iterable[GradientEdge | None]] = {
        call.edge.node: (call.source,) for call in calls if call.is_plain
    }
    plain |= {call.edge.node: call.sources for call in leaf_calls if call.is_known}
    parents: dict[Any, list[Any]] = {}
    alone = {call.edge.node for call in leaf_calls if call.is_embedding}
    child: Any
    end: Any
    waiting: list[Any] = [root.grad_fn for root in roots if root is not None and root.grad_fn is not None]
    uses: Counter[str] = Counter()
    seen: set[Any] = set()
    kinds: list[Any] = [
        *(call.weight for call in calls),
        *(name for call in leaf_calls for name in call.names.values()),
    ]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        # Kernels of BatchNorm differ between its modes, and forms are compared across them.
        kinds.append(_NORM if _NORM in type(node).__name__ else type(node))
        if node in plain:
            following: Iterable[Any] = [(s.node, s.output_nr) for s in plain[node] if s is not None]
        else:
            following = node.next_functions
        for child, _ in following:
            end = child
            if child in alone or (alone and type(child).__name__ in SHAPES):
                parents.setdefault(child, []).append(node)
            while type(end).__name__ == "ToCopyBackward0":  # autocast makes one copy of a weight for all its uses
                end = end.next_functions[0][0]
            if type(end) is _LEAF:
                name = names.get(id(end.variable))
                if name is not None:
                    uses[name] += 1
            elif child is not None:
                waiting.append(child)
    return Graph(uses, hash(tuple(kinds)), parents)


def outside_layers(calls: Sequence[Call], uses: Counter[str]) -> set[str]:
    """Parameters whose gradient comes from more than one layer, or from outside of layers, according to the graph."""
    inside = Counter(name for call in calls if not call.is_plain for name in (call.weight, call.bias))
    found = {name for name, count in uses.items() if count > inside[name]}
    layers: dict[str, tuple[str | None, nn.Module]] = {}
    owners: dict[str, str] = {}
    for call in calls:
        bias, module = layers.setdefault(call.weight, (call.bias, call.module))
        # Convolutions may differ in stride or padding, and a bias belongs to one weight.
        other = module is not call.module and isinstance(module, nn.Conv2d)
        if bias != call.bias or other or (call.bias and owners.setdefault(call.bias, call.weight) != call.weight):
            found |= {name for name in (call.weight, bias, call.bias, owners.get(call.bias or "")) if name is not None}
    return found


def fits(layer: LayerRecord, gradients: Mapping[str, Tensor | None]) -> tuple[bool, bool]:
    """Whether the scores of the backward pass add up to the gradient of the layer, and whether that is informative.

    Scores or inputs that are all zero say nothing, unless the gradient is not zero.
    """
    layer = replace(layer, scale=torch.ones_like(layer.scale))
    scores, inputs = layer.scores[0], layer.inputs
    total = torch.einsum("btgo,btgi->goi", scores, inputs)
    # At an inner optimum the sum is nothing but rounding, so errors are measured by the size of its terms.
    terms = torch.einsum("btgo,btgi->goi", scores.abs(), inputs.abs())
    eps = max(torch.finfo(t.dtype).eps for call in layer.raw_scores for t in call)
    relative, absolute = max(1e-2, 4 * eps), max(1e-3, 4 * eps)
    wide = layer.bias is not None
    pairs = [(layer.weight, total[..., :-1] if wide else total, terms[..., :-1] if wide else terms)]
    if layer.bias is not None:
        pairs.append((layer.bias, total[..., -1], terms[..., -1]))
    good = telling = True
    for name, computed, size in pairs:
        true = gradients[name]
        true = torch.zeros_like(computed) if true is None else true.reshape(computed.shape).to(computed.dtype)
        largest = float(size.max())
        telling &= largest > torch.finfo(computed.dtype).tiny / eps
        good &= torch.allclose(computed, true, rtol=relative, atol=absolute * largest)
    return good, telling


def check_independent(values: Tensor, calls: Sequence[Call], scores: Scores) -> set[str]:
    """Refuse samples that influence each other; returns the weights of the layers that could show it.

    Args:
        values: the loss of every sample, with its graph.
        scores: of their sum, at each call.
    """
    samples = values.shape[0]
    # The first sample and the last: a sum that runs along the batch shows in one of them only.
    rows = {0, samples - 1}
    seen: set[str] = set()
    for call, score in zip(calls, scores, strict=True):
        if score is None or call.output_shape[0] != samples:
            continue
        alive = torch.nonzero(call.placed(score).reshape(samples, -1).ne(0).any(1)).reshape(-1)
        if len(alive):
            seen.add(call.weight)
            rows |= {int(alive[0]), int(alive[-1])}
    if samples < 2 or not calls:
        return seen
    for row in sorted(rows):
        found = torch.autograd.grad(values[row], [c.edge for c in calls], retain_graph=True, allow_unused=True)
        for call, score in zip(calls, found, strict=True):
            if score is None or call.output_shape[0] != samples:
                continue
            touched = call.placed(score).reshape(samples, -1).ne(0).any(1)
            touched[row] = False
            if bool(touched.any()):
                raise InputError(
                    f"In the layer of {call.weight!r} the loss of one sample depends on another sample. Per-sample"
                    " curvature needs independent samples in the first dimension (no batch statistics, batch-first"
                    " sequences)."
                )
    return seen
