"""Learning how much each class of an unbalanced set should count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from nhgd._randomness import Randomness
from nhgd._solution import Solution
from nhgd._validation import counted, positive
from nhgd.data.loader import Data
from nhgd.errors import InputError
from nhgd.inverse._krylov.spectrum import largest_eigenvalue
from nhgd.losses import Losses
from nhgd.oracle import Oracle
from nhgd.plot.shares import draw_shares
from nhgd.problem import Bilevel
from nhgd.schedule import Decay
from nhgd.task._classifier import MODELS, Architecture, Split, cross_entropies, mean_cross_entropy, trained
from nhgd.task._images import CLASSES, mean_and_deviation, read
from nhgd.task._inner_solver import lbfgs
from nhgd.task.base import AbstractTask, Instance

DATASETS = ("auto", "digits", "mnist", "fashion-mnist")
BOX = (-1.5, 1.5)  # of v: no class has more than 20 times the share of another
TOL = 1e-4  # of the gradient of a model that is trained from scratch


@dataclass(frozen=True)
class UnbalancedSets:
    """The four splits: the first is unbalanced, the others have as many samples of each class, or all that are left."""

    train: Split
    judge: Split
    evaluation: Split
    test: Split

    @property
    def counts(self) -> Tensor:
        """Training samples of each class."""
        return torch.bincount(self.train.y, minlength=CLASSES)

    @property
    def joint(self) -> Split:
        """The training samples and those that judge."""
        return Split(torch.cat([self.train.x, self.judge.x]), torch.cat([self.train.y, self.judge.y]))


@final
@dataclass(frozen=True)
class Imbalance(AbstractTask):
    """Class weights for an unbalanced training set, learnt from a few samples of each class.

        inner: mean_i w_{y_i} CE(y_i, theta(x_i)) + l2 ||theta||^2,      w_c = N / n_c softmax(v)_c
        outer: mean cross-entropy on as many samples of each class

    n_c of the N training samples are of class c. softmax(v)_c is the share of the class in the training loss, so the
    mean weight is 1 whatever v is, and the ridge keeps its meaning. v = 0 gives every class the same share: weights by
    inverse frequency, where learning begins. The counts fall from `most` by the same factor from class to class, in a
    random order of classes, to `most / ratio`.

    The step is chosen by the loss on an evaluation split. Its shares are judged by the balanced accuracy on test data,
    the mean over classes of the part that is right, of new models trained to the end with the weights fixed:
    balanced_accuracy with the learnt shares, inverse_balanced_accuracy with equal ones, unweighted_balanced_accuracy
    with weights of 1. The balanced samples that judge could be trained on as well, which the three numbers that begin
    with joint_ do: both sets together, each class with the share given or learnt.

    Args:
        dataset: "digits" (bundled), "mnist" or "fashion-mnist" (IDX files), or "auto": mnist when a folder was named,
            else digits.
        most, ratio: training samples of the most frequent class, and how many times as many as of the rarest.
        judge, evaluation: samples of each class in the outer loss, and in the split that chooses the step.
        model, hidden: "mlp" with a hidden layer of this width, or "linear".
        l2: the ridge.
        batch: samples in an inner batch; None: all.
        inner_steps, inner_lr, outer_lr: of the solver. inner_lr None: half the inverse of the largest curvature where
            the run begins.
        dtype: "float32" or "float64".
    """

    name: ClassVar[str] = "imbalance"
    headline: ClassVar[str] = "balanced_accuracy"
    curve: ClassVar[str] = "loop_balanced_accuracy"
    selection: ClassVar[str] = "evaluation_loss"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "default": {},
        "quick": {"dataset": "digits", "most": 40, "ratio": 20.0, "model": "linear"},
    }
    dataset: str = "auto"
    most: int = 100
    ratio: float = 50.0
    judge: int = 10
    evaluation: int = 10
    model: str = "mlp"
    hidden: int = 32
    l2: float = 1e-3
    batch: int | None = None
    inner_steps: int = 20
    inner_lr: float | None = None
    outer_lr: float = 0.05
    dtype: str = "float32"

    def __post_init__(self) -> None:
        self.check_choices(dataset=DATASETS, model=MODELS, dtype=("float32", "float64"))
        sizes = {name: getattr(self, name) for name in ("most", "judge", "evaluation", "inner_steps")}
        counted("imbalance", **sizes, **({} if self.batch is None else {"batch": self.batch}))
        positive("imbalance", l2=self.l2, outer_lr=self.outer_lr)
        if self.inner_lr is not None:
            positive("imbalance", inner_lr=self.inner_lr)
        if not 1 <= self.ratio <= self.most:
            raise InputError(
                f"imbalance: ratio must lie between 1 and most ({self.most}), so that every class has a training sample;"
                f" got {self.ratio:g}."
            )
        _ = self.architecture  # which checks its own settings

    @property
    def architecture(self) -> Architecture:
        """The model."""
        return Architecture(self.model, hidden=self.hidden)

    def load(self, seed: int, device: torch.device, data: str | Path | None = None) -> UnbalancedSets:
        """Read the data set and split it."""
        generator = torch.Generator().manual_seed(seed)
        images = read(self.dataset, "mnist", data)
        counts = [round(self.most * self.ratio ** (-rank / (CLASSES - 1))) for rank in range(CLASSES)]
        ranks = torch.randperm(CLASSES, generator=generator).tolist()
        reserved = self.most + self.judge + self.evaluation
        parts: list[list[Tensor]] = [[], [], [], []]
        for c in range(CLASSES):
            mine = torch.nonzero(images.y == c).flatten()
            if len(mine) < reserved + (images.test is None):
                raise InputError(
                    f"imbalance: most + judge + evaluation is {reserved}, but class {c} has only {len(mine)} samples"
                    f"{'' if images.test else ', and some must be left for testing'}. Ask for fewer."
                )
            mine = mine[torch.randperm(len(mine), generator=generator)]
            judge, evaluation, train, test = mine.split([self.judge, self.evaluation, self.most, len(mine) - reserved])
            for part, found in zip(parts, (train[: counts[ranks[c]]], judge, evaluation, test), strict=True):
                part.append(found)
        train, judge, evaluation, test = (torch.cat(part) for part in parts)
        mean, deviation = mean_and_deviation(images.x[train], "imbalance")

        def split(x: Tensor, y: Tensor) -> Split:
            return Split(((x - mean) / deviation).to(device, getattr(torch, self.dtype)), y.to(device))

        own_test = images.x[test], images.y[test]
        return UnbalancedSets(
            split(images.x[train], images.y[train]),
            split(images.x[judge], images.y[judge]),
            split(images.x[evaluation], images.y[evaluation]),
            split(*(images.test or own_test)),
        )

    @override
    def build(self, seed: int, device: torch.device, data: str | Path | None = None) -> ImbalanceInstance:
        sets = self.load(seed, device, data)
        train, dtype = sets.train, sets.train.x.dtype
        model = self.architecture.build(train.x.shape[1], CLASSES, seed, device, dtype)
        v = torch.zeros(CLASSES, dtype=dtype, device=device)
        frequency = sets.counts.to(dtype) / len(train.y)

        def inner(model: nn.Module, v: Tensor, batch: Any) -> Losses:
            scores = model(batch[0])
            weights = (v.softmax(0) / frequency)[batch[1]]
            return Losses(cross_entropies(scores, batch[1]), weights=weights, outputs=scores)

        problem = Bilevel(inner, mean_cross_entropy, model, v, l2=self.l2, likelihood="categorical")
        full_inner = (train.x, train.y)
        top = _curvature(problem, full_inner)
        with torch.no_grad():  # learning begins where the inner problem is solved
            solved = self.from_scratch(train, v.softmax(0), seed)
            for parameter, found in zip(model.parameters(), solved.parameters(), strict=True):
                parameter.copy_(found)
        return ImbalanceInstance(
            problem=problem,
            inner_data=Data(train.x, train.y, batch=self.batch),
            outer_data=Data(sets.judge.x, sets.judge.y),
            full_inner=full_inner,
            full_outer=(sets.judge.x, sets.judge.y),
            steps=60,
            task=self,
            seed=seed,
            sets=sets,
            model=model,
            v=v,
            inner_lr=self.inner_lr or 0.5 / max(top, _curvature(problem, full_inner)),
        )

    def from_scratch(self, split: Split, shares: Tensor, seed: int) -> nn.Module:
        """A new model in float64, trained to the end with these shares of the classes in its loss, (C,)."""
        frequency = torch.bincount(split.y, minlength=CLASSES) / len(split.y)
        weights = (shares.double() / frequency)[split.y]
        return trained(self.architecture, split.x, split.y, CLASSES, self.l2, seed, TOL, weights)[0]


def _curvature(problem: Bilevel, batch: tuple[Tensor, Tensor]) -> float:
    """The largest eigenvalue of the inner Hessian at the current theta."""
    with Randomness(0, problem.theta.device).scope():
        return largest_eigenvalue(Oracle(problem, [batch]), problem.theta.flat(), 20)


@torch.no_grad()
def balanced_accuracy(model: nn.Module, split: Split) -> float:
    """The mean over classes of the part of their samples that is right.

    >>> balanced_accuracy(nn.Identity(), Split(torch.eye(3)[[0, 0, 1]], torch.tensor([0, 0, 2])))
    0.5
    """
    x = split.x.to(next(iter(model.parameters()), split.x).dtype)
    hits = (model(x).argmax(1) == split.y).double()
    return float(torch.stack([hits[split.y == c].mean() for c in split.y.unique()]).mean())


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class ImbalanceInstance(Instance):
    """The problem with its splits.

    Attributes:
        task, seed: the settings it was built from.
        sets: the four splits.
        model, v: theta, and the logarithms of the shares, up to a constant.
        inner_lr: the inner step size.
    """

    task: Imbalance
    seed: int
    sets: UnbalancedSets
    model: nn.Module
    v: Tensor
    inner_lr: float

    @override
    def solver_settings(self) -> dict[str, Any]:
        """Plain steps inside, Adam outside."""
        return {
            "inner_steps": self.task.inner_steps,
            "inner_lr": self.inner_lr,
            "outer_lr": Decay(self.task.outer_lr, final=0.1),
            "outer_optimizer": torch.optim.Adam,
            "project_v": BOX,
        }

    @override
    def metrics(self, theta: nn.Module, v: Tensor) -> dict[str, float]:
        """On the evaluation split and the test set, and the shares of the classes."""
        evaluation = self.sets.evaluation
        return {
            "evaluation_loss": float(F.cross_entropy(theta(evaluation.x), evaluation.y)),
            "loop_balanced_accuracy": balanced_accuracy(theta, self.sets.test),
            **{f"share_{c}": share for c, share in enumerate(v.softmax(0).tolist())},
        }

    @override
    def summary(self, solution: Solution) -> dict[str, float]:
        """The balanced accuracy of new models with the selected shares, beside equal shares and weights of 1."""
        sets = self.sets
        with self.problem.guarded(seed=0), torch.no_grad():
            losses = self.losses()
            now = self.metrics(self.model, self.v)
        end = {"step": solution.stats["steps"], **now}
        best = min([*(row for row in solution.history if "evaluation_loss" in row), end], key=_evaluation_loss)
        learnt = sets.train.x.new_tensor([best[f"share_{c}"] for c in range(CLASSES)])
        equal = torch.full_like(learnt, 1 / CLASSES)
        found = {}
        for prefix, split in (("", sets.train), ("joint_", sets.joint)):
            counts = torch.bincount(split.y, minlength=CLASSES)
            for name, shares in (("", learnt), ("inverse_", equal), ("unweighted_", counts / len(split.y))):
                model = self.task.from_scratch(split, shares, self.seed)
                found[f"{prefix}{name}balanced_accuracy"] = balanced_accuracy(model, sets.test)
        return {
            **losses,
            **found,
            "selected_step": best["step"],
            "evaluation_loss": best["evaluation_loss"],
            "final_evaluation_loss": end["evaluation_loss"],
            "loop_balanced_accuracy": best["loop_balanced_accuracy"],
            **{f"share_{c}": best[f"share_{c}"] for c in range(CLASSES)},
        }

    @override
    def solve_inner(self) -> float:
        return lbfgs(
            partial(self.problem.objective, self.full_inner),
            self.problem.theta.leaves,
            1e-3 if self.task.dtype == "float32" else 1e-6,
        )

    @override
    def pictures(self, folder: Path) -> list[Path]:
        shares = self.v.detach().softmax(0).tolist()
        return [draw_shares(folder / "shares.png", self.sets.counts.tolist(), shares)]


def _evaluation_loss(row: Mapping[str, Any]) -> float:
    found: float = row["evaluation_loss"]
    return found
