"""How strongly to penalise each feature, or each class, of a logistic model."""

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
from nhgd.data.bundled import breast_cancer, made
from nhgd.data.loader import Data
from nhgd.errors import InputError
from nhgd.losses import Losses
from nhgd.problem import Bilevel
from nhgd.task._classifier import linear_classifier
from nhgd.task._inner_solver import newton
from nhgd.task.base import AbstractTask, Instance

BOX = (-12.0, 0.0)  # of v, the logarithm of a ridge
MADE = {"ijcnn1_like": (22, 2, 0.1), "covtype_like": (54, 7, 0.5)}  # features, classes, share outside of class 0


@final
@dataclass(frozen=True)
class L2(AbstractTask):
    """Per-feature ridge of a logistic model, chosen on validation data; with more than two classes, a ridge for each
    class.

        inner: mean_i log(1 + exp(-y_i z_i)) + sum_j exp(v_j) theta_j^2,      z = x . theta + bias
        outer: the same loss on validation data, without the ridge

    The default data are scikit-learn's bundled breast-cancer measurements (569 samples, 30 features, standardised),
    with `decoys` further features of pure noise that a good ridge learns to switch off. `dataset="synthetic"` draws a
    logistic model instead and needs nothing beyond torch. The presets "ijcnn1-like" and "covtype-like" have the sizes
    of the regularisation problems of benchmark_bilevel, from data that scikit-learn makes: 22 features and two classes,
    of which one is rare, with a ridge for each feature; 54 features and seven classes, a softmax model with a ridge for
    each class,

        inner: mean_i CE(y_i, z_i) + sum_c exp(v_c) ||theta_c||^2,      theta_c the weights and the bias of class c
    """

    name: ClassVar[str] = "l2"
    headline: ClassVar[str] = "test_loss"
    curve: ClassVar[str] = "test_loss"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "default": {},
        "quick": {"dataset": "synthetic", "samples": 120, "features": 4, "decoys": 2},
        "ijcnn1-like": {"dataset": "ijcnn1_like", "samples": 50_000, "decoys": 0, "batch": 512},
        "covtype-like": {"dataset": "covtype_like", "samples": 50_000, "decoys": 0, "batch": 512},
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
        self.check_choices(dataset=("breast_cancer", "synthetic", *MADE))
        if not BOX[0] <= self.start <= BOX[1]:
            raise InputError(f"l2: start is the logarithm of a ridge between exp(-12) and 1, got {self.start}.")
        if self.decoys < 0:
            raise InputError(f"l2: decoys must be 0 or more, got {self.decoys}.")

    @property
    def classes(self) -> int:
        """How many there are."""
        return MADE[self.dataset][1] if self.dataset in MADE else 2

    @override
    def build(self, seed: int, device: torch.device, data: str | Path | None = None) -> Instance:
        self.refuse_data(data)
        g = torch.Generator().manual_seed(seed)
        if self.dataset == "synthetic":
            x = torch.randn(self.samples, self.features, generator=g, dtype=torch.float64)
            logits = x @ torch.randn(self.features, generator=g, dtype=torch.float64)
            y = torch.bernoulli(logits.sigmoid(), generator=g)
        elif self.dataset in MADE:
            x, labels = made(self.samples, *MADE[self.dataset], seed)
            y = labels if self.classes > 2 else labels.double()
        else:
            x, y = breast_cancer()
        x = torch.cat([x, torch.randn(len(x), self.decoys, generator=g, dtype=torch.float64)], dim=1)
        order = torch.randperm(len(x), generator=g)
        x, y = x[order].to(device), y[order].to(device)
        train, validation = int(0.4 * len(x)), int(0.7 * len(x))
        mean, deviation = x[:train].mean(0), x[:train].std(0)
        x = (x - mean) / deviation
        several = self.classes > 2
        model = linear_classifier(x.shape[1], self.classes if several else 1, device=device)
        ridges = self.classes if several else x.shape[1] + 1
        v = torch.full((ridges,), self.start, dtype=torch.float64, device=device)
        full_inner = (x[:train], y[:train])
        full_outer = (x[train:validation], y[train:validation])
        return L2Instance(
            problem=(
                Bilevel(
                    _inner_of_classes, _outer_of_classes, model, v, l2=_Ridges(x.shape[1]), likelihood="categorical"
                )
                if several
                else Bilevel(_inner, _outer, model, v, l2=_ridge, likelihood="bernoulli")
            ),
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


def _inner_of_classes(model: nn.Module, v: Tensor, batch: Any) -> Losses:
    z = model(batch[0])
    return Losses(F.cross_entropy(z, batch[1], reduction="none"), outputs=z)


def _outer_of_classes(model: nn.Module, v: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@dataclass(frozen=True)
class _Ridges:
    """One for each class, of so many features."""

    features: int

    def __call__(self, v: Tensor) -> dict[str, Tensor]:
        return {"weight": v.exp()[:, None].expand(-1, self.features), "bias": v.exp()}


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
        top = (0.25 if self.full_inner[1].is_floating_point() else 0.5) * float(
            torch.linalg.eigvalsh(rows.T @ rows / len(rows))[-1]
        ) + 2 * math.exp(high)
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
        if not y.is_floating_point():
            z = theta(x)
            right = (z.argmax(1) == y).double().mean()
            return {"test_loss": float(F.cross_entropy(z, y)), "test_accuracy": float(right)}
        z = theta(x)[:, 0]
        return {
            "test_loss": float(F.binary_cross_entropy_with_logits(z, y)),
            "test_accuracy": float(((z > 0) == (y > 0.5)).double().mean()),
        }

    @override
    def solve_inner(self) -> float:
        return newton(self.problem, self.full_inner, 1e-12)
