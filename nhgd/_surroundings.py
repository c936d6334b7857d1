"""Automatic mixed precision and a default device that the caller has set around the library.

    torch.set_default_device("cuda")
    with torch.autocast("cuda"):
        solver.run(steps=100)

The user's functions run under both, as in the user's own loop. Everything else does not: backward passes, statistics
and solves use the precision and the device of their numbers, and draw from generators of the CPU. torch keeps the casts
of parameters until the outermost context ends, whatever happens to the parameters meanwhile, so they are dropped at
every `Variable.view` of theta and v.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

_KINDS = ("cpu", "cuda")  # of devices
_CPU = torch.device("cpu")


class _Outside(threading.local):
    """The settings of this thread before they were switched off."""

    enabled: tuple[tuple[str, torch.dtype], ...] = ()
    caching: bool = True
    device: torch.device | None = None  # None: the CPU, which is torch's own default


_outside = _Outside()


@contextmanager
def library_settings() -> Iterator[None]:
    """A context without autocast and with the CPU as default device, except inside `user_settings`. Free if both are so
    already.
    """
    enabled = tuple((kind, torch.get_autocast_dtype(kind)) for kind in _KINDS if torch.is_autocast_enabled(kind))
    # A default device is a mode of torch's functions, and to ask for it takes a hundred times as long.
    device = torch.get_default_device() if torch._C._len_torch_function_stack() else _CPU
    if not enabled and device.type == "cpu":
        yield
        return
    before = _outside.enabled, _outside.caching, _outside.device
    if enabled:
        _outside.enabled, _outside.caching = enabled, torch.is_autocast_cache_enabled()
    try:
        with ExitStack() as stack:
            if device.type != "cpu":
                _outside.device = device
                stack.enter_context(_CPU)
            for kind, _ in enabled:
                stack.enter_context(torch.autocast(kind, enabled=False))
            yield
    finally:
        _outside.enabled, _outside.caching, _outside.device = before
        if enabled:
            torch.clear_autocast_cache()  # the caller may call the model next


@contextmanager
def user_settings() -> Iterator[None]:
    """A context with the caller's own settings, for the user's functions."""
    if not _outside.enabled and _outside.device is None:
        yield
        return
    with ExitStack() as stack:
        if _outside.device is not None:
            stack.enter_context(_outside.device)
        for kind, dtype in _outside.enabled:
            stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=_outside.caching))
        yield
