"""Operations of captured steps that the CPU does faster in another form, with results that are equal to rounding.

A layer with few outputs is a product of a tall matrix with a narrow one, and a softmax over few classes a sum over
short rows. Intel's MKL and torch's own kernels take about half the time, or a tenth, where the long dimension comes
last. Two products with the same tall matrix, as of a layer's weight and of the vector along which a cross derivative is
taken, read it once if they are one product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nhgd._kernels import is_narrow
from nhgd._turned import few_classes, softmax_gradient

# torch's own functions take less time to call than operations by their full names, and call the same.
BOUND = (
    "abs add addcdiv addcmul amax amin bmm cat clamp clamp_max clamp_min div dot eq exp ge gt index_select le lerp log lt"
    " maximum minimum mm mul mv ne neg pow reciprocal sqrt stack sub where"
)
BOUND_IN_PLACE = "add_ addcdiv_ addcmul_ clamp_ clamp_max_ clamp_min_ copy_ div_ index_put_ lerp_ mul_ sqrt_ sub_ zero_"

aten = torch.ops.aten
Call = tuple[Callable[..., Any], Any, Any]


def narrow_product(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any, Any] | None:
    """The tall matrix, the narrow one that lies transposed in memory, and what is added to each row of their product,
    which may be None; None for any other operation.
    """
    if kwargs or function not in (aten.mm.default, aten.addmm.default):
        return None
    bias, a, b = (None, *args) if function is aten.mm.default else args
    dense = tuple(a.stride) == (a.size[1], 1) and tuple(b.stride) == (1, b.size[0])
    alike = a.dtype == b.dtype and (bias is None or (len(bias.size) == 1 and bias.dtype == a.dtype))
    return (a, b, bias) if dense and alike and is_narrow(a.size[0], b.size[1], a.dtype) else None


def bound(function: Any, args: Sequence[Any], kwargs: dict[str, Any], outs: dict[str, Tensor]) -> Call:
    """The call, by torch's own function where that takes the same arguments."""
    name = function._overloadpacket.__name__
    # They take no gaps among indices, and understand a second number in another way.
    gaps = any(item is None for given in args if isinstance(given, (list, tuple)) for item in given)
    numbers = name.startswith(("add", "sub")) and "Scalar" in function._overloadname
    if gaps or numbers:
        return function, args, kwargs | outs
    if list(outs) == ["out"] and name in BOUND.split():
        return getattr(torch, name), args, kwargs | outs
    if not outs and name in BOUND_IN_PLACE.split():
        return getattr(Tensor, name), args, kwargs
    return function, args, kwargs | outs


def faster(function: Any, args: Sequence[Any], results: Sequence[Tensor]) -> Call | None:
    """The call in another form, if there is a faster one."""
    if function is aten._log_softmax.default:
        x, dim, half = args
        if not half and few_classes(x, dim) and x.is_contiguous():
            rows, classes = x.shape
            return _log_softmax, (x, results[0], x.new_empty(classes, rows), x.new_empty(classes, rows)), {}
    if function is aten._log_softmax_backward_data.default:
        gradient, output, dim, dtype = args
        alike = dtype == gradient.dtype == output.dtype and dtype in (torch.float32, torch.float64)
        dense = gradient.is_contiguous() and output.is_contiguous()
        if alike and dense and few_classes(output, dim):
            rows, classes = output.shape
            own = output.new_ones(classes), output.new_empty(rows, 1), torch.empty_like(output)
            return softmax_gradient, (gradient, output, *own, results[0]), {}
    if function is aten.index.Tensor:
        x, indices = args
        if x.ndim == 1 and x.is_contiguous() and len(indices) == 1 and indices[0].dtype == torch.int64:
            return torch.take, (x, indices[0]), {"out": results[0]}
    return None


def narrow_products(a: Tensor, narrow: Sequence[tuple[Tensor, Tensor | None]], results: Sequence[Tensor]) -> Call:
    """One product of a tall matrix with several narrow ones, each of which lies transposed in memory, with a row that
    is added to all of it or without.
    """
    columns = [b.shape[1] for b, _ in narrow]
    first, added = narrow[0]
    factors, sums = first.T, None if added is None else added[:, None]
    places: list[tuple[Tensor, Tensor]] = []
    if len(narrow) > 1:
        factors = a.new_empty(sum(columns), a.shape[1])
        places = list(zip(factors.split(columns), [b.T for b, _ in narrow], strict=True))
        if any(bias is not None for _, bias in narrow):
            sums = a.new_zeros(sum(columns), 1)
            parts = zip(sums[:, 0].split(columns), narrow, strict=True)
            places += [(place, bias) for place, (_, bias) in parts if bias is not None]
    products = a.new_empty(sum(columns), a.shape[0])
    found = [(result, part.T) for result, part in zip(results, products.split(columns), strict=True)]
    return _narrow_products, (a.T, factors, sums, products, places, found), {}


def _narrow_products(
    a: Tensor,
    factors: Tensor,
    sums: Tensor | None,
    products: Tensor,
    places: list[tuple[Tensor, Tensor]],
    found: list[tuple[Tensor, Tensor]],
) -> None:
    for place, part in places:
        place.copy_(part)
    if sums is None:
        torch.mm(factors, a, out=products)
    else:
        torch.addmm(sums, factors, a, out=products)
    for result, part in found:
        result.copy_(part)


def _log_softmax(x: Tensor, result: Tensor, turned: Tensor, found: Tensor) -> None:
    turned.copy_(x.T)
    torch.log_softmax(turned, 0, out=found)
    result.copy_(found.T)
