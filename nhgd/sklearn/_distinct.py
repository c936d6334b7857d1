"""Samples that differ from each other, each with how often it was given."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from nhgd.errors import InputError

Array = np.ndarray[Any, Any]
PIECE = 1024


def sample_weights(given: Any, samples: int) -> Array | None:
    """The weight of every sample, (N,), 0 or more; None if all weigh the same as without any."""
    if given is None:
        return None
    try:
        weights = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError("LabelCleaner: sample_weight must be an array of numbers, (N,).") from None
    if weights.ndim == 0:
        weights = np.full(samples, float(weights))
    if weights.shape != (samples,):
        raise InputError(f"LabelCleaner: sample_weight must have shape ({samples},), but its shape is {weights.shape}.")
    if not np.isfinite(weights).all() or (weights < 0).any():
        raise InputError("LabelCleaner: each number of sample_weight must be finite, and 0 or more.")
    if not weights.any():
        raise InputError("LabelCleaner: sample_weight is zero for every sample, so nothing is left to learn from.")
    return None if (weights == 1).all() else weights


@dataclass(frozen=True)
class Distinct:
    """One of each group of equal samples, so that a sample of weight 2 is one that was given twice.

    Equal samples belong into one fold: a model that has seen a wrong label with the same features confirms it.

    Attributes:
        index: one of each group, (M,).
        times: the sum of its weights, (M,); None: every sample stands for itself, in the order given.
        group: the group of each sample, (N,); -1 where its weight is 0.
    """

    index: Array
    times: Array | None
    group: Array

    @classmethod
    def of(cls, weights: Array | None, *columns: Array) -> Distinct:
        """Of samples with these features and labels. If there are weights or equal samples, the order given is lost."""
        count = len(columns[0])
        present = np.arange(count) if weights is None else np.flatnonzero(weights)
        digests = np.empty(len(present), dtype="S32")
        for start in range(0, len(present), PIECE):
            piece = present[start : start + PIECE]
            parts = [np.ascontiguousarray(column[piece] + 0).reshape(len(piece), -1) for column in columns]  # no -0.0
            for i in range(len(piece)):
                digest = hashlib.blake2b(digest_size=16)
                for part in parts:
                    digest.update(part[i].tobytes())
                digests[start + i] = digest.hexdigest()
        _, first, group = np.unique(digests, return_index=True, return_inverse=True)
        if weights is None and len(first) == count:
            return cls(present, None, present)
        everyone = np.full(count, -1)
        everyone[present] = group.ravel()
        times = np.bincount(group.ravel(), None if weights is None else weights[present], len(first)).astype(float)
        return cls(present[first], times, everyone)

    @property
    def absent(self) -> Array:
        """Which samples belong to no group, (N,)."""
        found: Array = self.group < 0
        return found

    def part(self, values: Array) -> Array:
        """Of values for all samples those of one in each group, (M, ...)."""
        return values if self.times is None else values[self.index]

    def spread(self, values: Array) -> Array:
        """Of values for groups those of every sample, (N, ...); anything for those that are absent."""
        return values if self.times is None else values[self.group]
