"""Updates of an inverse A = M^{-1} in place, as M <- (1 - g) M + g R^T R, without inverting.

All of them end in A <- scale A - W^T W, which is one pass over A on a GPU with Triton.
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


def by_rows(symmetric: Tensor) -> Tensor | None:
    """The same memory as a contiguous array, whose columns may lie together, as LAPACK leaves them; None if it has gaps."""
    return next((view for view in (symmetric, symmetric.T) if view.is_contiguous()), None)


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
    keep = 1 - gain
    # With p = A r / (1 - g): A / (1 - g) - p p^T / (1 / g + p.r). Few kernels, because each costs more than it computes.
    product = torch.addmv(row, inverse, row, beta=0, alpha=1 / keep)
    both = torch.stack([product, row]) @ row
    small = both[0] + 1 / gain
    root = product * small.rsqrt()
    subtract_outer(inverse, root[None], 1 / keep)
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
    subtract_outer(inverse, root, 1 / keep)
    return [1.0, *torch.stack(torch.aminmax(inverse.diagonal())).tolist()]


def fold_steps(inverse: Tensor, rows: Tensor, gains: Sequence[float]) -> Tensor:
    """The updates by the rows (n, D) one after another, in place, each with its gain, in one pass over A.

    A is read once for A R^T and updated once; between them everything happens in n vectors. With c_k = 1 / (1 - g_k),

        p_k = c_k A_k r_k,     w_k = p_k / sqrt(1 / g_k + p_k.r_k),     A_{k+1} = c_k A_k - w_k w_k^T

    Returns what `fold_row` does for each of the rows, (n, 4).
    """
    product = rows @ inverse  # (n, D)
    diagonal = inverse.diagonal().clone()
    roots = torch.zeros_like(rows)
    total, found = 1.0, []
    for k, gain in enumerate(gains):
        keep = 1 - gain
        row, before = rows[k], roots[:k]
        p = torch.addmv(product[k], before.T, before @ row, beta=total / keep, alpha=-1 / keep)
        small = p @ row + 1 / gain
        roots[:k].mul_(keep**-0.5)
        roots[k] = p * small.rsqrt()
        total /= keep
        diagonal = diagonal / keep - roots[k].square()
        found.append(torch.stack([row @ row, small, *torch.aminmax(diagonal)]))
    subtract_outer(inverse, roots, total)
    return torch.stack(found)
