"""Which labels are wrong? A scikit-learn classifier that learns it from a few trusted samples."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, check_random_state, validate_data
from torch import Tensor, nn

from nhgd.algorithm import NHGD
from nhgd.data.loader import Data
from nhgd.errors import InputError, counted, not_negative
from nhgd.problem import Bilevel, Losses
from nhgd.schedule import Decay
from nhgd.solve import Solver
from nhgd.task.inner_solver import lbfgs

Array = np.ndarray[Any, Any]


class NoTrustedSetWarning(UserWarning):
    """Part of the noisy data was held out in place of a trusted set."""


class LabelCleaner(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """A linear classifier that finds wrong labels while it is trained, and then does without them.

    Each training sample has the weight w_i = sigmoid(b - e^a loss_i), one learnt function of its loss; (a, b) are chosen
    by natural hypergradient descent so that a model trained with these weights does well on trusted samples. Half of the
    trusted samples train the model with weight 1, the other half judges it, since what was trained on cannot judge.

    Without a trusted set a part of the data is held out in its place, and judged by a bounded loss, (1 - p_y^q) / q, that
    wrong labels cannot dominate. A trusted set of even a few samples a class is better, so this warns.

    Args:
        steps: outer steps.
        inner_steps: inner steps for each of them.
        l2: the ridge of the model, on standardised features.
        batch_size: samples an inner step sees; memory is bounded by it and by the data itself.
        held_out: the part of the data that stands for the trusted set when none is given.
        robustness: q of the bounded loss, in (0, 1].
        device: where to train, "cpu" or "cuda".
        verbose: show a progress bar; None: on a terminal only.
        random_state: seed or generator.

    Attributes:
        weights_: the weight of every training sample, (N,); a suspect one is below 0.5.
        label_issues_: the indices of the suspects, worst first.
        suggested_labels_: what the cleaned model would call each training sample, (N,).
        classes_, n_features_in_: as in scikit-learn.

    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(200, 2)); y = (X[:, 0] > 0).astype(int)
    >>> noisy = y.copy(); noisy[:20] = 1 - y[:20]
    >>> cleaner = LabelCleaner(steps=30, random_state=0).fit(X[:150], noisy[:150], X[150:], y[150:])
    >>> bool((cleaner.label_issues_[:10] < 20).all())
    True

    References: J. Shu et al., Meta-Weight-Net: learning an explicit mapping for sample weighting, 2019; Z. Zhang,
    M. Sabuncu, Generalized cross entropy loss for training deep neural networks with noisy labels, 2018 (bounded loss).
    """

    def __init__(
        self,
        steps: int = 150,
        inner_steps: int = 20,
        l2: float = 1e-3,
        batch_size: int = 1024,
        held_out: float = 0.2,
        robustness: float = 0.7,
        device: str = "cpu",
        verbose: bool | None = False,
        random_state: Any = None,
    ) -> None:
        self.steps = steps
        self.inner_steps = inner_steps
        self.l2 = l2
        self.batch_size = batch_size
        self.held_out = held_out
        self.robustness = robustness
        self.device = device
        self.verbose = verbose
        self.random_state = random_state

    def fit(self, X: Any, y: Any, X_trusted: Any = None, y_trusted: Any = None) -> LabelCleaner:
        """Learn which labels to believe, and a model from those.

        Args:
            X, y: the samples, (N, P), and their labels, (N,), some of them wrong.
            X_trusted, y_trusted: samples whose labels are right, every class among them.
        """
        counted("LabelCleaner", steps=self.steps, inner_steps=self.inner_steps, batch_size=self.batch_size)
        not_negative("LabelCleaner", l2=self.l2)
        for name, value in (("held_out", self.held_out), ("robustness", self.robustness)):
            if not 0 < value <= (1 if name == "robustness" else 0.5):
                raise InputError(f"LabelCleaner: {name} is {value}, out of its range.")
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise InputError("LabelCleaner needs labels of at least two classes, but y has one class only.")
        random = check_random_state(self.random_state)
        seed = int(random.randint(2**31 - 1))
        with np.errstate(over="ignore", invalid="ignore"):
            self._center = X.mean(0)
            deviation = X.std(0)
        if not np.isfinite(deviation).all():
            raise InputError(
                f"Feature {int(np.argmin(np.isfinite(deviation)))} of X holds numbers too large to compute with. Rescale it, or"
                " leave it out."
            )
        self._scale = np.where(deviation > 0, deviation, 1.0)
        if (X_trusted is None) != (y_trusted is None):
            raise InputError("Give X_trusted and y_trusted together, or neither.")
        robust = X_trusted is None
        if robust:
            judged = self._hold_out(codes, random)
            trusted_x, trusted_y = X[judged], codes[judged]
            guide = np.zeros(0, dtype=np.int64)
            warnings.warn(
                f"No trusted set was given, so {len(judged)} of the {len(y)} samples were held out to judge the rest, with"
                " labels that may be wrong. A few samples with right labels, as X_trusted and y_trusted, do better.",
                NoTrustedSetWarning,
                stacklevel=2,
            )
        else:
            trusted_x, trusted_y = self._trusted(X_trusted, y_trusted)
            guide, judge = _halves(trusted_y, random)
        rows, labels = self._tensor(X), torch.as_tensor(codes, device=self.device)
        other, other_labels = self._tensor(trusted_x), torch.as_tensor(trusted_y, device=self.device)
        if robust:
            kept = np.setdiff1d(np.arange(len(y)), judged)
            inner = (rows[kept], labels[kept])
            outer = (other, other_labels)
            extra = (other[:0], other_labels[:0])
        else:
            inner = (rows, labels)
            outer = (other[judge], other_labels[judge])
            extra = (other[guide], other_labels[guide])
        model, v = self._learn(inner, extra, outer, robust, seed)
        with torch.no_grad():
            losses = F.cross_entropy(model(rows), labels, reduction="none")
            weights = _weight(v, losses)
        self.weights_: Array = weights.cpu().numpy()
        suspects = np.flatnonzero(self.weights_ < 0.5)
        self.label_issues_: Array = suspects[np.argsort(self.weights_[suspects], kind="stable")]
        self.weighting_: tuple[float, float] = (float(v[0]), float(v[1]))
        self._fit_final(rows, labels, weights, extra, outer if not robust else None)
        self.suggested_labels_: Array = self.predict(X)
        return self

    def _hold_out(self, codes: Array, random: Any) -> Array:
        """At least one sample of each class, about `held_out` of each."""
        chosen = []
        for c in range(len(self.classes_)):
            members = random.permutation(np.flatnonzero(codes == c))
            if len(members) < 2:
                raise InputError(
                    f"Class {self.classes_.tolist()[c]!r} has one sample only, so none can be held out. Give a trusted set."
                )
            chosen.append(members[: max(1, round(self.held_out * len(members)))])
        return np.sort(np.concatenate(chosen))

    def _trusted(self, X: Any, y: Any) -> tuple[Array, Array]:
        X, y = validate_data(self, X, y, dtype=np.float64, reset=False)
        unknown = np.setdiff1d(y, self.classes_)
        if len(unknown):
            raise InputError(f"The trusted set holds labels that y does not: {unknown[:5].tolist()}.")
        codes = np.searchsorted(self.classes_, y)
        counts = np.bincount(codes, minlength=len(self.classes_))
        if (counts < 2).any():
            short = self.classes_[counts < 2][:5].tolist()
            raise InputError(f"The trusted set needs at least two samples of every class; too few of {short}.")
        return X, codes

    def _tensor(self, X: Array) -> Tensor:
        rows = torch.as_tensor((X - self._center) / self._scale, dtype=torch.float32, device=self.device)
        if not bool(torch.isfinite(rows).all()):
            row = int(torch.isfinite(rows).all(1).int().argmin())
            raise InputError(
                f"Trusted sample {row} lies too far from all others to compute with. Correct it, or leave it out."
            )
        return rows

    def _model(self, features: int) -> nn.Linear:
        model: nn.Linear = nn.utils.skip_init(nn.Linear, features, len(self.classes_), device=self.device)
        with torch.no_grad():
            model.weight.zero_()
            model.bias.zero_()
        return model

    def _learn(
        self,
        inner_set: tuple[Tensor, Tensor],
        extra: tuple[Tensor, Tensor],
        outer_set: tuple[Tensor, Tensor],
        robust: bool,
        seed: int,
    ) -> tuple[nn.Linear, Tensor]:
        noisy = len(inner_set[1])
        x, y = torch.cat([inner_set[0], extra[0]]), torch.cat([inner_set[1], extra[1]])
        model = self._model(x.shape[1])
        v = torch.tensor([0.0, 1.4], device=x.device)
        q = self.robustness

        def inner(model: nn.Module, v: Tensor, batch: Any) -> Losses:
            x, y, index = batch
            z = model(x)
            losses = F.cross_entropy(z, y, reduction="none")
            weights = torch.where(index < noisy, _weight(v, losses.detach()), torch.ones_like(losses))
            return Losses(losses, weights, z)

        def outer(model: nn.Module, v: Tensor, batch: Any) -> Tensor:
            losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
            return ((1 - (-q * losses).exp()) / q).mean() if robust else losses.mean()

        problem = Bilevel(inner, outer, model, v, l2=self.l2, likelihood="categorical")
        if len(extra[1]):
            self._train(model, extra[0], extra[1], None, 10 * self.l2)
        rate = 1.0 / _largest_curvature(x)
        solver = Solver(
            problem,
            Data(x, y, batch=self.batch_size),
            Data(*outer_set),
            method=NHGD(),
            inner_steps=self.inner_steps,
            inner_optimizer=lambda leaves: torch.optim.SGD(leaves, lr=rate, momentum=0.9, nesterov=True),
            outer_optimizer=torch.optim.Adam,
            outer_lr=Decay(0.05, final=0.05, hold=0.3),
            seed=seed,
        )
        self.history_ = solver.run(steps=self.steps, progress=self.verbose).history
        return model, v.detach()

    def _fit_final(
        self,
        x: Tensor,
        y: Tensor,
        weights: Tensor,
        extra: tuple[Tensor, Tensor],
        outer: tuple[Tensor, Tensor] | None,
    ) -> None:
        """A model from every sample that is believed, trusted ones with weight 1."""
        parts = [part for part in (extra, outer) if part is not None and len(part[1])]
        x = torch.cat([x, *(part[0] for part in parts)])
        y = torch.cat([y, *(part[1] for part in parts)])
        kept = torch.cat([(weights >= 0.5).to(weights), weights.new_ones(len(y) - len(weights))])
        model = self._model(x.shape[1])
        self._train(model, x, y, kept if bool(kept.any()) else None, self.l2)
        self.coef_: Array = model.weight.detach().cpu().double().numpy()
        self.intercept_: Array = model.bias.detach().cpu().double().numpy()

    def _train(self, model: nn.Linear, x: Tensor, y: Tensor, weights: Tensor | None, l2: float) -> None:
        problem = Bilevel(
            lambda model, v, batch: Losses(F.cross_entropy(model(batch[0]), batch[1], reduction="none"), weights),
            lambda model, v, batch: v.sum(),
            model,
            x.new_zeros(1),
            l2=max(l2, 1e-6),
        )
        lbfgs(problem, (x, y), tol=1e-2)

    def decision_function(self, X: Any) -> Array:
        """Class scores, (N, C); for two classes the score of the second over the first, (N,)."""
        check_is_fitted(self, "coef_")
        X = validate_data(self, X, dtype=np.float64, reset=False)
        scores: Array = ((X - self._center) / self._scale) @ self.coef_.T + self.intercept_
        return scores[:, 1] - scores[:, 0] if len(self.classes_) == 2 else scores

    def predict(self, X: Any) -> Array:
        """The class of each sample, (N,)."""
        scores = self.decision_function(X)
        codes = (scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(1)
        found: Array = self.classes_[codes]
        return found

    def predict_proba(self, X: Any) -> Array:
        """The probability of each class, (N, C)."""
        scores = self.decision_function(X)
        if scores.ndim == 1:
            scores = np.stack([-scores / 2, scores / 2], axis=1)
        scores = np.exp(scores - scores.max(1, keepdims=True))
        found: Array = scores / scores.sum(1, keepdims=True)
        return found


def _weight(v: Tensor, losses: Tensor) -> Tensor:
    return torch.sigmoid(v[1] - v[0].exp() * losses)


def _halves(codes: Array, random: Any) -> tuple[Array, Array]:
    """Two index sets, each with samples of every class."""
    first, second = [], []
    for c in np.unique(codes):
        members = random.permutation(np.flatnonzero(codes == c))
        first.append(members[: len(members) // 2])
        second.append(members[len(members) // 2 :])
    return np.concatenate(first), np.concatenate(second)


def _largest_curvature(x: Tensor, steps: int = 20) -> float:
    """Half the largest eigenvalue of mean x x^T bounds the softmax Hessian with weights at most 1."""
    rows = F.pad(x[:20_000], (0, 1), value=1.0)
    q, size = rows.new_ones(rows.shape[1]), 1.0
    for _ in range(steps):
        q = rows.T @ (rows @ (q / q.norm())) / len(rows)
        size = float(q.norm())
    return max(0.5 * size, 1e-6)
