"""The mean and deviation of features, and everything that is put on that scale."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nhgd.errors import InputError

Array = np.ndarray[Any, Any]
FARTHEST = 1e8  # standard deviations of a feature; powers of larger values overflow in float32


class TrustedScaleWarning(UserWarning):
    """The trusted samples do not look like X: most likely only one of the two went through a scaler."""


@dataclass(frozen=True)
class Scaling:
    """Mean and deviation of each feature.

    Attributes:
        center, scale: (P,); the scale of a feature that does not vary is 1.
        varies: which features do, (P,).
        piece: rows that are worked on at a time.
    """

    center: Array
    scale: Array
    varies: Array
    piece: int

    @classmethod
    def of(cls, X: Array, piece: int, times: Array | None = None) -> Scaling:
        """Of the rows of X, in pieces, each row as often as `times` says."""
        pieces = [slice(start, start + piece) for start in range(0, len(X), piece)]
        total = len(X) if times is None else times.sum()

        def counted(some: Array, rows: slice) -> Array:
            found: Array = some.sum(0, dtype=np.float64) if times is None else times[rows] @ some
            return found

        with np.errstate(over="ignore", invalid="ignore"):
            center = sum(counted(X[rows], rows) for rows in pieces) / total
            deviation = np.sqrt(sum(counted(np.square(X[rows] - center), rows) for rows in pieces) / total)
        if not np.isfinite(deviation).all():
            raise InputError(
                f"Feature {int(np.argmin(np.isfinite(deviation)))} of X holds numbers too large to compute with. Rescale it, or"
                " leave it out."
            )
        return cls(np.asarray(center), np.where(deviation > 0, deviation, 1.0), deviation > 0, piece)

    def scaled(self, X: Array) -> Array:
        """Rows on this scale, in float64."""
        found: Array = (X - self.center) / self.scale
        return found

    def tensor(self, X: Array, device: str | torch.device) -> Tensor:
        """Rows on this scale, in float32; samples too far away for that are refused."""
        rows = torch.empty(X.shape, dtype=torch.float32, device=device)
        for start in range(0, len(X), self.piece):
            piece = slice(start, start + self.piece)
            rows[piece] = torch.as_tensor(self.scaled(X[piece]), dtype=torch.float32)
            far = ~(rows[piece].abs() <= FARTHEST)  # nan is far, too
            if bool(far.any()):
                row, feature = (int(place) for place in torch.nonzero(far)[0])
                raise InputError(
                    f"Trusted sample {start + row} is too far from all others in feature {feature} to compute with."
                    " Correct it, or leave the sample or the feature out."
                )
        return rows

    def compare(self, X: Array) -> None:
        """Warn where most features of the trusted samples have another place or spread."""
        with np.errstate(over="ignore", invalid="ignore"):
            rows = self.scaled(X)[:, self.varies]
            shift, spread = np.abs(rows.mean(0)), rows.std(0)
        # A feature that is constant among a few samples is not informative; one that overflows is refused elsewhere.
        told = (spread > 0) & np.isfinite(spread)
        strange = told & ((shift > 2) | (spread > 4) | (spread < 1 / 4))
        if strange.sum() > told.sum() / 2:
            warnings.warn(
                f"The trusted samples are on another scale than X: {int(strange.sum())} of {int(told.sum())} features"
                " have another mean or spread. Earlier steps of a Pipeline transform X only: pass X_trusted through"
                " them too (Pipeline(..., transform_input=['X_trusted']), or pipeline[:-1].transform(X_trusted)), or"
                " omit the scaler, because features are standardised here.",
                TrustedScaleWarning,
                stacklevel=3,
            )
