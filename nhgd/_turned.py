"""Products and softmaxes with few columns, taken with the long dimension last.

Intel's MKL and torch's own kernels take half the time for such a product, and a tenth for a softmax over few classes,
if the long dimension comes last. Results differ by rounding alone, and lie in memory as usual. It is done below
autograd, so that graphs stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nhgd import _tape as tape
from nhgd._kernels import TALL, is_narrow

MANY = 1024  # samples of a pass for which it pays to look at each operation
CLASSES = 32  # of a softmax, at most

aten = torch.ops.aten


@contextmanager
def turned(device: torch.device, samples: int | None) -> Iterator[None]:
    """A context for a pass over many samples on the CPU; captured steps have such forms of their own."""
    if device.type != "cpu" or samples is None or samples < MANY or tape.tape() is not None:
        yield
        return
    with Turned():  # type: ignore[no-untyped-call]  # of torch
        yield


class Turned(TorchDispatchMode):
    """Takes operations in a turned form where that is faster."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        form = _FORMS.get(func)
        if form is not None and not kwargs and all(_is_plain(a) for a in args if isinstance(a, Tensor)):
            found = form(*args)
            if found is not None:
                return found
        return func(*args, **(kwargs or {}))


def few_classes(x: Tensor, dim: int) -> bool:
    """Whether a softmax of x along this dimension is over few classes of many samples."""
    rows, classes = x.shape if x.ndim == 2 else (0, 0)
    return dim % 2 == 1 and rows >= TALL and 1 < classes <= CLASSES


def softmax_gradient(
    gradient: Tensor, output: Tensor, ones: Tensor, sums: Tensor, probabilities: Tensor, result: Tensor
) -> None:
    """gradient - exp(output) * (sum of the gradient over classes), into `result`, by way of the other memory."""
    torch.exp(output, out=probabilities)
    torch.mv(gradient, ones, out=sums[:, 0])
    torch.addcmul(gradient, probabilities, sums, value=-1, out=result)


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided and tensor.device.type == "cpu"
    )


def _is_narrow(a: Tensor, b: Tensor) -> bool:
    dense = a.is_contiguous() and b.T.is_contiguous() and a.dtype == b.dtype
    return dense and is_narrow(a.shape[0], b.shape[1], a.dtype)


def _mm(a: Tensor, b: Tensor) -> Tensor | None:
    return torch.mm(b.T, a.T).T.contiguous() if _is_narrow(a, b) else None


def _addmm(bias: Tensor, a: Tensor, b: Tensor) -> Tensor | None:
    if bias.ndim != 1 or bias.dtype != a.dtype or not _is_narrow(a, b):
        return None
    return torch.addmm(bias[:, None], b.T, a.T).T.contiguous()


def _log_softmax(x: Tensor, dim: int, half: bool) -> Tensor | None:
    known = x.dtype in (torch.float32, torch.float64) and few_classes(x, dim)
    return x.T.contiguous().log_softmax(0).T.contiguous() if known else None


def _log_softmax_gradient(gradient: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Tensor | None:
    alike = dtype == gradient.dtype == output.dtype and dtype in (torch.float32, torch.float64)
    if not (alike and few_classes(output, dim) and gradient.shape == output.shape):
        return None
    rows, classes = output.shape
    result = torch.empty_like(output, memory_format=torch.contiguous_format)
    softmax_gradient(
        gradient,
        output,
        output.new_ones(classes),
        output.new_empty(rows, 1),
        torch.empty_like(result),
        result,
    )
    return result


_FORMS: dict[Any, Callable[..., Tensor | None]] = {
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten._log_softmax.default: _log_softmax,
    aten._log_softmax_backward_data.default: _log_softmax_gradient,
}
