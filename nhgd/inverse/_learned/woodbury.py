"""Updates of an inverse A = M^{-1} in place, as M <- (1 - g) M + g R^T R, without inverting."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def fold_row(inverse: Tensor, row: Tensor, gain: float) -> Tensor:
    """The update of A by one row r, (D,), in place: A is read twice and written once, and nothing waits for the device.

    Returns r.r, what the update divides by, which must be above 0, and the least and largest entry on A's diagonal.
    """
    keep = 1 - gain
    # With p = A r / (1 - g): A / (1 - g) - p p^T / (1 / g + p.r). Few kernels, because each costs more than it computes.
    product = torch.addmv(row, inverse, row, beta=0, alpha=1 / keep)
    both = torch.stack([product, row]) @ row
    small = both[0] + 1 / gain
    root = product * small.rsqrt()
    if inverse.is_cuda:
        inverse.addr_(root, root, beta=1 / keep, alpha=-1)
    else:
        inverse.addmm_(root[:, None], root[None], beta=1 / keep, alpha=-1)  # addr_ would not keep it symmetric here
    return torch.stack([both[1], small, *torch.aminmax(inverse.diagonal())])


def fold_rows(inverse: Tensor, rows: Tensor, gain: float) -> list[float]:
    """The update by several rows at once, R, (n, D), in place; returns what `fold_row` does but for r.r."""
    if len(rows) > rows.shape[1]:
        _, rows = torch.linalg.qr(rows, mode="r")  # the same R^T R in D rows
    keep = 1 - gain
    product = rows @ inverse  # R A, (n, D)
    small = (product @ rows.T).mul_(gain / keep)
    small.diagonal().add_(1.0)
    factor, info = torch.linalg.cholesky_ex(small)
    if int(info) != 0:
        return [0.0, 0.0, 0.0]
    root = torch.linalg.solve_triangular(factor, product, upper=False).mul_(math.sqrt(gain) / keep)
    inverse.addmm_(root.T, root, beta=1 / keep, alpha=-1)
    # An asymmetric part would grow by 1 / keep at each step. An outer product of one vector has none.
    inverse.add_(inverse.T.clone()).mul_(0.5)
    return [1.0, *torch.stack(torch.aminmax(inverse.diagonal())).tolist()]
