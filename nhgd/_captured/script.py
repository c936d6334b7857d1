"""A captured step: the actions of its host, in order, and the captured segments between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from nhgd._captured.comparison import copy_into
from nhgd._captured.decision import Decision
from nhgd._captured.graph import AbstractCapture
from nhgd._captured.rehearsal import Rehearsal
from nhgd._tape import BatchSource, Deferred, HostValue, NotRepeatable, Number, Overlap, Reading, Tape
from nhgd._tree import map_tensors, tensors
from nhgd.algorithm import StepInfo

T = TypeVar("T")
ROOM = 2**28  # bytes that overlapped work may keep alive, and batches that are gathered together
DEPTH = 16  # steps that are launched before their numbers are read


class Arena:
    """Memory on the device for the numbers and indices of a step, with staging memory on the host.

    Each pending step has a staging row of its own, because its transfer may not have finished when the host prepares
    the next.
    """

    def __init__(self, numbers: int, indices: int, device: torch.device) -> None:
        size, pin = numbers + indices, device.type == "cuda"
        self._all = torch.zeros(size, dtype=torch.int64, device=device)  # the bits of the numbers, and the indices
        self._staged = torch.zeros(DEPTH, size, dtype=torch.int64, pin_memory=pin)
        self.numbers, self.indices = self._all[:numbers].view(torch.float64), self._all[numbers:]
        rows = self._staged.numpy()
        self._rows, self._index_rows = rows[:, :numbers].view("float64"), rows[:, numbers:]

    def put_number(self, row: int, place: int, value: float) -> None:
        """Stage a number."""
        self._rows[row, place] = value

    def put_index(self, row: int, place: slice, value: Tensor) -> None:
        """Stage indices."""
        self._index_rows[row, place] = value.reshape(-1).numpy()

    def staging(self, place: slice) -> list[Any]:
        """Where these indices are staged, in each row."""
        return [row[place] for row in self._index_rows]

    def index(self, row: int, place: slice) -> Tensor:
        """The indices staged there."""
        first = len(self.numbers)
        return self._staged[row, first + place.start : first + place.stop].clone()

    def send(self, row: int, numbers: slice, indices: slice) -> None:
        """Transfer part of a row to the device."""
        first = len(self.numbers)
        parts = [numbers, slice(first + indices.start, first + indices.stop)]
        if numbers.stop == first and indices.start == 0:  # neighbours
            parts = [slice(numbers.start, first + indices.stop)]
        for part in parts:
            if part.stop > part.start:
                self._all[part].copy_(self._staged[row, part], non_blocking=True)


class Script(Tape):
    """Captures a step after its rehearsal, and replays it.

    During capture nothing runs on the device: numbers, indices and the results of eager sections are those of the
    rehearsal.
    """

    def __init__(self, rehearsal: Rehearsal, capture: AbstractCapture) -> None:
        self._rehearsal, self._capture = rehearsal, capture
        device = rehearsal.device
        self.arena = Arena(len(rehearsal.uploads), sum(i.numel() for i in rehearsal.indices), device)
        self.lines: list[Callable[[int], None]] = []
        self.segments: list[Callable[[int], None]] = []  # transfers included, eager sections not
        self.deferred: list[Deferred] = []
        self.batches: list[tuple[Any, slice]] = []  # their stream, and their place in the arena
        self.info: StepInfo | None = None
        self.most_pending = DEPTH  # steps with numbers that were not read, this one included
        self._host_values: list[Any] = []
        self._work = rehearsal.work()
        self._kinds = iter(rehearsal.kinds)
        self._numbers = iter(rehearsal.numbers)
        self._indices = iter(rehearsal.indices)
        self._results = iter(rehearsal.results)
        self._uploaded: dict[int, tuple[Number, Tensor]] = {}
        self._readings: list[Tensor] = []
        self._given: list[list[Tensor]] = []  # results of eager sections
        self._ends: list[Callable[[], None]] = []
        self._decision: Decision | None = None  # the last, if nothing after it needs its result on the host
        self._late: list[Callable[[int], None]] = []  # host values after it
        self._states: Sequence[Tensor] = ()  # of the run
        self._host_value_count = self._index_count = 0
        self._early: dict[int, tuple[Any, Overlap]] = {}
        self._kept = 0  # bytes
        self._place = [0, 0]  # in the arena
        self._sent = [0, 0]
        self._values: Tensor | None = None  # of the readings, and the distance v moved, after a step
        count = len(rehearsal.readings) + 1
        self._rows = torch.zeros(DEPTH, count, dtype=torch.float64, pin_memory=device.type == "cuda")

    # -- capture
    # ---------------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Open the first segment."""
        self._take_over(self._rehearsal)
        self.arena.send(0, slice(0, len(self.arena.numbers)), slice(0, len(self.arena.indices)))
        self._capture.open()
        if self._capture.gathers_ahead:
            self._gather()

    def _gather(self) -> None:
        """Gather the batches whose samples are known where the step starts; if they have room, a stream at a time."""
        starts = list(accumulate((i.numel() for i in self._rehearsal.indices), initial=0))
        streams: dict[int, tuple[Any, list[int]]] = {}
        for number, stream in self._rehearsal.early:
            streams.setdefault(id(stream), (stream, []))[1].append(number)
        for stream, numbers in streams.values():
            indices = [self.arena.indices[starts[number] : starts[number + 1]] for number in numbers]
            alike = len(numbers) > 1 and len({len(index) for index in indices}) == 1
            if alike and stream.bytes(sum(map(len, indices))) <= ROOM:
                with self._capture.early() as work:
                    batches = stream.gathered_together(indices)
                self._early |= {number: (batch, work) for number, batch in zip(numbers, batches, strict=True)}
                continue
            for number, index in zip(numbers, indices, strict=True) if self._capture.overlaps else ():
                with self._capture.early() as work:
                    self._early[number] = (stream.gathered(index), work)

    @override
    def batch(self, stream: BatchSource) -> Any:
        """The batch; gathered at the start of the step if its samples are known there."""
        number = self._index_count
        index = self.index(stream.drawing())
        staging, draw = self.arena.staging(self.batches[-1][1]), stream.draw_into
        self.lines[-1] = lambda row: draw(staging[row])
        if number not in self._early:
            return stream.gathered(index)
        found, work = self._early[number]
        work.join()
        return found

    @override
    def overlapped(self, kept: tuple[Tensor, ...]) -> AbstractContextManager[Overlap]:
        self._kept += sum(t.numel() * t.element_size() for t in kept)
        if self._kept > ROOM:
            return nullcontext(Overlap())
        return self._capture.overlapped(kept)

    def finish(self, info: StepInfo, stride: Tensor) -> None:
        """Close the last segment. `stride`: the distance v moved."""
        self.info = info
        if next(self._kinds, None) is not None:
            raise NotRepeatable("a step did less under capture than when it ran eagerly")
        self._capture.join()
        self._values = torch.stack([t.double() for t in (*self._readings, stride)])
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
            raise NotRepeatable("a step did something else under capture than when it ran eagerly")

    @override
    def number(self, make: Callable[[], float]) -> float:
        self._expect("number")
        cell = [next(self._numbers)]

        def line(row: int) -> None:
            cell[0] = make()

        self.lines.append(line)
        return Number.of(cell[0], lambda: cell[0])

    @override
    def uploaded(self, value: Number) -> Tensor:
        known = self._uploaded.get(id(value))
        if known is None:
            self._expect("upload")
            place, put, give = self._place[0], self.arena.put_number, value.now
            self._place[0] += 1
            self.lines.append(lambda row: put(row, place, give()))
            known = self._uploaded[id(value)] = (value, self.arena.numbers[place])
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
    def keep_up(self) -> None:
        self.most_pending = 2

    @override
    def join(self) -> None:
        self._capture.join()

    @override
    def effect(self, do: Callable[[], None]) -> None:
        """Performed during capture too, because later decisions of the host depend on it."""
        self._expect("effect")
        do()
        self.lines.append(lambda row: do())

    @override
    def eager(self, work: Callable[[], T]) -> T:
        """Close the segment, and open another after the work."""
        self._expect("eager")
        self._wait_for_decision()
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
    def decided(
        self,
        numbers: Tensor,
        expected: Tensor,
        accepts: Callable[[list[float]], bool],
        otherwise: Callable[[], Tensor],
    ) -> Tensor:
        """Close the segment, and open another, which is launched before the numbers arrive if nothing forbids it."""
        self._expect("decided")
        self._wait_for_decision()
        self._close()
        place: Tensor = next(self._results).clone()
        self._given.append([place])
        made = Decision(numbers, expected, place, accepts, otherwise, len(self.segments))
        if self._capture.overlaps:
            self._decision = made
        else:
            made.waits = True
        self.lines.append(lambda row: made.begin(self._states))
        self._capture.open()
        return place

    def _wait_for_decision(self) -> None:
        """What follows may need the result of the last decision."""
        if self._decision is not None:
            self._decision.waits = True
            self.lines += self._late
            self._decision, self._late = None, []

    @override
    def reading(self, tensor: Tensor) -> Reading:
        self._readings.append(tensor.detach())
        return Reading(len(self._readings) - 1)

    @override
    def defer(self, make: Callable[..., Any], arguments: tuple[Any, ...]) -> Deferred:
        self.deferred.append(Deferred(make, arguments))
        return self.deferred[-1]

    @override
    def host_value(self, make: Callable[[], Any]) -> HostValue:
        self._expect("host_value")
        place = self._host_value_count
        self._host_value_count += 1

        def line(row: int) -> None:
            self._host_values[place] = make()

        (self.lines if self._decision is None else self._late).append(line)
        return HostValue(place)

    # -- replay
    # ---------------------------------------------------------------------------------------------------------------

    def fits(self, rehearsal: Rehearsal) -> bool:
        """Whether the host did in a rehearsal what it does here."""
        return rehearsal.work() == self._work

    def rehearsed(self, rehearsal: Rehearsal, states: Sequence[Tensor]) -> None:
        """Run the captured work with the host numbers and eager results of a rehearsal.

        states: everything that a step changes. Where what follows the last decision changes more, it is not launched
        before the decision is known.
        """
        for places, result in zip(self._given, rehearsal.results, strict=True):
            for place, found in zip(places, tensors(result), strict=True):
                place.copy_(found)
        self._take_over(rehearsal)
        start = [t.clone() for t in states]
        first = len(self.segments) if self._decision is None else self._decision.first
        self._play(slice(0, first))
        if self._decision is None:
            return
        if not self._decision.is_repeatable(lambda: self._play(slice(first, None)), states):
            self._wait_for_decision()
            copy_into(list(states), start)
            self._play(slice(0, None))

    def _play(self, some: slice, row: int = 0) -> None:
        """Launch some of the segments."""
        for play in self.segments[some]:
            play(row)

    def _take_over(self, rehearsal: Rehearsal) -> None:
        for place, value in enumerate(rehearsal.uploads):
            self.arena.put_number(0, place, value)
        start = 0
        for indices in rehearsal.indices:
            self.arena.put_index(0, slice(start, start + indices.numel()), indices)
            start += indices.numel()

    def play(self, row: int, states: Sequence[Tensor]) -> list[Any]:
        """Launch a whole step; returns what its host computed. Its readings are on their way into a row.

        states: everything that a step changes.
        """
        self._host_values, self._states = [None] * self._host_value_count, states
        for line in self.lines:
            line(row)
        if self._decision is not None and not self._decision.stands(states):
            self._play(slice(self._decision.first, None), row)
        assert self._values is not None
        self._rows[row].copy_(self._values, non_blocking=True)
        for line in self._late:
            line(row)
        for end in self._ends:
            end()
        return self._host_values

    def values(self, row: int) -> tuple[list[float], float]:
        """The readings in a row and the distance v moved, once the device has finished."""
        *found, stride = self._rows[row].tolist()
        return found, stride

    def last_values(self) -> list[float]:
        """The readings of the last step."""
        assert self._values is not None
        found: list[float] = self._values[:-1].tolist()
        return found
