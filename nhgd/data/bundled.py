"""Data that ships with scikit-learn, so that everything runs without a download."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nhgd.errors import InputError


def _datasets() -> Any:
    try:
        from sklearn import datasets
    except ImportError:
        raise InputError("The bundled data sets come with scikit-learn: pip install 'nhgd[cli]'.") from None
    return datasets


def breast_cancer() -> tuple[Tensor, Tensor]:
    """Measurements (569, 30) and diagnoses (569,), 0 or 1, both float64."""
    found = _datasets().load_breast_cancer()
    return torch.as_tensor(found.data, dtype=torch.float64), torch.as_tensor(found.target, dtype=torch.float64)


def made(samples: int, features: int, classes: int, rare: float, seed: int) -> tuple[Tensor, Tensor]:
    """Samples (N, d) in clusters and their classes (N,), made by scikit-learn: half of the features tell, a quarter
    follow from those.

    Args:
        rare: the share of the samples that are not of class 0.
    """
    x, y = _datasets().make_classification(
        samples, features, n_informative=features // 2, n_redundant=features // 4, n_classes=classes,
        weights=[1 - rare, *[rare / (classes - 1)] * (classes - 1)], class_sep=1.0, flip_y=0.02, random_state=seed,
    )  # fmt: skip
    return torch.as_tensor(x, dtype=torch.float64), torch.as_tensor(y, dtype=torch.int64)


def digits() -> tuple[Tensor, Tensor]:
    """Pixels (1797, 64) between 0 and 1, and labels (1797,)."""
    found = _datasets().load_digits()
    return torch.as_tensor(found.data, dtype=torch.float32) / 16, torch.as_tensor(found.target, dtype=torch.int64)
