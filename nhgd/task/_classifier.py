"""Small classifiers, and how one is trained from scratch by a solver that knows nothing of a run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nhgd.errors import RunError, counted, unknown
from nhgd.oracle import Oracle
from nhgd.problem import Bilevel, Losses
from nhgd.task._inner_solver import lbfgs

MODELS = ("linear", "mlp")


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
        """A new model: zeros where it is linear, else drawn from the seed; global generators are left alone."""
        if self.model == "linear":
            linear: nn.Linear = nn.utils.skip_init(nn.Linear, features, classes, bias=self.bias, dtype=dtype)
            for parameter in linear.parameters():
                nn.init.zeros_(parameter)
            return linear.to(device)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            layers = nn.Linear(features, self.hidden), nn.Tanh(), nn.Linear(self.hidden, classes)
        return nn.Sequential(*layers).to(device, dtype)


def cross_entropies(scores: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy of every sample, (B,), in the dtype of the scores but computed in float64.

    A small loss is the difference of two large numbers. In float32 its rounding would hide what a step gains where few
    samples are fitted well.
    """
    return F.cross_entropy(scores.double(), labels, reduction="none").to(scores.dtype)


def trained(
    architecture: Architecture, x: Tensor, labels: Tensor, classes: int, l2: float, seed: int = 0, tol: float = 1e-6
) -> tuple[nn.Module, float]:
    """A new model trained on x (N, P) by L-BFGS on all samples in float64, and the norm of its last gradient.

    Where `tol` is out of reach, as an MLP's may be, the point reached is kept.
    """
    x = x.detach().double()
    model = architecture.build(x.shape[1], classes, seed, x.device)

    def inner(model: nn.Module, v: Tensor, batch: Any) -> Losses:
        return Losses(F.cross_entropy(model(batch[0]), batch[1], reduction="none"))

    problem = Bilevel(inner, lambda model, v, batch: v.sum(), model, x.new_zeros(1), l2=l2)
    try:
        norm = lbfgs(problem, (x, labels), tol)
    except RunError:
        norm = float(Oracle(problem, [(x, labels)]).gradient().norm())
    return model, norm


@torch.no_grad()
def accuracy_of(model: nn.Module, x: Tensor, labels: Tensor, batch: int = 10_000) -> float:
    """The part of the samples that a model classifies rightly, in batches and in the dtype of x."""
    same = next(model.parameters()).dtype == x.dtype
    hits = 0
    for start in range(0, len(x), batch):
        part = x[start : start + batch]
        scores = model(part) if same else model(part.to(next(model.parameters()).dtype))
        hits += int((scores.argmax(1) == labels[start : start + batch]).sum())
    return hits / len(x)
