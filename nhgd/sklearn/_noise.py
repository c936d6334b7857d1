"""How labels become wrong, estimated from scores of samples that the model was not trained on; and which to suspect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import expit

Array = np.ndarray[Any, Any]
SHARPNESSES = np.geomspace(0.7, 16.0, 8)
STEPS = 8  # EM iterations at each sharpness; the transition matrix is warm-started
MOST = 5_000  # samples by which a sharpness is chosen
LEAST_PROBABILITY = 1 / 3  # of a label to be wrong, for a suspect
TINY = 1e-300
NEGLIGIBLE = 5.0  # how much less likely, as a logarithm, a sharpness is left out


@dataclass(frozen=True)
class NoiseModel:
    """Where given labels come from: a class by the scores of the model, then another one by mistake.

        P(given = j | x) = sum_k p_k(x) T_kj,      p(x) = softmax(sharpness * scores(x))

    A model that was trained on wrong labels, or with a strong ridge, is less sure than it should be; without the
    sharpness that would pass for noise that depends on x, and T would find none. A few samples cannot tell one from the
    other, so answers are averaged over sharpnesses, each with its own T, as likely as they make the labels.

    Attributes:
        sharpnesses, log_weights: by which scores are multiplied, and how likely each is, (S,).
        transitions: T, (S, C, C), true classes in rows, given ones in columns.
        log_likelihood: the greatest of given and trusted labels.
        trusted_log_likelihood: of the trusted ones alone, there; 0 without any.

    References: C. Northcutt et al., Confident learning: estimating uncertainty in dataset labels, 2021 (the transition
    from out-of-sample probabilities). Deviations: 1. T by maximum likelihood instead of counts above thresholds,
    because counts depend on how sure the model is.
    """

    sharpnesses: Array
    log_weights: Array
    transitions: Array
    log_likelihood: float
    trusted_log_likelihood: float

    @property
    def transition(self) -> Array:
        """T on average, (C, C)."""
        mean: Array = np.tensordot(np.exp(self.log_weights), self.transitions, axes=1)
        return mean

    def log_prior(self, scores: Array) -> Array:
        """log p(x), (N, C)."""
        return averaged([_log_softmax(sharpness * scores) for sharpness in self.sharpnesses], self.log_weights)

    def log_posterior(self, scores: Array, labels: Array) -> Array:
        """log P(true = k | x, given label), (N, C)."""
        found = []
        for sharpness, transition in zip(self.sharpnesses, self.transitions, strict=True):
            joint = _log_softmax(sharpness * scores) + np.log(transition)[:, labels].T
            found.append(joint - _log_sum(joint)[:, None])
        return averaged(found, self.log_weights)


def fit_noise(
    scores: Array,
    labels: Array,
    trusted_scores: Array | None = None,
    trusted_labels: Array | None = None,
    prior: float = 0.0,
    times: Array | None = None,
) -> NoiseModel:
    """The sharpness and the transition under which given and trusted labels are most likely.

    Args:
        scores, labels: of samples that the model was not trained on, (N, C), and their given labels, (N,).
        trusted_scores, trusted_labels: the same of trusted samples, which determine the sharpness alone.
        prior: the power of the sharpness that is its prior, where there are no trusted ones.
        times: how often each sample counts, (N,); None: once.

    >>> rng = np.random.default_rng(0)
    >>> true = rng.integers(0, 2, 4000)
    >>> given = np.where(rng.random(4000) < 0.2, 1 - true, true)
    >>> found = fit_noise(np.eye(2)[true], given)
    >>> bool(np.abs(np.diag(found.transition) - 0.8).max() < 0.05)
    True
    """
    classes = scores.shape[1]
    part = slice(None, None, -(-len(labels) // MOST))
    times = np.ones(len(labels)) if times is None else times
    some, given, often = scores[part], labels[part], times[part]
    total_given = float(often.sum())
    transition = _shrunk(0.8 * np.eye(classes) * total_given + 0.2 * total_given / classes)
    anchored = trusted_scores is not None and trusted_labels is not None and len(trusted_labels) > 0
    transitions, total, trusted = [], np.zeros(len(SHARPNESSES)), np.zeros(len(SHARPNESSES))
    for i, sharpness in enumerate(SHARPNESSES):
        p = np.exp(_log_softmax(sharpness * some))
        transition = _maximised(p, given, transition, often)
        transitions.append(transition)
        total[i] = (often * np.log((p * transition[:, given].T).sum(1) + TINY)).sum()
        if trusted_scores is not None and trusted_labels is not None and anchored:
            trusted[i] = _log_softmax(sharpness * trusted_scores)[np.arange(len(trusted_labels)), trusted_labels].sum()
    total += trusted
    evidence = total if anchored else total + prior * np.log(SHARPNESSES)
    best = int(evidence.argmax())
    likely = np.flatnonzero(evidence > evidence[best] - NEGLIGIBLE)
    if len(some) < len(labels):
        for i in likely.tolist():
            p = np.exp(_log_softmax(SHARPNESSES[i] * scores))
            transitions[i] = _maximised(p, labels, transitions[i], times)
    weights = evidence[likely] - _log_sum(evidence[None, likely])[0]
    kept = np.stack([transitions[i] for i in likely.tolist()])
    return NoiseModel(SHARPNESSES[likely], weights, kept, float(total[best]), float(trusted[best]))


def _maximised(p: Array, labels: Array, transition: Array, times: Array, steps: int = STEPS) -> Array:
    given = np.eye(p.shape[1])[labels] * times[:, None]
    for _ in range(steps):
        joint = p * transition[:, labels].T
        joint /= joint.sum(1, keepdims=True) + TINY
        transition = _shrunk(joint.T @ given)
    return transition


def _shrunk(counts: Array) -> Array:
    """Counts of true and given classes as probabilities, drawn to one rate of error for all by C samples a class."""
    classes = len(counts)
    wrong = 1 - np.trace(counts) / counts.sum()
    common = np.full((classes, classes), wrong / (classes - 1))
    np.fill_diagonal(common, 1 - wrong)
    rows = counts + classes * common + 1e-9
    shrunk: Array = rows / rows.sum(1, keepdims=True)
    return shrunk


def threshold(log_odds: Array, allowed: Array, times: Array | None = None) -> float:
    """The log-odds of being wrong above which to suspect a label, so that the expected F1 is greatest.

        F1 of the n worst = 2 sum_{worst n} p_i / (n + sum_i p_i)

    Labels that are right with a probability above two thirds are never suspected: where next to none is wrong, the
    expected F1 would be greatest with a few that are most likely right.

    Args:
        log_odds: log P(wrong) / P(right) of every sample, (N,).
        allowed: which may be suspected, (N,).
        times: how often each sample counts, (N,); None: once.

    >>> threshold(np.array([3.0, 2.0, -2.0, -3.0]), np.ones(4, dtype=bool))
    0.0
    """
    p = expit(log_odds)
    order = np.flatnonzero(allowed & (p >= LEAST_PROBABILITY))
    if not len(order):
        return float(max(log_odds.max(initial=0.0), 0.0)) + 1.0
    order = order[np.argsort(-log_odds[order], kind="stable")]
    times = np.ones(len(p)) if times is None else times
    p = p * times
    expected = 2 * np.cumsum(p[order]) / (np.cumsum(times[order]) + p.sum())
    last = int(expected.argmax())
    below = log_odds[allowed & (log_odds < log_odds[order[last]])]
    least = float(below.max()) if len(below) else float(log_odds[order[last]]) - 1.0
    return (float(log_odds[order[last]]) + least) / 2


def wrong_log_odds(log_posterior: Array, labels: Array) -> Array:
    """log P(wrong) - log P(right), (N,), from the log-posterior of the true class, (N, C); without rounding to 0 or
    1.
    """
    rows = np.arange(len(labels))
    right = log_posterior[rows, labels]
    others = log_posterior.copy()
    others[rows, labels] = -np.inf
    return _log_sum(others) - right


def averaged(log_posteriors: list[Array], log_weights: Array) -> Array:
    """The logarithm of a weighted mean of probabilities, (N, C)."""
    weights = log_weights - _log_sum(log_weights[None])[0]
    stacked = np.stack([one + weight for one, weight in zip(log_posteriors, weights, strict=True)])
    top = stacked.max(0)
    found: Array = top + np.log(np.exp(stacked - top).sum(0))
    return found


def _log_sum(rows: Array) -> Array:
    top = rows.max(1)
    found: Array = top + np.log(np.exp(rows - top[:, None]).sum(1))
    return found


def _log_softmax(scores: Array) -> Array:
    found: Array = scores - _log_sum(scores)[:, None]
    return found
