"""What the host does in an outer step whose work on a device is captured: numbers it makes, numbers it reads, work in between.

A captured step is repeated without its Python. What of it the host decides anew each time goes through this file: batches are
drawn, step sizes follow their schedules, factors are decomposed, losses are looked at. Without a tape every function here does
at once what it is asked for, and its caller computes as it always did.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, TypeVar

from torch import Tensor

T = TypeVar("T")
MORE = "more"  # among notes: notes that the host finds out in the middle of each step


class Number(float):
    """A number that the host makes anew in each step: the float of the step that is looked at, and the way to that of others.

    Sums, products and quotients with other numbers are such numbers too. A tensor takes it for a constant: what a device
    computes with goes through `on_device` first.
    """

    _now: Callable[[], float]

    @classmethod
    def of(cls, value: float, now: Callable[[], float]) -> Number:
        """With a value here, and what gives it in other steps."""
        made = cls(value)
        made._now = now
        return made

    def now(self) -> float:
        """Its value in the step that is under way."""
        return self._now()

    def __add__(self, other: Any) -> Any:
        return NotImplemented if isinstance(other, Tensor) else _joined(float.__add__, self, other)

    __radd__ = __add__

    def __mul__(self, other: Any) -> Any:
        return NotImplemented if isinstance(other, Tensor) else _joined(float.__mul__, self, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return NotImplemented if isinstance(other, Tensor) else _joined(float.__truediv__, self, other)

    def __neg__(self) -> Number:
        return Number.of(-float(self), lambda: -self.now())


def _joined(function: Callable[[float, float], float], a: Number, b: float) -> Number:
    return Number.of(function(float(a), float(b)), lambda: function(a.now(), now(b)))


def now(value: float) -> float:
    """A number in the step that is under way."""
    return value.now() if isinstance(value, Number) else float(value)


class Reading:
    """Stands for a number that will be read from the device some steps later."""

    def __init__(self, place: int) -> None:
        self.place = place


class Later:
    """Stands for what the host makes of readings, once they are known."""

    def __init__(self, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.make = make
        self.arguments = arguments


class Told:
    """Stands for something that the host finds out in the middle of each step."""

    def __init__(self, place: int) -> None:
        self.place = place


class Aside:
    """Work that went on beside what followed it."""

    def join(self) -> None:
        """From here on it is done."""


class NotRepeatable(Exception):
    """Says why steps of a run cannot be captured, or cannot be from here on."""


class Gathers(Protocol):
    """Whoever gives batches by the indices of their samples."""

    def next_index(self) -> Tensor:
        """The samples of the next batch."""

    def gathered(self, index: Tensor) -> Any:
        """The batch of some samples."""


class Tape(ABC):
    """Notes what the host does in a step."""

    @abstractmethod
    def number(self, make: Callable[[], float]) -> float:
        """Of the host."""

    @abstractmethod
    def fed(self, value: Number) -> Tensor:
        """A number on the device, 0-dimensional, of float64: as with Python's numbers, tensors keep their precision beside it."""

    @abstractmethod
    def index(self, make: Callable[[], Tensor]) -> Tensor:
        """Whole numbers on the device, that the host makes."""

    @abstractmethod
    def effect(self, do: Callable[[], None]) -> None:
        """A change of what the host keeps, which no device takes part in."""

    @abstractmethod
    def island(self, work: Callable[[], T]) -> T:
        """Work on the device, and perhaps of the host, that is not captured."""

    @abstractmethod
    def reading(self, tensor: Tensor) -> Reading:
        """A number of the device, for the host to look at some steps later."""

    @abstractmethod
    def later(self, make: Callable[..., Any], arguments: tuple[Any, ...]) -> Later:
        """What the host does with readings."""

    @abstractmethod
    def told(self, make: Callable[[], Any]) -> Told:
        """What the host has found out by now."""

    @abstractmethod
    def aside(self, kept: tuple[Tensor, ...]) -> AbstractContextManager[Aside]:
        """Work inside may go on beside what follows; `kept`: what it reads of the work before."""

    @abstractmethod
    def at_end(self, do: Callable[[], None]) -> None:
        """What the host does after each step, where it may look at what the step has left."""

    @abstractmethod
    def join(self) -> None:
        """From here on all work that went on beside is done."""

    @abstractmethod
    def batch(self, stream: Gathers) -> Any:
        """The next batch of a stream."""


class _Here(threading.local):
    tape: Tape | None = None
    repeatable: bool = False


_here = _Here()


def tape() -> Tape | None:
    """That of the step under way, if it has one."""
    return _here.tape


def repeatable() -> bool:
    """Whether the shapes of all work must follow from step numbers alone, because steps of this run are captured."""
    return _here.repeatable


@contextmanager
def taping(tape: Tape | None, repeatable: bool = True) -> Iterator[None]:
    """Inside, steps are noted on a tape."""
    before = _here.tape, _here.repeatable
    _here.tape, _here.repeatable = tape, repeatable
    try:
        yield
    finally:
        _here.tape, _here.repeatable = before


def number(make: Callable[[], float]) -> float:
    """A number that the host makes anew in each step."""
    return make() if _here.tape is None else _here.tape.number(make)


def on_device(value: float) -> float | Tensor:
    """What tensors are to compute with: the number itself, unless it is made anew in each step of a captured run."""
    return value if _here.tape is None or not isinstance(value, Number) else _here.tape.fed(value)


def index(make: Callable[[], Tensor]) -> Tensor:
    """Whole numbers that the host makes anew in each step."""
    return make() if _here.tape is None else _here.tape.index(make)


def effect(do: Callable[[], None]) -> None:
    """A change of what the host keeps."""
    if _here.tape is None:
        do()
    else:
        _here.tape.effect(do)


def island(work: Callable[[], T]) -> T:
    """Work that cannot be captured. Of its result, tensors alone differ from step to step."""
    return work() if _here.tape is None else _here.tape.island(work)


def reading(tensor: Tensor) -> Any:
    """A number of the device: a float, or what will be one."""
    return float(tensor) if _here.tape is None else _here.tape.reading(tensor)


def later(make: Callable[..., T], *arguments: Any) -> T:
    """What the host makes of readings: here and now, or when they are known."""
    if _here.tape is None:
        return make(*arguments)
    found: Any = _here.tape.later(make, arguments)
    return found  # type: ignore[no-any-return]  # it stands for what it will be


def told(make: Callable[[], T]) -> T:
    """What the host has found out in the middle of a step."""
    if _here.tape is None:
        return make()
    found: Any = _here.tape.told(make)
    return found  # type: ignore[no-any-return]  # it stands for what it will be


def aside(*kept: Tensor | None) -> AbstractContextManager[Aside]:
    """Work inside may go on beside what follows, until it is joined; `kept`: what it reads of the work before."""
    if _here.tape is None:
        return nullcontext(_DONE)
    return _here.tape.aside(tuple(t for t in kept if t is not None))


def join() -> None:
    """From here on all work that went on beside is done."""
    if _here.tape is not None:
        _here.tape.join()


def at_end(do: Callable[[], None]) -> None:
    """What the host does after each step, where it may look at what the step has left in a state."""
    if _here.tape is None:
        do()
    else:
        _here.tape.at_end(do)


_DONE = Aside()
