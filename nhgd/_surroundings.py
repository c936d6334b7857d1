"""Automatic mixed precision that the caller has enabled around the library.

    with torch.autocast("cuda"):
        solver.run(steps=100)

The user's functions run under it, as in the user's own loop. Everything else does not: backward passes, statistics and
solves use the precision of their numbers. torch keeps the casts of parameters until the outermost context ends, whatever
happens to the parameters meanwhile, so they are dropped at every `Variable.view` of theta and v.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

_KINDS = ("cpu", "cuda")  # of devices


class _Outside(threading.local):
    """The autocast settings of this thread when autocast was switched off."""

    enabled: tuple[tuple[str, torch.dtype], ...] = ()
    caching: bool = True


_outside = _Outside()


@contextmanager
def without_autocast() -> Iterator[None]:
    """A context without autocast, except inside `user_autocast`. Free if it is already off."""
    enabled = tuple((kind, torch.get_autocast_dtype(kind)) for kind in _KINDS if torch.is_autocast_enabled(kind))
    if not enabled:
        yield
        return
    before = _outside.enabled, _outside.caching
    _outside.enabled, _outside.caching = enabled, torch.is_autocast_cache_enabled()
    try:
        with ExitStack() as stack:
            for kind, _ in enabled:
                stack.enter_context(torch.autocast(kind, enabled=False))
            yield
    finally:
        _outside.enabled, _outside.caching = before
        torch.clear_autocast_cache()  # the caller may call the model next


@contextmanager
def user_autocast() -> Iterator[None]:
    """A context with the caller's autocast settings, for the user's functions."""
    if not _outside.enabled:
        yield
        return
    with ExitStack() as stack:
        for kind, dtype in _outside.enabled:
            stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=_outside.caching))
        yield
