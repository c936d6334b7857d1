"""A softmax classifier: linear, with bias, at zero; trained to the end, and how steep its loss can be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nhgd.problem import Bilevel, Losses
from nhgd.task._inner_solver import lbfgs


@dataclass(frozen=True)
class Split:
    """Samples of one purpose: features (N, P), standardised, and labels (N,)."""

    x: Tensor
    y: Tensor


def softmax_classifier(x: Tensor, classes: int) -> nn.Linear:
    """A linear model with bias for samples such as x, (N, P), at zero."""
    model: nn.Linear = nn.utils.skip_init(nn.Linear, x.shape[1], classes, device=x.device, dtype=x.dtype)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    return model


def fit(
    model: nn.Module, split: Split, l2: float, tol: float, weights: Tensor | None = None, steps: int = 2000
) -> float:
    """Train a classifier to the end, in place; returns the norm of the last gradient. weights: (N,), of the samples."""

    def inner(model: nn.Module, v: Tensor, batch: Any) -> Losses:
        return Losses(F.cross_entropy(model(batch[0]), batch[1], reduction="none"), weights)

    nothing = split.x.new_zeros(1)
    problem = Bilevel(inner, lambda model, v, batch: v.sum(), model, nothing, l2=l2)
    return lbfgs(problem, (split.x, split.y), tol, steps)


def accuracy(scores: Tensor, labels: Tensor) -> float:
    """The part of the samples whose highest score is the right one."""
    return float((scores.argmax(1) == labels).double().mean())


def largest_curvature(x: Tensor, steps: int = 20) -> float:
    """A bound on the largest eigenvalue of the softmax Hessian with weights at most 1: half that of mean x x^T."""
    rows = F.pad(x, (0, 1), value=1.0)
    q = torch.ones(rows.shape[1], dtype=rows.dtype, device=rows.device)
    size = 1.0
    for _ in range(steps):
        q = rows.T @ (rows @ (q / q.norm())) / len(rows)
        size = float(q.norm())
    return 0.5 * size
