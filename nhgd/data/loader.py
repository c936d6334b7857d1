"""Where batches come from: `Data` for tensors in memory, `Stream` for an endless walk over any loader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nhgd.data.batch import Batch, first_bad, move
from nhgd.errors import InputError


class Data:
    """Tensors in memory, yielded as batches `(x, y, ..., index)`, reshuffled at every pass.

    One pass permutes the tensors once into contiguous memory and then hands out slices, because a random gather for
    every batch costs about a quarter of a small model's training step.

    Args:
        arrays: tensors or NumPy arrays with the same first dimension.
        batch: samples per batch; None means all of them. The last batch of a pass may be shorter.
        shuffle: a new order at every pass, drawn from torch's global generator (which a `Solver` seeds).
        device: where to keep the tensors; default: where they are.

    >>> data = Data(torch.arange(5.0), batch=2, shuffle=False)
    >>> [index.tolist() for x, index in data]
    [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self,
        *arrays: Tensor | np.ndarray[Any, Any],
        batch: int | None = None,
        shuffle: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        if not arrays:
            raise InputError("Data needs at least one tensor: Data(x, y, batch=1024).")
        self.tensors = tuple(torch.as_tensor(_usable(a), device=device) for a in arrays)
        if any(t.ndim == 0 for t in self.tensors):
            raise InputError(
                "Data takes tensors whose first dimension counts the samples, but one of them is a scalar."
            )
        found = [t.shape[0] for t in self.tensors]
        if len(set(found)) > 1:
            raise InputError(
                f"Data got tensors of different length: {', '.join(map(str, found))}. Every sample needs one row in each."
            )
        if found[0] == 0:
            raise InputError("Data got no samples: the tensors have length 0.")
        if batch is not None and (not isinstance(batch, int) or batch < 1):
            raise InputError(f"Data: batch must be a whole number of at least 1, got {batch}.")
        bad = first_bad(self.tensors)
        if bad:
            raise InputError(f"Data: {bad} holds nan or inf. Remove or impute such samples first.")
        self.samples = found[0]
        self.batch = min(batch or self.samples, self.samples)
        self.shuffle = shuffle
        self._index = torch.arange(self.samples, device=self.tensors[0].device)

    def __len__(self) -> int:
        return -(-self.samples // self.batch)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        columns = (*self.tensors, self._index)
        if self.shuffle and self.batch < self.samples:
            order = torch.randperm(self.samples)
            columns = tuple(t[order.to(t.device)] for t in columns)
        for start in range(0, self.samples, self.batch):
            yield tuple(t[start : start + self.batch] for t in columns)

    def take(self, index: Tensor) -> tuple[Tensor, ...]:
        """The samples with these indices, as one batch."""
        return tuple(t[index.to(t.device)] for t in (*self.tensors, self._index))


def _usable(array: Tensor | np.ndarray[Any, Any]) -> Tensor | np.ndarray[Any, Any]:
    """The array itself, or a copy where torch could not share its memory: read-only or walked backwards."""
    if isinstance(array, np.ndarray) and not (array.flags.writeable and all(s >= 0 for s in array.strides)):
        return array.copy()
    return array


class Stream:
    """An endless walk over a re-iterable loader, pass after pass, with batches moved to one device."""

    def __init__(self, source: Iterable[Batch], name: str, device: torch.device) -> None:
        self.source = reiterable(source, name)
        self.name = name
        self.device = device
        self.passes = 0
        self.last: Batch = None
        self._walk: Iterator[Batch] | None = None

    def peek(self) -> Batch:
        """The first batch of a pass; the walk and torch's generator stay where they are."""
        before = torch.get_rng_state()
        try:
            return Stream(self.source, self.name, self.device).next()
        finally:
            torch.set_rng_state(before)

    def next(self) -> Batch:
        """The next batch; a new pass begins when one ends."""
        for _ in range(2):
            if self._walk is None:
                self._walk = iter(self.source)
                self.passes += 1
            for batch in self._walk:
                self.last = move(batch, self.device)
                return self.last
            self._walk = None
        raise InputError(f"{self.name} yields no batch. Give it at least one, for example [(x, y)].")


def reiterable(source: Iterable[Batch], name: str) -> Iterable[Batch]:
    """Return `source` if it can be walked over again and again, and refuse it with a sentence if not."""
    remedy = f"Pass {name}=nhgd.Data(x, y, batch=1024), a DataLoader, or a list of batches such as [(x, y)]."
    if isinstance(source, Tensor):
        raise InputError(f"{name} is a bare tensor, so it is unclear what a batch is. {remedy}")
    if isinstance(source, tuple) and source and all(isinstance(item, Tensor) for item in source):
        raise InputError(f"{name} is a tuple of tensors, which reads as one batch rather than as many. {remedy}")
    if isinstance(source, (dict, str)) or not hasattr(source, "__iter__"):
        raise InputError(f"{name} is a {type(source).__name__}, which yields no batches. {remedy}")
    if hasattr(source, "__next__"):
        raise InputError(f"{name} is a one-shot iterator: it would be empty after the first pass. {remedy}")
    return source
