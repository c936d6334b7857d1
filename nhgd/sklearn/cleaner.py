"""A scikit-learn classifier that finds wrong labels, with or without a few trusted samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy.special import expit
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, check_random_state, validate_data

from nhgd._progress import bar
from nhgd._validation import check_settings, counted, not_negative
from nhgd.data.device import usable_device
from nhgd.errors import InputError
from nhgd.sklearn._cross_fitting import Classifier, Linear, Module, Samples, log_probabilities
from nhgd.sklearn._distinct import Distinct, sample_weights
from nhgd.sklearn._html import findings
from nhgd.sklearn._inputs import check_counts, check_model, numbers, probabilities
from nhgd.sklearn._member import member_of, panel
from nhgd.sklearn._noise import threshold, wrong_log_odds
from nhgd.sklearn._roles import NoTrustedSetWarning as NoTrustedSetWarning
from nhgd.sklearn._scaling import Scaling
from nhgd.sklearn._scaling import TrustedScaleWarning as TrustedScaleWarning
from nhgd.sklearn._training import LAST, Training

Array = np.ndarray[Any, Any]


class LabelCleaner(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """A classifier that finds wrong labels while it is trained, and then does without them.

    1. Each training sample has the weight w_i = sigmoid(e^a (e^b - loss_i)), one learnt function of its loss; (a, b)
      are
       chosen by natural hypergradient descent so that a model trained with these weights does well on samples that
       judge. The outer step is chosen on others. Trusted samples guide, judge and choose; without any, a part of the
       data is held out in their place, and judged by a bounded loss, (1 - p_y^q) / q, that wrong labels cannot
       dominate.
    2. Models trained with these weights score samples that they were not trained on (5 folds). From the scores comes a
       noise model, P(given | x) = sum_k p_k(x) T_kj, and from this the probability that a label is wrong; trained again
       with the probability to be right as weights, twice, they give the final one. Trusted samples have weight 1 and,
       out of fold, calibrate the scores. All of this is done with several ridges, and the probabilities are averaged.
    3. The suspects are the labels most probably wrong, as many as maximise the expected F1, provided that the model
      trained
       without them predicts another class.

    Features are standardised here, so no scaler is needed. The steps of a Pipeline transform X only. To transform
    X_trusted as well, use `Pipeline(..., transform_input=["X_trusted"])` with scikit-learn's metadata routing and
    `set_fit_request(X_trusted=True, y_trusted=True)`, or `pipeline[:-1].transform(X_trusted)` after fitting those
    steps. A trusted set on another scale than X causes a warning.

    Args:
        model: None: a linear softmax classifier; an nn.Module from standardised samples (B, P) to scores (B, C); or a
            scikit-learn classifier with predict_proba, which gets the raw X. With the last, weights are learnt for a
            linear model of its out-of-fold log-probabilities.
        steps: maximum number of outer steps; the one that is best on held-out samples is used.
        inner_steps: inner steps for each of them.
        l2: the ridge of the model, on standardised features; None: an average over several, with a linear model, and
            1e-3 with a module.
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
        suggested_labels_: the class of each training sample by the cleaned model, (N,), or by `pred_probs` if given;
            never the given label of a suspect.
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

    def fit(
        self,
        X: Any,
        y: Any,
        X_trusted: Any = None,
        y_trusted: Any = None,
        pred_probs: Any = None,
        sample_weight: Any = None,
    ) -> LabelCleaner:
        """Learn which labels to trust, and train a model on them.

        Args:
            X, y: the samples, (N, P), and their labels, (N,), some of them wrong.
            X_trusted, y_trusted: samples with correct labels, of every class.
            pred_probs: probabilities of the classes, sorted, for every sample, (N, C), by a model that was not trained
                on it (out of fold). Suspects are then found from these alone; a trusted set is refused.
            sample_weight: how often each sample counts, (N,): 2 is a sample that was given twice, and 0 one that is not
                there, though its label is scored all the same.
        """
        self._check_settings()
        X, y = validate_data(self, X, y, dtype="numeric")
        X = numbers(X)
        check_classification_targets(y)
        counts = sample_weights(sample_weight, len(y))
        self.classes_ = np.unique(y if counts is None else y[counts > 0])
        if len(self.classes_) < 2:
            raise InputError("LabelCleaner needs labels of at least two classes, but y has one class only.")
        codes = self._codes(y, "Labels of samples with a weight of 0")
        if (X_trusted is None) != (y_trusted is None):
            raise InputError("Give X_trusted and y_trusted together, or neither.")
        if pred_probs is not None and X_trusted is not None:
            raise InputError(
                "Give pred_probs or a trusted set, not both: pred_probs has no predictions for the trusted samples."
            )
        given = None
        if pred_probs is not None:
            given = log_probabilities(probabilities(pred_probs, (len(y), len(self.classes_))))
        check_counts(self.model, counts, given is None)
        random = check_random_state(self.random_state)
        seed = int(random.randint(2**31 - 1))
        distinct = Distinct.of(counts, X, codes, *([] if given is None else [given]))
        samples = Samples(distinct.part(X), distinct.part(codes), distinct.times)
        self._scaling = Scaling.of(samples.x, self.batch_size, samples.times)
        rows = self._scaling.tensor(samples.x, self.device)
        if X_trusted is None:
            trusted = Samples(np.zeros((0, X.shape[1])), np.zeros(0, dtype=np.int64))
            trusted_rows = rows[:0]
        else:
            trusted = self._trusted(X_trusted, y_trusted)
            self._scaling.compare(trusted.x)
            trusted_rows = self._scaling.tensor(trusted.x, self.device)
        self.history_: list[Any] = []
        with bar("Finding wrong labels", None if self.verbose is None else bool(self.verbose)) as tick:
            training = Training(self, self.classes_, samples, rows, trusted, trusted_rows, random, seed, tick)
            if given is not None:
                members = [member_of(distinct.part(given), samples.y, samples.times)]
            else:
                members = training.members()
            self._panel = panel(members, len(trusted.y) > 0)
            posterior, guess = self._panel.joint([m.log_prior for m in members], [m.log_posterior for m in members])
            scores = wrong_log_odds(posterior, samples.y)
            self.threshold_: float = threshold(scores, guess != samples.y, samples.times)
            suspect = (scores > self.threshold_) & (guess != samples.y)
            tick(LAST, "the model without the suspects")
            self._learner, fitted = training.final(members, suspect)
            tick(1.0, "done")
        if isinstance(self._learner, Linear):
            self.coef_: Array = fitted[:-1].T
            self.intercept_: Array = fitted[-1]
        else:
            self.model_: Any = fitted
        if (learnt := training.learnt) is not None:
            self.history_ = learnt.history
            self.weighting_: tuple[float, float] = (float(learnt.v[0]), float(learnt.v[1]))
            self.selected_step_: int = learnt.step
        self.noise_matrix_: Array = self._panel.noise_matrix
        posterior, guess = distinct.spread(posterior), distinct.spread(guess)
        if (absent := distinct.absent).any():
            some = None if given is None else given[absent]
            posterior[absent], guess[absent] = self._opinion(X[absent], codes[absent], some)
        self.label_probabilities_: Array = np.exp(posterior)
        self.scores_: Array = wrong_log_odds(posterior, codes)
        predicted = self._decide(self._scores(X)) if given is None else self.classes_[guess]
        self._conclude((self.scores_ > self.threshold_) & (guess != codes), predicted, codes)
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

    def _conclude(self, suspect: Array, predicted: Array, codes: Array) -> None:
        """Drop suspects that the cleaned model would label the same, and set the attributes of the others."""
        suspect = suspect & (predicted != self.classes_[codes])
        weights = expit(self.threshold_ - self.scores_)
        self.weights_: Array = np.where(suspect, np.minimum(weights, np.nextafter(0.5, 0)), np.maximum(weights, 0.5))
        found = np.flatnonzero(suspect)
        self.label_issues_: Array = found[np.argsort(-self.scores_[found], kind="stable")]
        self.suggested_labels_: Array = predicted
        counts = np.zeros((len(self.classes_), len(self.classes_)), dtype=np.int64)
        np.add.at(counts, (codes[found], np.searchsorted(self.classes_, predicted[found])), 1)
        self.issue_counts_: Array = counts

    def _trusted(self, X: Any, y: Any) -> Samples:
        X, y = validate_data(self, X, y, dtype=np.float64, reset=False)
        codes = self._codes(y, "The trusted set contains labels")
        counts = np.bincount(codes, minlength=len(self.classes_))
        if (counts < 2).any():
            short = self.classes_[counts < 2][:5].tolist()
            raise InputError(f"The trusted set needs at least two samples of every class; too few of {short}.")
        return Samples(X, codes)

    def _codes(self, y: Array, whose: str) -> Array:
        """The class of each label, as its place among all."""
        unknown = np.setdiff1d(y, self.classes_)
        if len(unknown):
            raise InputError(f"{whose} that y does not: {unknown[:5].tolist()}.")
        found: Array = np.searchsorted(self.classes_, y)
        return found

    def label_scores(self, X: Any, y: Any, pred_probs: Any = None) -> Array:
        """The log-odds that each label of new samples is wrong, (N,), on the scale of `scores_` and `threshold_`.

        New samples are scored by the cross-fitted models, by the mean of what they say; a sample of the training set
        gets a similar score, but by models that have seen its label, so use `scores_` for those.

        Args:
            X, y: the samples, (N, P), and their labels, (N,).
            pred_probs: probabilities of their classes, (N, C), where `fit` was given some.
        """
        X, codes, given = self._new(X, y, pred_probs)
        return wrong_log_odds(self._opinion(X, codes, given)[0], codes)

    def relabel(self, X: Any, y: Any, pred_probs: Any = None) -> Array:
        """The labels of new samples, (N,), those that are suspect replaced by the class that `predict` gives.

        A label is suspect as in training: its score is above `threshold_`, and the models call the sample something
        else.
        """
        X, codes, given = self._new(X, y, pred_probs)
        posterior, guess = self._opinion(X, codes, given)
        predicted = self._decide(self._scores(X)) if given is None else self.classes_[guess]
        suspect = (wrong_log_odds(posterior, codes) > self.threshold_) & (guess != codes)
        found: Array = np.where(suspect, predicted, self.classes_[codes])
        return found

    def _new(self, X: Any, y: Any, pred_probs: Any) -> tuple[Array, Array, Array | None]:
        """New samples with the places of their labels, and log-probabilities if the cleaner works on these."""
        check_is_fitted(self, "weights_")
        X, y = validate_data(self, X, y, dtype=np.float64, reset=False)
        codes = self._codes(y, "The samples to score have labels")
        wanted = not self._panel.judges[0].models
        if wanted != (pred_probs is not None):
            raise InputError(
                "This LabelCleaner was fitted with pred_probs, so it needs those of new samples too."
                if wanted
                else "This LabelCleaner was fitted without pred_probs, so it takes none for new samples."
            )
        if not wanted:
            return X, codes, None
        return X, codes, log_probabilities(probabilities(pred_probs, (len(y), len(self.classes_))))

    def _opinion(self, X: Array, codes: Array, given: Array | None) -> tuple[Array, Array]:
        """The log-posterior of samples that no model was trained on, (N, C), and the class of each by the panel,
        (N,).
        """
        if given is not None:
            return self._panel.opinion([given], codes)
        raw = isinstance(self._panel.judges[0].learner, Classifier)
        rows = X if raw else self._scaling.scaled(X)
        return self._panel.opinion([judge.scores(rows) for judge in self._panel.judges], codes)

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

    def _repr_mimebundle_(self, **how: Any) -> dict[str, Any]:
        """What notebooks show: scikit-learn's picture of the estimator, and what was found."""
        shown: dict[str, Any] = super()._repr_mimebundle_(**how)
        return shown | {"text/html": self._with_findings(shown["text/html"])} if "text/html" in shown else shown

    @property
    def _repr_html_(self) -> Any:
        """The same for what knows no bundles; as in scikit-learn there is none with `display="text"`."""
        picture = super()._repr_html_
        return lambda: self._with_findings(picture())

    def _with_findings(self, picture: str) -> str:
        if not hasattr(self, "issue_counts_"):
            return picture
        return picture + findings(self.classes_, self.issue_counts_, self.noise_matrix_, len(self.scores_))
