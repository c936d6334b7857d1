"""Projections: onto a ball, into a box, or by a function of the user's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nhgd.errors import InputError
from nhgd.loop.settings import Projection
from nhgd.variable import Variable


@torch.no_grad()
def project(variable: Variable, rule: Projection) -> None:
    """Bring a variable back, in place: onto the ball of a radius, into the box (low, high), or by the function given.

    >>> theta = Variable(torch.tensor([3.0, 4.0]), "theta")
    >>> project(theta, 1.0)
    >>> theta.flat()
    tensor([0.6000, 0.8000])
    >>> project(theta, (0.0, 0.5))
    >>> theta.flat()
    tensor([0.5000, 0.5000])
    """
    if rule is None:
        return
    if callable(rule):
        with variable.view() as given:
            _apply(rule, given)
    elif isinstance(rule, tuple):
        low, high = rule
        for leaf in variable.leaves:
            leaf.clamp_(low, high)
    else:
        norm = torch.stack([leaf.norm().to(variable.dtype) for leaf in variable.leaves]).norm()
        shrink = (rule / norm.clamp_min(torch.finfo(norm.dtype).tiny)).clamp_max(1.0)
        for leaf in variable.leaves:
            leaf.mul_(shrink.to(leaf.dtype))


def _apply(rule: Callable[[Any], Any], given: Any) -> None:
    """Apply the user's projection, which changes its argument in place or returns the projected value."""
    found = rule(given)
    if isinstance(found, Tensor) and isinstance(given, Tensor):
        given.copy_(found)
    elif isinstance(found, dict) and isinstance(given, dict):
        for name, tensor in found.items():
            given[name].copy_(tensor)
    elif found is not None and found is not given:
        raise InputError(
            "A projection must change its argument in place or return a value of the same form; it returned a"
            f" {type(found).__name__}."
        )
