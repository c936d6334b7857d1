"""Calls of modules that hold parameters outside of Linear and Conv2d: norms, embeddings, other convolutions, scales,
adapters.

The backward pass of an inner step shows the score of every sample at a module's output. With the input, that gives what
each sample adds to the gradient of the module's parameters, by work on this module alone:

    LayerNorm, RMSNorm, GroupNorm    sum_t g_it n_it and sum_t g_it, n the normalised input
    Embedding                        g_it, added at the row of each token
    any other                        the pull-back of the module itself, vectorised over the samples

and <s_i, x> is the score times the derivative of the output along x. No second pass over the model is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules.batchnorm import _BatchNorm

NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
# Modules whose computation is known, so that their scores are not compared with the gradient.
KNOWN = (
    *NORMS,
    nn.Embedding,
    nn.Conv1d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.BatchNorm1d,  # in evaluation mode
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.PReLU,
    nn.Bilinear,
)
# Nodes between a tensor without samples and the sum in which it meets them; none of them holds a tensor.
SHAPES = ("UnsqueezeBackward0", "ExpandBackward0")


@dataclass(eq=False)
class LeafCall:
    """One call of a module whose parameters no child of another kind shares.

    Attributes:
        names: of its parameters in theta, by their names in the module.
        inputs: the tensors it was given, in order.
        sources: where those were made.
        edge: where its output was made.
        output_shape: of its output.
        frozen: its other parameters and buffers, which its derivative needs.
    """

    module: nn.Module
    names: dict[str, str]
    inputs: tuple[Tensor, ...]
    sources: tuple[GradientEdge | None, ...]
    edge: GradientEdge
    output_shape: torch.Size
    frozen: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, module: nn.Module, args: tuple[Any, ...], output: Any, names: Mapping[int, str]) -> LeafCall | None:
        """The call, if the module is one of this kind; `names` are those of theta's leaves, by identity."""
        if isinstance(module, (nn.Linear, nn.Conv2d)) or torch.nn.utils.parametrize.is_parametrized(module):
            return None
        if not isinstance(output, Tensor) or not output.requires_grad or not args:
            return None
        if not all(isinstance(arg, Tensor) for arg in args) or output.ndim == 0:
            return None
        own = {n: names[id(p)] for n, p in module._parameters.items() if p is not None and id(p) in names}
        if not own or (isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)):
            return None
        if any(id(p) in names for child in module._modules.values() if child is not None for p in child.parameters()):
            return None  # the module holds layers of its own, which are looked at one by one
        frozen: dict[str, Tensor] = {}
        if not isinstance(module, (*NORMS, nn.Embedding)):
            tensors = [*module.named_parameters(), *module.named_buffers()]
            frozen = {n: t.detach() for n, t in tensors if n not in own}
        sources = tuple(get_gradient_edge(arg) if arg.requires_grad else None for arg in args)
        inputs = tuple(arg.detach() for arg in args)
        return cls(module, own, inputs, sources, get_gradient_edge(output), output.shape, frozen)

    @property
    def is_known(self) -> bool:
        """Whether the module computes what its class does."""
        module = self.module
        if type(module) not in KNOWN or "forward" in vars(module):
            return False
        if isinstance(module, nn.Embedding):
            return not (module.scale_grad_by_freq or module.sparse or module.max_norm is not None)
        return True

    @property
    def is_embedding(self) -> bool:
        """Whether its input are places in a table."""
        return self.is_known and isinstance(self.module, nn.Embedding)

    def gives_rows(self, samples: int) -> bool:
        """Whether the samples are the first dimension of what it was given and of what it gave."""
        shapes = [self.output_shape, *(x.shape for x in self.inputs)]
        return all(len(shape) > 0 and shape[0] == samples for shape in shapes)

    def met_at(self, parents: Mapping[Any, Sequence[Any]]) -> LeafCall | None:
        """The same call for an embedding of places that all samples share: its score is that of the sum in which it
        meets them.

        parents: of each node of the graph, those that use it.
        """
        if not self.is_embedding:
            return None
        node = self.edge.node
        while True:
            above = parents.get(node, ())
            if len(above) != 1:
                return None
            node, kind = above[0], type(above[0]).__name__
            if kind == "AddBackward0":
                break
            if kind not in SHAPES:
                return None
        if getattr(node, "_saved_alpha", 1) != 1:
            return None
        ids = self.inputs[0]
        core = self.output_shape[1:] if len(self.output_shape) > 2 and self.output_shape[0] == 1 else self.output_shape
        return replace(self, edge=GradientEdge(node, 0), inputs=(ids.reshape(core[:-1]),), output_shape=core)

    def shared_shape(self, samples: int) -> torch.Size:
        """Of its scores."""
        return self.output_shape if self.gives_rows(samples) else torch.Size((samples, *self.output_shape))

    def fits(self, score: Tensor | None, samples: int) -> bool:
        """Whether a score has one entry for each sample and output."""
        return score is None or score.shape == self.shared_shape(samples)

    def rows(self, scores: Sequence[Tensor | None], scale: Tensor) -> dict[str, Tensor]:
        """What each sample adds to the gradient of each parameter, (K B, n), from K scores of the output."""
        samples = len(scale)
        wide = [self._wide(score, samples) for score in scores]
        found: dict[str, list[Tensor]] = {name: [] for name in self.names.values()}
        for score in wide:
            for own, rows in self._pulled(score).items():
                name = self.names[own]
                found[name].append(rows.reshape(samples, -1) * scale.to(rows.dtype)[:, None])
        return {name: torch.cat(parts) for name, parts in found.items()}

    def products(self, score: Tensor | None, along: Mapping[str, Tensor], samples: int) -> Tensor:
        """The score times the derivative of the output along x, (B,), whose parts are given by name."""
        wide = self._wide(score, samples)
        parts = {own: along[name].to(wide.dtype) for own, name in self.names.items()}
        if isinstance(self.module, nn.LayerNorm) and self.is_known and "weight" in parts:
            x, module = self.inputs[0].to(wide.dtype), self.module
            moved = F.layer_norm(x, module.normalized_shape, parts["weight"], parts.get("bias"), module.eps)
        elif isinstance(self.module, NORMS) and self.is_known:
            moved = torch.zeros_like(wide)
            if "weight" in parts:
                moved = self._normalised(wide.dtype) * self._as_affine(parts["weight"], wide)
            if "bias" in parts:
                moved = moved + self._as_affine(parts["bias"], wide)
        elif self.is_embedding:
            moved = F.embedding(self._ids(), parts["weight"]) * self._counted(wide)
        else:
            pulled = self._pulled(wide)
            return torch.stack(
                [pulled[own].reshape(samples, -1) @ part.reshape(-1) for own, part in parts.items()]
            ).sum(0)
        return (moved * wide).flatten(1).sum(1)

    def _wide(self, score: Tensor | None, samples: int) -> Tensor:
        """A score in float32 at least; one that did not come is 0."""
        shape = self.shared_shape(samples)
        if score is None:
            kept = next((x.dtype for x in self.inputs if x.is_floating_point()), torch.float32)
            return torch.zeros(shape, dtype=_precise(kept), device=self.inputs[0].device)
        return score.detach().to(_precise(score.dtype)).reshape(shape)

    def _pulled(self, score: Tensor) -> dict[str, Tensor]:
        """Rows of each parameter by its name in the module, (B, ...)."""
        if isinstance(self.module, NORMS) and self.is_known:
            return self._of_norm(score)
        if self.is_embedding:
            return self._of_embedding(score)
        return self._of_any(score)

    def _normalised(self, dtype: torch.dtype) -> Tensor:
        x, module = self.inputs[0].to(dtype), self.module
        if isinstance(module, nn.LayerNorm):
            return F.layer_norm(x, module.normalized_shape, eps=module.eps)
        if isinstance(module, nn.RMSNorm):
            eps = torch.finfo(self.inputs[0].dtype).eps if module.eps is None else module.eps
            return F.rms_norm(x, module.normalized_shape, eps=eps)
        assert isinstance(module, nn.GroupNorm)
        return F.group_norm(x, module.num_groups, eps=module.eps)

    def _as_affine(self, part: Tensor, like: Tensor) -> Tensor:
        """A weight or bias as it is multiplied with the output: the channels of a GroupNorm are the second
        dimension.
        """
        return part.reshape(-1, *[1] * (like.ndim - 2)) if isinstance(self.module, nn.GroupNorm) else part

    def _of_norm(self, score: Tensor) -> dict[str, Tensor]:
        terms = {"bias": lambda: score, "weight": lambda: score * self._normalised(score.dtype)}

        def summed(term: Tensor) -> Tensor:
            if isinstance(self.module, nn.GroupNorm):
                return term.flatten(2).sum(2) if term.ndim > 2 else term
            inside = len(self.module.normalized_shape)  # type: ignore[arg-type]  # of a norm
            return term.reshape(len(term), -1, *term.shape[term.ndim - inside :]).sum(1)

        return {own: summed(terms[own]()) for own in self.names}

    def _ids(self) -> Tensor:
        return self.inputs[0]

    def _counted(self, like: Tensor) -> Tensor:
        """1 for tokens whose row of the table learns, 0 for padding."""
        padding = self.module.padding_idx
        ids = self._ids()
        return (ids != padding if isinstance(padding, int) else torch.ones_like(ids, dtype=torch.bool)).to(like)[
            ..., None
        ]

    def _of_embedding(self, score: Tensor) -> dict[str, Tensor]:
        assert isinstance(self.module, nn.Embedding)
        samples, (tokens, width) = len(score), (self.module.num_embeddings, self.module.embedding_dim)
        ids = self._ids()
        each = (ids if ids.shape == score.shape[:-1] else ids.expand(samples, *ids.shape)).reshape(samples, -1)
        at = (each + tokens * torch.arange(samples, device=each.device)[:, None]).reshape(-1)
        given = (score * self._counted(score)).reshape(-1, width)
        return {"weight": score.new_zeros(samples * tokens, width).index_add_(0, at, given).reshape(samples, -1)}

    def _of_any(self, score: Tensor) -> dict[str, Tensor]:
        named = dict(self.module.named_parameters())
        chosen = {own: named[own].detach().to(score.dtype) for own in self.names}
        fixed = {n: t.to(score.dtype) if t.is_floating_point() else t for n, t in self.frozen.items()}
        inputs = tuple(x.to(score.dtype) if x.is_floating_point() else x for x in self.inputs)

        def pulled(inputs: tuple[Tensor, ...], g: Tensor) -> dict[str, Tensor]:
            def output(parameters: dict[str, Tensor]) -> Tensor:
                one = tuple(x.unsqueeze(0) for x in inputs)
                made: Tensor = torch.func.functional_call(self.module, fixed | parameters, one)
                return made

            found: dict[str, Tensor] = torch.func.vjp(output, chosen)[1](g.unsqueeze(0))[0]
            return found

        with torch.enable_grad():
            rows: dict[str, Tensor] = torch.func.vmap(pulled)(inputs, score)
        return {own: t.detach() for own, t in rows.items()}


def rows_of(call: LeafCall, scores: Sequence[Tensor | None], scale: Tensor) -> dict[str, Tensor] | None:
    """The rows of a call; None where its module cannot be evaluated on its own, or on one sample."""
    if call.is_known:
        return call.rows(scores, scale)
    # Code of others may fail in any way on a sample alone; the general way says then what is wrong.
    with suppress(Exception):
        return call.rows(scores, scale)
    return None


def adds_up(rows: Tensor, gradient: Tensor | None, eps: float) -> bool:
    """Whether rows of samples add up to the gradient of their parameter, up to rounding."""
    total, size = rows.sum(0), rows.abs().sum(0)
    true = torch.zeros_like(total) if gradient is None else gradient.reshape(-1).to(total.dtype)
    return torch.allclose(total, true, rtol=max(1e-2, 4 * eps), atol=max(1e-3, 4 * eps) * float(size.max()))


def summed(parts: Sequence[Tensor]) -> Tensor:
    """The rows of a parameter over all calls that use it."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
