"""What the directions of a solve tell about the Hessian."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from nhgd.errors import NonFiniteError


class Curvature:
    """The curvature along the directions so far, with its sign told from rounding errors.

    Args:
        owner: who asks, for messages.
        dtype: of the products.

    Attributes:
        last: p.Hp of the last direction.
        largest: |Hp| / |p| of the steepest one.
        negative: whether one had clearly negative curvature.
        vanished: whether one had a curvature of rounding size.
    """

    def __init__(self, owner: str, dtype: torch.dtype) -> None:
        self.owner = owner
        self.eps = torch.finfo(dtype).eps
        self.last = 0.0
        self.largest = 0.0
        self.negative = False
        self.vanished = False

    def positive(self, p: Tensor, hp: Tensor, count: int) -> bool:
        """Whether the curvature along p is above zero by more than rounding; `count` is the number of the product."""
        if p.dtype.itemsize < 4:  # where the square of a length may overflow
            p, hp = p.float(), hp.float()
        self.last, pp, steepness = torch.stack([p.dot(hp), p.dot(p), hp.dot(hp)]).tolist()
        if not math.isfinite(self.last):
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
        return False

    def notes(self, residual: float) -> dict[str, Any]:
        """What a solve that ended with this relative residual says of it."""
        said: dict[str, Any] = {"negative_curvature": self.negative}
        if self.vanished and not self.negative:
            said["outside"] = residual
        return said
