"""What the directions of a solve reveal about the Hessian."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from nhgd.errors import NonFiniteError


class DirectionalCurvature:
    """The curvature along the directions so far, with its sign distinguished from rounding errors.

    Args:
        owner: who asks, for messages.
        dtype: of the products.

    Attributes:
        last: p.Hp of the last direction.
        largest: |Hp| / |p| of the steepest one.
        negative: whether one had clearly negative curvature.
        vanished: whether one had a curvature that is of rounding size beside the largest. That alone does not make H
            singular: a parameter may be badly scaled.
    """

    def __init__(self, owner: str, dtype: torch.dtype) -> None:
        self.owner = owner
        self.eps = torch.finfo(dtype).eps
        self.last = 0.0
        self.largest = 0.0
        self.negative = False
        self.vanished = False

    def positive(self, p: Tensor, hp: Tensor, count: int) -> bool:
        """Whether the curvature along p is above zero; `count` is the number of the product."""
        if p.dtype.itemsize < 4:  # where the square of a length may overflow
            p, hp = p.float(), hp.float()
        self.last, pp, steepness = torch.stack([p.dot(hp), p.dot(p), hp.dot(hp)]).tolist()
        if not math.isfinite(self.last):
            if self.vanished:  # an iteration on rounding errors has run away
                return False
            raise NonFiniteError(
                f"{self.owner}: the curvature along the search direction is {self.last} in product {count}."
            )
        self.largest = max(self.largest, (steepness / pp) ** 0.5 if pp > 0 else 0.0)
        rounding = self.eps * self.largest * pp
        if self.last > rounding:
            return True
        # A product sums over samples and layers: one rounding error more or less is no negative curvature.
        clearly = self.last < -100 * rounding
        self.negative, self.vanished = self.negative or clearly, self.vanished or not clearly
        return self.last > 0

    def notes(self, x: Tensor, length: float, size: float) -> dict[str, Any]:
        """The notes of a solve that ended at x with a residual of this length, for a u of this size."""
        said: dict[str, Any] = {"negative_curvature": self.negative}
        if self.vanished and not self.negative:
            shown = self.eps * self.largest * float(x.norm())  # by what is just above rounding
            said |= {"outside": length / size, "cut": length / shown if shown > 0 else float(length > 0)}
        return said
