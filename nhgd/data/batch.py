"""A batch is whatever the user's loader yields: a tensor, or tensors in tuples, lists, mappings and dataclasses.

Other objects that hold tensors, such as graphs and packed sequences, are not looked into for samples: how many they have is
known from the losses alone. They are moved by their own `.to()`, and their tensors are seen by `first_bad` and `fingerprint`.
"""

from __future__ import annotations

import copy
import hashlib
from collections import UserDict, UserList
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from nhgd.errors import InputError

Batch: TypeAlias = Any
_DEEP = 4  # how far into objects of other kinds tensors are looked for


def _items(batch: Batch) -> list[tuple[str, Any]] | None:
    """The parts of a container with the way to each, or None for what is no container."""
    if isinstance(batch, Mapping):
        return [(f"[{key!r}]", item) for key, item in batch.items()]
    if is_dataclass(batch) and not isinstance(batch, type):
        return [(f".{field.name}", getattr(batch, field.name)) for field in fields(batch) if hasattr(batch, field.name)]
    if isinstance(batch, (list, UserList)) or (isinstance(batch, tuple) and not hasattr(batch, "to")):
        return [(f"[{i}]", item) for i, item in enumerate(batch)]
    return None


def leaves(batch: Batch, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a batch with the way to each: `[0]`, `['x']`, `[1][0]`, `.x`.

    >>> [path for path, _ in leaves((torch.zeros(2), {"y": torch.zeros(2)}))]
    ['[0]', "[1]['y']"]
    """
    if isinstance(batch, Tensor):
        yield path, batch
    else:
        for key, item in _items(batch) or ():
            yield from leaves(item, path + key)


def _others(batch: Batch, path: str = "") -> Iterator[tuple[str, Any]]:
    """What a batch holds beside tensors that may hold tensors itself."""
    if isinstance(batch, Tensor):
        return
    items = _items(batch)
    if items is None:
        if isinstance(batch, np.ndarray) or callable(getattr(batch, "to", None)):
            yield path, batch
        return
    for key, item in items:
        yield from _others(item, path + key)


def _inside(thing: Any, path: str, deep: int = _DEEP) -> Iterator[tuple[str, Tensor]]:
    """The tensors among the attributes of an object of another kind."""
    if isinstance(thing, np.ndarray):
        if thing.dtype.kind in "biuf":
            yield path, torch.as_tensor(thing.copy())
    elif isinstance(thing, Tensor):
        yield path, thing
    elif deep:
        items = _items(thing)
        if items is None:
            named = thing._asdict() if hasattr(thing, "_asdict") else getattr(thing, "__dict__", {})
            items = [(f".{name}", item) for name, item in named.items()]
        for key, item in items:
            yield from _inside(item, path + key, deep - 1)


def _all(batch: Batch) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a batch, also those in objects of other kinds."""
    yield from leaves(batch)
    for path, thing in _others(batch):
        yield from _inside(thing, path)


def transform(batch: Batch, function: Callable[[Tensor], Tensor]) -> Batch:
    """The same structure, of the same types, with `function` applied to every tensor."""
    return _mapped(batch, function, lambda thing: thing)


def _mapped(batch: Batch, function: Callable[[Tensor], Tensor], other: Callable[[Any], Any]) -> Batch:
    if isinstance(batch, Tensor):
        return function(batch)
    items = _items(batch)
    if items is None:
        return other(batch) if callable(getattr(batch, "to", None)) else batch
    made: Any
    found = [_mapped(item, function, other) for _, item in items]
    if isinstance(batch, Mapping):
        named = dict(zip(batch, found, strict=True))
        if type(batch) is dict:
            return named
        if not isinstance(batch, (dict, UserDict)):
            return _like(batch, named)
        made = copy.copy(batch)  # with what a subclass holds beside its items
        for key, item in named.items():
            made[key] = item
        return made
    if is_dataclass(batch):
        made = copy.copy(batch)
        names = [field.name for field in fields(batch) if hasattr(batch, field.name)]
        for name, item in zip(names, found, strict=True):
            object.__setattr__(made, name, item)  # also where it is frozen
        return made
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*found)
    return type(batch)(found)


def _like(batch: Mapping[Any, Any], named: dict[Any, Any]) -> Batch:
    """A mapping of another kind made anew, because a copy might share its items; a dict where its type takes no dict."""
    try:
        return type(batch)(named)  # type: ignore[call-arg]  # most take one
    except TypeError:
        return named


def move(batch: Batch, device: torch.device) -> Batch:
    """The batch on `device`; nothing is copied when it is there already."""
    return _mapped(
        batch,
        lambda t: t if t.device == device else t.to(device, non_blocking=True),
        lambda thing: thing if all(t.device == device for _, t in _inside(thing, "")) else thing.to(device),
    )


def lengths(batch: Batch) -> dict[str, int]:
    """The first dimension of every tensor that has one."""
    return {path: t.shape[0] for path, t in leaves(batch) if t.ndim > 0}


def common_length(batch: Batch) -> int | None:
    """The number of samples, when all tensors agree on it and no object of another kind holds tensors of its own.

    NumPy arrays, of ids or strings beside the tensors, have no say.
    """
    found = set(lengths(batch).values())
    return found.pop() if len(found) == 1 and not _hidden(batch) else None


def _hidden(batch: Batch) -> bool:
    """Whether an object of another kind may hold samples."""
    return any(not isinstance(thing, np.ndarray) for _, thing in _others(batch))


def sizes(batches: Sequence[Batch], name: str) -> list[int]:
    """How many samples each of several batches has, by which they count.

    >>> sizes([torch.zeros(3), torch.zeros(1)], "outer_data")
    [3, 1]
    """
    found = [common_length(batch) for batch in batches]
    differ = len({tuple(lengths(batch).items()) for batch in batches}) > 1
    hidden = len(batches) > 1 and any(_hidden(batch) for batch in batches)
    if None in found and (differ or hidden):
        raise InputError(
            f"It is unclear how many samples each batch of {name} has, so they cannot count by their sizes. Give tensors, in"
            " tuples, dicts or dataclasses, whose first dimension counts the samples."
        )
    return [n or 1 for n in found]


def first_bad(batch: Batch) -> str | None:
    """Where the first nan or inf of a batch lies, in words, or None."""
    for path, tensor in _all(batch):
        if tensor.is_floating_point() and tensor.numel() and not bool(torch.isfinite(tensor).all()):
            where = torch.nonzero(~torch.isfinite(tensor.reshape(tensor.shape[0] if tensor.ndim else 1, -1)).all(1))[0]
            row = f", row {int(where)}" if tensor.ndim else ""
            return f"tensor {path or 'x'}{row}"
    return None


def fingerprint(batch: Batch, most: int = 2**16) -> str:
    """What tells a batch from others: a hash of its shapes and dtypes and of up to `most` numbers of each tensor.

    >>> fingerprint((torch.zeros(3), torch.ones(2))) == fingerprint((torch.zeros(3), torch.ones(2)))
    True
    >>> fingerprint(torch.arange(3)) == fingerprint(torch.arange(3).flip(0))
    False
    """
    digest = hashlib.sha256()
    for path, tensor in _all(batch):
        digest.update(f"{path} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // most)].contiguous().cpu()
        digest.update(some.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
