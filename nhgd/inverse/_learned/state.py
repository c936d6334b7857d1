"""What evolves in an online inverse: tensors and numbers that can be moved, saved and compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from nhgd._tree import leaves, map_tensors, named_tensors

S = TypeVar("S", bound="State")


@dataclass
class State:
    """Base of every state. Its fields are tensors, numbers, None, or dicts (also nested) of these by name."""

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by the way to it, such as `.inputs['0.weight']`."""
        return dict(named_tensors(self))

    def clone(self: S) -> S:
        """The same state in memory of its own, untouched by later observations."""
        return map_tensors(torch.clone, self._checked())

    def to(self: S, device: torch.device | str) -> S:
        """The same state on another device."""
        return map_tensors(lambda tensor: tensor.to(device), self._checked())

    def _checked(self: S) -> S:
        """Refuse an object that the copy would share with this state."""
        for path, leaf in leaves(self):
            if leaf is not None and not isinstance(leaf, (Tensor, int, float)):
                raise TypeError(f"A state cannot hold a {type(leaf).__name__} ({path}).")
        return self
