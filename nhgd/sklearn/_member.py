"""One of several cross-fitted models, and its opinion of every label."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from nhgd.sklearn._cross_fitting import AbstractLearner, Advance, CrossFitting, Linear
from nhgd.sklearn._noise import NoiseModel, averaged, fit_noise

Array = np.ndarray[Any, Any]
MIDDLE = 1e-2  # the ridge under which weights are learnt where none is given
# The power of the sharpness that is its prior between rounds: a model that learns from wrong labels is not sure enough
# to find them, and would go on learning from them. The last round answers without it.
SHARPER = 4.0
ROUNDS = 2  # of cross-fitting with weights from the noise model, after the one with learnt weights


@dataclass(frozen=True)
class Judge:
    """What can be said of the label of any sample: cross-fitted models, and how labels became wrong by their scores.

    Attributes:
        learner: how the models were trained.
        models: one for each fold; none where scores are given from elsewhere.
        noise: the noise model of their scores.
    """

    learner: AbstractLearner
    models: tuple[Any, ...]
    noise: NoiseModel

    def scores(self, rows: Array) -> Array:
        """The scores of samples that no model was trained on, (N, C): the mean over all."""
        found: Array = np.mean([self.learner.scores(model, rows) for model in self.models], axis=0)
        return found


@dataclass(frozen=True)
class Member:
    """A judge, and its opinion of every sample it was trained with.

    Attributes:
        judge: who judges.
        log_prior: log p(x), (N, C), without the given label.
        log_posterior: log P(true class | x, given label), (N, C).
        first_log_likelihood: under learnt weights, before any that other folds took part in.
    """

    judge: Judge
    log_prior: Array
    log_posterior: Array
    first_log_likelihood: float


@dataclass(frozen=True)
class Panel:
    """Several judges, and how far each is trusted, as a logarithm, (S,)."""

    judges: tuple[Judge, ...]
    trust: Array

    @property
    def noise_matrix(self) -> Array:
        """P(given class | true class), true ones in rows, (C, C)."""
        found: Array = np.exp(averaged([np.log(judge.noise.transition) for judge in self.judges], self.trust))
        return found

    def joint(self, log_priors: list[Array], log_posteriors: list[Array]) -> tuple[Array, Array]:
        """The log-posterior of all together, (N, C), and the class that they would give each sample, (N,)."""
        return averaged(log_posteriors, self.trust), averaged(log_priors, self.trust).argmax(1)

    def opinion(self, scores: list[Array], labels: Array) -> tuple[Array, Array]:
        """The same of samples by the scores that each judge gives them, and their labels."""
        both = list(zip(self.judges, scores, strict=True))
        return self.joint(
            [judge.noise.log_prior(mine) for judge, mine in both],
            [judge.noise.log_posterior(mine, labels) for judge, mine in both],
        )


def panel(members: list[Member], anchored: bool) -> Panel:
    """The judges of all members; `anchored`: with trusted samples.

    The likelihood of noisy labels rewards fitting wrong ones; that of trusted labels does not.
    """
    trust = [member.judge.noise.trusted_log_likelihood if anchored else 0.0 for member in members]
    return Panel(tuple(member.judge for member in members), np.array(trust))


def cross_fitted(fitting: CrossFitting, weights: Array, advance: Advance) -> Member:
    """Scores under learnt weights, then under the probabilities to be right that come from them."""
    samples, trusted = fitting.samples, fitting.trusted.y
    codes = samples.y
    first = None
    for left in reversed(range(1 + ROUNDS)):
        of_round = partial(_told, advance, f"round {1 + ROUNDS - left}/{1 + ROUNDS}")
        scores, trusted_scores = fitting.scores(weights, of_round)
        noise = fit_noise(scores, codes, trusted_scores, trusted, SHARPER if left else 0.0, samples.times)
        posterior = noise.log_posterior(scores, codes)
        weights = np.exp(posterior[np.arange(len(codes)), codes])
        first = noise.log_likelihood if first is None else first
    assert first is not None
    judge = Judge(fitting.learner, tuple(fitting.models.values()), noise)
    return Member(judge, noise.log_prior(scores), posterior, first)


def _told(advance: Advance, before: str, words: str) -> None:
    advance(f"{before}, {words}")


def member_of(scores: Array, codes: Array, times: Array | None) -> Member:
    """A member from given scores, with the learner of the final model."""
    noise = fit_noise(scores, codes, times=times)
    judge = Judge(Linear(scores.shape[1], MIDDLE), (), noise)
    return Member(judge, noise.log_prior(scores), noise.log_posterior(scores, codes), noise.log_likelihood)
