"""Block-diagonal splitting of large Kronecker factors."""

from __future__ import annotations

from math import ceil

import torch.nn.functional as F
from torch import Tensor


def blocks(size: int, most: int | None, even: bool) -> tuple[int, int]:
    """How many blocks a factor of some rows is split into, and the rows of each; `even`: without any left over.

    >>> blocks(3072, 1024, even=True), blocks(3073, 1024, even=False), blocks(7, 4, even=True)
    ((3, 1024), (4, 769), (1, 7))
    """
    if most is None or size <= most:
        return 1, size
    count = ceil(size / most)
    if not even:
        return count, ceil(size / count)
    return next(((n, size // n) for n in range(count, 2 * count + 1) if size % n == 0), (1, size))


def split(layer: tuple[int, int, int], most: int | None) -> tuple[int, int, int]:
    """(groups, out, in) of a layer with blocks of its factors; a convolution in groups is not split.

    >>> split((1, 3072, 769), 1024)
    (3, 1024, 769)
    """
    groups, out, columns = layer
    if groups > 1 or most is None:
        return layer
    (rows, height), (wide, width) = blocks(out, most, even=True), blocks(columns, most, even=False)
    return rows * wide, height, width


def gram(rows: Tensor, count: int, width: int) -> Tensor:
    """The diagonal blocks of rows^T rows, (count, width, width), for rows (N, n); what is beyond n counts as 0."""
    padded = F.pad(rows, (0, count * width - rows.shape[1]))
    each: Tensor = padded.unflatten(1, (count, width)).transpose(0, 1)
    return each.mT @ each
