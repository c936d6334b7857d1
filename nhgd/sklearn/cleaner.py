"""A scikit-learn classifier that finds wrong labels, with or without a few trusted samples."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, check_random_state, validate_data
from torch import Tensor, nn

from nhgd._validation import check_settings, counted, not_negative
from nhgd.data.device import usable_device
from nhgd.errors import InputError
from nhgd.sklearn._cross_fitting import (
    AbstractLearner,
    Classifier,
    CrossFitting,
    Linear,
    Module,
    Samples,
    folds,
    log_probabilities,
)
from nhgd.sklearn._inputs import check_model, probabilities, template_of
from nhgd.sklearn._learnt_weights import LearntWeights, Parts, learn_weights
from nhgd.sklearn._member import MIDDLE, Member, cross_fitted, member_of
from nhgd.sklearn._noise import averaged, threshold, wrong_log_odds
from nhgd.sklearn._roles import Roles
from nhgd.sklearn._scaling import Scaling
from nhgd.sklearn._scaling import TrustedScaleWarning as TrustedScaleWarning
from nhgd.task._classifier import Split, softmax_classifier

Array = np.ndarray[Any, Any]
RIDGES = (1e-4, 1e-3, 1e-2, 1e-1)
FEW_RIDGES = (1e-3, 1e-2)  # for slow fits; with many samples the ridge matters less
LARGE = 20_000_000  # samples times features times classes
FOLDS = 5


class NoTrustedSetWarning(UserWarning):
    """Part of the noisy data was held out because no trusted set was given.

    Attributes:
        finding: which part, as a sentence; the message continues with the remedy.
    """

    def __init__(self, held_out: int, samples: int) -> None:
        self.finding = (
            f"No trusted set was given, so {held_out} of the {samples} samples were held out to judge the rest,"
            " although their labels may be wrong."
        )
        super().__init__(
            f"{self.finding} A few samples with correct labels, given as X_trusted and y_trusted, would"
            " give better results."
        )


class LabelCleaner(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """A classifier that finds wrong labels while it is trained, and then does without them.

    1. Each training sample has the weight w_i = sigmoid(e^a (e^b - loss_i)), one learnt function of its loss; (a, b) are
       chosen by natural hypergradient descent so that a model trained with these weights does well on samples that judge.
       The outer step is chosen on others. Trusted samples guide, judge and choose; without any, a part of the data is held
       out in their place, and judged by a bounded loss, (1 - p_y^q) / q, that wrong labels cannot dominate.
    2. Models trained with these weights score samples that they were not trained on (5 folds). From the scores comes a
       noise model, P(given | x) = sum_k p_k(x) T_kj, and from this the probability that a label is wrong; trained again with
       the probability to be right as weights, twice, they give the final one. Trusted samples have weight 1 and, out of
       fold, calibrate the scores. All of this is done with several ridges, and the probabilities are averaged.
    3. The suspects are the labels most probably wrong, as many as maximise the expected F1, provided that the model trained
       without them predicts another class.

    Features are standardised here, so no scaler is needed. The steps of a Pipeline transform X only. To transform X_trusted as
    well, use `Pipeline(..., transform_input=["X_trusted"])` with scikit-learn's metadata routing and
    `set_fit_request(X_trusted=True, y_trusted=True)`, or `pipeline[:-1].transform(X_trusted)` after fitting those steps. A
    trusted set on another scale than X causes a warning.

    Args:
        model: None: a linear softmax classifier; an nn.Module from standardised samples (B, P) to scores (B, C); or a
            scikit-learn classifier with predict_proba, which gets the raw X. With the last, weights are learnt for a
            linear model of its out-of-fold log-probabilities.
        steps: maximum number of outer steps; the one that is best on held-out samples is used.
        inner_steps: inner steps for each of them.
        l2: the ridge of the model, on standardised features; None: an average over several, with a linear model, else 1e-2.
        batch_size: samples of an inner step.
        held_out: the part of the data that replaces the trusted set if none is given.
        robustness: q of the bounded loss, in (0, 1].
        device: for learning weights and training modules: "cpu", "cuda" or a torch.device.
        verbose: show a progress bar; None: on a terminal only.
        random_state: seed or generator.

    Attributes:
        scores_: the log-odds that each label is wrong, (N,). Higher is worse, without ties at 0 or 1.
        threshold_: labels with higher scores are suspect, if the model also disagrees.
        weights_: the weight of every training sample, (N,), sigmoid(threshold_ - scores_); a suspect one is below 0.5.
        label_issues_: the indices of the suspects, worst first.
        suggested_labels_: the class of each training sample by the cleaned model, (N,), or by `pred_probs` if given; never
            the given label of a suspect.
        issue_counts_: suspects by given class (rows) and suggested class (columns), (C, C).
        noise_matrix_: P(given class | true class), true ones in rows, (C, C).
        label_probabilities_: P(true class | sample, given label), out of fold, (N, C).
        weighting_: (a, b).
        selected_step_: the outer step that (a, b) come from.
        history_: a row for each outer step.
        model_: the cleaned model, if one was given.
        coef_, intercept_: of the linear one.
        classes_, n_features_in_: as in scikit-learn.

    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(200, 2)); y = (X[:, 0] > 0).astype(int)
    >>> noisy = y.copy(); noisy[:20] = 1 - y[:20]
    >>> cleaner = LabelCleaner(random_state=0).fit(X[:150], noisy[:150], X[150:], y[150:])
    >>> bool((cleaner.label_issues_[:10] < 20).all())
    True

    References: J. Shu et al., Meta-Weight-Net: learning an explicit mapping for sample weighting, 2019; Z. Zhang,
    M. Sabuncu, Generalized cross entropy loss for training deep neural networks with noisy labels, 2018 (bounded loss);
    C. Northcutt et al., Confident learning: estimating uncertainty in dataset labels, 2021 (out-of-sample scores);
    Z. Lipton et al., Optimal thresholding of classifiers to maximize F1 measure, 2014.
    """

    def __init__(
        self,
        model: Any = None,
        steps: int = 40,
        inner_steps: int = 10,
        l2: float | None = None,
        batch_size: int = 1024,
        held_out: float = 0.2,
        robustness: float = 0.7,
        device: str | torch.device = "cpu",
        verbose: bool | int | None = False,
        random_state: Any = None,
    ) -> None:
        self.model = model
        self.steps = steps
        self.inner_steps = inner_steps
        self.l2 = l2
        self.batch_size = batch_size
        self.held_out = held_out
        self.robustness = robustness
        self.device = device
        self.verbose = verbose
        self.random_state = random_state

    def fit(self, X: Any, y: Any, X_trusted: Any = None, y_trusted: Any = None, pred_probs: Any = None) -> LabelCleaner:
        """Learn which labels to trust, and train a model on them.

        Args:
            X, y: the samples, (N, P), and their labels, (N,), some of them wrong.
            X_trusted, y_trusted: samples with correct labels, of every class.
            pred_probs: probabilities of the classes, sorted, for every sample, (N, C), by a model that was not trained on it
                (out of fold). Suspects are then found from these alone; a trusted set is refused.
        """
        self._check_settings()
        X, y = validate_data(self, X, y, dtype="numeric")
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise InputError("LabelCleaner needs labels of at least two classes, but y has one class only.")
        if (X_trusted is None) != (y_trusted is None):
            raise InputError("Give X_trusted and y_trusted together, or neither.")
        if pred_probs is not None and X_trusted is not None:
            raise InputError(
                "Give pred_probs or a trusted set, not both: pred_probs has no predictions for the trusted samples."
            )
        random = check_random_state(self.random_state)
        seed = int(random.randint(2**31 - 1))
        self._scaling = Scaling.of(X, self.batch_size)
        rows = self._scaling.tensor(X, self.device)
        if X_trusted is None:
            trusted = Samples(np.zeros((0, X.shape[1])), np.zeros(0, dtype=np.int64))
            trusted_rows = rows[:0]
        else:
            trusted = self._trusted(X_trusted, y_trusted)
            self._scaling.compare(trusted.x)
            trusted_rows = self._scaling.tensor(trusted.x, self.device)
        self.history_: list[Any] = []
        if pred_probs is not None:
            members = [member_of(log_probabilities(probabilities(pred_probs, (len(y), len(self.classes_)))), codes)]
        else:
            members = self._members(X, rows, codes, trusted, trusted_rows, random, seed)
        suspect, predicted = self._judge(members, codes, len(trusted.y) > 0)
        samples = self._features(X, rows, codes, members[0].learner)
        believed = self._features(trusted.x, trusted_rows, trusted.y, members[0].learner)
        self._fit_final(members, samples, believed, suspect)
        if pred_probs is None:
            predicted = self._decide(self._scores(X))
        self._conclude(suspect, predicted, codes)
        return self

    def _check_settings(self) -> None:
        check_settings(self)
        counted("LabelCleaner", steps=self.steps, inner_steps=self.inner_steps, batch_size=self.batch_size)
        if self.l2 is not None:
            not_negative("LabelCleaner", l2=self.l2)
        usable_device("LabelCleaner", self.device)
        for name, value, most in (("held_out", self.held_out, 0.5), ("robustness", self.robustness, 1.0)):
            if not 0 < value <= most:
                raise InputError(f"LabelCleaner: {name} must be above 0 and at most {most}, got {value!r}.")
        check_model(self.model)

    def _members(
        self,
        X: Array,
        rows: Tensor,
        codes: Array,
        trusted: Samples,
        trusted_rows: Tensor,
        random: Any,
        seed: int,
    ) -> list[Member]:
        """Learn weights by hypergradients, and cross-fit every learner under them."""
        learners = self._learners(rows, seed)
        robust = not len(trusted.y)
        if robust:
            roles = Roles.held_out(codes, self.classes_.tolist(), self.held_out, random)
            warnings.warn(NoTrustedSetWarning(roles.count, len(codes)), stacklevel=3)
        else:
            roles = Roles.of_trusted(trusted.y, random)
        samples = self._features(X, rows, codes, learners[0])
        believed = self._features(trusted.x, trusted_rows, trusted.y, learners[0])
        fold, trusted_fold = folds(codes, FOLDS, random), folds(trusted.y, FOLDS, random)
        fitting = [CrossFitting(learner, samples, fold, believed, trusted_fold) for learner in learners]
        model: nn.Module = softmax_classifier(rows, len(self.classes_))
        if isinstance(learners[0], Module):
            model = copy.deepcopy(learners[0].template).to(self.device).eval()
        elif isinstance(learners[0], Classifier):
            rows, trusted_rows = _standardised(*fitting[0].scores(np.ones(len(codes))), like=rows)
            model = softmax_classifier(rows, len(self.classes_))
        y, trusted_y = (torch.as_tensor(labels, device=self.device) for labels in (codes, trusted.y))
        noisy, other = Split(rows, y), Split(trusted_rows, trusted_y)
        source = noisy if robust else other
        kept = roles.others(len(codes)) if robust else slice(None)
        judge, evaluation = _part(source, roles.judge), _part(source, roles.evaluation)
        parts = Parts(_part(noisy, kept), _part(other, roles.guide), judge, evaluation, robust)
        learnt = self._learn(model, parts, seed)
        weights = learnt.of(noisy)
        return [cross_fitted(one, weights) for one in fitting]

    def _learn(self, model: nn.Module, parts: Parts, seed: int) -> LearntWeights:
        learnt = learn_weights(
            model,
            parts,
            MIDDLE if self.l2 is None else max(self.l2, 1e-6),
            self.robustness,
            self.steps,
            self.inner_steps,
            self.batch_size,
            seed,
            None if self.verbose is None else bool(self.verbose),
        )
        self.history_ = learnt.history
        self.weighting_: tuple[float, float] = (float(learnt.v[0]), float(learnt.v[1]))
        self.selected_step_: int = learnt.step
        return learnt

    def _learners(self, rows: Tensor, seed: int) -> list[AbstractLearner]:
        """The learners to cross-fit: the model, or linear ones with several ridges."""
        classes = len(self.classes_)
        if isinstance(self.model, nn.Module):
            device, l2 = torch.device(self.device), MIDDLE if self.l2 is None else max(self.l2, 1e-6)
            return [Module(classes, template_of(self.model, rows, classes, device, seed), l2, device, seed)]
        if self.model is not None:
            return [Classifier(classes, self.model)]
        if self.l2 is not None:
            return [Linear(classes, max(self.l2, 1e-6))]
        return [Linear(classes, l2) for l2 in (RIDGES if rows.numel() * classes <= LARGE else FEW_RIDGES)]

    def _features(self, X: Array, rows: Tensor, codes: Array, learner: AbstractLearner | None) -> Samples:
        """Samples as a learner takes them: as they are for a classifier of scikit-learn's, else standardised."""
        return Samples(X if isinstance(learner, Classifier) else rows.double().cpu().numpy(), codes)

    def _judge(self, members: list[Member], codes: Array, anchored: bool) -> tuple[Array, Array]:
        """Whom to suspect by all members together, (N,), and the class they would give each sample, (N,)."""
        # The likelihood of noisy labels rewards fitting wrong ones; that of trusted labels does not.
        trust = np.array([member.noise.trusted_log_likelihood if anchored else 0.0 for member in members])
        posterior = averaged([member.log_posterior for member in members], trust)
        guess = averaged([member.log_prior for member in members], trust).argmax(1)
        self.noise_matrix_: Array = np.exp(averaged([np.log(member.noise.transition) for member in members], trust))
        self.label_probabilities_: Array = np.exp(posterior)
        self.scores_: Array = wrong_log_odds(posterior, codes)
        self.threshold_: float = threshold(self.scores_, guess != codes)
        suspect: Array = (self.scores_ > self.threshold_) & (guess != codes)
        return suspect, self.classes_[guess]

    def _conclude(self, suspect: Array, predicted: Array, codes: Array) -> None:
        """Drop suspects that the cleaned model would label the same, and set the attributes of the others."""
        suspect = suspect & (predicted != self.classes_[codes])
        weights = 0.5 * (1 + np.tanh((self.threshold_ - self.scores_) / 2))
        self.weights_: Array = np.where(suspect, np.minimum(weights, np.nextafter(0.5, 0)), np.maximum(weights, 0.5))
        found = np.flatnonzero(suspect)
        self.label_issues_: Array = found[np.argsort(-self.scores_[found], kind="stable")]
        self.suggested_labels_: Array = predicted
        counts = np.zeros((len(self.classes_), len(self.classes_)), dtype=np.int64)
        np.add.at(counts, (codes[found], np.searchsorted(self.classes_, predicted[found])), 1)
        self.issue_counts_: Array = counts

    def _trusted(self, X: Any, y: Any) -> Samples:
        X, y = validate_data(self, X, y, dtype=np.float64, reset=False)
        unknown = np.setdiff1d(y, self.classes_)
        if len(unknown):
            raise InputError(f"The trusted set contains labels that y does not: {unknown[:5].tolist()}.")
        codes = np.searchsorted(self.classes_, y)
        counts = np.bincount(codes, minlength=len(self.classes_))
        if (counts < 2).any():
            short = self.classes_[counts < 2][:5].tolist()
            raise InputError(f"The trusted set needs at least two samples of every class; too few of {short}.")
        return Samples(X, codes)

    def _fit_final(self, members: list[Member], samples: Samples, trusted: Samples, suspect: Array) -> None:
        """A model from every sample that is believed, trusted ones with weight 1."""
        best = max(members, key=lambda member: member.first_log_likelihood).learner
        everything = Samples(np.concatenate([samples.x, trusted.x]), np.concatenate([samples.y, trusted.y]))
        kept = np.concatenate([(~suspect).astype(float), np.ones(len(trusted.y))])
        if isinstance(best, Linear):
            best = replace(best, steps=500)
        self._learner = best
        _, fitted = best.fit(everything, kept)
        if isinstance(best, Linear):
            self.coef_: Array = fitted[:-1].T
            self.intercept_: Array = fitted[-1]
        else:
            self.model_: Any = fitted

    def decision_function(self, X: Any) -> Array:
        """Class scores, (N, C); for two classes the score of the second over the first, (N,)."""
        check_is_fitted(self, "weights_")
        return self._scores(validate_data(self, X, dtype=np.float64, reset=False))

    def _scores(self, X: Array) -> Array:
        """The same of rows that are known to be in order."""
        learner = self._learner
        rows = self._scaling.scaled(X)
        if isinstance(learner, Classifier):
            scores = learner.scores(self.model_, X)
        elif isinstance(learner, Module):
            scores = learner.scores(self.model_, rows)
        else:
            scores = rows @ self.coef_.T + self.intercept_
        found: Array = scores[:, 1] - scores[:, 0] if len(self.classes_) == 2 else scores
        return found

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


def _standardised(scores: Array, trusted: Array, like: Tensor) -> tuple[Tensor, Tensor]:
    """Scores as features of a linear model."""
    center, deviation = scores.mean(0), scores.std(0)
    scale = np.where(deviation > 0, deviation, 1.0)
    found, other = (
        torch.as_tensor((z - center) / scale, dtype=like.dtype, device=like.device) for z in (scores, trusted)
    )
    return found, other


def _part(split: Split, which: Any) -> Split:
    return Split(split.x[which], split.y[which])
