"""A batch is whatever the user's loader yields: a tensor, or tuples, lists and dicts of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

Batch: TypeAlias = Any


def leaves(batch: Batch, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a batch with the way to each: `[0]`, `['x']`, `[1][0]`.

    >>> [path for path, _ in leaves((torch.zeros(2), {"y": torch.zeros(2)}))]
    ['[0]', "[1]['y']"]
    """
    if isinstance(batch, Tensor):
        yield path, batch
    elif isinstance(batch, dict):
        for key, item in batch.items():
            yield from leaves(item, f"{path}[{key!r}]")
    elif isinstance(batch, (tuple, list)):
        for i, item in enumerate(batch):
            yield from leaves(item, f"{path}[{i}]")


def transform(batch: Batch, function: Callable[[Tensor], Tensor]) -> Batch:
    """The same structure with `function` applied to every tensor."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {key: transform(item, function) for key, item in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(transform(item, function) for item in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(transform(item, function) for item in batch)
    return batch


def move(batch: Batch, device: torch.device) -> Batch:
    """The batch on `device`; nothing is copied when it is there already."""
    return transform(batch, lambda t: t if t.device == device else t.to(device, non_blocking=True))


def lengths(batch: Batch) -> dict[str, int]:
    """The first dimension of every tensor that has one."""
    return {path: t.shape[0] for path, t in leaves(batch) if t.ndim > 0}


def common_length(batch: Batch) -> int | None:
    """The number of samples, when all tensors agree on it."""
    found = set(lengths(batch).values())
    return found.pop() if len(found) == 1 else None


def first_bad(batch: Batch) -> str | None:
    """Where the first nan or inf of a batch lies, in words, or None."""
    for path, tensor in leaves(batch):
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
    for path, tensor in leaves(batch):
        digest.update(f"{path} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // most)].contiguous().cpu()
        digest.update(some.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
