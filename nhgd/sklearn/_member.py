"""One of several cross-fitted models, and its opinion of every label."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nhgd.sklearn._cross_fitting import AbstractLearner, CrossFitting, Linear
from nhgd.sklearn._noise import NoiseModel, fit_noise

Array = np.ndarray[Any, Any]
MIDDLE = 1e-2  # the ridge under which weights are learnt where none is given
# The power of the sharpness that is its prior between rounds: a model that learns from wrong labels is not sure enough to
# find them, and would go on learning from them. The last round answers without it.
SHARPER = 4.0
ROUNDS = 2  # of cross-fitting with weights from the noise model, after the one with learnt weights


@dataclass(frozen=True)
class Member:
    """One of several cross-fitted models: its opinion of every sample, and the likelihood of the known labels.

    Attributes:
        learner: how it was trained.
        log_prior: log p(x), sharpened, (N, C), without the given label.
        log_posterior: log P(true class | x, given label), (N, C).
        noise: how labels became wrong, by this model.
        first_log_likelihood: under learnt weights, before any that other folds took part in.
    """

    learner: AbstractLearner
    log_prior: Array
    log_posterior: Array
    noise: NoiseModel
    first_log_likelihood: float


def cross_fitted(fitting: CrossFitting, weights: Array) -> Member:
    """Scores under learnt weights, then under the probabilities to be right that come from them."""
    codes, trusted = fitting.samples.y, fitting.trusted.y
    first = None
    for left in reversed(range(1 + ROUNDS)):
        scores, trusted_scores = fitting.scores(weights)
        noise = fit_noise(scores, codes, trusted_scores, trusted, SHARPER if left else 0.0)
        posterior = noise.log_posterior(scores, codes)
        weights = np.exp(posterior[np.arange(len(codes)), codes])
        first = noise.log_likelihood if first is None else first
    assert first is not None
    return Member(fitting.learner, noise.log_prior(scores), posterior, noise, first)


def member_of(scores: Array, codes: Array) -> Member:
    """A member from given scores, with the learner of the final model."""
    noise = fit_noise(scores, codes)
    posterior = noise.log_posterior(scores, codes)
    learner = Linear(scores.shape[1], MIDDLE)
    return Member(learner, noise.log_prior(scores), posterior, noise, noise.log_likelihood)
