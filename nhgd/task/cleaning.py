"""Learning which labels to trust."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from nhgd._randomness import Randomness
from nhgd._solution import Solution
from nhgd._validation import counted, not_negative, positive
from nhgd.data.loader import Data
from nhgd.errors import InputError
from nhgd.execution import Inline
from nhgd.inverse._krylov.spectrum import largest_eigenvalue
from nhgd.loop.loop import Loop
from nhgd.loop.settings import LoopSettings
from nhgd.oracle import Oracle
from nhgd.plot.demo import ShownSamples, draw_suspects
from nhgd.problem import Bilevel
from nhgd.task._classifier import Architecture, Split, accuracy, mean_cross_entropy
from nhgd.task._images import CLASSES, mean_and_deviation, read
from nhgd.task._labels import NOISES, area, corrupt, detection_scores, with_every_class
from nhgd.task._overfitting import overfitting
from nhgd.task._weighted_training import WeightedTraining, inner_settings, outer_settings
from nhgd.task._weighting import WEIGHTINGS
from nhgd.task.base import AbstractTask, Instance

DATASETS = ("auto", "digits", "mnist")


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

    The model is a softmax classifier with bias, or any other. A third split, for evaluation, chooses the outer step
    whose numbers are reported, and detects overfitting: see `overfitting`, whose numbers are among the metrics. A
    sample is suspect when its weight is below 0.5.

    By default the weight is a function of the sample's loss with two parameters, which a small trusted set can
    determine. With a free weight for each sample, as in the paper, a good hypergradient overfits the trusted set. Half
    of the trusted samples join the inner problem with weight 1; the other half makes the outer loss, because samples
    that were trained on cannot judge.

    Args:
        dataset: "digits" (bundled), "mnist" (IDX files), or "auto": mnist when a folder was named, else digits.
        noise, noise_kind: the fraction of training labels touched, and how: "flip" (always wrong), "uniform" (a random
            class, possibly the right one) or "pair".
        train, trusted, evaluation: samples of each split; None: a share that suits the data set.
        model: "linear", "mlp" with a hidden layer of `hidden` units, or in Python a function (features, classes) ->
            module of samples (B, features).
        weights: "loss": v = (a, b), weight sigmoid(e^a (e^b - loss_i)); "net": a small net of the loss
            (Meta-Weight-Net); "clip": v in [0, 1]^N, one number each (the paper); "sigmoid": weight sigmoid(v_i).
        start: the first weight of a sample, or with a function of the loss that of a sample without loss; None: 0.5 and
            0.8.
        trusted_inside: the share of the trusted samples that joins the inner problem; None: half with a function of the
            loss, none with a weight for each sample.
        warm_up: how theta starts: "solved", where the trusted samples inside are fitted and then the inner problem is
            solved; or a number of inner steps after that fit; 0: nothing of it. None: "solved" with a function of the
            loss, 0 with a weight for each sample. Its time is part of the preparation.
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
    headline: ClassVar[str] = "test_accuracy"
    curve: ClassVar[str] = "test_accuracy"
    selection: ClassVar[str] = "evaluation_loss"
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
        self.check_choices(
            dataset=DATASETS,
            noise_kind=NOISES,
            weights=WEIGHTINGS,
            outer=("adam", "sgd"),
            dtype=("float32", "float64"),
        )
        counted("cleaning", batch=self.batch, inner_steps=self.inner_steps)
        not_negative("cleaning", l2=self.l2)
        for name in ("inner_lr", "outer_lr"):
            if getattr(self, name) is not None:
                positive("cleaning", **{name: getattr(self, name)})
        if not 0 <= self.noise < 1:
            raise InputError(
                f"cleaning: noise is the share of training labels to corrupt, at least 0 and below 1; got {self.noise}."
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
        images = read(self.dataset, "mnist", data)
        order = torch.randperm(len(images.x), generator=generator)
        x, y = images.x[order], images.y[order]
        n, m, e = self._sizes(len(x), has_test=images.test is not None)
        x_test, y_test = images.test or (x[n + m + e :], y[n + m + e :])
        if len(y[n : n + m].unique()) < CLASSES:
            order = with_every_class(y, n, n + m, CLASSES)
            x, y = x[order], y[order]
        mean, deviation = mean_and_deviation(x[:n], "cleaning")
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

    def _sizes(self, samples: int, has_test: bool) -> tuple[int, int, int]:
        """How many of the samples train, are trusted and evaluate; without a test set of their own, some are left
        for one.
        """
        usual = (samples * 5 // 6, samples // 12, samples // 12) if has_test else (1000, 200, 200)
        n, m, e = self.train or usual[0], self.trusted or usual[1], self.evaluation or usual[2]
        if n + m + e > samples - (not has_test):
            raise InputError(
                f"cleaning: train + trusted + evaluation is {n + m + e}, but there are only {samples} samples"
                f"{'' if has_test else ' and some must be left for testing'}."
            )
        if m < CLASSES or e < 1:
            raise InputError(
                f"cleaning: {samples} samples are too few for {CLASSES} trusted ones and some for evaluation. Use more."
            )
        return n, m, e

    @override
    def build(self, seed: int, device: torch.device, data: str | Path | None = None) -> CleaningInstance:
        sets = self.load(seed, device, data)
        weighting = WEIGHTINGS[self.weights](len(sets.train.y))
        model = self._model(sets.train.x, seed)
        v = weighting.first(self.start, sets.train.x)
        share = self.trusted_inside if self.trusted_inside is not None else 0.5 * weighting.by_loss
        inside = int(share * len(sets.trusted.y))
        guide, judge = sets.trusted.part(slice(inside)), sets.trusted.part(slice(inside, None))
        training = WeightedTraining(model, v, weighting, sets.train, guide, self.l2)
        problem, inner_data = training.problem(mean_cross_entropy), training.data(self.batch)
        full_outer = (judge.x, judge.y)
        inner_lr = self._start(training, problem, inner_data, full_outer, seed)
        return CleaningInstance(
            problem=problem,
            inner_data=inner_data,
            outer_data=Data(*full_outer),
            full_inner=training.everything,
            full_outer=full_outer,
            method_settings={} if self.batches is None else {"batches": self.batches},
            task=self,
            sets=sets,
            training=training,
            inner_lr=inner_lr,
        )

    def _start(
        self, training: WeightedTraining, problem: Bilevel, data: Data, full_outer: tuple[Tensor, Tensor], seed: int
    ) -> float:
        """Bring theta to its start, in place; returns the inner step size that suits it."""
        inner_lr = self._inner_lr(training, problem, data, seed)
        warm_up = self.warm_up if self.warm_up is not None else "solved" if training.weighting.by_loss else 0
        if warm_up == "solved":
            training.start_solved()
            if self.model != "linear":  # a step that suits the first theta may be too long where the run begins
                inner_lr = min(inner_lr, self._inner_lr(training, problem, data, seed))
        elif isinstance(warm_up, int) and warm_up:
            training.start_from_trusted()
            settings = LoopSettings(**inner_settings(inner_lr, self.momentum))
            with Randomness(seed, problem.theta.device).scope():
                loop = Loop(problem, data, [full_outer], settings, Inline())
                for _ in range(warm_up):
                    loop.inner_step()
        return inner_lr

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

    def _inner_lr(self, training: WeightedTraining, problem: Bilevel, data: Data, seed: int) -> float:
        if self.inner_lr is not None:
            return self.inner_lr
        if self.model == "linear":
            return training.step_size()
        with Randomness(seed, problem.theta.device).scope():
            batch = next(iter(data))
        top = largest_eigenvalue(Oracle(problem, [batch]), problem.theta.flat(), 20)
        return 0.5 / top if top > 0 else 0.01

    def sample_weights(self, model: nn.Module, v: Any, sets: LabelSets) -> Tensor:
        """The weight of every training sample, (N,)."""
        losses = F.cross_entropy(model(sets.train.x), sets.train.y, reduction="none")
        index = torch.arange(len(losses), device=losses.device)
        return WEIGHTINGS[self.weights](len(losses)).weights(v, losses, index)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class CleaningInstance(Instance):
    """The problem with its splits.

    Attributes:
        task: the settings it was built from.
        sets: the four splits.
        training: the inner problem.
        inner_lr: the first inner step size.
    """

    task: Cleaning
    sets: LabelSets
    training: WeightedTraining
    inner_lr: float

    @override
    def solver_settings(self) -> dict[str, Any]:
        """Momentum inside and Adam outside, unless the task says otherwise."""
        task = self.task
        outer_lr = task.outer_lr or (0.03 if task.weights == "net" else 0.05)
        return {
            "inner_steps": task.inner_steps,
            **inner_settings(self.inner_lr, task.momentum),
            **(outer_settings(outer_lr) if task.outer == "adam" else {"outer_lr": outer_lr, "outer_optimizer": None}),
            "project_v": self.training.weighting.box,
        }

    @override
    def plain_sgd_settings(self) -> dict[str, Any]:
        """No momentum."""
        return inner_settings(self.inner_lr, momentum=0)

    @override
    def metrics(self, theta: nn.Module, v: Any) -> dict[str, float]:
        """On the evaluation split and the test set, and how well wrong labels are found."""
        evaluation, test = self.sets.evaluation, self.sets.test
        z = theta(evaluation.x)
        return {
            "evaluation_loss": float(F.cross_entropy(z, evaluation.y)),
            "evaluation_accuracy": accuracy(z, evaluation.y),
            "test_accuracy": accuracy(theta(test.x), test.y),
            **detection_scores(self.task.sample_weights(theta, v, self.sets), self.sets.wrong),
        }

    @override
    def summary(self, solution: Solution) -> dict[str, float]:
        with self.problem.guarded(seed=0), torch.no_grad():
            losses = self.losses()
            end = {
                "step": solution.stats["steps"],
                "outer_loss": losses["outer_loss"],
                **self.metrics(self.training.model, self.training.v),
            }
        rows = [*(row for row in solution.history if "evaluation_loss" in row), end]
        best = min(rows, key=lambda row: row["evaluation_loss"])
        chosen = ("test_accuracy", "f1", "auc", "precision", "recall")
        return {
            **losses,
            **{key: best[key] for key in chosen},
            "selected_step": best["step"],
            **{f"final_{key}": end[key] for key in chosen},
            "evaluation_loss": best["evaluation_loss"],
            "final_evaluation_loss": end["evaluation_loss"],
            **overfitting(rows[0], best, end, self.training.weighting.by_loss),
            "wrong_labels": float(self.sets.wrong.sum()),
        }

    @override
    def influence_metrics(self, total: Tensor) -> dict[str, float]:
        """How well a low influence points at a wrong label."""
        wrong = self.sets.wrong.cpu()
        return {"auc": area(-total[: len(wrong)], wrong)}

    @override
    def pictures(self, folder: Path) -> list[Path]:
        """suspects.png: the samples with the lowest weights at the end, with their given and their true labels."""
        sets = self.sets
        with self.problem.guarded(seed=0), torch.no_grad():
            weights = self.task.sample_weights(self.training.model, self.training.v, sets).detach().cpu()
        images = sets.pixels.reshape(-1, sets.side, sets.side).cpu()
        samples = ShownSamples(images, sets.train.y.cpu(), sets.true_labels.cpu(), sets.wrong.cpu())
        suspects = weights < 0.5
        right = int((suspects & samples.wrong).sum())
        title = f"{int(suspects.sum())} labels suspected, {right} of them wrong; the most suspected: given label (true label)"
        return [draw_suspects(folder / "suspects.png", weights, samples, title)]

    @override
    def solve_inner(self) -> float:
        return self.training.solve_exactly(self.problem, 3e-3 if self.task.dtype == "float32" else 1e-6)
