"""Scores of samples by models that were not trained on them, each trained with a weight for every sample."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from scipy.optimize import minimize
from sklearn.base import clone
from sklearn.utils.validation import has_fit_parameter
from torch import Tensor, nn
from typing_extensions import override

from nhgd._randomness import Randomness
from nhgd.errors import InputError, RunError
from nhgd.task._classifier import Split, fit

Array = np.ndarray[Any, Any]
Advance = Callable[[str], None]
# Of what a classifier's probabilities are mixed with, evenly over the classes: trees are as sure as 0 and 1
FLOOR = 1e-3


@dataclass(frozen=True)
class Samples:
    """Features (N, P) and classes from 0 (N,), and how often each counts, (N,), if not once."""

    x: Array
    y: Array
    times: Array | None = None

    def part(self, which: Array) -> Samples:
        """Some of them."""
        return Samples(self.x[which], self.y[which], None if self.times is None else self.times[which])

    def counted(self, weights: Array) -> Array:
        """Weights times how often each counts, (N,)."""
        return weights if self.times is None else weights * self.times

    def averaging(self, weights: Array) -> Array:
        """The same over the mean of how often each counts, so that a plain mean over samples is one over repeated
        ones.
        """
        return weights if self.times is None else weights * (self.times / self.times.mean())

    def followed_by(self, others: Samples) -> Samples:
        """These and others, which count once each unless they say otherwise."""
        times = None
        if self.times is not None or others.times is not None:
            times = np.concatenate([np.ones(len(s.y)) if s.times is None else s.times for s in (self, others)])
        return Samples(np.concatenate([self.x, others.x]), np.concatenate([self.y, others.y]), times)


@dataclass(frozen=True)
class AbstractLearner(ABC):
    """What can be trained with a weight for every sample.

    Attributes:
        classes: how many there are; training samples need not show all of them.
    """

    classes: int

    @abstractmethod
    def fit(self, samples: Samples, weights: Array, start: Any = None) -> Any:
        """A fitted model, from that of an earlier fit on nearly the same samples if there is one."""

    @abstractmethod
    def scores(self, model: Any, rows: Array) -> Array:
        """The scores of a fitted model for rows, (N, C)."""


@final
@dataclass(frozen=True)
class Linear(AbstractLearner):
    """The softmax classifier of least mean_i w_i CE_i + l2 ||theta||^2, bias included, by L-BFGS in float64."""

    l2: float
    steps: int = 60

    @override
    def fit(self, samples: Samples, weights: Array, start: Any = None) -> Array:
        """Coefficients (P + 1, C), the last row of them the bias."""
        weights = samples.averaging(weights)
        x, count = samples.x, len(samples.y)
        shape = (x.shape[1] + 1, self.classes)
        wanted = np.eye(self.classes)[samples.y] * weights[:, None]

        def value(flat: Array) -> tuple[float, Array]:
            theta = flat.reshape(shape)
            z = x @ theta[:-1] + theta[-1]
            z -= z.max(1, keepdims=True)
            e = np.exp(z)
            total = e.sum(1, keepdims=True)
            loss = float((weights * np.log(total[:, 0])).sum() - (wanted * z).sum())
            residual = (e / total * weights[:, None] - wanted) / count
            slope = np.vstack([x.T @ residual, residual.sum(0)]) + 2 * self.l2 * theta
            return loss / count + self.l2 * float((theta * theta).sum()), slope.ravel()

        first = np.zeros(shape) if start is None else start
        options = {"maxiter": self.steps, "gtol": 1e-4}
        theta: Array = minimize(value, first.ravel(), jac=True, method="L-BFGS-B", options=options).x.reshape(shape)
        return theta

    @override
    def scores(self, model: Array, rows: Array) -> Array:
        found: Array = rows @ model[:-1] + model[-1]
        return found


@final
@dataclass(frozen=True)
class Module(AbstractLearner):
    """A copy of an nn.Module, (B, P) -> (B, C), trained by L-BFGS as far as a few hundred steps go, without dropout."""

    template: nn.Module
    l2: float
    device: torch.device
    seed: int
    steps: int = 200

    @override
    def fit(self, samples: Samples, weights: Array, start: Any = None) -> nn.Module:
        """The trained module, from the template or from an earlier fit."""
        model = copy.deepcopy(self.template if start is None else start).to(self.device).eval()
        split = Split(self.tensor(samples.x), torch.as_tensor(samples.y, device=self.device))
        given = torch.as_tensor(samples.averaging(weights), dtype=split.x.dtype, device=self.device)
        with Randomness(self.seed, self.device).scope(), suppress(RunError):
            fit(model, split, self.l2, 1e-3, given, steps=self.steps)
        return model

    def tensor(self, rows: Array) -> Tensor:
        """Rows in the dtype of the module, on its device."""
        dtype = next(self.template.parameters()).dtype
        return torch.as_tensor(rows, dtype=dtype, device=self.device)

    @override
    def scores(self, model: nn.Module, rows: Array) -> Array:
        with torch.no_grad():
            found: Array = model(self.tensor(rows)).double().cpu().numpy()
        return found


@final
@dataclass(frozen=True)
class Classifier(AbstractLearner):
    """A clone of a scikit-learn classifier; without support for sample_weight it is trained on believed samples
    only, repeated as often as each counts.
    """

    template: Any

    @override
    def fit(self, samples: Samples, weights: Array, start: Any = None) -> Any:
        """A fitted clone."""
        model = clone(self.template)
        if has_fit_parameter(model, "sample_weight"):
            model.fit(samples.x, samples.y, sample_weight=samples.counted(weights))
        else:
            kept = samples.part(weights >= 0.5)
            kept = kept if len(np.unique(kept.y)) > 1 else samples
            often = np.ones(len(kept.y)) if kept.times is None else kept.times
            model.fit(kept.x.repeat(often.astype(int), 0), kept.y.repeat(often.astype(int)))
        return model

    @override
    def scores(self, model: Any, rows: Array) -> Array:
        """The logarithms of its probabilities; classes it has not seen get probabilities of FLOOR."""
        p = np.zeros((len(rows), self.classes))
        p[:, model.classes_.astype(int)] = model.predict_proba(rows)
        if not np.isfinite(p).all():
            raise InputError(
                f"LabelCleaner: predict_proba of {type(self.template).__name__} gave numbers that are not finite."
            )
        return log_probabilities(p)


def log_probabilities(p: Array) -> Array:
    """Logarithms of probabilities (N, C) that keep their order and are finite."""
    found: Array = np.log((1 - FLOOR) * p + FLOOR / p.shape[1])
    return found


def folds(labels: Array, count: int, random: Any) -> Array:
    """The fold of every sample, (N,), drawn so that each class is spread evenly."""
    fold = np.zeros(len(labels), dtype=np.int64)
    first = 0
    for c in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == c))
        fold[members] = (first + np.arange(len(members))) % count
        first += len(members)  # where the last class ended, so that small classes do not all go to the first folds
    return fold


class CrossFitting:
    """Models of one learner, each trained without one fold, on samples with weights and on trusted ones with weight 1.

    Args:
        learner: the learner to train.
        samples, fold: the samples, and the fold of each, (N,).
        trusted, trusted_fold: trusted ones, maybe none.
    """

    def __init__(
        self, learner: AbstractLearner, samples: Samples, fold: Array, trusted: Samples, trusted_fold: Array
    ) -> None:
        self.learner, self.samples, self.fold = learner, samples, fold
        self.trusted, self.trusted_fold = trusted, trusted_fold
        self.models: dict[int, Any] = {}

    def scores(self, weights: Array, advance: Advance = lambda words: None) -> tuple[Array, Array]:
        """Out-of-fold scores of the samples, (N, C), and of the trusted ones, (M, C). A second call starts from the
        first.

        Args:
            weights: of the samples, (N,).
            advance: told of each fold that is done.
        """
        classes = self.learner.classes
        found, trusted = np.zeros((len(self.fold), classes)), np.zeros((len(self.trusted_fold), classes))
        for k in np.unique(self.fold).tolist():
            inside, believed = self.fold != k, self.trusted_fold != k
            some = self.samples.part(inside).followed_by(self.trusted.part(believed))
            w = np.concatenate([weights[inside], np.ones(int(believed.sum()))])
            self.models[k] = model = self.learner.fit(some, w, self.models.get(k))
            found[~inside] = self.learner.scores(model, self.samples.x[~inside])
            if not believed.all():
                trusted[~believed] = self.learner.scores(model, self.trusted.x[~believed])
            advance(f"fold {k + 1}")
        return found, trusted
