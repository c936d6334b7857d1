"""Numbers that the host reads from a GPU while it goes on with other work.

Reading a number waits for everything that was launched before it on the same stream. Where the number depends only on
what was there at a mark, it is computed on a second stream, which waits for the mark alone, and not for work launched
since.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class _Current(threading.local):
    mark: Any = None  # a torch.cuda.Event, and the device


_current = _Current()
_streams: dict[torch.device, Any] = {}


@contextmanager
def marked(device: torch.device, wanted: bool = True) -> Iterator[None]:
    """A context whose start is a mark, on a GPU, if that is wanted."""
    before = _current.mark
    _current.mark = None
    if wanted and device.type == "cuda":
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        _current.mark = event, device
    try:
        yield
    finally:
        _current.mark = before


def forget() -> None:
    """What was there at the mark has changed: it holds no more."""
    _current.mark = None


@contextmanager
def beside(wanted: bool = True) -> Iterator[list[Tensor]]:
    """A context for work that uses only what was there at the mark, and is read before it ends.

    Without a mark, or where that is not `wanted`, it is done here and now. The list takes the tensors made inside that
    are used afterwards, whose memory must stay until that is done.
    """
    kept: list[Tensor] = []
    if _current.mark is None or not wanted:
        yield kept
        return
    event, device = _current.mark
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    main, side = torch.cuda.current_stream(device), _streams[device]
    side.wait_event(event)
    with torch.cuda.stream(side):
        yield kept
    main.wait_stream(side)
    for tensor in kept:
        tensor.record_stream(main)
