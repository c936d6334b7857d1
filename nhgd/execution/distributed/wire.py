"""Tensors and records as bytes: no pickles, only shapes in JSON and the numbers themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from nhgd._tree import Slot, Structure, flatten, unflatten
from nhgd._tree.encoding import DTYPES, Decoder, Encoder, expected
from nhgd.inverse._learned.state import State
from nhgd.record import BatchGradient, InnerRecord, LayerStatistics, PerSampleGradients

S = TypeVar("S", bound=State)
Shapes = Sequence[Any]  # (dtype, shape) for each tensor
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_RECORDS = expected(BatchGradient, PerSampleGradients, LayerStatistics)


def shapes(tensors: Sequence[Tensor]) -> Shapes:
    """The metadata needed to read tensors back from their bytes."""
    return [[_NAMES[t.dtype], list(t.shape)] for t in tensors]


def to_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """A copy of all numbers in one array of bytes, the widest first, so that each is aligned."""
    kinds = {t.dtype for t in tensors}
    if len(kinds) == 1:  # as a rule, and in the inner loop
        return torch.cat([t.reshape(-1) for t in tensors]).view(torch.uint8)
    order = sorted(kinds, key=lambda kind: (-kind.itemsize, str(kind)))
    parts = [torch.cat([t.reshape(-1) for t in tensors if t.dtype == kind]).view(torch.uint8) for kind in order]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def from_bytes(found: Shapes, data: Tensor) -> list[Tensor]:
    """The tensors that gave these bytes, as views of them.

    >>> kept = [torch.tensor(1.5), torch.arange(3), torch.zeros(0)]
    >>> [t.tolist() for t in from_bytes(shapes(kept), to_bytes(kept))]
    [1.5, [0, 1, 2], []]
    """
    kinds = [getattr(torch, name) for name, _ in found]
    order = sorted(range(len(found)), key=lambda i: (-kinds[i].itemsize, str(kinds[i]), i))
    made: dict[int, Tensor] = {}
    at = 0
    for i in order:
        shape = found[i][1]
        size = kinds[i].itemsize * torch.Size(shape).numel()
        made[i] = data[at : at + size].view(kinds[i]).reshape(shape)
        at += size
    return [made[i] for i in range(len(found))]


def size_of(found: Shapes) -> int:
    """How many bytes they take."""
    return sum(getattr(torch, name).itemsize * torch.Size(shape).numel() for name, shape in found)


class Layout(NamedTuple):
    """All of a record but its numbers: two processes agree on it once.

    `is_part` says whether the record is of one worker's part of a batch, which those of the other workers complete.
    """

    structure: Structure
    is_part: bool
    shapes: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, record: InnerRecord) -> tuple[Layout, list[Tensor]]:
        """The layout of a record, and its tensors."""
        is_part = not isinstance(record, BatchGradient) and record.reduction is not None
        if not isinstance(record, BatchGradient) and is_part:
            record = replace(record, reduction=None)
        structure, tensors = flatten(record)
        return cls(structure, is_part, tuple([(_NAMES[t.dtype], tuple(t.shape)) for t in tensors])), tensors

    def to_text(self) -> dict[str, Any]:
        """The same as JSON."""
        without = unflatten(self.structure, [Slot.TENSOR] * len(self.shapes))
        return {"record": Encoder().encode(without, "record"), "is_part": self.is_part, "shapes": self.shapes}

    @classmethod
    def from_text(cls, text: dict[str, Any]) -> Layout:
        """The layout that gave this JSON."""
        without = Decoder({}, _RECORDS, torch.device("cpu")).decode(text["record"])
        return cls(flatten(without)[0], text["is_part"], tuple((name, tuple(shape)) for name, shape in text["shapes"]))

    def record(self, tensors: Sequence[Tensor]) -> InnerRecord:
        """The record of these tensors. A partial one counts as complete."""
        made: InnerRecord = unflatten(self.structure, tensors)
        return made


def to_message(tree: State) -> tuple[dict[str, Any], list[Tensor]]:
    """A state as text and tensors."""
    encoder = Encoder()
    return {"tree": encoder.encode(tree, ""), "names": list(encoder.tensors)}, list(encoder.tensors.values())


def from_message(text: dict[str, Any], tensors: Sequence[Tensor], like: S, device: torch.device) -> S:
    """The state that `to_message` took apart, of the class of `like`."""
    named = dict(zip(text["names"], tensors, strict=False))  # a message without tensors has its bytes, none, as one
    found = Decoder(named, expected(like), device).decode(text["tree"])
    assert isinstance(found, type(like))
    return found
