"""The ridge's Hessian: all that a learnt inverse asks of a point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from nhgd import _tape as tape


@final
@dataclass(frozen=True)
class Ridge:
    """The Hessian of sum( l2 * theta^2 ), a diagonal: 2 l2 for every coordinate of theta.

    Args:
        value: one number if it is the same everywhere, so that nothing is read from a device that may be busy;
            else (D,).

    >>> Ridge(0.5).diagonal(2, torch.float64).tolist()
    [0.5, 0.5]
    >>> Ridge(torch.tensor([0.5, 0.0])).positive
    False
    """

    value: float | Tensor

    @property
    def positive(self) -> bool:
        """Whether it is above 0 for every coordinate."""
        return self.value > 0 if isinstance(self.value, float) else bool((self.value > 0).all())

    @property
    def is_uniform(self) -> bool:
        """Whether it is known to be the same for every coordinate."""
        return isinstance(self.value, float)

    def plus(self, damping: float) -> Ridge:
        """With a number added to every entry.

        >>> Ridge(0.5).plus(0.25).value
        0.75
        """
        return self if damping == 0 else Ridge(self.value + damping)

    def diagonal(self, size: int, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """(D,) for D = `size`, on a device; None: on its own."""
        if isinstance(self.value, float):
            value = tape.on_device(self.value)
            if isinstance(value, Tensor):
                return value.to(dtype).expand(size)
            return torch.full((size,), value, dtype=dtype, device=device)
        return self.value.to(device=device, dtype=dtype)

    def tensor(self, dtype: torch.dtype) -> Tensor:
        """Its tensor in a message: 0-dimensional, in main memory, or (D,)."""
        if isinstance(self.value, float):
            return torch.tensor(self.value, dtype=dtype)
        return self.value.detach()

    @classmethod
    def of(cls, tensor: Tensor) -> Ridge:
        """The ridge that gave this tensor."""
        return cls(float(tensor) if tensor.ndim == 0 else tensor)

    def to(self, device: torch.device) -> Ridge:
        """The same on another device."""
        return self if isinstance(self.value, float) else Ridge(self.value.to(device))
