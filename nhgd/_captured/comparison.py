"""Whether a captured step does what the eager one did."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nhgd._captured.static_state import StaticState
from nhgd._tape import NotRepeatable


def copy_into(places: list[Tensor], values: list[Tensor]) -> None:
    with torch.no_grad():
        for place, value in zip(places, values, strict=True):
            place.copy_(value)


def close(got: Tensor, wanted: Tensor, before: Tensor, precision: torch.dtype = torch.float64) -> bool:
    """Whether two results differ only by rounding, relative to what the step changed.

    precision: of the numbers that they were computed from.
    """
    if not got.is_floating_point():
        return torch.equal(got, wanted)
    a, b, c = got.double(), wanted.double(), before.double()
    own, computed = (torch.finfo(dtype).eps if dtype != torch.float64 else 1e-12 for dtype in (got.dtype, precision))
    eps = max(own, computed) if got.numel() else 1e-12
    allowed = eps**0.5 * float((b - c).norm()) + 8 * eps * float(b.norm())
    return bool((a - b).norm() <= allowed)


def counter_increments(static: StaticState, before: dict[str, Any], owners: dict[str, int]) -> dict[str, int]:
    """How much each integer of the states grew in a step. Any other change on the host cannot be repeated."""
    grown = dict[str, int]()
    owner = static.owners()
    for path, value in static.counters().items():
        earlier = before.get(path)
        if owner[path] == owners.get(path) or earlier is value:
            continue
        if type(earlier) is int and type(value) is int:
            if value != earlier:
                grown[path] = value - earlier
        elif type(earlier) is not type(value) or earlier != value:
            raise NotRepeatable(f"{path} of the states changes on the host")
    return grown
