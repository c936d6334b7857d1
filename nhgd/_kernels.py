"""Which kernels modules run on: those that torch can differentiate, once or twice."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


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
