"""Learning which labels to trust."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nhgd._randomness import Randomness
from nhgd._solution import Row, Solution
from nhgd.data.bundled import digits
from nhgd.data.idx import find, read_images
from nhgd.data.loader import Data
from nhgd.errors import InputError, counted, not_negative, positive, unknown
from nhgd.execution import Inline
from nhgd.inverse._krylov.spectrum import largest_eigenvalue
from nhgd.loop.loop import Loop
from nhgd.loop.settings import LoopSettings
from nhgd.oracle import Oracle
from nhgd.problem import Bilevel
from nhgd.schedule import Decay
from nhgd.task._classifier import Architecture
from nhgd.task._labels import NOISES, corrupt, found, with_every_class
from nhgd.task._softmax import Split, accuracy, largest_curvature
from nhgd.task._weighted_training import WeightedTraining, momentum, suited
from nhgd.task._weighting import WEIGHTINGS
from nhgd.task.base import AbstractTask, Instance

CLASSES = 10
DATASETS = ("auto", "digits", "mnist")
RISE, GAP = 0.1, 0.5  # from where on a run is said to overfit


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


class OverfittingWarning(UserWarning):
    """The weights follow the trusted samples further than those tell about others."""


@final
@dataclass(frozen=True)
class Cleaning(AbstractTask):
    """Find wrong labels: a weight for each training sample, learnt from a small trusted set.

        inner: mean_i w_i CE(y_i, theta . x_i) + l2 ||theta||^2
        outer: mean cross-entropy on the trusted samples

    The model is a softmax classifier with bias, or any other. A third split, for evaluation, chooses the outer step whose
    numbers are reported, and tells overfitting: see `overfitting`, whose numbers are among the metrics. A sample is
    suspect when its weight is below 0.5.

    By default the weight is a function of the sample's loss with two parameters, which a small trusted set can tell.
    With a free weight for each sample, as in the paper, a good hypergradient overfits the trusted set. Half of the trusted
    samples join the inner problem with weight 1; the other half makes the outer loss, because samples that were trained
    on cannot judge.

    Args:
        dataset: "digits" (bundled), "mnist" (IDX files), or "auto": mnist when a folder was named, else digits.
        noise, noise_kind: the fraction of training labels touched, and how: "flip" (always wrong), "uniform" (a random
            class, possibly the right one) or "pair".
        train, trusted, evaluation: samples of each split; None: a share that suits the data set.
        model: "linear", "mlp" with a hidden layer of `hidden` units, or in Python a function (features, classes) -> module
            of samples (B, features).
        weights: "loss": v = (a, b), weight sigmoid(e^a (e^b - loss_i)); "net": a small net of the loss (Meta-Weight-Net);
            "clip": v in [0, 1]^N, one number each (the paper); "sigmoid": weight sigmoid(v_i).
        start: the first weight of a sample, or with a function of the loss that of a sample without loss; None: 0.5 and
            0.8.
        trusted_inside: the share of the trusted samples that joins the inner problem; None: half with a function of the
            loss, none with a weight for each sample.
        warm_up: how theta starts: "solved", where the trusted samples inside are fitted and then the inner problem is
            solved; or a number of inner steps after that fit; 0: nothing of it. None: "solved" with a function of the loss,
            0 with a weight for each sample. Its time is part of the preparation.
        l2: the ridge.
        batch: samples in an inner batch.
        batches: inner batches that the cross derivative is averaged over, M in the paper, or "all", for methods that do
            so; None: what the method does by itself.
        inner_steps, inner_lr, outer_lr: of the solver. inner_lr None: the inverse of the largest curvature, half of it
            where the model is not linear. outer_lr None: 0.05, or 0.03 for a net.
        momentum: Nesterov's, of the inner steps, whose size then falls to a tenth over the run; 0: plain steps of one
            size, which some methods take in any case.
        outer: "adam", with outer_lr falling to a twentieth, or "sgd".
        dtype: "float32" or "float64".
    """

    name: ClassVar[str] = "cleaning"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "default": {},
        # It starts too trustful, so that even a few steps have something to learn.
        "quick": {"dataset": "digits", "train": 300, "trusted": 100, "evaluation": 100, "start": 0.95},
        "paper": {
            "dataset": "mnist",
            "noise": 0.5,
            "noise_kind": "uniform",
            "weights": "clip",
            "l2": 1e-4,
            "batch": 1024,
            "batches": 5,
            "inner_steps": 10,
            "inner_lr": 0.01,
            "momentum": 0.0,
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
    model: str | Callable[[int, int], nn.Module] = "linear"
    hidden: int = 64
    weights: str = "loss"
    start: float | None = None
    trusted_inside: float | None = None
    warm_up: int | str | None = None
    l2: float = 1e-3
    batch: int = 1024
    batches: int | str | None = None
    inner_steps: int = 20
    inner_lr: float | None = None
    outer_lr: float | None = None
    momentum: float = 0.9
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
        counted("cleaning", batch=self.batch, inner_steps=self.inner_steps)
        not_negative("cleaning", l2=self.l2)
        for name in ("inner_lr", "outer_lr"):
            if getattr(self, name) is not None:
                positive("cleaning", **{name: getattr(self, name)})
        if not 0 <= self.noise < 1:
            raise InputError(
                f"cleaning: noise is the share of the training labels that are touched, from 0 to below 1; got {self.noise}."
            )
        for name in ("momentum", "trusted_inside"):
            share = getattr(self, name)
            if share is not None and not 0 <= share < 1:
                raise InputError(f"cleaning: {name} must be 0 or more and below 1, got {share}.")
        if isinstance(self.warm_up, str) and self.warm_up != "solved":
            raise InputError(f"cleaning: warm_up is 'solved' or a number of inner steps, got {self.warm_up!r}.")
        if isinstance(self.warm_up, int):
            not_negative("cleaning", warm_up=self.warm_up)
        if self.start is not None and not 0 < self.start < 1:
            raise InputError(f"cleaning: start must lie between 0 and 1, got {self.start}.")
        for name in ("train", "trusted", "evaluation"):
            size = getattr(self, name)
            if size is not None and size < CLASSES:
                raise InputError(f"cleaning: {name} must be at least {CLASSES}, got {size}.")
        if not callable(self.model):
            Architecture(self.model, hidden=self.hidden)

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
        """Load the data, set the problem up and bring theta to its start."""
        sets = self.load(seed, device, data)
        weighting = WEIGHTINGS[self.weights](len(sets.train.y))
        model = self._model(sets.train.x, seed)
        v = weighting.first(self.start, sets.train.x)
        share = self.trusted_inside if self.trusted_inside is not None else 0.5 * weighting.by_loss
        inside = int(share * len(sets.trusted.y))
        guide, judge = (
            Split(sets.trusted.x[part], sets.trusted.y[part]) for part in (slice(inside), slice(inside, None))
        )
        training = WeightedTraining(model, v, weighting, sets.train, guide, self.l2)

        def outer(model: nn.Module, v: Any, batch: Any) -> Tensor:
            return F.cross_entropy(model(batch[0]), batch[1])

        problem = training.problem(outer)
        everything = training.samples
        full_inner = (everything.x, everything.y, torch.arange(len(everything.y), device=device))
        full_outer = (judge.x, judge.y)
        inner_data = Data(everything.x, everything.y, batch=self.batch)
        inner_lr = self._inner_lr(problem, everything.x, inner_data, seed)
        warm_up = self.warm_up if self.warm_up is not None else "solved" if weighting.by_loss else 0
        if warm_up == "solved":
            training.start_solved()
            if self.model != "linear":  # a step that suits the first theta may be too long where the run begins
                inner_lr = min(inner_lr, self._inner_lr(problem, everything.x, inner_data, seed))
        inner: dict[str, Any] = {
            "inner_lr": Decay(inner_lr, final=0.1, hold=0.3) if self.momentum else inner_lr,
            "inner_optimizer": momentum(self.momentum) if self.momentum else None,
        }
        if isinstance(warm_up, int) and warm_up:
            training.start_from_trusted()
            with Randomness(seed, device).scope():
                loop = Loop(problem, inner_data, [full_outer], LoopSettings(**inner), Inline())
                for _ in range(warm_up):
                    loop.inner_step()

        def metrics(theta: nn.Module, v: Any) -> dict[str, float]:
            z = theta(sets.evaluation.x)
            return {
                "evaluation_loss": float(F.cross_entropy(z, sets.evaluation.y)),
                "evaluation_accuracy": accuracy(z, sets.evaluation.y),
                "test_accuracy": accuracy(theta(sets.test.x), sets.test.y),
                **found(self.sample_weights(theta, v, sets), sets.wrong),
            }

        def summary(solution: Solution) -> dict[str, float]:
            with problem.guarded(seed=0), torch.no_grad():
                end = {
                    "step": solution.stats["steps"],
                    "outer_loss": float(outer(model, v, full_outer)),
                    **metrics(model, v),
                }
                inner_loss = float(problem.objective(full_inner))
            rows = [*(row for row in solution.history if "evaluation_loss" in row), end]
            best = min(rows, key=lambda row: row["evaluation_loss"])
            chosen = ("test_accuracy", "f1", "auc", "precision", "recall")
            return {
                "outer_loss": end["outer_loss"],
                "inner_loss": inner_loss,
                **{key: best[key] for key in chosen},
                "selected_step": best["step"],
                **{f"final_{key}": end[key] for key in chosen},
                "evaluation_loss": best["evaluation_loss"],
                "final_evaluation_loss": end["evaluation_loss"],
                **overfitting(rows[0], best, end, weighting.by_loss),
                "wrong_labels": float(sets.wrong.sum()),
            }

        outer_lr = self.outer_lr or (0.03 if self.weights == "net" else 0.05)
        solver = {
            "inner_steps": self.inner_steps,
            **inner,
            "outer_lr": Decay(outer_lr, final=0.05, hold=0.3) if self.outer == "adam" else outer_lr,
            "outer_optimizer": torch.optim.Adam if self.outer == "adam" else None,
            "project_v": weighting.box,
        }

        return Instance(
            problem,
            inner_data,
            Data(judge.x, judge.y),
            solver,
            "nhgd",
            100,
            metrics,
            summary,
            full_inner,
            full_outer,
            lambda: training.solve_exactly(3e-3 if self.dtype == "float32" else 1e-6),
            sets,
            {} if self.batches is None else {"batches": self.batches},
            {"nhgd": suited(problem)},
            plain={"inner_lr": inner_lr, "inner_optimizer": None},
        )

    def _model(self, x: Tensor, seed: int) -> nn.Module:
        if not callable(self.model):
            return Architecture(self.model, hidden=self.hidden).build(x.shape[1], CLASSES, seed, x.device, x.dtype)
        with Randomness(seed, x.device).scope():
            model = self.model(x.shape[1], CLASSES)
        if not isinstance(model, nn.Module):
            raise InputError(f"cleaning: model must return an nn.Module, but it returned a {type(model).__name__}.")
        model = model.to(x.device, x.dtype)
        mode = model.training
        with Randomness(seed, x.device).scope(), torch.no_grad():
            shape = tuple(model.eval()(x[:2]).shape)
        model.train(mode)
        if shape != (2, CLASSES):
            raise InputError(
                f"cleaning: the model must turn samples (B, {x.shape[1]}) into scores (B, {CLASSES}), but two samples gave"
                f" {shape}."
            )
        return model

    def _inner_lr(self, problem: Bilevel, x: Tensor, data: Data, seed: int) -> float:
        if self.inner_lr is not None:
            return self.inner_lr
        if self.model == "linear":
            return 1.0 / largest_curvature(x)
        with Randomness(seed, x.device).scope():
            batch = next(iter(data))
        top = largest_eigenvalue(Oracle(problem, [batch]), problem.theta.flat(), 20)
        return 0.5 / top if top > 0 else 0.01

    def sample_weights(self, model: nn.Module, v: Any, sets: LabelSets) -> Tensor:
        """The weight of every training sample, (N,)."""
        losses = F.cross_entropy(model(sets.train.x), sets.train.y, reduction="none")
        index = torch.arange(len(losses), device=losses.device)
        return WEIGHTINGS[self.weights](len(losses)).weights(v, losses, index)


def overfitting(first: Row, best: Row, end: Row, by_loss: bool) -> dict[str, float]:
    """How far the weights follow the trusted samples further than those tell about others; too far, and it warns.

    overfitting: by which part the evaluation loss rose from its least while the trusted loss went on falling, 0 where it
    did not. gap: by which part the trusted loss is below the evaluation loss, less what it was after the first step. It
    warns when the one is above a tenth or the other above a half.

    Args:
        first, best, end: losses after the first step, where that on the evaluation split was least, and at the end.
        by_loss: whether one function weighs all samples already.

    >>> first = {"evaluation_loss": 0.5, "outer_loss": 0.5}
    >>> best = {"step": 5, "evaluation_loss": 0.4, "outer_loss": 0.4}
    >>> end = {"evaluation_loss": 0.42, "outer_loss": 0.315}
    >>> {key: round(value, 3) for key, value in overfitting(first, best, end, by_loss=True).items()}
    {'overfitting': 0.05, 'gap': 0.25}
    """
    fell = end["outer_loss"] < best["outer_loss"]
    rise = float(end["evaluation_loss"] / best["evaluation_loss"] - 1) if fell else 0.0
    gap = float(first["outer_loss"] / first["evaluation_loss"] - end["outer_loss"] / end["evaluation_loss"])
    if rise > RISE or gap > GAP:
        remedy = "" if by_loss else ", or weights=loss, which has two parameters in place of one for each sample"
        warnings.warn(
            "The weights overfit the trusted samples: at the end the loss is"
            f" {end['outer_loss']:.3g} on those and {end['evaluation_loss']:.3g} on the evaluation split, where it was"
            f" {best['evaluation_loss']:.3g} after step {best['step']:g}. Use the numbers of that step, which are those"
            f" without final_. Against it help fewer outer steps, more trusted samples{remedy}.",
            OverfittingWarning,
            stacklevel=2,
        )
    return {"overfitting": rise, "gap": gap}
