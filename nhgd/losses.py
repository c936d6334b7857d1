"""The result of the inner function for a batch: `Losses`, with weights and outputs kept apart."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from nhgd.data.batch import Batch, common_length, lengths
from nhgd.errors import InputError

InnerResult: TypeAlias = "Tensor | tuple[Tensor, Tensor] | Losses"


@dataclass(frozen=True)
class Losses:
    """The result of the inner function for a batch of B samples.

    Args:
        values: the loss of every sample, (B,). A scalar is accepted by the methods that need no per-sample quantity.
        weights: the weight of every sample, (B,), at least 0. None means 1 for all. The batch objective is
            mean(weights * values), never divided by the sum of the weights. Weights that depend on theta, such as a
            function of the losses, are differentiated in the gradient and in Hessian products; the Fisher matrix and
            the GGN take them as constants, whether detached or not: F = mean_i w_i s_i s_i^T with s_i the gradient of
            the loss.
        outputs: the model's outputs, (B, ...), needed by the exact and sampled Fisher matrices alone.
    """

    values: Tensor
    weights: Tensor | None = None
    outputs: Tensor | None = None

    def __post_init__(self) -> None:
        # By hand: it is made in every pass, and perhaps within a compiled function.
        if not isinstance(self.values, Tensor):
            raise InputError(f"Losses: values must be a Tensor of shape (B,), got a {type(self.values).__name__}.")
        for name, value in (("weights", self.weights), ("outputs", self.outputs)):
            if value is not None and not isinstance(value, Tensor):
                shape = tuple(self.values.shape)
                raise InputError(
                    f"Losses: {name} of shape {type(value).__name__} for losses of shape {shape}. Give a Tensor."
                )

    @property
    def per_sample(self) -> bool:
        """Whether there is one loss for each sample."""
        return self.values.ndim == 1

    def samples(self, batch: Batch) -> int:
        """How many samples there are: as many as losses; of a scalar loss, as many as the batch shows, or 1."""
        return self.values.numel() if self.per_sample else common_length(batch) or 1

    def outputs_for(self, reader: str) -> Tensor:
        """The model's outputs; an error that says why `reader` needs them if there are none."""
        if self.outputs is None:
            raise InputError(
                f"{reader} needs the model's outputs: return nhgd.Losses(values, outputs=...) from inner()."
            )
        if not self.outputs.requires_grad:
            raise InputError(
                f"{reader} differentiates the model's outputs, but Losses.outputs is detached from theta. Return the"
                " outputs that the losses were computed from."
            )
        return self.outputs

    def slope(self, reader: str) -> Tensor:
        """The derivative of every loss in its sample's outputs, with its graph."""
        found = torch.autograd.grad(self.values.sum(), self.outputs_for(reader), create_graph=True, allow_unused=True)[
            0
        ]
        if found is None:
            raise InputError(
                f"{reader} differentiates the losses in the model's outputs, but the losses were not computed from"
                " Losses.outputs. Return the same tensor."
            )
        return found

    def mean(self) -> Tensor:
        """The batch objective without the ridge: mean_i( w_i l_i )."""
        weighted = self.values if self.weights is None else self.weights * self.values
        return weighted.mean()

    def check_finite(self) -> None:
        """Refuse losses or weights that are not finite, naming the sample, and weights below zero."""
        for name, tensor in (("loss", self.values), ("weight", self.weights)):
            if tensor is None or bool(torch.isfinite(tensor).all()):
                continue
            rows = torch.nonzero(~torch.isfinite(tensor.reshape(-1))).reshape(-1)
            raise InputError(
                f"The inner {name} is {tensor.reshape(-1)[rows[0]].item()} for sample {int(rows[0])} of the batch"
                f" ({len(rows)} of {tensor.numel()} are not finite)."
            )
        if self.weights is not None and bool((self.weights < 0).any()):
            row = int(torch.nonzero(self.weights < 0)[0])
            raise InputError(
                f"The weight of sample {row} of the batch is {self.weights[row].item():.3g}. Weights must be at least"
                " 0: clamp them, pass them through a sigmoid, or use project_v=(0, 1)."
            )


def padded(losses: Losses, share: Tensor) -> Losses:
    """The losses of a batch that is filled up, with the share of each sample in its weight."""
    if not losses.per_sample:
        raise InputError("A batch can be filled up only if there is one loss for each of its samples.")
    share = share.to(losses.values.dtype)
    if losses.weights is None:
        return replace(losses, weights=share)
    weights = losses.weights * share
    weights.unpadded = losses.weights, share  # type: ignore[attr-defined]  # for the function below
    return replace(losses, weights=weights)


def unpadded(weights: Tensor) -> tuple[Tensor, Tensor | None]:
    """The weights that the inner function gave, and the share that they were multiplied by, if they were."""
    found: tuple[Tensor, Tensor | None] = getattr(weights, "unpadded", (weights, None))
    return found


def score_weights(log_probability: Tensor) -> Tensor:
    """Weights of 1 whose derivative in v is the score, for inner data that are drawn from a distribution with v in it.

        w_i = exp( log p(xi_i; v) - log p(xi_i; v), held constant ) = 1,        dw_i/dv = grad_v log p(xi_i; v)

    Where the samples of a batch are drawn at the current v, the derivative of the inner gradient in v has a second
    term, E[ grad_theta l (grad_v log p)^T ], because another v draws other samples. Return
    `Losses(values, weights=score_weights(log_p))` from inner(), with log_p (B,) at the drawn samples, and every method
    takes it: the cross derivative differentiates weights in v, and nothing else changes. A term that v enters in l
    itself, or by samples that are functions of v, adds to it.

    The inner data must be drawn anew from the current v: an object whose `__iter__` reads v and draws.

    >>> v = torch.tensor(0.0, requires_grad=True)
    >>> w = score_weights(torch.nn.functional.logsigmoid(v).expand(3))
    >>> w.tolist(), torch.autograd.grad(w.sum(), v)[0].item()
    ([1.0, 1.0, 1.0], 1.5)
    """
    return (log_probability - log_probability.detach()).exp()


def check_weight(low: float | Tensor | None) -> None:
    """Refuse a lowest weight below 0."""
    if low is not None and float(low) < 0:
        raise InputError(
            f"A weight of an inner batch is {float(low):.3g}. Weights must be at least 0: clamp them, pass them through a"
            " sigmoid, or use project_v=(0, 1)."
        )


def as_losses(result: InnerResult, batch: Batch) -> Losses:
    """What inner() returned for a batch, as `Losses`; what no method could work with is refused."""
    if isinstance(result, tuple) and len(result) == 2:
        result = Losses(*result)
    elif isinstance(result, Tensor):
        result = Losses(result)
    if not isinstance(result, Losses):
        raise InputError(
            f"inner() returned a {type(result).__name__}. Return losses of shape (B,), (losses, weights) or nhgd.Losses."
        )
    values, weights, outputs = result.values, result.weights, result.outputs
    if not isinstance(values, Tensor) or not values.is_floating_point():
        raise InputError("inner() must return floating-point losses as a Tensor of shape (B,).")
    if values.ndim > 1:
        raise InputError(
            f"inner() returned losses of shape {tuple(values.shape)}. Return one loss for each sample, shape (B,):"
            " reduce the other dimensions, or use reduction='none' on class scores of shape (B, C)."
        )
    if values.ndim == 1:
        samples = common_length(batch)
        if samples is not None and values.shape[0] != samples:
            raise InputError(
                f"inner() returned {values.shape[0]} losses for a batch of {samples} samples. Return one for each sample."
            )
        found = lengths(batch) if samples is None else {}
        if len(set(found.values())) > 1 and values.shape[0] in found.values():
            raise InputError(uneven(found))
    if not values.numel():
        raise InputError("inner() returned no loss, because the batch has no samples. Leave empty batches out.")
    if values.dtype.itemsize < 4:  # a mean over many samples would lose what half precision has
        values = values.float()
        result = replace(result, values=values)
    if weights is not None:
        if not isinstance(weights, Tensor) or weights.shape != values.shape:
            shape = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
            raise InputError(f"inner() returned weights of shape {shape} for losses of shape {tuple(values.shape)}.")
        if values.ndim == 0:
            raise InputError("Weights need one loss for each sample, but inner() returned a scalar loss.")
        if weights.dtype != values.dtype:  # counts, for example: their square roots would be rounded to float32
            result = replace(result, weights=weights.to(values.dtype))
    if outputs is not None and values.ndim == 1 and (outputs.ndim == 0 or outputs.shape[0] != values.shape[0]):
        raise InputError(
            f"Losses.outputs has shape {tuple(outputs.shape)}; its first dimension must be the {values.shape[0]} samples."
        )
    return result


def uneven(found: dict[str, int]) -> str:
    """A sentence about a batch whose tensors have these lengths."""
    listed = ", ".join(f"{path} has {n} rows" for path, n in found.items())
    return f"The tensors of a batch have different lengths: {listed}. Every sample needs one row in each."
