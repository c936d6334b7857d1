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

from nhgd._solver import Solver
from nhgd._validation import check_settings, counted, not_negative
from nhgd.data.device import usable_device
from nhgd.data.loader import Data
from nhgd.errors import InputError
from nhgd.task._classifier import Split, fit, softmax_classifier
from nhgd.task._weighted_training import WeightedTraining, inner_settings, nhgd_for, outer_settings
from nhgd.task._weighting import ByLoss

Array = np.ndarray[Any, Any]
FARTHEST = 1e8  # deviations of a feature; powers of what lies farther overflow in float32


class NoTrustedSetWarning(UserWarning):
    """Part of the noisy data was held out in place of a trusted set.

    Attributes:
        finding: which part, as a sentence; the message goes on with what to do.
    """

    def __init__(self, held_out: int, samples: int) -> None:
        self.finding = (
            f"No trusted set was given, so {held_out} of the {samples} samples were held out to judge the rest, with labels that"
            " may be wrong."
        )
        super().__init__(f"{self.finding} A few samples with right labels, as X_trusted and y_trusted, do better.")


class TrustedScaleWarning(UserWarning):
    """The trusted samples do not look like X: most likely only one of the two went through a scaler."""


class LabelCleaner(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """A linear classifier that finds wrong labels while it is trained, and then does without them.

    Each training sample has the weight w_i = sigmoid(e^a (e^b - loss_i)), one learnt function of its loss; (a, b) are
    chosen by natural hypergradient descent so that a model trained with these weights does well on trusted samples. Half of
    the trusted samples train the model with weight 1, the other half judges it, since what was trained on cannot judge.
    It is the task `cleaning` with its default weights, for data of one's own.

    Without a trusted set a part of the data is held out in its place, and judged by a bounded loss, (1 - p_y^q) / q, that
    wrong labels cannot dominate. A trusted set of even a few samples a class is better, so this warns.

    Features are standardised here, so that no scaler is needed before. The steps of a Pipeline transform X alone; where there
    are some, X_trusted goes through them by `Pipeline(..., transform_input=["X_trusted"])` with scikit-learn's metadata
    routing and `set_fit_request(X_trusted=True, y_trusted=True)`, or by hand: `pipeline[:-1].transform(X_trusted)` after they
    were fitted. A trusted set on another scale than X is warned of.

    Args:
        steps: outer steps.
        inner_steps: inner steps for each of them.
        l2: the ridge of the model, on standardised features.
        batch_size: samples an inner step sees; memory is bounded by it and by the data itself.
        held_out: the part of the data that stands for the trusted set when none is given.
        robustness: q of the bounded loss, in (0, 1].
        device: where to train, "cpu", "cuda" or a torch.device.
        verbose: show a progress bar; None: on a terminal only.
        random_state: seed or generator.

    Attributes:
        weights_: the weight of every training sample, (N,); a suspect one is below 0.5.
        label_issues_: the indices of the suspects, worst first.
        weighting_: (a, b).
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
        device: str | torch.device = "cpu",
        verbose: bool | int | None = False,
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
        check_settings(self)
        counted("LabelCleaner", steps=self.steps, inner_steps=self.inner_steps, batch_size=self.batch_size)
        not_negative("LabelCleaner", l2=self.l2)
        usable_device("LabelCleaner", self.device)
        for name, value, most in (("held_out", self.held_out, 0.5), ("robustness", self.robustness, 1.0)):
            if not 0 < value <= most:
                raise InputError(f"LabelCleaner: {name} must be above 0 and at most {most}, got {value!r}.")
        X, y = validate_data(self, X, y, dtype="numeric")
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise InputError("LabelCleaner needs labels of at least two classes, but y has one class only.")
        random = check_random_state(self.random_state)
        seed = int(random.randint(2**31 - 1))
        pieces = [slice(start, start + self.batch_size) for start in range(0, len(X), self.batch_size)]
        with np.errstate(over="ignore", invalid="ignore"):
            self._center = sum(X[piece].sum(0, dtype=np.float64) for piece in pieces) / len(X)
            deviation = np.sqrt(sum(np.square(X[piece] - self._center).sum(0) for piece in pieces) / len(X))
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
            warnings.warn(NoTrustedSetWarning(len(judged), len(y)), stacklevel=2)
        else:
            trusted_x, trusted_y = self._trusted(X_trusted, y_trusted)
            self._compare_scales(trusted_x, deviation > 0)
            guide, judge = _halves(trusted_y, random)
        rows, labels = self._tensor(X), torch.as_tensor(codes, device=self.device)
        other, other_labels = self._tensor(trusted_x), torch.as_tensor(trusted_y, device=self.device)
        if robust:
            kept = np.setdiff1d(np.arange(len(y)), judged)
            noisy, outer = Split(rows[kept], labels[kept]), Split(other, other_labels)
            extra = Split(other[:0], other_labels[:0])
        else:
            noisy, outer = Split(rows, labels), Split(other[judge], other_labels[judge])
            extra = Split(other[guide], other_labels[guide])
        model, v = self._learn(noisy, extra, outer, robust, seed)
        with torch.no_grad():
            losses = F.cross_entropy(model(rows), labels, reduction="none")
            weights = ByLoss(len(labels)).weights(v, losses, torch.arange(len(labels), device=losses.device))
        self.weights_: Array = weights.cpu().numpy()
        suspects = np.flatnonzero(self.weights_ < 0.5)
        self.label_issues_: Array = suspects[np.argsort(self.weights_[suspects], kind="stable")]
        self.weighting_: tuple[float, float] = (float(v[0]), float(v[1]))
        self._fit_final(Split(rows, labels), weights, [] if robust else [extra, outer])
        self.suggested_labels_: Array = self._decide(self._scores(X))
        return self

    def _compare_scales(self, X: Array, varies: Array) -> None:
        """Warn where most features of the trusted samples have another place or spread than those of X."""
        with np.errstate(over="ignore", invalid="ignore"):
            rows = (X[:, varies] - self._center[varies]) / self._scale[varies]
            shift, spread = np.abs(rows.mean(0)), rows.std(0)
        # A feature that does not vary among a few samples tells nothing; one that overflows is refused elsewhere.
        told = (spread > 0) & np.isfinite(spread)
        strange = told & ((shift > 2) | (spread > 4) | (spread < 1 / 4))
        if strange.sum() > told.sum() / 2:
            warnings.warn(
                f"The trusted samples are on another scale than X: {int(strange.sum())} of {int(told.sum())} features have another"
                " mean or spread. The steps of a Pipeline before this one transform X alone: let X_trusted go through them too"
                " (Pipeline(..., transform_input=['X_trusted']), or pipeline[:-1].transform(X_trusted)), or leave the scaler out,"
                " because features are standardised here.",
                TrustedScaleWarning,
                stacklevel=3,
            )

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
        rows = torch.empty(X.shape, dtype=torch.float32, device=self.device)
        for start in range(0, len(X), self.batch_size):
            piece = slice(start, start + self.batch_size)
            rows[piece] = torch.as_tensor((X[piece] - self._center) / self._scale, dtype=torch.float32)
            far = ~(rows[piece].abs() <= FARTHEST)  # nan is far, too
            if bool(far.any()):
                row, feature = (int(place) for place in torch.nonzero(far)[0])
                raise InputError(
                    f"Trusted sample {start + row} lies too far from all others in feature {feature} to compute with. Correct it,"
                    " or leave the sample or the feature out."
                )
        return rows

    def _learn(self, noisy: Split, extra: Split, outer_set: Split, robust: bool, seed: int) -> tuple[nn.Linear, Tensor]:
        weighting = ByLoss(len(noisy.y))
        model, v = softmax_classifier(noisy.x, len(self.classes_)), weighting.first(None, noisy.x)
        training = WeightedTraining(model, v, weighting, noisy, extra, max(self.l2, 1e-6))
        q = self.robustness

        def outer(model: nn.Module, v: Tensor, batch: Any) -> Tensor:
            losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
            return ((1 - (-q * losses).exp()) / q).mean() if robust else losses.mean()

        problem = training.problem(outer)
        training.start_solved()
        solver = Solver(
            problem,
            training.data(self.batch_size),
            Data(outer_set.x, outer_set.y),
            method=nhgd_for(problem),
            inner_steps=self.inner_steps,
            seed=seed,
            **inner_settings(training.step_size()),
            **outer_settings(),
        )
        self.history_ = solver.run(
            steps=self.steps, progress=None if self.verbose is None else bool(self.verbose)
        ).history
        return model, v.detach()

    def _fit_final(self, given: Split, weights: Tensor, trusted: list[Split]) -> None:
        """A model from every sample that is believed, trusted ones with weight 1."""
        parts = [given, *trusted]
        everything = Split(torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts]))
        kept = torch.cat([(weights >= 0.5).to(weights), weights.new_ones(len(everything.y) - len(weights))])
        model = softmax_classifier(everything.x, len(self.classes_))
        fit(model, everything, max(self.l2, 1e-6), 1e-2, kept if bool(kept.any()) else None)
        self.coef_: Array = model.weight.detach().cpu().double().numpy()
        self.intercept_: Array = model.bias.detach().cpu().double().numpy()

    def decision_function(self, X: Any) -> Array:
        """Class scores, (N, C); for two classes the score of the second over the first, (N,)."""
        check_is_fitted(self, "coef_")
        return self._scores(validate_data(self, X, dtype=np.float64, reset=False))

    def _scores(self, X: Array) -> Array:
        """The same of rows that are known to be in order."""
        scores: Array = ((X - self._center) / self._scale) @ self.coef_.T + self.intercept_
        return scores[:, 1] - scores[:, 0] if len(self.classes_) == 2 else scores

    def predict(self, X: Any) -> Array:
        """The class of each sample, (N,)."""
        return self._decide(self.decision_function(X))

    def _decide(self, scores: Array) -> Array:
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


def _halves(codes: Array, random: Any) -> tuple[Array, Array]:
    """Two index sets, each with samples of every class."""
    first, second = [], []
    for c in np.unique(codes):
        members = random.permutation(np.flatnonzero(codes == c))
        first.append(members[: len(members) // 2])
        second.append(members[len(members) // 2 :])
    return np.concatenate(first), np.concatenate(second)
