"""Batches: whatever the user's loader yields, a tensor or tensors in tuples, lists, mappings and dataclasses.

Other objects that hold tensors, such as graphs and packed sequences, are not looked into for samples: how many they
have is known from the losses alone. They are moved by their own `.to()`, and their tensors are seen by `first_bad` and
`fingerprint`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from nhgd._tree import children, leaves, map_leaves, named_tensors
from nhgd.errors import InputError

Batch: TypeAlias = Any
_DEEP = 4  # how far into objects of other kinds tensors are looked for


def _opaque(batch: Batch) -> Iterator[tuple[str, Any]]:
    """Leaves other than tensors that may hold samples of their own."""
    for path, leaf in leaves(batch):
        if not isinstance(leaf, Tensor) and (isinstance(leaf, np.ndarray) or _can_move(leaf)):
            yield path, leaf


def _is_plain(batch: Batch) -> bool:
    """Whether it is a tuple of tensors, whose form needs no walk."""
    return type(batch) is tuple and all(type(item) is Tensor for item in batch)


def _can_move(leaf: Any) -> bool:
    return callable(getattr(leaf, "to", None))


def _inside(thing: Any, path: str, deep: int = _DEEP) -> Iterator[tuple[str, Tensor]]:
    """The tensors among the attributes of an object of another kind."""
    if isinstance(thing, np.ndarray):
        if thing.dtype.kind in "biuf":
            yield path, torch.as_tensor(thing.copy())
    elif isinstance(thing, Tensor):
        yield path, thing
    elif deep:
        items = children(thing)
        if items is None:
            named = thing._asdict() if hasattr(thing, "_asdict") else getattr(thing, "__dict__", {})
            items = [(f".{name}", item) for name, item in named.items()]
        for key, item in items:
            yield from _inside(item, path + key, deep - 1)


def _all(batch: Batch) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a batch, including those in other objects."""
    yield from named_tensors(batch)
    for path, thing in _opaque(batch):
        yield from _inside(thing, path)


def move(batch: Batch, device: torch.device) -> Batch:
    """The batch on `device`; nothing is copied when it is there already."""
    if _is_plain(batch) and all(t.device == device for t in batch):
        return batch

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf if leaf.device == device else leaf.to(device, non_blocking=True)
        if not _can_move(leaf) or all(t.device == device for _, t in _inside(leaf, "")):
            return leaf
        return leaf.to(device)

    return map_leaves(moved, batch)


def lengths(batch: Batch) -> dict[str, int]:
    """The first dimension of every tensor that has one."""
    return {path: t.shape[0] for path, t in named_tensors(batch) if t.ndim > 0}


def common_length(batch: Batch) -> int | None:
    """The number of samples, when all tensors agree on it and no object of another kind holds tensors of its own.

    NumPy arrays, such as ids or strings, do not count.
    """
    if _is_plain(batch):  # as most are, in each inner step
        plain = {t.shape[0] for t in batch if t.ndim}
        return plain.pop() if len(plain) == 1 else None
    found = set(lengths(batch).values())
    return found.pop() if len(found) == 1 and not _hidden(batch) else None


def _hidden(batch: Batch) -> bool:
    """Whether an object of another kind may hold samples."""
    return any(not isinstance(thing, np.ndarray) for _, thing in _opaque(batch))


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
            f"The number of samples in each batch of {name} is unclear, so batches cannot be weighted by size. Use"
            " tensors, in tuples, dicts or dataclasses, whose first dimension counts the samples."
        )
    return [n or 1 for n in found]


def first_bad(batch: Batch) -> str | None:
    """The place of the first nan or inf of a batch, in words, or None."""
    for path, tensor in _all(batch):
        if tensor.is_floating_point() and tensor.numel() and not bool(torch.isfinite(tensor).all()):
            where = torch.nonzero(~torch.isfinite(tensor.reshape(tensor.shape[0] if tensor.ndim else 1, -1)).all(1))[0]
            row = f", row {int(where)}" if tensor.ndim else ""
            return f"tensor {path or 'x'}{row}"
    return None


def fingerprint(batch: Batch, most: int = 2**16) -> str:
    """A hash of a batch: of its shapes and dtypes and of up to `most` numbers of each tensor.

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
