"""An eager step that notes what its host does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from nhgd._randomness import state_bytes
from nhgd._tape import BatchSource, Deferred, HostValue, NotRepeatable, Number, Overlap, Reading, Tape
from nhgd._tree import map_tensors, tensors

T = TypeVar("T")


class Rehearsal(Tape):
    """Runs a step as without a tape, and keeps the numbers that its host made.

    Attributes:
        kinds: what the host did, in order.
        uploads, indices, results: numbers and indices sent to the device, and results of eager sections.
        readings, deferred, host_values, ends: what the host reads and does later.
        batches: their stream, and what was drawn.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kinds: list[str] = []
        self.numbers: list[float] = []
        self.uploads: list[float] = []
        self.indices: list[Tensor] = []
        self.results: list[Any] = []
        self.readings: list[Tensor] = []
        self.deferred: list[Deferred] = []
        self.host_values: list[Any] = []
        self.ends: list[Callable[[], None]] = []
        self.batches: list[tuple[BatchSource, Any]] = []
        self.early: list[
            tuple[int, BatchSource]
        ] = []  # batches drawn before the end of the first segment, by the number of their index
        self._uploaded: dict[int, tuple[Number, Tensor]] = {}
        self._standing = state_bytes(device)

    def _made(self, make: Callable[[], T]) -> T:
        """Call a function of the host, which alone may draw random numbers."""
        self.check_draws()
        found = make()
        self._standing = state_bytes(self.device)
        return found

    def check_draws(self) -> None:
        """Refuse a step whose work on the device draws random numbers."""
        if state_bytes(self.device) != self._standing:
            raise NotRepeatable("a step draws random numbers, such as those of dropout")

    @override
    def number(self, make: Callable[[], float]) -> float:
        self.kinds.append("number")
        value = float(self._made(make))
        self.numbers.append(value)
        return Number.of(value, lambda: value)

    @override
    def uploaded(self, value: Number) -> Tensor:
        known = self._uploaded.get(id(value))
        if known is None:
            self.kinds.append("upload")
            self.uploads.append(float(value))
            made = torch.tensor(float(value), dtype=torch.float64, device=self.device)
            known = self._uploaded[id(value)] = (value, made)
        return known[1]

    @override
    def index(self, make: Callable[[], Tensor]) -> Tensor:
        self.kinds.append("index")
        made = self._made(make)
        self.indices.append(made)
        return made.to(self.device)

    @override
    def batch(self, stream: BatchSource) -> Any:
        if "eager" not in self.kinds and "decided" not in self.kinds:
            self.early.append((len(self.indices), stream))
        batch = stream.gathered(self.index(stream.drawing()))
        self.batches.append((stream, batch))
        return batch

    @override
    def overlapped(self, kept: tuple[Tensor, ...]) -> AbstractContextManager[Overlap]:
        return nullcontext(Overlap())

    @override
    def at_end(self, do: Callable[[], None]) -> None:
        self.ends.append(do)

    @override
    def keep_up(self) -> None:
        pass

    @override
    def join(self) -> None:
        pass

    @override
    def effect(self, do: Callable[[], None]) -> None:
        self.kinds.append("effect")
        self._made(do)

    @override
    def eager(self, work: Callable[[], T]) -> T:
        self.kinds.append("eager")
        result = self._made(work)
        self.results.append(map_tensors(lambda t: t, result))  # in new containers: a state may hold the original ones
        return result

    @override
    def decided(
        self,
        numbers: Tensor,
        expected: Tensor,
        accepts: Callable[[list[float]], bool],
        otherwise: Callable[[], Tensor],
    ) -> Tensor:
        self.kinds.append("decided")
        result = self._made(lambda: expected if accepts(numbers.tolist()) else otherwise())
        self.results.append(result)
        return result

    @override
    def reading(self, tensor: Tensor) -> Reading:
        self.readings.append(tensor.detach())
        return Reading(len(self.readings) - 1)

    @override
    def defer(self, make: Callable[..., Any], arguments: tuple[Any, ...]) -> Deferred:
        self.deferred.append(Deferred(make, arguments))
        return self.deferred[-1]

    @override
    def host_value(self, make: Callable[[], Any]) -> HostValue:
        self.kinds.append("host_value")
        self.host_values.append(make())
        return HostValue(len(self.host_values) - 1)

    def work(self) -> tuple[Any, ...]:
        """What the host did, and how much the device was sent and gave back."""
        results = [[(t.shape, t.dtype) for t in tensors(result)] for result in self.results]
        return tuple(self.kinds), [i.shape for i in self.indices], results, len(self.readings)

    def values(self) -> list[float]:
        """The values of the readings."""
        if not self.readings:
            return []
        found: list[float] = torch.stack([t.double() for t in self.readings]).tolist()
        return found
