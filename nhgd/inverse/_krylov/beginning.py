"""Where an iterative solve begins."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def begin(u: Tensor, product: Callable[[Tensor], Tensor], start: Tensor | None) -> tuple[Tensor, Tensor]:
    """A first x, which may be changed in place, and its residual u - H x.

    A given start is taken only where its residual is smaller than that of zero: far from the last point it can be worse.
    """
    if start is not None:
        r = u - product(start)
        if float(r.norm()) < float(u.norm()):
            return start.clone(), r
    return torch.zeros_like(u), u.clone()
