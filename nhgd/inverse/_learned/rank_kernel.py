"""A R^T and A <- scale A - W^T W for a symmetric A, as Triton kernels. Imported on demand, where there is a CUDA
device.

Both read the blocks of A on and below its diagonal alone, which is half of it. A product leaves its sums over each
block in memory of their own, and they are added up in one order, so that two runs of one seed agree. An update writes
each block to both places, so A is symmetric afterwards in every bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton  # type: ignore[import-not-found, unused-ignore]  # only where torch brings it
    import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
except ImportError:  # torch for the CPU comes without it
    triton = None

TILE = 64
SUMS = 128  # columns that one program adds up

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _tile(matrix, roots, scale, size, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # Triton reads annotations
        if tl.program_id(1) > tl.program_id(0):
            return
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        below = i[:, None] >= j[None, :]
        inside = (i[:, None] < size) & (j[None, :] < size) & below
        entries = tl.load(matrix + i[:, None].to(tl.int64) * size + j[None, :], mask=inside, other=0.0) * tl.load(scale)
        for k in range(count):
            along = tl.load(roots + k * size + i, mask=i < size, other=0.0)
            across = tl.load(roots + k * size + j, mask=j < size, other=0.0)
            entries -= along[:, None] * across[None, :]
        tl.store(matrix + i[:, None].to(tl.int64) * size + j[None, :], entries, mask=inside)
        mirrored = (j[:, None] < size) & (i[None, :] < size) & (i[None, :] > j[:, None])
        tl.store(matrix + j[:, None].to(tl.int64) * size + i[None, :], tl.trans(entries), mask=mirrored)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _half_products(matrix, rows, sums, size, count, blocks, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        # Block (i, j) of A times a part of a row adds to the part i of its product, and the block transposed to the
        # part j. sums: (count, blocks, size), the second index being that of the other part.
        if tl.program_id(1) > tl.program_id(0):
            return
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        below = i[:, None] >= j[None, :]
        inside = (i[:, None] < size) & (j[None, :] < size) & below
        entries = tl.load(matrix + i[:, None].to(tl.int64) * size + j[None, :], mask=inside, other=0.0)
        if tl.program_id(0) == tl.program_id(1):
            entries = tl.where(below, entries, tl.trans(entries))
        for k in range(count):
            across = tl.load(rows + k * size + j, mask=j < size, other=0.0)
            place = sums + (k * blocks + tl.program_id(1)).to(tl.int64) * size + i
            tl.store(place, tl.sum(entries * across[None, :], 1), mask=i < size)
            if tl.program_id(0) != tl.program_id(1):
                along = tl.load(rows + k * size + i, mask=i < size, other=0.0)
                place = sums + (k * blocks + tl.program_id(0)).to(tl.int64) * size + j
                tl.store(place, tl.sum(entries * along[:, None], 0), mask=j < size)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _add_up(sums, product, size, blocks, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        k = tl.program_id(1).to(tl.int64)
        total = tl.zeros((BLOCK,), dtype=product.dtype.element_ty)
        for block in range(blocks):
            total += tl.load(sums + (k * blocks + block) * size + i, mask=i < size, other=0.0)
        tl.store(product + k * size + i, total, mask=i < size)


def subtract(matrix: Tensor, roots: Tensor, scale: float) -> None:
    """A <- scale A - W^T W, in place, for W (n, D) and a symmetric A (D, D), both contiguous."""
    size = len(matrix)
    factor = torch.full((1,), scale, dtype=matrix.dtype, device=matrix.device)  # a number would become a float32
    grid = (triton.cdiv(size, TILE),) * 2
    with torch.cuda.device(matrix.device):
        _tile[grid](matrix, roots, factor, size, len(roots), BLOCK=TILE)


def products(matrix: Tensor, rows: Tensor) -> Tensor:
    """R A, (n, D), for R (n, D) and a symmetric A (D, D), both contiguous."""
    size, count = len(matrix), len(rows)
    blocks = triton.cdiv(size, TILE)
    sums = torch.empty(count, blocks, size, dtype=matrix.dtype, device=matrix.device)
    found = torch.empty_like(rows)
    with torch.cuda.device(matrix.device):
        _half_products[(blocks, blocks)](matrix, rows, sums, size, count, blocks, BLOCK=TILE)
        _add_up[(triton.cdiv(size, SUMS), count)](sums, found, size, blocks, BLOCK=SUMS)
    return found
