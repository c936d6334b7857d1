"""How many bytes of tensors a piece of work needs at its peak, measured on any device."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Counts the storage that operators inside this block create, as long as it lives.

    It works wherever the tensors are, and sees what autograd keeps. It slows the work down: never time inside it.

    >>> with PeakMemory() as peak:
    ...     x = torch.zeros(1000, dtype=torch.float64) + 1
    >>> peak.bytes
    16000
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own, without annotations
        self.bytes = 0
        self._now = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, Tensor):
                storage = t.untyped_storage()
                key = storage._cdata
                if key not in given and key not in self._seen:
                    self._seen.add(key)
                    size = storage.nbytes()
                    self._now += size
                    weakref.finalize(storage, self._forget, key, size)
        self.bytes = max(self.bytes, self._now)
        return result

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self._now -= size


def peak_of(work: Callable[[], object]) -> int:
    """The most bytes that a piece of work makes and holds at once."""
    with PeakMemory() as peak:
        work()
    return int(peak.bytes)


def extrapolated(work: Callable[[int], object], samples: int) -> int:
    """The peak of work on so many samples, from its peak on an eighth and on a quarter of them."""
    few, more = max(2, samples // 8), max(4, samples // 4)
    if more >= samples:
        return peak_of(lambda: work(samples))
    work(few)  # what is made once and kept does not count
    low, high = peak_of(lambda: work(few)), peak_of(lambda: work(more))
    return int(low + (high - low) * (samples - few) / (more - few))


def synchronise(device: torch.device) -> None:
    """Wait for the device, so that a clock read next is right."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# What torch and NumPy say if they raise no specific error; the last three are sizes beyond any memory.
_FULL = (
    "can't allocate memory",
    "not enough memory",
    "Cannot allocate memory",
    "Storage size calculation overflowed",
    "array is too big",
    "Maximum allowed dimension exceeded",
    "numel: integer multiplication overflow",
)


def out_of_memory(error: BaseException) -> str | None:
    """A sentence for an error about exhausted memory, of a GPU or of the machine; None for other errors.

    >>> out_of_memory(MemoryError())
    'Out of memory. Use smaller sizes or batches, or a larger machine.'
    """
    said = str(error)
    of_its_kind = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    if not of_its_kind and not (isinstance(error, (RuntimeError, ValueError)) and any(text in said for text in _FULL)):
        return None
    first = said.splitlines()[0].removesuffix(".") if said else ""
    return f"Out of memory{f': {first}' if first else ''}. Use smaller sizes or batches, or a larger machine."
