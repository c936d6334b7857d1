"""BatchNorm with batch statistics, through which samples influence each other.

The gradient of one sample is not defined there; only the batch objective is. K-FAC, EKFAC and the diagonal learn from
its score at a sample's place in a layer, taken through the statistics of the batch. With weights it is the score of
sum_i sqrt(w_i) l_i: sqrt(w_i) s_i for independent samples, and finite at a weight of zero. For the exact and the
sampled Fisher matrix it is that of sum_i sqrt(w_i) e_ik r_ik . z_i, with random signs e_ik: the roots of one k are
similar for all samples, and without signs BatchNorm would remove their common part, which is most of the curvature.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn.modules.batchnorm import _BatchNorm


def normalises_by_batch(module: nn.Module) -> TypeGuard[_BatchNorm]:
    """Whether a module is a BatchNorm that normalises by its batch: in training mode, or without running statistics."""
    return isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)


@dataclass(eq=False)
class NormCall:
    """One call of such a BatchNorm: its input, the names of its weight and bias in theta, and where its output was
    made.
    """

    module: _BatchNorm
    weight: str | None
    bias: str | None
    input: Tensor
    edge: GradientEdge | None

    def without_places(self) -> NormCall:
        """The call alone, which holds no graph."""
        return replace(self, edge=None)

    @property
    def names(self) -> set[str]:
        """Of its weight and bias, as far as they belong to theta."""
        return {name for name in (self.weight, self.bias) if name is not None}

    def gives_rows(self, samples: int) -> bool:
        """Whether the module computes what its class does, on an input whose first dimension is the samples."""
        plain = "forward" not in vars(self.module) and type(self.module).forward is _BatchNorm.forward
        return plain and self.input.shape[0] == samples

    def rows(self, scores: Sequence[Tensor | None], scale: Tensor) -> dict[str, Tensor]:
        """What each sample adds to the gradient of the weight and of the bias, (K B, C) each, from K scores of the
        output.

        sum_t g_it n_it for the weight and sum_t g_it for the bias, n the normalised input.
        """
        x = self.input.to(torch.promote_types(self.input.dtype, torch.float32))
        variance, mean = torch.var_mean(x, _but_channels(x), correction=0, keepdim=True)
        normalised = (x - mean) * torch.rsqrt(variance + self.module.eps)
        given = [torch.zeros_like(x) if g is None else g.detach().reshape(x.shape).to(x.dtype) for g in scores]
        factor = scale.to(x.dtype)[:, None]

        def summed(terms: list[Tensor]) -> Tensor:
            return torch.cat([t.reshape(*x.shape[:2], -1).sum(2) * factor for t in terms])

        found = {self.weight: [g * normalised for g in given], self.bias: given}
        return {name: summed(terms) for name, terms in found.items() if name is not None}


@lru_cache(maxsize=16)
def signs(roots: int, samples: int, device: torch.device) -> Tensor:
    """Random signs, (K, B). They are the same each time, so that nothing is drawn from the run."""
    drawn = torch.randint(2, (roots, samples), generator=torch.Generator().manual_seed(0))
    return (2 * drawn - 1).to(device)


def summed_rows(calls: Iterable[tuple[NormCall, Sequence[Tensor | None]]], scale: Tensor) -> dict[str, Tensor]:
    """Rows of each weight and bias over all calls that use it, from the scores of each call."""
    found: dict[str, Tensor] = {}
    for call, scores in calls:
        for name, rows in call.rows(scores, scale).items():
            found[name] = found[name] + rows if name in found else rows
    return found


@contextmanager
def held_statistics() -> Iterator[None]:
    """A context in which BatchNorm treats the statistics of a batch as constants, so that any other coupling shows."""
    before: dict[_BatchNorm, tuple[bool, Tensor | None, Tensor | None]] = {}

    def put(module: _BatchNorm, training: bool, mean: Tensor | None, variance: Tensor | None) -> None:
        module.training = training
        module._buffers.update(running_mean=mean, running_var=variance)

    def hold(module: nn.Module, args: tuple[object, ...]) -> None:
        x = args[0] if args else None
        if not normalises_by_batch(module) or not isinstance(x, Tensor):
            return
        before[module] = (module.training, module._buffers["running_mean"], module._buffers["running_var"])
        kept = module.running_mean if module.weight is None else module.weight
        wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
        variance, mean = (
            t.to(x.dtype if kept is None else kept.dtype) for t in torch.var_mean(wide, _but_channels(x), correction=0)
        )
        put(module, False, mean, variance)

    def release(module: nn.Module, args: tuple[object, ...], output: object) -> None:
        if isinstance(module, _BatchNorm) and module in before:
            put(module, *before.pop(module))

    hooks = [
        nn.modules.module.register_module_forward_pre_hook(hold),
        nn.modules.module.register_module_forward_hook(release, always_call=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _but_channels(x: Tensor) -> list[int]:
    """All dimensions but the second."""
    return [0, *range(2, x.ndim)]
