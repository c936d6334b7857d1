"""What evolves in an online inverse: tensors that can be moved, saved and compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar
from urllib.parse import quote, unquote

import torch
from torch import Tensor

S = TypeVar("S", bound="State")


@dataclass
class State:
    """Base of every state. Its fields are tensors, numbers, None, or dicts (also nested) of these by name.

    `tensors` gives all of it as one flat dict, which is what safetensors stores, and `restore` goes back. A field that
    may be None or an empty dict needs that as its default.
    """

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor and number by path, numbers as 0-dimensional tensors under a marked name."""
        flat: dict[str, Tensor] = {}
        for field in fields(self):
            _flatten(field.name, getattr(self, field.name), flat)
        return flat

    @classmethod
    def restore(cls: type[S], tensors: Mapping[str, Tensor]) -> S:
        """The state that gave these tensors."""
        nested: dict[str, Any] = {}
        for path, tensor in tensors.items():
            *folders, name = path.split("/")
            folders = [unquote(folder) for folder in folders]
            place = nested
            for folder in folders:
                place = place.setdefault(folder, {})
            if name.endswith(("#int", "#float")):
                name, kind = name.rsplit("#", 1)
                place[unquote(name)] = int(tensor) if kind == "int" else float(tensor)
            else:
                place[unquote(name)] = tensor
        return cls(**nested)

    def clone(self: S) -> S:
        """The same state in memory of its own, untouched by later observations."""
        return type(self).restore({path: tensor.clone() for path, tensor in self.tensors().items()})

    def to(self: S, device: torch.device | str) -> S:
        """The same state on another device."""
        return type(self).restore(
            {k: t if k.endswith(("#int", "#float")) else t.to(device) for k, t in self.tensors().items()}
        )


def _flatten(path: str, value: Any, flat: dict[str, Tensor]) -> None:
    if isinstance(value, Tensor):
        flat[path] = value
    elif isinstance(value, dict):
        for name, item in value.items():
            # Parameters of a dict may have any name, also one with a slash.
            _flatten(f"{path}/{quote(name, safe='')}", item, flat)
    elif isinstance(value, (int, float)):
        kind = "int" if isinstance(value, int) else "float"
        flat[f"{path}#{kind}"] = torch.tensor(value, dtype=torch.int64 if kind == "int" else torch.float64)
    elif value is not None:
        raise TypeError(f"A state cannot hold a {type(value).__name__} ({path}).")
