"""A <- scale A - W^T W in one pass over A, as a Triton kernel. Imported on demand, where there is a CUDA device."""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton  # type: ignore[import-not-found, unused-ignore]  # only where torch brings it
    import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
except ImportError:  # torch for the CPU comes without it
    triton = None

TILE = 64

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _tile(matrix, roots, scale, size, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # Triton reads annotations
        # Entries (i, j) and (j, i) take the same products in the same order, so a symmetric array stays so in every bit.
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = (i[:, None] < size) & (j[None, :] < size)
        place = matrix + i[:, None].to(tl.int64) * size + j[None, :]
        entries = tl.load(place, mask=inside, other=0.0) * tl.load(scale)
        for k in range(count):
            along = tl.load(roots + k * size + i, mask=i < size, other=0.0)
            across = tl.load(roots + k * size + j, mask=j < size, other=0.0)
            entries -= along[:, None] * across[None, :]
        tl.store(place, entries, mask=inside)


def subtract(matrix: Tensor, roots: Tensor, scale: float) -> None:
    """A <- scale A - W^T W, in place, for W (n, D) and A (D, D), both contiguous."""
    size = len(matrix)
    factor = torch.full((1,), scale, dtype=matrix.dtype, device=matrix.device)  # a number would become a float32
    grid = (triton.cdiv(size, TILE),) * 2
    with torch.cuda.device(matrix.device):
        _tile[grid](matrix, roots, factor, size, len(roots), BLOCK=TILE)
