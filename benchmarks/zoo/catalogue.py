"""The problems by name."""

from __future__ import annotations

from benchmarks.zoo import learning, physics, regularisation, representation, weighting
from benchmarks.zoo.case import Builder

CASES: dict[str, Builder] = {
    "representation-conv": representation.conv,
    "representation-mlp": representation.mlp,
    "class-weights": weighting.class_weights,
    "label-cleaning": weighting.label_cleaning,
    "source-weights": weighting.source_weights,
    "augmentation": regularisation.augmentation,
    "ridges": regularisation.ridges,
    "kernel": regularisation.kernel,
    "distillation": learning.distillation,
    "sinusoids": learning.sinusoids,
    "poisson": physics.poisson,
    "quadratic": physics.quadratic,
}
