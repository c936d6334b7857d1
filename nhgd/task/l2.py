"""How strongly to penalise each feature of a logistic model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from nhgd._validation import positive
from nhgd.data.bundled import breast_cancer
from nhgd.data.loader import Data
from nhgd.errors import InputError
from nhgd.losses import Losses
from nhgd.problem import Bilevel
from nhgd.task._classifier import linear_classifier
from nhgd.task._inner_solver import newton
from nhgd.task.base import AbstractTask, Instance

BOX = (-12.0, 0.0)  # of v, the logarithm of a ridge


@final
@dataclass(frozen=True)
class L2(AbstractTask):
    """Per-feature ridge of a logistic model, chosen on validation data.

        inner: mean_i log(1 + exp(-y_i z_i)) + sum_j exp(v_j) theta_j^2,      z = x . theta + bias
        outer: the same loss on validation data, without the ridge

    The default data are scikit-learn's bundled breast-cancer measurements (569 samples, 30 features, standardised),
    with `decoys` further features of pure noise that a good ridge learns to switch off. `dataset="synthetic"` draws a
    logistic model instead and needs nothing beyond torch.
    """

    name: ClassVar[str] = "l2"
    headline: ClassVar[str] = "test_loss"
    curve: ClassVar[str] = "test_loss"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "default": {},
        "quick": {"dataset": "synthetic", "samples": 120, "features": 4, "decoys": 2},
    }
    dataset: str = "breast_cancer"
    samples: int = 600
    features: int = 10
    decoys: int = 20
    start: float = -4.0
    batch: int | None = None

    def __post_init__(self) -> None:
        positive("l2", features=self.features)
        if self.samples < 10:
            raise InputError(f"l2: samples must be at least 10, to be split in three, got {self.samples}.")
        self.check_choices(dataset=("breast_cancer", "synthetic"))
        if not BOX[0] <= self.start <= BOX[1]:
            raise InputError(f"l2: start is the logarithm of a ridge between exp(-12) and 1, got {self.start}.")
        if self.decoys < 0:
            raise InputError(f"l2: decoys must be 0 or more, got {self.decoys}.")

    @override
    def build(self, seed: int, device: torch.device, data: str | Path | None = None) -> Instance:
        self.refuse_data(data)
        g = torch.Generator().manual_seed(seed)
        if self.dataset == "synthetic":
            x = torch.randn(self.samples, self.features, generator=g, dtype=torch.float64)
            logits = x @ torch.randn(self.features, generator=g, dtype=torch.float64)
            y = torch.bernoulli(logits.sigmoid(), generator=g)
        else:
            x, y = breast_cancer()
        x = torch.cat([x, torch.randn(len(x), self.decoys, generator=g, dtype=torch.float64)], dim=1)
        order = torch.randperm(len(x), generator=g)
        x, y = x[order].to(device), y[order].to(device)
        train, validation = int(0.4 * len(x)), int(0.7 * len(x))
        mean, deviation = x[:train].mean(0), x[:train].std(0)
        x = (x - mean) / deviation
        model = linear_classifier(x.shape[1], 1, device=device)
        v = torch.full((x.shape[1] + 1,), self.start, dtype=torch.float64, device=device)
        full_inner = (x[:train], y[:train])
        full_outer = (x[train:validation], y[train:validation])
        return L2Instance(
            problem=Bilevel(_inner, _outer, model, v, l2=_ridge, likelihood="bernoulli"),
            inner_data=Data(*full_inner, batch=self.batch),
            outer_data=Data(*full_outer),
            full_inner=full_inner,
            full_outer=full_outer,
            method="aid",
            test=(x[validation:], y[validation:]),
        )


def _inner(model: nn.Module, v: Tensor, batch: Any) -> Losses:
    z = model(batch[0])[:, 0]
    return Losses(F.binary_cross_entropy_with_logits(z, batch[1], reduction="none"), outputs=z)


def _outer(model: nn.Module, v: Tensor, batch: Any) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch[0])[:, 0], batch[1])


def _ridge(v: Tensor) -> dict[str, Tensor]:
    return {"weight": v[:-1].exp(), "bias": v[-1].exp()}


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class L2Instance(Instance):
    """The problem with its test set."""

    test: tuple[Tensor, Tensor]

    @override
    def solver_settings(self) -> dict[str, Any]:
        """One inner step size that is stable for every v in the box, because the box bounds the curvature."""
        low, high = BOX
        rows = F.pad(self.full_inner[0], (0, 1), value=1.0)
        top = 0.25 * float(torch.linalg.eigvalsh(rows.T @ rows / len(rows))[-1]) + 2 * math.exp(high)
        return {
            "inner_steps": 20,
            "inner_lr": 1.0 / top,
            "outer_lr": 0.1,
            "outer_optimizer": torch.optim.Adam,
            "project_v": (low, high),
        }

    @override
    def metrics(self, theta: nn.Module, v: Tensor) -> dict[str, float]:
        x, y = self.test
        z = theta(x)[:, 0]
        return {
            "test_loss": float(F.binary_cross_entropy_with_logits(z, y)),
            "test_accuracy": float(((z > 0) == (y > 0.5)).double().mean()),
        }

    @override
    def solve_inner(self) -> float:
        return newton(self.problem, self.full_inner, 1e-12)
