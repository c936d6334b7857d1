"""A step that is taken, and whose host is noted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from nhgd._randomness import standing
from nhgd._tape import Aside, Gathers, Later, NotRepeatable, Number, Reading, Tape, Told
from nhgd._tree import map_tensors

T = TypeVar("T")


class Rehearsal(Tape):
    """Takes a step as it would be taken without a tape, and keeps the numbers that its host made.

    Attributes:
        kinds: of what the host did, in order.
        fed_numbers, indices, results: what was put onto the device, and what islands gave.
        readings, laters, told_things, ends: as they are noted for later.
        draws: batches of each stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kinds: list[str] = []
        self.numbers: list[float] = []
        self.fed_numbers: list[float] = []
        self.indices: list[Tensor] = []
        self.results: list[Any] = []
        self.readings: list[Tensor] = []
        self.laters: list[Later] = []
        self.told_things: list[Any] = []
        self.ends: list[Callable[[], None]] = []
        self.draws: dict[int, int] = {}
        self.early: list[tuple[int, Gathers]] = []  # batches that nothing of the step comes before, by their index
        self._fed: dict[int, tuple[Number, Tensor]] = {}
        self._standing = standing(device)

    def _made(self, make: Callable[[], T]) -> T:
        """What the host makes may draw random numbers; nothing else may."""
        self.check_draws()
        found = make()
        self._standing = standing(self.device)
        return found

    def check_draws(self) -> None:
        """Refuse a step that draws random numbers on its own."""
        if standing(self.device) != self._standing:
            raise NotRepeatable("a step draws random numbers, such as those of dropout")

    @override
    def number(self, make: Callable[[], float]) -> float:
        self.kinds.append("number")
        value = float(self._made(make))
        self.numbers.append(value)
        return Number.of(value, lambda: value)

    @override
    def fed(self, value: Number) -> Tensor:
        known = self._fed.get(id(value))
        if known is None:
            self.kinds.append("fed")
            self.fed_numbers.append(float(value))
            made = torch.tensor(float(value), dtype=torch.float64, device=self.device)
            known = self._fed[id(value)] = (value, made)
        return known[1]

    @override
    def index(self, make: Callable[[], Tensor]) -> Tensor:
        self.kinds.append("index")
        made = self._made(make)
        self.indices.append(made)
        return made.to(self.device)

    @override
    def batch(self, stream: Gathers) -> Any:
        self.draws[id(stream)] = self.draws.get(id(stream), 0) + 1
        if "island" not in self.kinds:
            self.early.append((len(self.indices), stream))
        return stream.gathered(self.index(stream.next_index))

    @override
    def aside(self, kept: tuple[Tensor, ...]) -> AbstractContextManager[Aside]:
        return nullcontext(Aside())

    @override
    def at_end(self, do: Callable[[], None]) -> None:
        self.ends.append(do)

    @override
    def join(self) -> None:
        pass

    @override
    def effect(self, do: Callable[[], None]) -> None:
        self.kinds.append("effect")
        self._made(do)

    @override
    def island(self, work: Callable[[], T]) -> T:
        self.kinds.append("island")
        result = self._made(work)
        self.results.append(map_tensors(lambda t: t, result))  # in containers of their own: a state may hold the others
        return result

    @override
    def reading(self, tensor: Tensor) -> Reading:
        self.readings.append(tensor.detach())
        return Reading(len(self.readings) - 1)

    @override
    def later(self, make: Callable[..., Any], arguments: tuple[Any, ...]) -> Later:
        self.laters.append(Later(make, arguments))
        return self.laters[-1]

    @override
    def told(self, make: Callable[[], Any]) -> Told:
        self.kinds.append("told")
        self.told_things.append(make())
        return Told(len(self.told_things) - 1)

    def values(self) -> list[float]:
        """Of the readings."""
        if not self.readings:
            return []
        found: list[float] = torch.stack([t.double() for t in self.readings]).tolist()
        return found
