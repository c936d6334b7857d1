"""R A, A <- scale A - W^T W and whole updates for a symmetric A, as Triton kernels. Imported on demand, where there is
a CUDA device.

All of them read the blocks of A on and below its diagonal alone, which is half of it. A product leaves its sums over
each block in memory of their own, and they are added up in one order, so that two runs of one seed agree. An update
writes each block to both places, so A is symmetric afterwards in every bit.

Between the two passes over A, `fold` has two small kernels: on a host that launches slowly, each one more would be seen
in the time of an update.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

try:
    import triton  # type: ignore[import-not-found, unused-ignore]  # only where torch brings it
    import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
except ImportError:  # torch for the CPU comes without it
    triton = None

FEW = 16  # rows: so many at once, which is the least that a matrix product in a kernel takes
TILE = 64
COUNTS = ["count", "blocks", "parts"]  # a kernel for each of them would have to be compiled
COLUMNS = 64  # that one program adds up
SOME = 128  # sums that one program loads at once, over all rows
PRECISION = "ieee" if torch.version.hip else "tf32x3"  # three products of few digits make one of all of them

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _block(blocks):  # type: ignore[no-untyped-def] # Triton reads annotations
        # Row and column of this program's block. A long row of blocks and a short one make a row of the grid.
        even = blocks + blocks % 2
        x, y = tl.program_id(0), tl.program_id(1)
        long = x < even - y
        return tl.where(long, even - 1 - y, y), tl.where(long, x, x - (even - y))

    @triton.jit(do_not_specialize=COUNTS)  # type: ignore[untyped-decorator, unused-ignore]
    def _half_products(  # type: ignore[no-untyped-def]
        matrix, rows, sums, size, count, blocks, ROWS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr
    ):
        # Block (i, j) of A times a part of a row adds to the part i of its product, and the block transposed to the
        # part j. sums: (count, blocks, size), the second index being that of the other part.
        above, left = _block(blocks)
        if above >= blocks:
            return
        inner = tl.arange(0, BLOCK)
        i, j = above * BLOCK + inner, left * BLOCK + inner
        corner = matrix + (above * BLOCK).to(tl.int64) * size + left * BLOCK
        inside = (i < size)[:, None] & (j < size)[None, :]
        entries = tl.load(corner + inner[:, None] * size + inner[None, :], mask=inside, other=0.0)
        if ROWS == 1:
            across = tl.load(rows + j, mask=j < size, other=0.0)
            tl.store(sums + left * size + i, tl.sum(entries * across[None, :], 1), mask=i < size)
            if above != left:
                along = tl.load(rows + i, mask=i < size, other=0.0)
                tl.store(sums + above * size + j, tl.sum(entries * along[:, None], 0), mask=j < size)
        else:
            k = tl.arange(0, ROWS)
            kind = matrix.dtype.element_ty
            in_i = (k < count)[:, None] & (i < size)[None, :]
            in_j = (k < count)[:, None] & (j < size)[None, :]
            across = tl.load(rows + k[:, None] * size + j[None, :], mask=in_j, other=0.0)
            part = tl.dot(across, tl.trans(entries), input_precision=PRECISION, out_dtype=kind)
            tl.store(sums + (k * blocks + left).to(tl.int64)[:, None] * size + i[None, :], part, mask=in_i)
            if above != left:
                along = tl.load(rows + k[:, None] * size + i[None, :], mask=in_i, other=0.0)
                part = tl.dot(along, entries, input_precision=PRECISION, out_dtype=kind)
                tl.store(sums + (k * blocks + above).to(tl.int64)[:, None] * size + j[None, :], part, mask=in_j)

    @triton.jit(do_not_specialize=COUNTS)  # type: ignore[untyped-decorator, unused-ignore]
    def _add_up(  # type: ignore[no-untyped-def]
        sums, rows, product, inner, size, count, blocks, ROWS: tl.constexpr, SOME: tl.constexpr, COLUMNS: tl.constexpr
    ):
        # P = R A for some columns, and what they add to P R^T and to the squares of R.
        # inner: (programs, ROWS + 1, ROWS).
        k, slot = tl.arange(0, ROWS), tl.arange(0, SOME)
        i = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        held = (k < count)[:, None] & (i < size)[None, :]
        total = tl.zeros((ROWS, COLUMNS), dtype=product.dtype.element_ty)
        for first in range(0, blocks, SOME):
            place = (k[:, None] * blocks + first + slot[None, :]).to(tl.int64) * size
            mask = held[:, None, :] & (first + slot < blocks)[None, :, None]
            total += tl.sum(tl.load(sums + place[:, :, None] + i[None, None, :], mask=mask, other=0.0), 1)
        tl.store(product + k[:, None] * size + i[None, :], total, mask=held)
        row = tl.load(rows + k[:, None] * size + i[None, :], mask=held, other=0.0)
        mine = inner + tl.program_id(0) * (ROWS + 1) * ROWS
        tl.store(mine + k[:, None] * ROWS + k[None, :], tl.sum(total[:, None, :] * row[None, :, :], 2))
        tl.store(mine + ROWS * ROWS + k, tl.sum(row * row, 1))

    @triton.jit(do_not_specialize=COUNTS)  # type: ignore[untyped-decorator, unused-ignore]
    def _roots(  # type: ignore[no-untyped-def]
        matrix, product, inner, gains, roots, extremes, found, size, count, parts,
        ROWS: tl.constexpr, SOME: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        # V = L^{-1} P for some columns, in a pass over the columns of the Cholesky factor L, which every program makes
        # for itself, and the least and largest entry on the diagonal after each row. extremes: (programs, 2, ROWS).
        kind = product.dtype.element_ty
        k, part = tl.arange(0, ROWS), tl.arange(0, SOME)
        small, squares = tl.zeros((ROWS * ROWS,), dtype=kind), tl.zeros((ROWS,), dtype=kind)
        for first in range(0, parts, SOME):
            start = inner + ((first + part) * (ROWS + 1) * ROWS)[None, :]
            mask = (first + part < parts)[None, :]
            small += tl.sum(tl.load(start + tl.arange(0, ROWS * ROWS)[:, None], mask=mask, other=0.0), 1)
            squares += tl.sum(tl.load(start + ROWS * ROWS + k[:, None], mask=mask, other=0.0), 1)
        small = tl.reshape(small, (ROWS, ROWS))
        i = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        held = (k < count)[:, None] & (i < size)[None, :]
        v = tl.load(product + k[:, None] * size + i[None, :], mask=held, other=0.0)
        diagonal = tl.load(matrix + i.to(tl.int64) * (size + 1), mask=i < size, other=1.0)
        divisors = tl.zeros((ROWS,), dtype=kind)
        least, largest = divisors, divisors
        left = tl.full((), 1.0, kind)
        for step in range(count):
            gain = tl.load(gains + step)
            left *= 1 - gain
            column = tl.sum(tl.where((k == step)[None, :], small, 0.0), 1)
            pivot = tl.sum(tl.where(k == step, column, 0.0), 0) + left / gain
            below = tl.where(k > step, column, 0.0) / tl.sqrt(pivot)
            small -= below[:, None] * below[None, :]
            root = tl.sum(tl.where((k == step)[:, None], v, 0.0), 0) / tl.sqrt(pivot)
            v = tl.where((k == step)[:, None], root[None, :], v - below[:, None] * root[None, :])
            diagonal -= root * root
            now = tl.where(diagonal == diagonal, diagonal / left, float("-inf"))  # so that a nan is seen
            least = tl.where(k == step, tl.min(tl.where(i < size, now, float("inf")), 0), least)
            largest = tl.where(k == step, tl.max(tl.where(i < size, now, float("-inf")), 0), largest)
            divisors = tl.where(k == step, pivot / left, divisors)
        tl.store(roots + k[:, None] * size + i[None, :], v / tl.sqrt(left), mask=held)
        mine = extremes + tl.program_id(0) * 2 * ROWS
        tl.store(mine + k, least)
        tl.store(mine + ROWS + k, largest)
        if tl.program_id(0) == 0:
            tl.store(found + 4 * k, squares, mask=k < count)
            tl.store(found + 4 * k + 1, divisors, mask=k < count)
            tl.store(found + 4 * count, 1 / left)

    @triton.jit(do_not_specialize=COUNTS)  # type: ignore[untyped-decorator, unused-ignore]
    def _tile(matrix, roots, scale, size, count, blocks, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        above, left = _block(blocks)
        if above >= blocks:
            return
        inner = tl.arange(0, BLOCK)
        i, j = above * BLOCK + inner, left * BLOCK + inner
        within = inner[:, None] * size + inner[None, :]
        corner = matrix + (above * BLOCK).to(tl.int64) * size + left * BLOCK
        inside = (i < size)[:, None] & (j < size)[None, :]
        entries = tl.load(corner + within, mask=inside, other=0.0, eviction_policy="evict_first") * tl.load(scale)
        for k in range(count):
            along = tl.load(roots + k * size + i, mask=i < size, other=0.0)
            across = tl.load(roots + k * size + j, mask=j < size, other=0.0)
            entries -= along[:, None] * across[None, :]
        turned = tl.trans(entries)
        if above == left:
            entries = tl.where(inner[:, None] >= inner[None, :], entries, turned)
        else:
            mirrored = matrix + (left * BLOCK).to(tl.int64) * size + above * BLOCK
            inside_too = (j < size)[:, None] & (i < size)[None, :]
            tl.store(mirrored + within, turned, mask=inside_too, eviction_policy="evict_first")
        tl.store(corner + within, entries, mask=inside, eviction_policy="evict_first")

    @triton.jit(do_not_specialize=COUNTS)  # type: ignore[untyped-decorator, unused-ignore]
    def _extremes(extremes, found, count, parts, ROWS: tl.constexpr, SOME: tl.constexpr):  # type: ignore[no-untyped-def]
        k, part = tl.arange(0, ROWS), tl.arange(0, SOME)
        least = tl.full((ROWS,), float("inf"), found.dtype.element_ty)
        largest = -least
        for first in range(0, parts, SOME):
            place = extremes + (first + part)[:, None] * 2 * ROWS + k[None, :]
            mask = (first + part < parts)[:, None]
            least = tl.minimum(least, tl.min(tl.load(place, mask=mask, other=float("inf")), 0))
            largest = tl.maximum(largest, tl.max(tl.load(place + ROWS, mask=mask, other=float("-inf")), 0))
        tl.store(found + 4 * k + 2, least, mask=k < count)
        tl.store(found + 4 * k + 3, largest, mask=k < count)


def subtract(matrix: Tensor, roots: Tensor, scale: float) -> None:
    """A <- scale A - W^T W, in place, for W (n, D) and a symmetric A (D, D), both contiguous."""
    factor = torch.full((1,), scale, dtype=matrix.dtype, device=matrix.device)  # a number would become a float32
    with torch.cuda.device(matrix.device):
        _subtract(matrix, roots, factor)


def _subtract(matrix: Tensor, roots: Tensor, scale: Tensor) -> None:
    size = len(matrix)
    # Where not every row begins at a multiple of 16 bytes, entries are loaded one by one, whose addresses take
    # registers.
    tile, warps = (TILE, 4) if size % 16 == 0 else (TILE // 2, 8)
    blocks = triton.cdiv(size, tile)
    _tile[_triangle(blocks)](matrix, roots, scale, size, len(roots), blocks, BLOCK=tile, num_warps=warps)


def _triangle(blocks: int) -> tuple[int, int]:
    """A grid with a program for each block on and below the diagonal; with an odd number, one row more."""
    even = blocks + blocks % 2
    return even + 1, even // 2


def _sums(matrix: Tensor, rows: Tensor) -> Tensor:
    """(n, blocks, D), whose sum over the blocks is R A."""
    size, count = len(matrix), len(rows)
    blocks = triton.cdiv(size, TILE)
    sums = torch.empty(count, blocks, size, dtype=matrix.dtype, device=matrix.device)
    _half_products[_triangle(blocks)](
        matrix, rows, sums, size, count, blocks, ROWS=_padded(count), BLOCK=TILE, PRECISION=PRECISION
    )
    return sums


def _padded(count: int) -> int:
    """One or all, so that few kernels are compiled."""
    return 1 if count == 1 else FEW


def _added_up(sums: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """P = R A, (n, D), and what each program adds to P R^T and to the squares of R."""
    count, blocks, size = sums.shape
    padded = _padded(count)
    product, inner = torch.empty_like(rows), sums.new_empty(triton.cdiv(size, COLUMNS), padded + 1, padded)
    grid = (len(inner),)
    _add_up[grid](
        sums, rows, product, inner, size, count, blocks, ROWS=padded, SOME=SOME // padded, COLUMNS=COLUMNS
    )  # fmt: skip
    return product, inner


def products(matrix: Tensor, rows: Tensor) -> Tensor:
    """R A, (n, D), for R (n, D) of `FEW` rows at most and a symmetric A (D, D), both contiguous."""
    with torch.cuda.device(matrix.device):
        return _added_up(_sums(matrix, rows), rows)[0]


def fold(matrix: Tensor, rows: Tensor, gains: Sequence[float]) -> Tensor:
    """`woodbury.fold_steps` for `FEW` rows at most, with a symmetric A and R contiguous."""
    count, size = rows.shape
    padded = _padded(count)
    with torch.cuda.device(matrix.device):
        sums = _sums(matrix, rows)  # what follows is launched while this is at work
        if count == 1:  # can be captured
            steps = sums.new_full((1,), gains[0])
        else:
            steps = torch.tensor(gains, dtype=sums.dtype).to(sums.device, non_blocking=True)
        product, inner = _added_up(sums, rows)
        parts = len(inner)
        roots, extremes = torch.empty_like(rows), sums.new_empty(parts, 2, padded)
        found = sums.new_empty(4 * count + 1)
        _roots[(parts,)](
            matrix, product, inner, steps, roots, extremes, found, size, count, parts,
            ROWS=padded, SOME=SOME // padded, COLUMNS=COLUMNS,
        )  # fmt: skip
        _subtract(matrix, roots, found[4 * count :])
        _extremes[(1,)](extremes, found, count, parts, ROWS=padded, SOME=SOME)
    return found[: 4 * count].view(count, 4)
