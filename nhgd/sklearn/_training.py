"""The models that LabelCleaner trains: with learnt weights, cross-fitted, and in the end without the suspects."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nhgd._progress import Tick
from nhgd.sklearn._cross_fitting import AbstractLearner, Classifier, CrossFitting, Linear, Module, Samples, folds
from nhgd.sklearn._inputs import template_of
from nhgd.sklearn._learnt_weights import LearntWeights, Parts, learn_weights
from nhgd.sklearn._member import MIDDLE, ROUNDS, Member, cross_fitted
from nhgd.sklearn._roles import NoTrustedSetWarning, Roles
from nhgd.sklearn._stages import Stages
from nhgd.task._classifier import Split, softmax_classifier

Array = np.ndarray[Any, Any]
RIDGES = (1e-4, 1e-3, 1e-2, 1e-1)
OF_MODULES = 1e-3  # more of it makes a network of two layers a linear model
FEW_RIDGES = (1e-3, 1e-2)  # for slow fits; with many samples the ridge matters less
LARGE = 20_000_000  # samples times features times classes
FOLDS = 5
LAST = 0.97  # the share of the work before the final model, roughly


@dataclass
class Training:
    """The samples of one fit, and the models that are trained on them.

    Attributes:
        settings: the LabelCleaner.
        classes: their names, sorted.
        samples, rows: the samples as given, and standardised.
        trusted, trusted_rows: trusted ones; maybe none.
        random, seed: where random numbers come from.
        tick: the progress bar.
        learnt: the weights of samples, once they are known.
    """

    settings: Any
    classes: Array
    samples: Samples
    rows: Tensor
    trusted: Samples
    trusted_rows: Tensor
    random: Any
    seed: int
    tick: Tick
    learnt: LearntWeights | None = field(default=None, init=False)

    def members(self) -> list[Member]:
        """Learn weights by hypergradients, and cross-fit every learner under them."""
        settings, samples, rows, trusted, trusted_rows = (
            self.settings,
            self.samples,
            self.rows,
            self.trusted,
            self.trusted_rows,
        )
        learners, codes, random = self._learners(), samples.y, self.random
        robust = not len(trusted.y)
        if robust:
            roles = Roles.held_out(codes, self.classes.tolist(), settings.held_out, random, samples.times)
            warnings.warn(NoTrustedSetWarning(roles.count, len(codes)), stacklevel=3)
        else:
            roles = Roles.of_trusted(trusted.y, random)
        seen = self._seen(learners[0])
        believed = self._believed(learners[0])
        fold, trusted_fold = folds(codes, FOLDS, random), folds(trusted.y, FOLDS, random)
        fitting = [CrossFitting(learner, seen, fold, believed, trusted_fold) for learner in learners]
        model: nn.Module = softmax_classifier(rows, len(self.classes))
        stages = Stages(self.tick, settings.steps + (1 + ROUNDS) * FOLDS * len(learners), LAST)
        if isinstance(learners[0], Module):
            model = copy.deepcopy(learners[0].template).to(settings.device).eval()
        elif isinstance(learners[0], Classifier):
            rows, trusted_rows = _standardised(*fitting[0].scores(np.ones(len(codes))), like=rows)
            model = softmax_classifier(rows, len(self.classes))
        y, trusted_y = (torch.as_tensor(labels, device=settings.device) for labels in (codes, trusted.y))
        noisy, other = Split(rows, y), Split(trusted_rows, trusted_y)
        source = noisy if robust else other
        kept = roles.others(len(codes)) if robust else slice(None)
        judge, evaluation = _part(source, roles.judge), _part(source, roles.evaluation)
        times = None
        if samples.times is not None:
            often = torch.as_tensor(samples.times, device=settings.device)
            once = often.new_ones(len(other.y))
            judges = often if robust else once
            times = often[kept], judges[roles.judge], judges[roles.evaluation]
        parts = Parts(_part(noisy, kept), _part(other, roles.guide), judge, evaluation, robust, times)
        self.learnt = self._learn(model, parts, stages)
        weights = self.learnt.of(noisy)
        return [
            cross_fitted(one, weights, stages.within(f"model {i}/{len(fitting)}"))
            for i, one in enumerate(fitting, start=1)
        ]

    def _learn(self, model: nn.Module, parts: Parts, stages: Stages) -> LearntWeights:
        settings = self.settings
        return learn_weights(
            model,
            parts,
            self._ridge(OF_MODULES if isinstance(settings.model, nn.Module) else MIDDLE),
            settings.robustness,
            settings.steps,
            settings.inner_steps,
            settings.batch_size,
            self.seed,
            stages.advance,
        )

    def _ridge(self, usual: float) -> float:
        """The ridge that was asked for, as far as solves allow, or else the usual one."""
        return usual if self.settings.l2 is None else max(self.settings.l2, 1e-6)

    def _learners(self) -> list[AbstractLearner]:
        """The learners to cross-fit: the model, or linear ones with several ridges."""
        settings, rows, classes = self.settings, self.rows, len(self.classes)
        if isinstance(settings.model, nn.Module):
            device = torch.device(settings.device)
            template = template_of(settings.model, rows, classes, device, self.seed)
            return [Module(classes, template, self._ridge(OF_MODULES), device, self.seed)]
        if settings.model is not None:
            return [Classifier(classes, settings.model)]
        if settings.l2 is not None:
            return [Linear(classes, self._ridge(settings.l2))]
        return [Linear(classes, l2) for l2 in (RIDGES if rows.numel() * classes <= LARGE else FEW_RIDGES)]

    def final(self, members: list[Member], suspect: Array) -> tuple[AbstractLearner, Any]:
        """A model from every sample that is believed, trusted ones with weight 1, and its learner."""
        best = max(members, key=lambda member: member.first_log_likelihood).judge.learner
        kept = np.concatenate([(~suspect).astype(float), np.ones(len(self.trusted.y))])
        if isinstance(best, Linear):
            best = replace(best, steps=500)
        return best, best.fit(self._seen(best).followed_by(self._believed(best)), kept)

    def _seen(self, learner: AbstractLearner) -> Samples:
        return _features(self.samples, self.rows, learner)

    def _believed(self, learner: AbstractLearner) -> Samples:
        return _features(self.trusted, self.trusted_rows, learner)


def _features(samples: Samples, rows: Tensor, learner: AbstractLearner) -> Samples:
    """Samples as a learner takes them: as they are for a classifier of scikit-learn's, else standardised."""
    return samples if isinstance(learner, Classifier) else replace(samples, x=rows.double().cpu().numpy())


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
