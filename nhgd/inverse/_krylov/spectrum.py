"""The largest eigenvalue of the inner Hessian, by power iteration."""

from __future__ import annotations

import torch
from torch import Tensor

from nhgd.oracle import Oracle


def largest_eigenvalue(at: Oracle, like: Tensor, steps: int) -> float:
    """The largest |eigenvalue| of H, approached from below by `steps` products from a fixed random start."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like)
    x /= x.norm()
    size = 0.0
    for _ in range(steps):
        hx = at.hvp(x)
        size = float(hx.norm())
        if not size > 0:
            return 0.0
        x = hx / size
    return size
