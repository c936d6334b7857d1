"""Curvature kept on a second device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock
from typing import Any, ClassVar, final

import torch
from torch import Tensor
from typing_extensions import override

from nhgd._tree import map_tensors
from nhgd.errors import InputError
from nhgd.execution._background import AbstractBackground
from nhgd.execution._remote import asking
from nhgd.execution._stopwatch import Stopwatch
from nhgd.execution.base import Curvature
from nhgd.inverse.base import Learned, SolveStats
from nhgd.inverse.capabilities import significant
from nhgd.record import InnerRecord
from nhgd.ridge import Ridge
from nhgd.variable import Variable


@final
class Device(AbstractBackground):
    """On a second device: records go there one way, and at the end of the inner loop u goes and x comes back.

    The state never travels, and `bytes_sent` counts all that does: records, u, the ridge and x. Copies between two GPUs
    go directly where one can reach the other's memory and through pinned memory of the host where not; they run on
    streams of their own, so that the inner loop does not wait for them.

    Args:
        device: where the curvature is kept, such as "cuda:1" or "cpu"; None: the next GPU after theta's.
        max_lag: how many records may be outstanding before an inner step waits; default 8.
        stale: take the current curvature at the end of the inner loop, instead of waiting for the outstanding records.

    >>> Device("cpu").name
    'device'
    """

    name: ClassVar[str] = "device"
    _between: tuple[torch.device, torch.device] | None = None  # home and the other device that streams were made for

    def __init__(
        self, device: str | torch.device | None = None, max_lag: int | None = None, stale: bool = False
    ) -> None:
        super().__init__(max_lag, stale)
        self._counting = Lock()
        try:
            self.device = None if device is None else torch.device(device)
        except (RuntimeError, ValueError, OverflowError):
            raise InputError(f"There is no device called {device!r}. Use for example cuda:1 or cpu.") from None
        if self.device is not None and self.device.type not in ("cpu", "cuda"):
            raise InputError(f"Curvature cannot be kept on {self.device}. Use for example cuda:1 or cpu.")
        if self.device is not None and self.device.type == "cpu":
            if self.device.index:
                raise InputError(f"There is no device {self.device}: all processors form one device. Use cpu.")
            self.device = torch.device("cpu")
        if self.device is not None and self.device.type == "cuda":
            count = torch.cuda.device_count()
            if (self.device.index or 0) >= count:
                raise InputError(f"There is no device {self.device}: this machine has {count} CUDA device(s).")

    def _prepare(self, theta: Variable) -> None:
        self._home = theta.device
        self._places = theta.slices()
        if self.device is None:
            if theta.device.type != "cuda" or torch.cuda.device_count() < 2:
                raise InputError(
                    "device execution keeps curvature on a second GPU, but there is none. Choose another device, as"
                    " in execution='device:cpu', or use stream or thread."
                )
            self.device = torch.device("cuda", ((theta.device.index or 0) + 1) % torch.cuda.device_count())
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        if self._between == (self._home, self.device):
            return  # the thread has entered these streams for good
        if self._between is not None and self.queue.is_open:
            raise InputError(
                f"This device executor was used between {self._between[0]} and {self._between[1]}, but theta is now"
                f" on {self._home}. Make a new one."
            )
        self._between = self._home, self.device
        self.busy = Stopwatch(self.device)
        # One stream on each GPU: copies leave on the home's, work is done on the other's.
        self._leaving = torch.cuda.Stream(self._home) if self._home.type == "cuda" else None
        self._side = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def _first(self, learner: Learned[Any], theta: Variable) -> Any:
        # Of theta only names, sizes, dtype and device matter, so the first state is made on the device itself.
        leaves = {
            name: torch.zeros_like(leaf, device=self.device)
            for name, leaf in zip(theta.names, theta.leaves, strict=True)
        }
        with self._there():
            return learner.init(Variable(leaves, "theta"))

    def _mark(self) -> Callable[[], None]:
        if self._leaving is None:
            return lambda: None
        leaving = self._leaving
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._home))
        return lambda: leaving.wait_event(event)

    def _received(self, record: InnerRecord) -> InnerRecord:
        return map_tensors(self._moved, record)

    def _moved(self, tensor: Tensor) -> Tensor:
        """A tensor of the home device, copied to the other one and ready for its stream."""
        assert self.device is not None
        self._count(tensor)
        if tensor.device == self.device:
            if self._side is None:
                return tensor
            return self._shared(tensor)
        if self._leaving is None:
            found = tensor.pin_memory() if self._side is not None else tensor
            return found.to(self.device, non_blocking=True)
        tensor.record_stream(self._leaving)
        if self._side is not None and torch.cuda.can_device_access_peer(self.device, self._home):
            with torch.cuda.stream(self._leaving):
                return tensor.to(self.device, non_blocking=True)
        with torch.cuda.device(self._home), torch.cuda.stream(self._leaving):
            staged = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        if self._side is None:
            event.synchronize()
            return staged
        self._side.wait_event(event)
        return staged.to(self.device, non_blocking=True)

    def _shared(self, tensor: Tensor) -> Tensor:
        """A tensor of one GPU for two of its streams."""
        assert self._side is not None
        assert self._leaving is not None
        self._side.wait_stream(self._leaving)
        tensor.record_stream(self._side)
        return tensor

    @contextmanager
    def _there(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self._side is not None:
                stack.enter_context(torch.cuda.device(self._side.device))
                stack.enter_context(torch.cuda.stream(self._side))
            yield

    @override
    def curvature(self) -> Curvature:
        """A stand-in for the inverse that solves where the state is kept."""
        found = super().curvature()
        return found._replace(inverse=asking(found.inverse, self._ask))

    def _ask(
        self, state: Any, u: Tensor, ridge: Ridge, error: Tensor | None = None
    ) -> tuple[Tensor, SolveStats | None]:
        assert self.device is not None
        assert self.learner is not None
        self._count(u, ridge.tensor(u.dtype), u)  # x is as large as u
        if self._side is not None and u.device.type == "cuda":
            self._side.wait_stream(torch.cuda.current_stream(u.device))
        with self._there():
            there = u.to(self.device)
            stats: SolveStats | None = None
            if error is None:
                x, stats = self.learner.solve(state, there, ridge.to(self.device))
            else:
                x, _ = significant(self.learner, state, there, error.to(self.device), self._places)
            x = x.to(u.device)
        if self._side is not None and u.device.type == "cuda":
            torch.cuda.current_stream(u.device).wait_stream(self._side)
            x.record_stream(torch.cuda.current_stream(u.device))
        return x, stats

    def _count(self, *moved: Tensor) -> None:
        with self._counting:  # both threads do
            self.traffic.bytes_sent += sum(tensor.numel() * tensor.element_size() for tensor in moved)

    @override
    def restore(self, state: Any) -> None:
        if state is not None and self.device is not None:
            if self._side is not None:
                for tensor in state.tensors().values():
                    if tensor.is_cuda:
                        self._side.wait_stream(torch.cuda.current_stream(tensor.device))
            with self._there():
                state = state.to(self.device)
        super().restore(state)
