"""Small classifiers of vectors: how they are built, trained to the end and judged, and how steep their loss can be."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nhgd._validation import counted
from nhgd.errors import RunError, unknown
from nhgd.task._inner_solver import lbfgs

MODELS = ("linear", "mlp")


@dataclass(frozen=True)
class Split:
    """Samples of one purpose: features (N, P), standardised, and labels (N,)."""

    x: Tensor
    y: Tensor

    def part(self, which: slice) -> Split:
        """Some of them."""
        return Split(self.x[which], self.y[which])


@dataclass(frozen=True)
class Architecture:
    """A classifier of vectors: linear, or with one hidden layer.

    Args:
        model: "linear" or "mlp".
        bias: whether the linear model has one; an MLP always does.
        hidden: the width of the hidden layer.

    >>> sum(p.numel() for p in Architecture("linear", bias=False).build(4, 3, seed=0).parameters())
    12
    """

    model: str = "linear"
    bias: bool = True
    hidden: int = 64

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise unknown("model", self.model, MODELS)
        counted("The classifier", hidden=self.hidden)

    @property
    def other(self) -> Architecture:
        """The model that this one is not."""
        return replace(self, model="mlp" if self.model == "linear" else "linear")

    def build(
        self,
        features: int,
        classes: int,
        seed: int,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> nn.Module:
        """A new model: zeros if it is linear, else drawn from the seed; the global generators do not move."""
        if self.model == "linear":
            return linear_classifier(features, classes, self.bias, device, dtype)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            layers = nn.Linear(features, self.hidden), nn.Tanh(), nn.Linear(self.hidden, classes)
        return nn.Sequential(*layers).to(device, dtype)


def linear_classifier(
    features: int,
    classes: int,
    bias: bool = True,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float64,
) -> nn.Linear:
    """A linear model at zero."""
    model: nn.Linear = nn.utils.skip_init(nn.Linear, features, classes, bias=bias, device=device, dtype=dtype)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def softmax_classifier(x: Tensor, classes: int) -> nn.Linear:
    """A linear model with bias for samples such as x, (N, P), at zero."""
    return linear_classifier(x.shape[1], classes, device=x.device, dtype=x.dtype)


def cross_entropies(scores: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy of every sample, (B,), in the dtype of the scores but computed in float64.

    A small loss is the difference of two large numbers. In float32 its rounding would hide what a step gains where few
    samples are fitted well.
    """
    return F.cross_entropy(scores.double(), labels, reduction="none").to(scores.dtype)


def mean_cross_entropy(model: nn.Module, v: Any, batch: Any) -> Tensor:
    """An outer loss: the mean cross-entropy on a batch (x, y, ...)."""
    return F.cross_entropy(model(batch[0]), batch[1])


def fit(
    model: nn.Module, split: Split, l2: float, tol: float, weights: Tensor | None = None, steps: int = 2000
) -> float:
    """Train a classifier to the end, in place; returns the norm of the last gradient. weights: (N,), of the samples."""
    return lbfgs(lambda: _objective(model, split, l2, weights), list(model.parameters()), tol, steps)


def trained(
    architecture: Architecture,
    x: Tensor,
    labels: Tensor,
    classes: int,
    l2: float,
    seed: int = 0,
    tol: float = 1e-6,
    weights: Tensor | None = None,
) -> tuple[nn.Module, float]:
    """A new model trained on x (N, P) by L-BFGS on all samples in float64, and the norm of its last gradient.

    Where `tol` is out of reach, as an MLP's may be, the point reached is kept.
    """
    split = Split(x.detach().double(), labels)
    model = architecture.build(x.shape[1], classes, seed, x.device)
    try:
        norm = fit(model, split, l2, tol, weights)
    except RunError:
        with torch.enable_grad():
            gradient = torch.autograd.grad(_objective(model, split, l2, weights), list(model.parameters()))
        norm = float(torch.cat([g.reshape(-1) for g in gradient]).norm())
    return model, norm


def ridge(model: nn.Module, l2: float) -> Tensor:
    """sum( l2 * theta^2 ) over all parameters of a model."""
    return torch.stack([(l2 * parameter.square()).sum() for parameter in model.parameters()]).sum()


def _objective(model: nn.Module, split: Split, l2: float, weights: Tensor | None = None) -> Tensor:
    """The mean of the weighted losses, and the ridge."""
    losses = F.cross_entropy(model(split.x), split.y, reduction="none")
    return (losses if weights is None else weights.to(losses.dtype) * losses).mean() + ridge(model, l2)


def accuracy(scores: Tensor, labels: Tensor) -> float:
    """The part of the samples whose highest score is the right one."""
    return float((scores.argmax(1) == labels).double().mean())


@torch.no_grad()
def accuracy_of(model: nn.Module, x: Tensor, labels: Tensor, batch: int = 10_000) -> float:
    """The part of the samples that a model classifies correctly, in batches and in the dtype of the model."""
    dtype = next(model.parameters()).dtype
    hits = 0
    for start in range(0, len(x), batch):
        scores = model(x[start : start + batch].to(dtype))
        hits += int((scores.argmax(1) == labels[start : start + batch]).sum())
    return hits / len(x)


@torch.no_grad()
def mean_loss(model: nn.Module, x: Tensor, y: Tensor, batch: int = 10_000) -> float:
    """The mean cross-entropy, in batches."""
    total = 0.0
    for start in range(0, len(x), batch):
        part = slice(start, start + batch)
        total += float(F.cross_entropy(model(x[part]), y[part], reduction="sum"))
    return total / len(x)


def largest_curvature(x: Tensor, steps: int | None = None) -> float:
    """A bound on the largest eigenvalue of the softmax Hessian of samples x, (N, P), with a bias and weights at most 1.

    It is half the largest eigenvalue of mean x x^T.

    Args:
        steps: of a power iteration, for many samples; None: exactly, in float64, for few.
    """
    rows = F.pad(x if steps else x.double(), (0, 1), value=1.0)
    if steps is None:
        return 0.5 * float(torch.linalg.matrix_norm(rows, 2)) ** 2 / len(rows)
    q = torch.ones(rows.shape[1], dtype=rows.dtype, device=rows.device)
    size = 1.0
    for _ in range(steps):
        q = rows.T @ (rows @ (q / q.norm())) / len(rows)
        size = float(q.norm())
    return 0.5 * size
