"""Operations of captured steps that the CPU does faster in another form, with results that are equal to rounding.

A layer with few outputs is a product of a tall matrix with a narrow one, and a softmax over few classes a sum over short rows.
Intel's MKL and torch's own kernels take about half the time, or a tenth, where the long dimension comes last. Two products with
the same tall matrix, as of a layer's weight and of the vector along which a cross derivative is taken, read it once if they
are one product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

NARROW = 64  # columns, at most
TALL = 256  # rows, at least
CLASSES = 32  # of a softmax, at most

aten = torch.ops.aten
Call = tuple[Callable[..., Any], Any, Any]


def is_narrow_product(function: Any, shapes: Sequence[Any]) -> bool:
    """Whether it is a tall matrix times a narrow one that lies transposed in memory; `shapes` are its two factors."""
    if function is not aten.mm.default or not torch.backends.mkl.is_available():
        return False
    a, b = shapes
    floats = a.dtype == b.dtype and a.dtype in (torch.float32, torch.float64)
    rows, columns = a.size[0], b.size[1]
    return bool(
        floats
        and rows >= TALL
        and columns <= NARROW
        and 4 * columns <= rows
        and tuple(a.stride) == (a.size[1], 1)
        and tuple(b.stride) == (1, b.size[0])
    )


def faster(function: Any, args: Sequence[Any], results: Sequence[Tensor]) -> Call | None:
    """The call in another form, if there is a faster one."""
    if function is aten._log_softmax.default:
        x, dim, half = args
        rows, classes = x.shape if x.ndim == 2 else (0, 0)
        if not half and dim % 2 == 1 and rows >= TALL and 1 < classes <= CLASSES and x.is_contiguous():
            return _log_softmax, (x, results[0], x.new_empty(classes, rows), x.new_empty(classes, rows)), {}
    return None


def narrow_products(a: Tensor, narrow: Sequence[Tensor], results: Sequence[Tensor]) -> Call:
    """One product of a tall matrix with several narrow ones, each of which lies transposed in memory."""
    columns = [b.shape[1] for b in narrow]
    factors = a.new_empty(sum(columns), a.shape[1]) if len(narrow) > 1 else narrow[0].T
    products = a.new_empty(sum(columns), a.shape[0])
    places = list(zip(factors.split(columns), [b.T for b in narrow], strict=True)) if len(narrow) > 1 else []
    found = [(result, part.T) for result, part in zip(results, products.split(columns), strict=True)]
    return _narrow_products, (a.T, factors, products, places, found), {}


def _narrow_products(
    a: Tensor,
    factors: Tensor,
    products: Tensor,
    places: list[tuple[Tensor, Tensor]],
    found: list[tuple[Tensor, Tensor]],
) -> None:
    for place, b in places:
        place.copy_(b)
    torch.mm(factors, a, out=products)
    for result, part in found:
        result.copy_(part)


def _log_softmax(x: Tensor, result: Tensor, turned: Tensor, found: Tensor) -> None:
    turned.copy_(x.T)
    torch.log_softmax(turned, 0, out=found)
    result.copy_(found.T)
