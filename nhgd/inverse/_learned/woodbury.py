"""Updates of an inverse A = M^{-1} in place, as M <- (1 - g) M + g R^T R, without inverting.

All of them begin with products R A and end in A <- scale A - W^T W, each of which is one pass over A. On a GPU with
Triton they read one half of A, which is symmetric, and an update by a few rows is five kernels.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

BLOCK = 512  # rows and columns
FEW = 64  # rows: with more of them, a matrix product is faster than the kernel


@cache
def _kernel() -> Any:
    """The module with the kernel; None without Triton."""
    found = importlib.import_module("nhgd.inverse._learned.rank_kernel")
    return None if found.triton is None else found


def subtract_outer(matrix: Tensor, roots: Tensor, scale: float) -> None:
    """A <- scale A - W^T W, in place, for W (n, D); a symmetric A stays symmetric in every bit."""
    rows = by_rows(matrix)
    if matrix.is_cuda and len(roots) <= FEW and rows is not None and _kernel() is not None:
        _kernel().subtract(rows, roots.contiguous(), scale)
        return
    if matrix.is_cuda and len(roots) == 1:
        matrix.addr_(roots[0], roots[0], beta=scale, alpha=-1)
        return
    if len(roots) > 1 and len(matrix) > BLOCK and not matrix.is_cuda:
        _by_halves(matrix, roots, scale)
        return
    matrix.addmm_(roots.T, roots, beta=scale, alpha=-1)  # on the CPU addr_ would not keep it symmetric
    if len(roots) > 1:
        # An asymmetric part would grow by the scale at each step. An outer product of one vector has none.
        matrix.add_(matrix.T.clone()).mul_(0.5)


def products(matrix: Tensor, rows: Tensor) -> Tensor:
    """R A, (n, D), for R (n, D) and a symmetric A."""
    view = _by_rows_for_kernels(matrix, rows)
    if view is not None:
        found: Tensor = _kernel().products(view, rows.contiguous())
        return found
    return rows @ matrix if len(rows) > 1 else torch.mv(matrix, rows[0])[None]


def by_rows(symmetric: Tensor) -> Tensor | None:
    """The same memory as a contiguous array, whose columns may lie together, as LAPACK leaves them; None if it has
    gaps.
    """
    if symmetric.is_contiguous():
        return symmetric
    return symmetric.T if symmetric.T.is_contiguous() else None


def _by_rows_for_kernels(matrix: Tensor, rows: Tensor) -> Tensor | None:
    """The same, where kernels take so many rows at once; None elsewhere."""
    if not matrix.is_cuda or _kernel() is None or len(rows) > _kernel().FEW:
        return None
    return by_rows(matrix)


def _by_halves(matrix: Tensor, roots: Tensor, scale: float) -> None:
    """The blocks below the diagonal are computed, those above it copied while they are in the cache."""
    edges = range(0, len(matrix), BLOCK)
    for i in edges:
        for j in range(0, i + 1, BLOCK):
            block = matrix[i : i + BLOCK, j : j + BLOCK]
            block.addmm_(roots[:, i : i + BLOCK].T, roots[:, j : j + BLOCK], beta=scale, alpha=-1)
            if i == j:
                block.add_(block.T.clone()).mul_(0.5)
            else:
                matrix[j : j + BLOCK, i : i + BLOCK] = block.T


def fold_row(inverse: Tensor, row: Tensor, gain: float) -> Tensor:
    """The update of A by one row r, (D,), in place: A is read twice and written once, and nothing waits for the device.

    Returns r.r, what the update divides by, which must be above 0, and the least and largest entry on A's diagonal.
    """
    view = _by_rows_for_kernels(inverse, row[None])
    if view is not None:
        found: Tensor = _kernel().fold(view, row[None].contiguous(), [gain])[0]
        return found
    keep = 1 - gain
    # With p = A r / (1 - g): A / (1 - g) - p p^T / (1 / g + p.r). Few kernels, because each costs more than it
    # computes.
    product = products(inverse, row[None])[0].div_(keep)
    both = torch.stack([product, row]) @ row
    small = both[0] + 1 / gain
    root = product.mul_(small.rsqrt())
    subtract_outer(inverse, root[None], 1 / keep)
    return torch.stack([both[1], small, *torch.aminmax(inverse.diagonal())])


def fold_rows(inverse: Tensor, rows: Tensor, gain: float) -> list[float]:
    """The update by several rows at once, R, (n, D), in place; returns what `fold_row` does but for r.r."""
    if len(rows) > rows.shape[1]:
        _, rows = torch.linalg.qr(rows, mode="r")  # the same R^T R in D rows
    keep = 1 - gain
    product = products(inverse, rows)  # R A, (n, D)
    small = (product @ rows.T).mul_(gain / keep)
    small.diagonal().add_(1.0)
    factor, info = torch.linalg.cholesky_ex(small)
    if int(info) != 0:
        return [0.0, 0.0, 0.0]
    root = torch.linalg.solve_triangular(factor, product, upper=False).mul_(math.sqrt(gain) / keep)
    subtract_outer(inverse, root, 1 / keep)
    return [1.0, *torch.stack(torch.aminmax(inverse.diagonal())).tolist()]


def fold_steps(inverse: Tensor, rows: Tensor, gains: Sequence[float]) -> Tensor:
    """The updates by the rows (n, D) one after another, in place, each with its gain, in one pass over A.

    With K_k = (1 - g_1) ... (1 - g_k), all of them together are

        M_n = K_n (M + R^T diag(g_k / K_k) R),       A_n = (A - V^T V) / K_n,       V = L^{-1} R A

    where L L^T = R A R^T + diag(K_k / g_k). The leading k rows of V belong to the first k updates: A_k = (A - V_k^T
    V_k) / K_k, and what update k divides by is L_kk^2 / K_k. So A is read once for R A and updated once, with few
    operations between.

    Returns what `fold_row` does for each of the rows, (n, 4).
    """
    view = _by_rows_for_kernels(inverse, rows)
    if view is not None:
        found: Tensor = _kernel().fold(view, rows.contiguous(), gains)
        return found
    kept, kept_over_gain, left = [], [], 1.0
    for gain in gains:
        left *= 1 - gain
        kept.append(left)
        kept_over_gain.append(left / gain)
    numbers = torch.tensor([kept, kept_over_gain], dtype=inverse.dtype).to(inverse.device, non_blocking=True)
    product = products(inverse, rows)  # (n, D)
    small = product @ rows.T
    small.diagonal().add_(numbers[1])
    factor, info = torch.linalg.cholesky_ex(small)
    v = torch.linalg.solve_triangular(factor, product, upper=False)
    diagonals = (inverse.diagonal() - v.square().cumsum(0)) / numbers[0, :, None]  # of all A_k
    divisors = factor.diagonal().square() / numbers[0]
    divisors = torch.where((info > 0) & (torch.arange(len(rows), device=info.device) >= info - 1), 0.0, divisors)
    subtract_outer(inverse, v.mul_(left**-0.5), 1 / left)
    return torch.stack([rows.square().sum(1), divisors, *torch.aminmax(diagonals, dim=1)], dim=1)
