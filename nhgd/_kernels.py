"""Which kernels modules run on: those that torch can differentiate, once or twice; and which products have a faster
form.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

NARROW = 64  # columns, at most
TALL = 256  # rows, at least


def is_narrow(rows: int, columns: int, dtype: torch.dtype) -> bool:
    """Whether a product with so few columns takes less time where its long dimension comes last, as with Intel's
    MKL.
    """
    known = dtype in (torch.float32, torch.float64) and torch.backends.mkl.is_available()
    return known and rows >= TALL and columns <= NARROW and 4 * columns <= rows


def narrow_is_slow(x: Tensor, weight: Tensor) -> bool:
    """Whether x (rows, in) times the transposed weight (columns, in) is such a product."""
    here = x.device.type == "cpu" and x.is_contiguous() and weight.is_contiguous()
    return here and x.dtype == weight.dtype and is_narrow(x.shape[0], weight.shape[0], x.dtype)


@contextmanager
def differentiable_kernels(recurrent: bool, twice: bool = True) -> Iterator[None]:
    """Run compiled modules as plain Python, and `recurrent` layers without cuDNN; if derivatives are taken `twice`,
    attention on the math kernel.
    """
    with ExitStack() as stack:
        stack.enter_context(uncompiled())
        if recurrent:
            stack.enter_context(_without_cudnn())
        if twice:
            stack.enter_context(torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH))
        yield


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled modules as plain Python inside. Free unless something was compiled."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def _without_cudnn() -> Iterator[None]:
    """Keep recurrent layers off cuDNN, whose kernels have no second derivative."""
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before
