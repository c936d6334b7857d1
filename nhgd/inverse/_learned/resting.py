"""How factors and eigenvectors are kept between their uses: in the host's memory, or in few digits.

An inner step has no use for them, and its activations are what memory is needed for. They are back on the device, in
all digits, while a record is folded in and while a system is solved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from nhgd.inverse._learned.kronecker_state import KroneckerState
from nhgd.inverse._learned.matrix_products import conjugate

T = TypeVar("T", bound=KroneckerState)
POLISH = 4  # products with the factors in a solve with eigenvectors of few digits


def at_rest(state: T, offload: bool, basis_dtype: torch.dtype | None) -> T:
    """The state as it is kept."""
    if basis_dtype is not None:
        known: dict[int, Tensor] = {}
        state = replace(state, bases=_of_bases(state, lambda q: _once(known, q, lambda t: t.to(basis_dtype))))
    return _moved(state, to_host) if offload else state


def awake(state: T, offload: bool, basis_dtype: torch.dtype | None, bases: bool = True) -> T:
    """The state as it is worked with; with `bases` or without."""
    if offload and state.weights:
        device = next(iter(state.weights.values())).device  # numbers stay there
        state = _moved(state, lambda t: t.to(device, non_blocking=True), bases)
    if basis_dtype is not None and bases:
        known: dict[int, Tensor] = {}
        dtype = next(iter(state.inputs.values())).dtype if state.inputs else None
        state = replace(state, bases=_of_bases(state, lambda q: _once(known, q, lambda t: t.to(dtype))))
    return state


def to_host(tensor: Tensor) -> Tensor:
    """A tensor in main memory, in pages that a GPU reads on its own."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def _moved(state: T, move: Callable[[Tensor], Tensor], bases: bool = True) -> T:
    """The state with everything that has the size of a layer moved; names that share a tensor share it afterwards."""
    known: dict[int, Tensor] = {}
    changed: dict[str, Any] = {
        kind: {name: _once(known, t, move) for name, t in getattr(state, kind).items()}
        for kind in ("inputs", "scores", "moments")
        if hasattr(state, kind)
    }
    if bases:
        changed["bases"] = {
            layer: {name: _once(known, t, move) for name, t in kept.items()} for layer, kept in state.bases.items()
        }
    return replace(state, **changed)


def _of_bases(state: KroneckerState, change: Callable[[Tensor], Tensor]) -> dict[str, dict[str, Tensor]]:
    """The bases with their eigenvectors changed."""
    return {
        layer: {name: change(t) if name.endswith("_vectors") else t for name, t in kept.items()}
        for layer, kept in state.bases.items()
    }


def _once(known: dict[int, Tensor], tensor: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
    if id(tensor) not in known:
        known[id(tensor)] = make(tensor)
    return known[id(tensor)]


def polished(
    a: Tensor, g: Tensor, extra: float, near: Callable[[Tensor], Tensor], iterations: int = POLISH
) -> Callable[[Tensor], Tensor]:
    """b -> (A (x) G + extra I)^{-1} b for matrices b, (G, out, in), by conjugate gradients that a solve which is near
    to it preconditions.

    Eigenvectors of few digits mix the largest eigenvalues into the smallest, by which a solve divides: alone they may
    be wrong by more than the solution. Each product with the factors, X -> G X A + extra X, takes most of that away.
    """
    return conjugate(a, g, extra, near, iterations)
