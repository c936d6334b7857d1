"""Learning which labels to trust."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nhgd.data.bundled import digits
from nhgd.data.idx import find, read_images
from nhgd.data.loader import Data
from nhgd.errors import InputError, not_negative, positive, unknown
from nhgd.problem import Bilevel, Losses
from nhgd.schedule import Decay
from nhgd.solve import Solution
from nhgd.task.base import AbstractTask, Instance
from nhgd.task.inner_solver import lbfgs
from nhgd.task.labels import NOISES, corrupt, found, with_every_class
from nhgd.task.weighting import AbstractWeighting, ByLoss, PerSample

CLASSES = 10
DATASETS = ("auto", "digits", "mnist")
WEIGHTINGS: dict[str, type[AbstractWeighting]] = {"sample": PerSample, "loss": ByLoss}


@dataclass(frozen=True)
class Split:
    """Samples of one purpose: pixels (N, P), standardised, and labels (N,)."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class LabelSets:
    """The four splits of a cleaning task, and which training labels are wrong, (N,)."""

    train: Split
    trusted: Split
    evaluation: Split
    test: Split
    true_labels: Tensor
    wrong: Tensor
    side: int
    pixels: Tensor  # the training images as they were, (N, P), between 0 and 1


@final
@dataclass(frozen=True)
class Cleaning(AbstractTask):
    """Find wrong labels: a weight for each training sample, learnt from a small trusted set.

        inner: mean_i w_i CE(y_i, theta . x_i) + l2 ||theta||^2
        outer: mean cross-entropy on the trusted samples

    The model is a softmax classifier with bias. A third split, for evaluation, chooses the outer step whose numbers are
    reported, because with one free weight for each sample a good hypergradient overfits the trusted set. A sample is
    suspect when its weight is below 0.5.

    With weights="loss" the weight is a function of the sample's loss with two parameters, which a small trusted set can
    tell. Half of the trusted samples then join the inner problem with weight 1; the other half makes the outer loss,
    because samples that were trained on cannot judge. theta starts where the inner problem is solved, by way of those
    trusted samples: far from there the implicit formula does not hold, and a few steps along it lead two parameters to
    believe every label.

    Args:
        dataset: "digits" (bundled), "mnist" (IDX files), or "auto": mnist when a folder was named, else digits.
        noise, noise_kind: the fraction of training labels touched, and how: "flip" (always wrong), "uniform" (a random
            class, possibly the right one) or "pair".
        train, trusted, evaluation: samples of each split; None: a share that suits the data set.
        weights: "sample": v in [0, 1]^N, one number each (the paper); "loss": v = (a, b), weight
            sigmoid(e^a (e^b - loss_i)).
        start: the first weight of a sample, or with weights="loss" of one without loss; None: 0.5 and 0.8.
        l2: the ridge.
        batch: samples in an inner batch.
        batches: inner batches that the cross derivative is averaged over, M in the paper, or "all", for methods that do
            so; None: what the method does by itself.
        inner_steps, inner_lr, outer_lr: of the solver. inner_lr None: the inverse of the largest curvature.
        outer: "adam", with outer_lr falling to a tenth, or "sgd".
        dtype: "float32" or "float64".
    """

    name: ClassVar[str] = "cleaning"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "default": {},
        "quick": {"dataset": "digits", "train": 300, "trusted": 100, "evaluation": 100},
        "loss": {"weights": "loss", "inner_steps": 20},
        "paper": {
            "dataset": "mnist",
            "noise": 0.5,
            "noise_kind": "uniform",
            "l2": 1e-4,
            "batch": 1024,
            "batches": 5,
            "inner_steps": 10,
            "inner_lr": 0.01,
            "outer_lr": 0.5,
            "outer": "sgd",
        },
    }
    dataset: str = "auto"
    noise: float = 0.4
    noise_kind: str = "flip"
    train: int | None = None
    trusted: int | None = None
    evaluation: int | None = None
    weights: str = "sample"
    start: float | None = None
    l2: float = 1e-3
    batch: int = 256
    batches: int | str | None = None
    inner_steps: int = 10
    inner_lr: float | None = None
    outer_lr: float = 0.05
    outer: str = "adam"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name, known in (
            ("dataset", DATASETS),
            ("noise_kind", NOISES),
            ("weights", tuple(WEIGHTINGS)),
            ("outer", ("adam", "sgd")),
            ("dtype", ("float32", "float64")),
        ):
            if getattr(self, name) not in known:
                raise unknown(f"{name} of cleaning", getattr(self, name), known)
        positive("cleaning", batch=self.batch, inner_steps=self.inner_steps, outer_lr=self.outer_lr)
        not_negative("cleaning", noise=self.noise, l2=self.l2)
        if self.noise > 1:
            raise InputError(f"cleaning: noise must lie between 0 and 1, got {self.noise}.")
        if self.start is not None and not 0 < self.start < 1:
            raise InputError(f"cleaning: start must lie between 0 and 1, got {self.start}.")
        for name in ("train", "trusted", "evaluation"):
            size = getattr(self, name)
            if size is not None and size < CLASSES:
                raise InputError(f"cleaning: {name} must be at least {CLASSES}, got {size}.")

    def load(self, seed: int, device: torch.device, data: str | Path | None = None) -> LabelSets:
        """Read the data set, split it and make some of the training labels wrong."""
        generator = torch.Generator().manual_seed(seed)
        if self.dataset == "digits" and data is not None:
            raise InputError(
                "The digits come with scikit-learn, so --data would be ignored. Leave it or dataset=digits away."
            )
        folder = find("mnist", data, cached=self.dataset == "mnist") if self.dataset != "digits" else None
        if folder is None:
            if self.dataset == "mnist":
                raise InputError(
                    "MNIST was asked for, but no folder was named. Download it with `nhgd data fetch mnist`, or point --data"
                    " or NHGD_DATA at its IDX files."
                )
            x, y = digits()
            order = torch.randperm(len(x), generator=generator)
            x, y = x[order], y[order]
            sizes = (self.train or 1000, self.trusted or 200, self.evaluation or 200)
            x_test, y_test = x[sum(sizes) :], y[sum(sizes) :]
        else:
            images = read_images(folder)
            x = torch.from_numpy(images.train_images.copy()).flatten(1).float() / 255
            y = torch.from_numpy(images.train_labels.copy()).long()
            order = torch.randperm(len(x), generator=generator)
            x, y = x[order], y[order]
            sizes = (self.train or len(x) * 5 // 6, self.trusted or len(x) // 12, self.evaluation or len(x) // 12)
            x_test = torch.from_numpy(images.test_images.copy()).flatten(1).float() / 255
            y_test = torch.from_numpy(images.test_labels.copy()).long()
        if sum(sizes) > len(x) or len(x_test) == 0:
            raise InputError(
                f"cleaning: train + trusted + evaluation is {sum(sizes)}, but there are only {len(x)} samples"
                f"{' and some must be left for testing' if folder is None else ''}."
            )
        n, m, e = sizes
        if m < CLASSES or e < 1:
            raise InputError(
                f"cleaning: {len(x)} samples are too few to set {CLASSES} trusted ones and some for evaluation aside. Give more."
            )
        if len(y[n : n + m].unique()) < CLASSES:
            order = with_every_class(y, n, n + m, CLASSES)
            x, y = x[order], y[order]
        mean, deviation = x[:n].mean(), x[:n].std()
        if not deviation > 0:
            raise InputError(
                "cleaning: all pixels of the training images are equal, so there is nothing to learn from."
            )
        noisy = corrupt(y[:n], self.noise, self.noise_kind, CLASSES, generator)

        def split(x: Tensor, y: Tensor) -> Split:
            return Split(((x - mean) / deviation).to(device, getattr(torch, self.dtype)), y.to(device))

        return LabelSets(
            train=split(x[:n], noisy),
            trusted=split(x[n : n + m], y[n : n + m]),
            evaluation=split(x[n + m : n + m + e], y[n + m : n + m + e]),
            test=split(x_test, y_test),
            true_labels=y[:n].to(device),
            wrong=(noisy != y[:n]).to(device),
            side=int(x.shape[1] ** 0.5),
            pixels=x[:n],
        )

    def build(self, seed: int, device: torch.device, data: str | Path | None = None) -> Instance:
        """Load the data and set the problem up."""
        sets = self.load(seed, device, data)
        weighting = WEIGHTINGS[self.weights](len(sets.train.y))
        model = softmax_classifier(sets.train.x)
        v = weighting.first(self.start).to(sets.train.x)
        half = len(sets.trusted.y) // 2 if self.weights == "loss" else 0
        judge = Split(sets.trusted.x[half:], sets.trusted.y[half:])
        x = torch.cat([sets.train.x, sets.trusted.x[:half]])
        y = torch.cat([sets.train.y, sets.trusted.y[:half]])

        def inner(model: nn.Module, v: Tensor, batch: Any) -> Losses:
            x, y, index = batch
            z = model(x)
            losses = F.cross_entropy(z, y, reduction="none")
            return Losses(losses, weights=weighting.weights(v, losses, index), outputs=z)

        def outer(model: nn.Module, v: Tensor, batch: Any) -> Tensor:
            return F.cross_entropy(model(batch[0]), batch[1])

        problem = Bilevel(inner, outer, model, v, l2=self.l2, likelihood="categorical")
        full_inner = (x, y, torch.arange(len(y), device=device))
        full_outer = (judge.x, judge.y)

        def solve_inner(tol: float = 1e-3 if self.dtype == "float32" else 1e-6) -> float:
            # Weights may depend on the losses: then not the weighted losses but their potential is minimal at theta*.
            def potential(model: nn.Module, v: Tensor, batch: Any) -> Tensor:
                return weighting.potential(v, F.cross_entropy(model(batch[0]), batch[1], reduction="none"), batch[2])

            return lbfgs(Bilevel(potential, outer, model, v, l2=self.l2), full_inner, tol)

        if half:
            fit(model, Split(sets.trusted.x[:half], sets.trusted.y[:half]), self.l2, 1e-2)
            solve_inner(1e-2)

        def metrics(theta: nn.Module, v: Tensor) -> dict[str, float]:
            z = theta(sets.evaluation.x)
            return {
                "evaluation_loss": float(F.cross_entropy(z, sets.evaluation.y)),
                "evaluation_accuracy": accuracy(z, sets.evaluation.y),
                "test_accuracy": accuracy(theta(sets.test.x), sets.test.y),
                **found(self.sample_weights(theta, v, sets), sets.wrong),
            }

        def summary(solution: Solution) -> dict[str, float]:
            rows = [row for row in solution.history if "evaluation_loss" in row]
            best = min(rows, key=lambda row: row["evaluation_loss"])
            chosen = ("test_accuracy", "f1", "auc", "precision", "recall")
            with torch.no_grad():
                last = metrics(model, v)
                losses = {
                    "outer_loss": float(outer(model, v, full_outer)),
                    "inner_loss": float(problem.objective(full_inner)),
                }
            return {
                **losses,
                **{key: best[key] for key in chosen},
                "selected_step": best["step"],
                **{f"final_{key}": last[key] for key in chosen},
                "evaluation_loss": best["evaluation_loss"],
                "final_evaluation_loss": last["evaluation_loss"],
                "wrong_labels": float(sets.wrong.sum()),
            }

        solver = {
            "inner_steps": self.inner_steps,
            "inner_lr": 1.0 / largest_curvature(x) if self.inner_lr is None else self.inner_lr,
            "outer_lr": Decay(self.outer_lr, final=0.1, hold=0.5) if self.outer == "adam" else self.outer_lr,
            "outer_optimizer": torch.optim.Adam if self.outer == "adam" else None,
            "project_v": weighting.box,
        }

        return Instance(
            problem,
            Data(x, y, batch=self.batch),
            Data(judge.x, judge.y),
            solver,
            "aid",
            100,
            metrics,
            summary,
            full_inner,
            full_outer,
            solve_inner,
            sets,
            {} if self.batches is None else {"batches": self.batches},
        )

    def sample_weights(self, model: nn.Module, v: Tensor, sets: LabelSets) -> Tensor:
        """The weight of every training sample, (N,)."""
        losses = F.cross_entropy(model(sets.train.x), sets.train.y, reduction="none")
        index = torch.arange(len(losses), device=losses.device)
        return WEIGHTINGS[self.weights](len(losses)).weights(v, losses, index)


def softmax_classifier(x: Tensor) -> nn.Linear:
    """A linear model with bias for samples such as x, (N, P), at zero."""
    model: nn.Linear = nn.utils.skip_init(nn.Linear, x.shape[1], CLASSES, device=x.device, dtype=x.dtype)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    return model


def fit(model: nn.Module, split: Split, l2: float, tol: float) -> float:
    """Train a classifier to the end, in place; returns the norm of the last gradient."""

    def inner(model: nn.Module, v: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    nothing = split.x.new_zeros(1)
    problem = Bilevel(inner, lambda model, v, batch: v.sum(), model, nothing, l2=l2)
    return lbfgs(problem, (split.x, split.y), tol)


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
