"""Straight lines through logarithms, with intervals from resampled runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RESAMPLED = 400
COVERED = 0.95


@dataclass(frozen=True)
class Slope:
    """The slope of a line in double logarithms, and its interval.

    >>> round(fitted([1.0, 10.0, 100.0], torch.tensor([[1.0, 0.1, 0.01], [2.0, 0.2, 0.02]])).slope, 6)
    -1.0
    """

    slope: float
    low: float
    high: float

    def meets(self, aim: float, within: float) -> bool:
        """Whether the slope is that near to an aim."""
        return abs(self.slope - aim) <= within

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return {"slope": self.slope, "low": self.low, "high": self.high}


def fitted(x: Sequence[float], errors: Tensor) -> Slope:
    """The slope of log(mean error) against log(x) by least squares.

    The errors of one run along x depend on each other, so runs are resampled as wholes.

    Args:
        x: (n,), above 0.
        errors: of every run, (R, n), above 0.
    """
    return _resampled(x, errors.double(), lambda some: some.mean(0))


def fitted_norms(x: Sequence[float], matrices: Tensor, seed: int = 0) -> Slope:
    """The same of the spectral norm of the mean over runs of matrices (R, n, D, D)."""
    return _resampled(x, matrices, lambda some: torch.linalg.matrix_norm(some.mean(0), 2), seed)


def _resampled(x: Sequence[float], values: Tensor, reduce: Callable[[Tensor], Tensor], seed: int = 0) -> Slope:
    logs = torch.tensor([math.log(value) for value in x], dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(values), (RESAMPLED, len(values)), generator=generator)
    slopes = sorted(_slope(logs, reduce(values[rows]).log()) for rows in chosen)
    return Slope(round(_slope(logs, reduce(values).log()), 12), *interval(slopes))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The middle part of sorted values that `COVERED` says."""
    cut = int((1 - COVERED) / 2 * len(values))
    return values[cut], values[len(values) - 1 - cut]


def _slope(x: Tensor, y: Tensor) -> float:
    x = x - x.mean()
    return float((x * y).sum() / x.square().sum())
