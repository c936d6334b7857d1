"""A captured step: what the host does in it, in order, and the segments of work in between."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from nhgd._captured.graph import AbstractCapture
from nhgd._captured.rehearsal import Rehearsal
from nhgd._tape import Aside, Gathers, Later, NotRepeatable, Number, Reading, Tape, Told
from nhgd._tree import map_tensors, tensors
from nhgd.algorithm import StepInfo

T = TypeVar("T")
ROOM = 2**28  # bytes that may be held for work that goes on beside the rest
DEPTH = 16  # steps that are repeated before their numbers are looked at


class Arena:
    """Memory that the host writes to before a segment: numbers and whole numbers, and as often in the host's own memory.

    Each of the steps whose numbers were not looked at yet has a row of its own there, because what is sent to the device may
    not have left when the next step is made.
    """

    def __init__(self, numbers: int, indices: int, device: torch.device) -> None:
        pin = device.type == "cuda"
        self.numbers = torch.zeros(numbers, dtype=torch.float64, device=device)
        self.indices = torch.zeros(indices, dtype=torch.int64, device=device)
        self._numbers = torch.zeros(DEPTH, numbers, dtype=torch.float64, pin_memory=pin)
        self._indices = torch.zeros(DEPTH, indices, dtype=torch.int64, pin_memory=pin)
        self._rows, self._index_rows = self._numbers.numpy(), self._indices.numpy()

    def put_number(self, row: int, place: int, value: float) -> None:
        """Write a number in the host's memory."""
        self._rows[row, place] = value

    def put_index(self, row: int, place: slice, value: Tensor) -> None:
        """Write whole numbers in the host's memory."""
        self._index_rows[row, place] = value.reshape(-1).numpy()

    def index(self, row: int, place: slice) -> Tensor:
        """What was written there."""
        return self._indices[row, place].clone()

    def send(self, row: int, numbers: slice, indices: slice) -> None:
        """Send a part of a row."""
        if numbers.stop > numbers.start:
            self.numbers[numbers].copy_(self._numbers[row, numbers], non_blocking=True)
        if indices.stop > indices.start:
            self.indices[indices].copy_(self._indices[row, indices], non_blocking=True)


class Script(Tape):
    """Notes a step that is captured, after its rehearsal, and repeats it.

    While it is noted, nothing is done on the device: numbers, indices and the results of islands are those of the rehearsal.
    """

    def __init__(self, rehearsal: Rehearsal, capture: AbstractCapture) -> None:
        self._rehearsal, self._capture = rehearsal, capture
        device = rehearsal.device
        self.arena = Arena(len(rehearsal.fed_numbers), sum(i.numel() for i in rehearsal.indices), device)
        self.lines: list[Callable[[int], None]] = []
        self.segments: list[Callable[[int], None]] = []  # sending included, islands not
        self.laters: list[Later] = []
        self.batches: list[tuple[Any, slice]] = []  # who drew them, and their place in the arena
        self.info: StepInfo | None = None
        self._told: list[Any] = []
        self._kinds = iter(rehearsal.kinds)
        self._numbers = iter(rehearsal.numbers)
        self._indices = iter(rehearsal.indices)
        self._results = iter(rehearsal.results)
        self._fed: dict[int, tuple[Number, Tensor]] = {}
        self._readings: list[Tensor] = []
        self._given: list[list[Tensor]] = []  # by islands
        self._ends: list[Callable[[], None]] = []
        self._told_count = self._index_count = 0
        self._early: dict[int, tuple[Any, Aside]] = {}
        self._kept = 0  # bytes
        self._place = [0, 0]  # in the arena
        self._sent = [0, 0]
        self._values: Tensor | None = None  # of the readings, after a step
        self._rows = torch.zeros(DEPTH, len(rehearsal.readings), dtype=torch.float64, pin_memory=device.type == "cuda")

    # -- noting ----------------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """The first segment begins."""
        self._take_over(self._rehearsal)
        self.arena.send(0, slice(0, len(self.arena.numbers)), slice(0, len(self.arena.indices)))
        self._capture.open()
        starts = [0]
        for indices in self._rehearsal.indices:
            starts.append(starts[-1] + indices.numel())
        for number, stream in self._rehearsal.early:
            index = self.arena.indices[starts[number] : starts[number + 1]]
            with self._capture.early() as work:
                self._early[number] = (stream.gathered(index), work)

    @override
    def batch(self, stream: Gathers) -> Any:
        """Gathered at the start of the step where its samples are known there."""
        number = self._index_count
        index = self.index(stream.next_index)
        if number not in self._early:
            return stream.gathered(index)
        found, work = self._early[number]
        work.join()
        return found

    @override
    def aside(self, kept: tuple[Tensor, ...]) -> AbstractContextManager[Aside]:
        self._kept += sum(t.numel() * t.element_size() for t in kept)
        if self._kept > ROOM:
            return nullcontext(Aside())
        return self._capture.aside(kept)

    def finish(self, info: StepInfo) -> None:
        """The last one ends."""
        self.info = info
        if next(self._kinds, None) is not None:
            raise NotRepeatable("a step did less when it was captured than when it was rehearsed")
        if self._readings:
            self._capture.join()
            self._values = torch.stack([t.double() for t in self._readings])
        self._close()
        self._capture.settled()
        self._early = {}

    def _close(self) -> None:
        segment = self._capture.close()
        sent, place = tuple(self._sent), tuple(self._place)
        numbers, indices = slice(sent[0], place[0]), slice(sent[1], place[1])
        self._sent = list(place)

        def play(row: int) -> None:
            self.arena.send(row, numbers, indices)
            segment.replay()

        self.lines.append(play)
        self.segments.append(play)

    def _expect(self, kind: str) -> None:
        found = next(self._kinds, None)
        if found != kind:
            raise NotRepeatable("a step did otherwise when it was captured than when it was rehearsed")

    @override
    def number(self, make: Callable[[], float]) -> float:
        self._expect("number")
        cell = [next(self._numbers)]

        def line(row: int) -> None:
            cell[0] = make()

        self.lines.append(line)
        return Number.of(cell[0], lambda: cell[0])

    @override
    def fed(self, value: Number) -> Tensor:
        known = self._fed.get(id(value))
        if known is None:
            self._expect("fed")
            place, put, give = self._place[0], self.arena.put_number, value.now
            self._place[0] += 1
            self.lines.append(lambda row: put(row, place, give()))
            known = self._fed[id(value)] = (value, self.arena.numbers[place])
        return known[1]

    @override
    def index(self, make: Callable[[], Tensor]) -> Tensor:
        self._expect("index")
        like = next(self._indices)
        self._index_count += 1
        place, put = slice(self._place[1], self._place[1] + like.numel()), self.arena.put_index
        self._place[1] = place.stop
        self.batches.append((getattr(make, "__self__", None), place))
        self.lines.append(lambda row: put(row, place, make()))
        return self.arena.indices[place].reshape(like.shape)

    @override
    def at_end(self, do: Callable[[], None]) -> None:
        self._ends.append(do)

    @override
    def join(self) -> None:
        self._capture.join()

    @override
    def effect(self, do: Callable[[], None]) -> None:
        """Done while noting, too: what the host decides by it must come out as in the rehearsal."""
        self._expect("effect")
        do()
        self.lines.append(lambda row: do())

    @override
    def island(self, work: Callable[[], T]) -> T:
        """The segment before it ends, and another begins."""
        self._expect("island")
        self._close()
        result: T = map_tensors(torch.clone, next(self._results))
        held = tensors(result)
        self._given.append(held)

        def line(row: int) -> None:
            for place, found in zip(held, tensors(work()), strict=True):
                place.copy_(found)

        self.lines.append(line)
        self._capture.open()
        return result

    @override
    def reading(self, tensor: Tensor) -> Reading:
        self._readings.append(tensor.detach())
        return Reading(len(self._readings) - 1)

    @override
    def later(self, make: Callable[..., Any], arguments: tuple[Any, ...]) -> Later:
        self.laters.append(Later(make, arguments))
        return self.laters[-1]

    @override
    def told(self, make: Callable[[], Any]) -> Told:
        self._expect("told")
        self._told_count += 1
        self.lines.append(lambda row: self._told.append(make()))
        return Told(self._told_count - 1)

    # -- repeating -------------------------------------------------------------------------------------------------------------

    def rehearsed(self, rehearsal: Rehearsal) -> None:
        """The captured work of a step that was rehearsed, with the numbers of its host and what its islands gave."""
        for places, result in zip(self._given, rehearsal.results, strict=True):
            for place, found in zip(places, tensors(result), strict=True):
                place.copy_(found)
        self._take_over(rehearsal)
        for play in self.segments:
            play(0)

    def _take_over(self, rehearsal: Rehearsal) -> None:
        for place, value in enumerate(rehearsal.fed_numbers):
            self.arena.put_number(0, place, value)
        start = 0
        for indices in rehearsal.indices:
            self.arena.put_index(0, slice(start, start + indices.numel()), indices)
            start += indices.numel()

    def play(self, row: int) -> list[Any]:
        """A whole step; what the host found out in the middle of it. Its numbers are on their way into a row."""
        self._told = []
        for line in self.lines:
            line(row)
        if self._values is not None:
            self._rows[row].copy_(self._values, non_blocking=True)
        for end in self._ends:
            end()
        return self._told

    def values(self, row: int) -> list[float]:
        """Of the readings, once the device has done its work."""
        found: list[float] = self._rows[row].tolist()
        return found

    def last_values(self) -> list[float]:
        """Of the readings after the work that was done last."""
        found: list[float] = [] if self._values is None else self._values.tolist()
        return found
