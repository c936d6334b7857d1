"""A scikit-learn classifier that learns a few samples to stand for many, and is trained on them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, check_random_state, validate_data
from torch import Tensor

from nhgd._solution import Row
from nhgd._solver import Solver
from nhgd._validation import check_settings, counted, positive
from nhgd.data.device import usable_device
from nhgd.data.loader import Data
from nhgd.errors import InputError, unknown
from nhgd.task._classifier import Architecture, trained
from nhgd.task.distillation import distilling, nhgd_for, noisy_means, outer_settings

Array = np.ndarray[Any, Any]
SCALES = ("all", "feature")


class DatasetDistiller(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """A classifier trained on a few learnt samples of each class, in place of all its training data.

    The samples are the outer variable of a bilevel problem: they are moved, by natural hypergradient descent, so that a
    model trained on them alone has a low cross-entropy on the training set. They begin at the means of their classes.
    In the end a new model is trained on them from scratch, and that one predicts.

    Args:
        per_class: how many samples to learn for each class.
        model: "linear", or "mlp" with one hidden layer.
        hidden: the width of that layer.
        l2: the ridge of the model, on standardised features.
        steps: outer steps, at most; None: as many as fit into the budget.
        budget: time to learn in, such as 30, "60s" or "5m"; None: no limit. With it, results depend on the machine.
        lr: the first step size of the samples, in deviations of the data; it falls to 0.
        batch_size: training samples of an outer step. Apart from the data itself, it bounds the memory.
        scale: "all": one mean and one deviation for all features, as suits pixels; "feature": one of each.
        device: where to learn, "cpu", "cuda" or a torch.device.
        verbose: show a progress bar; None: on a terminal only.
        random_state: seed or generator.

    Attributes:
        images_: the learnt samples, in the units of X, (per_class * C, P), those of one class together.
        labels_: their labels, (per_class * C,).
        history_: one dict for each outer step, as `Solution.history`.
        n_iter_: how many outer steps were taken.
        classes_, n_features_in_: as in scikit-learn.

    >>> from sklearn.datasets import load_digits
    >>> X, y = load_digits(return_X_y=True)
    >>> distiller = DatasetDistiller(per_class=1, steps=40, random_state=0).fit(X[:1000], y[:1000])
    >>> distiller.images_.shape, distiller.labels_.tolist()
    ((10, 64), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    >>> distiller.score(X[1000:], y[1000:]) > 0.85
    True

    References: T. Wang, J.-Y. Zhu, A. Torralba, A. Efros, Dataset distillation, 2018; Natural Hypergradient Descent,
    the experiment on data distillation.
    """

    def __init__(
        self,
        per_class: int = 5,
        model: str = "linear",
        hidden: int = 64,
        l2: float = 3e-3,
        steps: int | None = 300,
        budget: str | float | None = None,
        lr: float = 0.06,
        batch_size: int = 4096,
        scale: str = "all",
        device: str | torch.device = "cpu",
        verbose: bool | int | None = False,
        random_state: Any = None,
    ) -> None:
        self.per_class = per_class
        self.model = model
        self.hidden = hidden
        self.l2 = l2
        self.steps = steps
        self.budget = budget
        self.lr = lr
        self.batch_size = batch_size
        self.scale = scale
        self.device = device
        self.verbose = verbose
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> DatasetDistiller:
        """Learn the samples, then train a model on them.

        Args:
            X, y: the training data, (N, P), and their labels, (N,).
        """
        self._check()
        architecture = Architecture(self.model, hidden=self.hidden)
        X, y = validate_data(self, X, y, dtype="numeric")
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise InputError("DatasetDistiller needs labels of at least two classes, but y has one class only.")
        if self.per_class > len(codes):
            raise InputError(
                f"DatasetDistiller: per_class is {self.per_class}, more than the {len(codes)} samples of X. Ask for"
                " far fewer."
            )
        random = check_random_state(self.random_state)
        seed = int(random.randint(2**31 - 1))
        self._center, self._scale = self._statistics(X)
        batches = _Batches(X, codes, random.permutation(len(codes)), self)
        classes = len(self.classes_)
        v = self._first(batches, random)
        labels = torch.arange(classes, device=self.device).repeat_interleave(self.per_class)
        theta = architecture.build(v.shape[1], classes, seed, torch.device(self.device), v.dtype)
        solver = Solver(
            distilling(theta, v, self.l2),
            Data(labels),
            batches,
            method=nhgd_for(len(v), classes, None, None),
            seed=seed,
            **outer_settings(self.lr),
        )
        solution = solver.run(
            steps=self.steps, budget=self.budget, progress=None if self.verbose is None else bool(self.verbose)
        )
        self.history_: list[Row] = solution.history
        self.n_iter_ = len(self.history_)
        found, _ = trained(architecture, v.cpu(), labels.cpu(), classes, self.l2, seed)
        self._model = found.requires_grad_(False)
        self.images_: Array = v.detach().cpu().double().numpy() * self._scale + self._center
        self.labels_: Array = np.repeat(self.classes_, self.per_class)
        return self

    def _check(self) -> None:
        check_settings(self)
        counted("DatasetDistiller", per_class=self.per_class, batch_size=self.batch_size)
        positive("DatasetDistiller", l2=self.l2, lr=self.lr)
        usable_device("DatasetDistiller", self.device)
        if self.steps is None and self.budget is None:
            raise InputError("DatasetDistiller needs to know when to stop: steps=300 or budget='60s'.")
        if self.scale not in SCALES:
            raise unknown("scale of DatasetDistiller", str(self.scale), SCALES)

    def _statistics(self, X: Array) -> tuple[Array, Array]:
        """Center and scale, (P,), of all features together or of each, from two passes in pieces."""
        axis = None if self.scale == "all" else 0
        pieces = [slice(start, start + self.batch_size) for start in range(0, len(X), self.batch_size)]
        count = X.size if axis is None else len(X)
        with np.errstate(over="ignore", invalid="ignore"):
            center = sum(X[piece].sum(axis, dtype=np.float64) for piece in pieces) / count
            square = sum(np.square(X[piece] - center).sum(axis, dtype=np.float64) for piece in pieces) / count
        deviation = np.sqrt(square)
        if not np.isfinite(deviation).all():
            raise InputError(
                "X holds numbers too large to compute with. Rescale it, or leave out the features that do."
            )
        spread = np.where(deviation > 0, deviation, 1.0)
        return np.broadcast_to(center, X.shape[1:]).copy(), np.broadcast_to(spread, X.shape[1:]).copy()

    def _standardised(self, X: Array) -> Tensor:
        return torch.as_tensor((X - self._center) / self._scale, dtype=torch.float32, device=self.device)

    def _first(self, batches: _Batches, random: Any) -> Tensor:
        """The mean of each class as often as needed, and a little noise, (n C, P)."""
        classes = len(self.classes_)
        sums = torch.zeros(classes, self.n_features_in_, device=self.device)
        for x, y in batches:
            sums.index_add_(0, y, x)
        counts = torch.as_tensor(np.bincount(batches.codes, minlength=classes), device=self.device)
        noise = random.normal(size=(self.per_class * classes, self.n_features_in_))
        return noisy_means(sums / counts[:, None], self.per_class, torch.as_tensor(noise).to(sums))

    def predict_proba(self, X: Any) -> Array:
        """The probability of each class, (N, C)."""
        check_is_fitted(self, "images_")
        X = validate_data(self, X, dtype="numeric", reset=False)
        found = []
        for start in range(0, len(X), self.batch_size):
            rows = (X[start : start + self.batch_size] - self._center) / self._scale
            found.append(self._model(torch.as_tensor(rows, dtype=torch.float64)).softmax(1).numpy())
        return np.concatenate(found)

    def predict(self, X: Any) -> Array:
        """The class of each sample, (N,)."""
        codes = self.predict_proba(X).argmax(1)
        found: Array = self.classes_[codes]
        return found


class _Batches:
    """Batches (x, y) of arrays, cut in an order drawn once and standardised when they are asked for."""

    def __init__(self, X: Array, codes: Array, order: Array, owner: DatasetDistiller) -> None:
        self.X, self.codes, self.order, self.owner = X, codes, order, owner
        self._only: tuple[Tensor, Tensor] | None = None

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        size = self.owner.batch_size
        if self._only is not None:
            yield self._only
            return
        for start in range(0, len(self.order), size):
            chosen = self.order[start : start + size]
            batch = (
                self.owner._standardised(self.X[chosen]),
                torch.as_tensor(self.codes[chosen], device=self.owner.device),
            )
            if size >= len(self.order):
                self._only = batch
            yield batch
