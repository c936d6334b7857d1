"""Learning a few images that stand for a whole training set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from nhgd._solution import Solution
from nhgd._validation import counted, positive
from nhgd.algorithm import NHGD, AbstractAlgorithm
from nhgd.data.loader import Data
from nhgd.errors import InputError
from nhgd.inverse import KFAC, FisherWindow
from nhgd.losses import Losses
from nhgd.plot.distilled import draw_distilled
from nhgd.problem import Bilevel
from nhgd.schedule import Decay
from nhgd.task._classifier import (
    Architecture,
    accuracy_of,
    cross_entropies,
    largest_curvature,
    mean_cross_entropy,
    mean_loss,
    trained,
)
from nhgd.task._images import CLASSES, DIGITS, NAMES, mean_and_deviation, read
from nhgd.task._inner_solver import lbfgs
from nhgd.task.base import AbstractTask, Instance

DIGITS_TEST = 500  # of the digits, which have no test set of their own
DATASETS = ("auto", "digits", "mnist", "fashion-mnist")
STARTS = ("auto", "mean", "real", "noise")
NOISE = 0.1  # of a pixel's deviation: images of one class must differ, or they stay equal
ALMOST_ZERO: Mapping[str, Any] = {"start": "noise", "start_noise": 1e-3}
WINDOW_ROWS = 1500  # beyond, factorising the window costs more than the rest of an outer step


@dataclass(frozen=True)
class ImageSets:
    """The training and the test set, pixels (N, P) standardised by `mean` and `deviation`, and the distilled labels."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    mean: float
    deviation: float
    labels: Tensor  # (n C,): n times 0, n times 1, ...

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of an image, taken to be square."""
        side = round(self.x.shape[1] ** 0.5)
        return (side, side) if side**2 == self.x.shape[1] else (1, self.x.shape[1])


@final
@dataclass(frozen=True)
class Distillation(AbstractTask):
    """Learn n images for each class such that a model trained on them alone does well on the training set.

        inner: mean_i CE(k_i, theta . v_i) + l2 ||theta||^2      over the n C images v, k_i their fixed labels
        outer: mean cross-entropy on the training samples

    The distilled images are so few that the exact Fisher matrix, which for a linear softmax model is the Hessian, is a
    small system: n C samples with C rows each. So `nhgd` here means that window, its inner steps preconditioned by it,
    one for each outer step. With more than 1,500 rows it means K-FAC of the exact Fisher matrix, renewed every tenth
    inner step and refined by five products, with two natural steps for each outer step; where inner batches are smaller
    than all images, natural steps follow the batch too closely, and those of the optimiser are taken.

    test_accuracy is that of a new model trained on the images by L-BFGS in float64, which has seen neither the run's
    theta nor its optimiser; loop_test_accuracy is that of the run's own theta; other_test_accuracy that of the other
    architecture, trained from scratch in the same way; random_test_accuracy that of the same model trained on as many
    random training images.

    Args:
        dataset: "digits" (bundled), "mnist" or "fashion-mnist" (IDX files), or "auto": fashion-mnist when a folder was
            named, else digits.
        train: how many training samples; None: all.
        per_class: n, how many images to learn for each class.
        model, bias, hidden: "linear", with or without bias, or "mlp" with a hidden layer of this width.
        l2: the ridge, of the inner problem and of the models trained from scratch.
        start: the first images: "mean" of their class and a little noise, "real" ones, or "noise" alone; "auto": the
            mean for fewer than 20 images a class, else real ones.
        start_noise: the deviation of that noise, where 1 is the deviation of a pixel of the data. Images of one class
            must differ, or they stay equal. The presets of the paper begin with images that are almost 0, because at
            class means and at real images the inner problem is so steep that the printed step sizes diverge
            (docs/distillation.md).
        batch: distilled images in an inner batch; None: all.
        outer_batch: training samples in an outer batch; None: all. The batches are cut once, after a shuffle.
        batches: inner batches that the cross derivative is averaged over, M in the paper, or "all"; None: what the
            method does by itself.
        inner_steps: None: one natural step (two with K-FAC), or 20 of an optimiser.
        inner_lr: None: half the inverse of the largest curvature at the first images.
        outer_lr, outer: "adam" or "sgd", with outer_lr falling to 0 over the steps or the budget. Twice as large a step
            gets further in a few hundred steps, but the images are then of less use to another architecture.
        box: keep every pixel between black and white, so that the results are images.
        dtype: "float32" or "float64".
    """

    name: ClassVar[str] = "distillation"
    headline: ClassVar[str] = "test_accuracy"
    curve: ClassVar[str] = "loop_test_accuracy"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "default": {},
        "quick": {"dataset": "digits", "per_class": 1},
        "paper-5": {
            "dataset": "fashion-mnist",
            "bias": False,
            "l2": 1 / 15680,
            "outer_batch": None,
            "box": False,
            **ALMOST_ZERO,
        },
        "paper-100": {
            "dataset": "fashion-mnist",
            "per_class": 100,
            "bias": False,
            "l2": 1 / 15680,
            "batch": 128,
            "inner_steps": 30,
            "batches": 5,
            "box": False,
            **ALMOST_ZERO,
        },
    }
    dataset: str = "auto"
    train: int | None = None
    per_class: int = 5
    model: str = "linear"
    bias: bool = True
    hidden: int = 64
    l2: float = 3e-3
    start: str = "auto"
    start_noise: float = NOISE
    batch: int | None = None
    outer_batch: int | None = 6000
    batches: int | str | None = None
    inner_steps: int | None = None
    inner_lr: float | None = None
    outer_lr: float = 0.03
    outer: str = "adam"
    box: bool = True
    dtype: str = "float32"

    def __post_init__(self) -> None:
        self.check_choices(dataset=DATASETS, start=STARTS, outer=("adam", "sgd"), dtype=("float32", "float64"))
        sizes = {name: getattr(self, name) for name in ("train", "batch", "outer_batch", "inner_steps")}
        counted("distillation", per_class=self.per_class, **{k: n for k, n in sizes.items() if n is not None})
        positive("distillation", l2=self.l2, outer_lr=self.outer_lr, start_noise=self.start_noise)
        if self.inner_lr is not None:
            positive("distillation", inner_lr=self.inner_lr)
        _ = self.architecture  # which checks its own settings

    @property
    @override
    def threads(self) -> int | None:
        """One for a linear model with small batches: a second gains a sixth, and on a busy machine costs far more."""
        small = self.outer_batch is not None and self.outer_batch <= 10_000
        return 1 if self.model == "linear" and small else None

    @property
    def architecture(self) -> Architecture:
        """The model."""
        return Architecture(self.model, self.bias, self.hidden)

    def load(self, seed: int, device: torch.device, data: str | Path | None = None) -> ImageSets:
        """Read the data set and bring it into a random order."""
        generator = torch.Generator().manual_seed(seed)
        images = read(self.dataset, "fashion-mnist", data)
        train = torch.randperm(len(images.x), generator=generator)
        x_test, y_test = images.test or (images.x[train[:DIGITS_TEST]], images.y[train[:DIGITS_TEST]])
        train = train[0 if images.test else DIGITS_TEST :]
        if self.train is not None and self.train > len(train):
            raise InputError(f"distillation: train is {self.train}, but there are only {len(train)} training samples.")
        train = train[: self.train]
        x, y = images.x[train], images.y[train]
        mean, deviation = (float(number) for number in mean_and_deviation(x, "distillation"))
        found = torch.bincount(y, minlength=CLASSES)
        rarest = int(found[:CLASSES].argmin())
        if found[rarest] == 0:
            raise InputError(f"distillation: the training set has no sample of class {rarest}.")
        if self.per_class > found[rarest]:
            raise InputError(
                f"distillation: per_class is {self.per_class}, but class {rarest} has only {int(found[rarest])} training samples."
                " Ask for at most as many, or for far fewer."
            )
        dtype = getattr(torch, self.dtype)
        return ImageSets(
            x.sub_(mean).div_(deviation).to(device, dtype),
            y.to(device),
            x_test.sub_(mean).div_(deviation).to(device, dtype),
            y_test.to(device),
            mean,
            deviation,
            torch.arange(CLASSES, device=device).repeat_interleave(self.per_class),
        )

    @override
    def build(self, seed: int, device: torch.device, data: str | Path | None = None) -> DistillationInstance:
        sets = self.load(seed, device, data)
        labels = sets.labels
        generator = torch.Generator().manual_seed(seed + 1)
        random = sets.x[some_of_each(sets.y, CLASSES, self.per_class, generator)]
        v = self._first(sets, random, generator)
        model = self.architecture.build(sets.x.shape[1], CLASSES, seed, device, sets.x.dtype)
        full_inner = (labels, torch.arange(len(labels), device=device))
        return DistillationInstance(
            problem=distilling(model, v, self.l2),
            inner_data=Data(labels, batch=self.batch),
            outer_data=Data(sets.x, sets.y, batch=self.outer_batch, shuffle=False),
            full_inner=full_inner,
            full_outer=(sets.x, sets.y),
            steps=1000 if len(sets.y) > 10_000 else 200,
            method_settings={} if self.batches is None else {"batches": self.batches},
            task=self,
            seed=seed,
            sets=sets,
            model=model,
            v=v,
            random=random,
            inner_lr=0.5 / largest_curvature(v) if self.inner_lr is None else self.inner_lr,
        )

    def _first(self, sets: ImageSets, random: Tensor, generator: torch.Generator) -> Tensor:
        """The initial images, (n C, P)."""
        start = self.start if self.start != "auto" else "mean" if self.per_class < 20 else "real"
        if start == "real":
            return random.clone()
        noise = torch.randn(random.shape, generator=generator, dtype=torch.float64).to(random)
        if start == "noise":
            return self.start_noise * noise
        means = torch.stack([sets.x[sets.y == c].mean(0) for c in range(CLASSES)])
        return noisy_means(means, self.per_class, noise, self.start_noise)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class DistillationInstance(Instance):
    """The problem with its data.

    Attributes:
        task, seed: the settings it was built from.
        sets: the training and the test set.
        model, v: theta, and the images.
        random: as many random training images, (n C, P).
        inner_lr: the first inner step size.
    """

    task: Distillation
    seed: int
    sets: ImageSets
    model: nn.Module
    v: Tensor
    random: Tensor
    inner_lr: float

    @override
    def solver_settings(self) -> dict[str, Any]:
        """Adam outside, the pixels kept between black and white."""
        task, sets = self.task, self.sets
        black, white = -sets.mean / sets.deviation, (1 - sets.mean) / sets.deviation
        return {
            "inner_steps": task.inner_steps or 20,
            "inner_lr": self.inner_lr,
            **outer_settings(task.outer_lr, task.outer),
            "metrics_every": 10,
            **({"project_v": (black, white)} if task.box else {}),
        }

    @override
    def methods(self) -> dict[str, AbstractAlgorithm]:
        """nhgd with the inverse that suits the number of images."""
        return {"nhgd": nhgd_for(len(self.v), CLASSES, self.task.batch, self.task.inner_steps)}

    @override
    def metrics(self, theta: nn.Module, v: Tensor) -> dict[str, float]:
        return {"loop_test_accuracy": accuracy_of(theta, self.sets.x_test, self.sets.y_test)}

    @override
    def summary(self, solution: Solution) -> dict[str, float]:
        """The accuracy of new models trained from scratch, on the images and on as many random ones."""
        architecture = self.task.architecture
        found, norm = self._from_scratch(architecture, self.v)
        with torch.no_grad():
            inner_loss = float(self.problem.objective(self.full_inner))
        return {
            "outer_loss": mean_loss(self.model, self.sets.x, self.sets.y),
            "inner_loss": inner_loss,
            "test_accuracy": found,
            **self.metrics(self.model, self.v),
            "other_test_accuracy": self._from_scratch(architecture.other, self.v)[0],
            "random_test_accuracy": self._from_scratch(architecture, self.random)[0],
            "scratch_gradient": norm,
            "images": float(len(self.v)),
        }

    @override
    def brief(self, solution: Solution) -> dict[str, float]:
        """Without the models that are trained from scratch."""
        with torch.no_grad():
            return self.losses() | self.metrics(self.model, self.v)

    def _from_scratch(self, architecture: Architecture, images: Tensor) -> tuple[float, float]:
        """The test accuracy of a new model, and the norm of its last gradient."""
        sets = self.sets
        tol = 1e-6 if architecture.model == "linear" else 1e-4  # an MLP takes long to get below
        new, norm = trained(architecture, images, sets.labels, CLASSES, self.task.l2, self.seed, tol)
        return accuracy_of(new.to(sets.x.dtype), sets.x_test, sets.y_test), norm

    @override
    def pictures(self, folder: Path) -> list[Path]:
        """images.png: the images of each class, with its name."""
        images = self.v.detach().double().cpu().reshape(CLASSES, -1, *self.sets.shape, 1).numpy()
        names = NAMES.get(self.task.dataset, DIGITS)
        title = f"{self.task.per_class} learnt image{'s' if self.task.per_class != 1 else ''} of each class"
        return [draw_distilled(folder / "images.png", images, names, title)]

    @override
    def solve_inner(self) -> float:
        return lbfgs(
            partial(self.problem.objective, self.full_inner),
            self.problem.theta.leaves,
            1e-4 if self.task.dtype == "float32" else 1e-8,
        )


def distilling(model: nn.Module, v: Tensor, l2: float) -> Bilevel:
    """The problem: a model trained on images v, judged on batches (x, y, ...). Inner batches are (labels, index)."""

    def inner(model: nn.Module, v: Tensor, batch: Any) -> Losses:
        labels, index = batch
        scores = model(v[index])
        return Losses(cross_entropies(scores, labels), outputs=scores)

    return Bilevel(inner, mean_cross_entropy, model, v, l2=l2, likelihood="categorical")


def outer_settings(lr: float, optimiser: str = "adam") -> dict[str, Any]:
    """Outer steps of a solver, whose size falls to 0."""
    return {"outer_lr": Decay(lr), "outer_optimizer": torch.optim.Adam if optimiser == "adam" else None}


def noisy_means(means: Tensor, per_class: int, noise: Tensor, deviation: float = NOISE) -> Tensor:
    """Initial images, (n C, P): the mean of each class, n times, with a little noise of unit variance, (n C, P)."""
    return means.repeat_interleave(per_class, 0) + deviation * noise


def nhgd_for(images: int, classes: int, batch: int | None, inner_steps: int | None) -> NHGD:
    """NHGD for this many images: the exact Fisher matrix of all of them if that is small, else K-FAC, refined."""
    kfac = KFAC(fisher="exact", beta=0.5, factor_every=10, invert_every=10)
    if batch is not None and batch < images:
        return NHGD(kfac, refine=5)
    small = images * classes <= WINDOW_ROWS
    steps = (1 if small else 2) if inner_steps is None else None
    if small:
        return NHGD(FisherWindow(window=images, fisher="exact"), inner="natural", natural_steps=steps)
    return NHGD(kfac, refine=5, inner="natural", natural_steps=steps)


def some_of_each(y: Tensor, classes: int, count: int, generator: torch.Generator) -> Tensor:
    """Indices of `count` random samples of each class, (count C,).

    >>> some_of_each(torch.tensor([1, 0, 1]), 2, 1, torch.Generator())[:1].tolist()
    [1]
    """
    found = []
    for c in range(classes):
        mine = torch.nonzero(y.cpu() == c).flatten()
        order = torch.randperm(len(mine), generator=generator)
        found.append(mine[order[:count]])
    return torch.cat(found).to(y.device)
