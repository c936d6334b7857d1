"""A stand-in for CUDA graphs on the CPU: operations are recorded with their memory, and done again on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from nhgd._captured.graph import AbstractCapture, Segment

READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "item", "equal", "masked_select", "_unique2", "unique_dim")
NUMBERS = ("tolist", "item", "__float__", "__int__", "__bool__", "numpy", "__index__")


class HostRead(RuntimeError):
    """A number was asked of the device while its work was captured."""


class Recorded(Segment):
    """Operations, each with its own memory."""

    def __init__(self, operations: list[tuple[Callable[..., Any], Any, Any, Any]]) -> None:
        self._operations = operations

    def replay(self) -> None:
        """Do them again. Memory that an operation made is written to; views and what is changed in place need nothing more."""
        with torch.no_grad():
            for function, args, kwargs, result in self._operations:
                again = function(*args, **kwargs)
                for place, found in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(place, Tensor) and place.numel() and place.data_ptr() != found.data_ptr():
                        place.copy_(found)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Callable[..., Any], Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        if name in READS:
            raise HostRead(f"{name} reads a number")
        if torch.Tag.nondeterministic_seeded in func.tags and "dropout" in name:
            raise HostRead(f"{name} draws")
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        apart = tree_map_only(Tensor, lambda t: t.detach() if t.requires_grad else t, (args, kwargs))
        self.operations.append((func, *apart, result))
        return result


class _NoNumbers(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in NUMBERS:
            raise HostRead(f"{func.__name__} reads a number")
        return func(*args, **(kwargs or {}))


class RecordedCapture(AbstractCapture):
    """Raises at every number that the host would read while work is captured."""

    name = "graph"

    def __init__(self) -> None:
        self._modes: list[Any] = []

    def open(self) -> None:
        self._modes = [_NoNumbers(), _Recorder()]
        for mode in self._modes:
            mode.__enter__()

    def close(self) -> Segment:
        recorder = self._modes[1]
        self.abandon()
        return Recorded(recorder.operations)

    def abandon(self) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(None, None, None)
        self._modes = []

    def settled(self) -> None:
        pass
