"""Where batches come from: `Data` for tensors in memory, or any loader that can be iterated over again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from nhgd._validation import validated
from nhgd.data.batch import Batch, first_bad, move
from nhgd.data.device import usable_device
from nhgd.errors import InputError


class Data:
    """Tensors in memory, yielded as batches `(x, y, ..., index)`, reshuffled at every pass.

    A pass draws an order and gathers each batch by it when it is asked for: no shuffled copy of the tensors is held,
    and the memory of a batch serves the next.

    Args:
        arrays: tensors or NumPy arrays with the same first dimension.
        batch: samples per batch; None means all of them. The last batch of a pass may be shorter.
        shuffle: a new order at every pass, drawn from torch's global generator (which a `Solver` seeds). "blocks": the
            batches of a pass are stretches of neighbouring samples, in a new order and cut at new places, and share the
            memory of the tensors: nothing is gathered. For data whose own order is random: neighbours meet again and
            again.
        device: of the tensors; default: where they are.

    >>> data = Data(torch.arange(5.0), batch=2, shuffle=False)
    >>> [index.tolist() for x, index in data]
    [[0, 1], [2, 3], [4]]
    """

    @validated
    def __init__(
        self,
        *arrays: Tensor | np.ndarray[Any, Any] | Sequence[Any],
        batch: int | None = None,
        shuffle: bool | Literal["blocks"] = True,
        device: torch.device | str | None = None,
    ) -> None:
        if not arrays:
            raise InputError("Data needs at least one tensor: Data(x, y, batch=1024).")
        if device is not None:
            device = usable_device("Data", device)
        self.tensors = tuple(_tensor(a, device) for a in arrays)
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
            raise InputError(f"Data: {bad} contains nan or inf. Remove or impute such samples first.")
        self.samples = found[0]
        self.batch = min(batch or self.samples, self.samples)
        self.shuffle = shuffle
        self._index = torch.arange(self.samples, device=self.tensors[0].device)

    def __len__(self) -> int:
        return -(-self.samples // self.batch)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return Walk(self)

    @property
    def columns(self) -> tuple[Tensor, ...]:
        """The tensors, and the index of each sample."""
        return (*self.tensors, self._index)

    @property
    def shuffles(self) -> bool:
        """Whether a pass draws an order."""
        return bool(self.shuffle) and self.batch < self.samples

    def size(self, place: int) -> int:
        """The samples of a batch, by its place in a pass."""
        return min(self.batch, self.samples - place * self.batch)

    def take(self, index: Tensor) -> tuple[Tensor, ...]:
        """The samples with these indices, as one batch."""
        return tuple(t[index.to(t.device)] for t in (*self.tensors, self._index))


class Walk(Iterator[tuple[Tensor, ...]]):
    """One pass over `Data`."""

    def __init__(self, data: Data) -> None:
        self._data = data
        self._place = 0
        self._order: Tensor | None = None  # drawn when the first batch is asked for
        self._samples: np.ndarray[Any, Any] | None = None  # the same in NumPy, whose operations take less time to call
        self._starts: list[int] = []  # of stretches
        self._orders: dict[torch.device, Tensor] = {}

    def __next__(self) -> tuple[Tensor, ...]:
        data, start = self._data, self._place * self._data.batch
        self._step()
        if self._starts:
            start = self._starts[self._place - 1]
            stop = start + data.size(self._place - 1)
            if stop > data.samples:  # around the end
                return data.take(torch.arange(start, stop) % data.samples)
            return tuple(t[start:stop] for t in data.columns)
        if self._order is None:
            return tuple(t[start : start + data.batch] for t in data.columns)
        if not self._orders:  # sent once a pass
            self._orders = {device: self._order.to(device) for device in {t.device for t in data.columns}}
        return tuple(gathered_rows(t, self._orders[t.device][start : start + data.batch]) for t in data.columns)

    def next_index(self) -> np.ndarray[Any, Any]:
        """The samples of the next batch, in the host's memory, in place of the batch itself."""
        start = self._place * self._data.batch
        stop = min(start + self._data.batch, self._data.samples)
        self._step()
        if self._starts:
            start = self._starts[self._place - 1]
            return np.arange(start, start + self._data.size(self._place - 1)) % self._data.samples
        if self._order is None:
            return np.arange(start, stop)
        if self._samples is None:
            self._samples = self._order.numpy()
        return self._samples[start:stop]

    def _step(self) -> None:
        if self._place * self._data.batch >= self._data.samples:
            raise StopIteration
        if self._place == 0 and self._data.shuffles:
            if self._data.shuffle == "blocks":
                self._starts = _cut(self._data.samples, self._data.batch)
            else:
                self._order = torch.randperm(self._data.samples)
        self._place += 1


def _cut(samples: int, batch: int) -> list[int]:
    """Where the batches of a pass start, the shorter one last: the samples form a ring that is cut at a random
    place.
    """
    first = int(torch.randint(samples, ()))
    order = [int(k) for k in torch.randperm(samples // batch)]
    order += [len(order)] if samples % batch else []
    return [(first + k * batch) % samples for k in order]


def gathered_rows(tensor: Tensor, index: Tensor) -> Tensor:
    """Rows of a tensor, in the order of memory that they have in it."""
    # index_select takes half the time of indexing, but knows no order of memory other than the usual one.
    return tensor.index_select(0, index) if tensor.is_contiguous() else tensor[index]


def _tensor(array: Any, device: torch.device | str | None) -> Tensor:
    """The array as a dense tensor with numbers in it; memory is shared where torch can: not read-only, nor
    backwards.
    """
    if isinstance(array, np.ndarray) and not (array.flags.writeable and all(s >= 0 for s in array.strides)):
        array = array.copy()
    try:
        # as_tensor would move a tensor to torch's default device
        found = array if isinstance(array, Tensor) else torch.as_tensor(array)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(f"Data takes tensors and arrays of numbers; torch rejects this one: {error}.") from error
    if found.layout != torch.strided or found.device.type == "meta":
        kind = "on the meta device, which holds no numbers" if found.device.type == "meta" else "sparse"
        raise InputError(f"Data takes dense tensors, but one is {kind}.")
    return found if device is None else found.to(device)


def one_batch(given: Any, name: str) -> Batch:
    """Return a single batch, and refuse an iterable of many."""
    if isinstance(given, (Data, DataLoader, Iterator)):
        kind = type(given).__name__
        example = "next(iter(data))" if not isinstance(given, Iterator) else "next(batches)"
        raise InputError(
            f"{name} must be one batch, such as (x, y, index), but it is a {kind}, which yields batches. Pass"
            f" {name}={example}, or all samples as one batch; inner_data= takes the {kind} itself."
        )
    return given


def inner_batches(inner_batch: Batch, inner_data: Iterable[Batch] | None, device: torch.device) -> list[Batch]:
    """The batches of the inner objective: those of inner_data if given, else the one batch."""
    if inner_data is None:
        batches = [one_batch(inner_batch, "inner_batch")]
    else:
        batches = list(reiterable(inner_data, "inner_data"))
    if not batches:
        raise InputError("inner_data yields no batch. Provide at least one, for example [(x, y)].")
    return [move(batch, device) for batch in batches]


def reiterable(source: Iterable[Batch], name: str) -> Iterable[Batch]:
    """Return `source` if it can be walked over again and again, and refuse it with a sentence if not."""
    remedy = f"Pass {name}=nhgd.Data(x, y, batch=1024), a DataLoader, or a list of batches such as [(x, y)]."
    if isinstance(source, Tensor):
        raise InputError(f"{name} is a single tensor, so it is unclear what a batch is. {remedy}")
    if isinstance(source, tuple) and source and all(isinstance(item, Tensor) for item in source):
        raise InputError(f"{name} is a tuple of tensors, which looks like one batch rather than many. {remedy}")
    if isinstance(source, (Mapping, str)) or not hasattr(source, "__iter__"):
        raise InputError(f"{name} is a {type(source).__name__}, which yields no batches. {remedy}")
    if hasattr(source, "__next__"):
        raise InputError(f"{name} is a one-shot iterator: it would be empty after the first pass. {remedy}")
    return source
