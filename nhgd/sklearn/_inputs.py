"""Checks of what `LabelCleaner` is given: models and probabilities."""

from __future__ import annotations

import copy
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from sklearn.utils.validation import has_fit_parameter
from torch import Tensor, nn

from nhgd._randomness import Randomness
from nhgd.errors import InputError

Array = np.ndarray[Any, Any]


@runtime_checkable
class SupportsProbabilities(Protocol):
    """A classifier as scikit-learn has it."""

    def fit(self, X: Any, y: Any) -> Any:
        """Learn from samples and their classes."""

    def predict_proba(self, X: Any) -> Any:
        """The probability of each class, (N, C)."""


def check_model(model: Any) -> None:
    """Refuse anything but None, a module, or a classifier with probabilities."""
    if model is None or isinstance(model, nn.Module):
        return
    if isinstance(model, type) or not isinstance(model, SupportsProbabilities):
        raise InputError(
            "LabelCleaner: model must be None, an nn.Module or a scikit-learn classifier with predict_proba, got"
            f" {model!r}."
        )


def numbers(X: Array) -> Array:
    """Features as numbers: columns of categories come as objects from a frame, and scikit-learn lets them pass."""
    if X.dtype != object:
        return X
    for feature, column in enumerate(X.T):
        try:
            column.astype(np.float64)
        except (TypeError, ValueError):
            raise InputError(
                f"LabelCleaner: feature {feature} of X holds {column[0]!r}, which is no number. Encode categories first, by"
                " OneHotEncoder or pandas.get_dummies, or leave the column out."
            ) from None
    found: Array = X.astype(np.float64)
    return found


def check_counts(model: Any, counts: Array | None, trains: bool) -> None:
    """Refuse weights of samples for a classifier that can take none, unless samples can be repeated instead."""
    if counts is None or not trains or model is None or isinstance(model, nn.Module):
        return
    if not has_fit_parameter(model, "sample_weight") and not (counts == counts.round()).all():
        raise InputError(
            f"LabelCleaner: {type(model).__name__} takes no sample_weight, so samples can only be repeated: give whole"
            " numbers, or choose another model."
        )


def template_of(model: nn.Module, rows: Tensor, classes: int, device: torch.device, seed: int) -> nn.Module:
    """A copy of a module in evaluation mode, once it has turned two samples into class scores."""
    template = copy.deepcopy(model).to(device, torch.float32).eval()
    if not any(parameter.requires_grad for parameter in template.parameters()):
        raise InputError("LabelCleaner: the model has no parameters to train.")
    try:
        with Randomness(seed, device).scope(), torch.no_grad():
            shape = tuple(template(rows[:2]).shape)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise InputError(
            f"LabelCleaner: the model does not take samples of shape (B, {rows.shape[1]}): {str(error).splitlines()[0]}"
        ) from error
    if shape != (min(2, len(rows)), classes):
        raise InputError(
            f"LabelCleaner: the model must turn samples (B, {rows.shape[1]}) into scores (B, {classes}), but two samples"
            f" gave {shape}."
        )
    return template


def probabilities(given: Any, shape: tuple[int, int]) -> Array:
    """Probabilities of the classes of every sample, (N, C)."""
    try:
        p = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError("LabelCleaner: pred_probs must be an array of numbers, (N, C).") from None
    if p.shape != shape:
        raise InputError(
            f"LabelCleaner: pred_probs must have a row for each sample and a column for each class, {shape}, but its shape"
            f" is {p.shape}."
        )
    if not (np.isfinite(p).all() and (p >= 0).all() and np.abs(p.sum(1) - 1).max() < 1e-2):
        raise InputError("LabelCleaner: each row of pred_probs must hold probabilities, 0 or more, that sum to 1.")
    return p
