"""Whether captured work does what its step did."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nhgd._captured.held import Held


def put(places: list[Tensor], values: list[Tensor]) -> None:
    with torch.no_grad():
        for place, value in zip(places, values, strict=True):
            place.copy_(value)


def close(got: Tensor, wanted: Tensor, before: Tensor) -> bool:
    """Whether two results differ by rounding, beside what the step changed."""
    if not got.is_floating_point():
        return torch.equal(got, wanted)
    a, b, c = got.double(), wanted.double(), before.double()
    eps = torch.finfo(got.dtype).eps if got.numel() and got.dtype != torch.float64 else 1e-12
    allowed = eps**0.5 * float((b - c).norm()) + 8 * eps * float(b.norm())
    return bool((a - b).norm() <= allowed)


def counted(held: Held, before: dict[str, Any], owners: dict[str, int]) -> tuple[dict[str, int], str | None]:
    """By how much whole numbers of the states grew in a step; or why it is not that simple."""
    now, grown = held.counters(), dict[str, int]()
    own = held.owners()
    for path, value in now.items():
        was = before.get(path)
        if own[path] == owners.get(path) or was is value:
            continue
        if type(was) is int and type(value) is int:
            if value != was:
                grown[path] = value - was
        elif type(was) is not type(value) or was != value:
            return {}, f"{path} of the states changes on the host"
    return grown, None
