"""What the host does in an outer step whose device work is captured: numbers it makes, numbers it reads, eager
sections.

A captured step is replayed without its Python. Whatever the host must still do each time goes through this module:
drawing batches, following step-size schedules, decomposing factors, reading losses. Without a tape each function here
acts at once.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, TypeVar

from torch import Tensor

T = TypeVar("T")
MORE = "more"  # among notes: a dict that the host computes during each step


class Number(float):
    """A number that the host recomputes in each step: the value in the step being captured, and a function for the
    others.

    Sums, products and quotients with it are Numbers too. A tensor would treat it as a constant, so numbers that the
    device computes with must pass through `on_device` first.
    """

    _now: Callable[[], float]

    @classmethod
    def of(cls, value: float, now: Callable[[], float]) -> Number:
        """A number with its present value and the function that recomputes it."""
        made = cls(value)
        made._now = now
        return made

    def now(self) -> float:
        """Its value in the current step."""
        return self._now()

    def __add__(self, other: Any) -> Any:
        return NotImplemented if isinstance(other, Tensor) else _combined(float.__add__, self, other)

    __radd__ = __add__

    def __mul__(self, other: Any) -> Any:
        return NotImplemented if isinstance(other, Tensor) else _combined(float.__mul__, self, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return NotImplemented if isinstance(other, Tensor) else _combined(float.__truediv__, self, other)

    def __neg__(self) -> Number:
        return Number.of(-float(self), lambda: -self.now())


def _combined(function: Callable[[float, float], float], a: Number, b: float) -> Number:
    return Number.of(function(float(a), float(b)), lambda: function(a.now(), now(b)))


def now(value: float) -> float:
    """The value of a number in the current step."""
    return value.now() if isinstance(value, Number) else float(value)


class Reading:
    """Stands for a number of the device that is read some steps later."""

    def __init__(self, place: int) -> None:
        self.place = place


class Deferred:
    """Stands for what the host computes from readings, once they are known."""

    def __init__(self, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.make = make
        self.arguments = arguments


class HostValue:
    """Stands for a value that the host computes during each step."""

    def __init__(self, place: int) -> None:
        self.place = place


class Overlap:
    """Work that may overlap with what follows it."""

    def join(self) -> None:
        """Wait for it."""


class NotRepeatable(Exception):
    """Steps of this run cannot be captured; the message is a clause that says why."""


class BatchSource(Protocol):
    """Something that gathers batches by the indices of their samples."""

    def drawing(self) -> Callable[[], Tensor]:
        """How the index of the next batch is drawn."""

    def draw_into(self, place: Any) -> None:
        """Draw that index into an array of the host."""

    def gathered(self, index: Tensor) -> Any:
        """The batch of these samples."""

    def gathered_together(self, indices: Sequence[Tensor]) -> list[Any]:
        """The batches of equally long indices."""

    def bytes(self, samples: int) -> int:
        """What so many samples take."""


class Tape(ABC):
    """Notes what the host does in a step."""

    @abstractmethod
    def number(self, make: Callable[[], float]) -> float:
        """A number of the host."""

    @abstractmethod
    def uploaded(self, value: Number) -> Tensor:
        """The number on the device, 0-dimensional and float64, which leaves the dtype of tensors it meets unchanged."""

    @abstractmethod
    def index(self, make: Callable[[], Tensor]) -> Tensor:
        """Integers on the device, made by the host."""

    @abstractmethod
    def effect(self, do: Callable[[], None]) -> None:
        """A change of the host's own state, without the device."""

    @abstractmethod
    def eager(self, work: Callable[[], T]) -> T:
        """Work that is not captured."""

    @abstractmethod
    def decided(
        self,
        numbers: Tensor,
        expected: Tensor,
        accepts: Callable[[list[float]], bool],
        otherwise: Callable[[], Tensor],
    ) -> Tensor:
        """A choice of the host by numbers of the device."""

    @abstractmethod
    def reading(self, tensor: Tensor) -> Reading:
        """A number of the device that the host reads later."""

    @abstractmethod
    def defer(self, make: Callable[..., Any], arguments: tuple[Any, ...]) -> Deferred:
        """Work of the host on readings."""

    @abstractmethod
    def host_value(self, make: Callable[[], Any]) -> HostValue:
        """A value that the host computes during the step."""

    @abstractmethod
    def overlapped(self, kept: tuple[Tensor, ...]) -> AbstractContextManager[Overlap]:
        """A context for work that may overlap with what follows; `kept`: the earlier tensors it reads."""

    @abstractmethod
    def at_end(self, do: Callable[[], None]) -> None:
        """Work of the host after each step, when it may read the new state."""

    @abstractmethod
    def keep_up(self) -> None:
        """Numbers of each step are read before the step after the next begins."""

    @abstractmethod
    def join(self) -> None:
        """Wait for all overlapped work."""

    @abstractmethod
    def batch(self, stream: BatchSource) -> Any:
        """The next batch of a stream."""


class _Current(threading.local):
    tape: Tape | None = None
    repeatable: bool = False


_current = _Current()


def tape() -> Tape | None:
    """The tape of the current step, if it has one."""
    return _current.tape


def repeatable() -> bool:
    """Whether the work of a step must follow from step numbers alone, because steps of this run are captured."""
    return _current.repeatable


@contextmanager
def taping(tape: Tape | None, repeatable: bool = True) -> Iterator[None]:
    """A context in which steps are noted on a tape."""
    before = _current.tape, _current.repeatable
    _current.tape, _current.repeatable = tape, repeatable
    try:
        yield
    finally:
        _current.tape, _current.repeatable = before


def number(make: Callable[[], float]) -> float:
    """A number that the host recomputes in each step."""
    return make() if _current.tape is None else _current.tape.number(make)


def on_device(value: float) -> float | Tensor:
    """A form of the number that tensors may compute with in a captured step."""
    return value if _current.tape is None or not isinstance(value, Number) else _current.tape.uploaded(value)


def index(make: Callable[[], Tensor]) -> Tensor:
    """Integers that the host recomputes in each step."""
    return make() if _current.tape is None else _current.tape.index(make)


def effect(do: Callable[[], None]) -> None:
    """A change of the host's own state."""
    if _current.tape is None:
        do()
    else:
        _current.tape.effect(do)


def eager(work: Callable[[], T]) -> T:
    """Work that cannot be captured. Only the tensors of its result may differ from step to step."""
    return work() if _current.tape is None else _current.tape.eager(work)


def decided(
    numbers: Tensor, expected: Tensor, accepts: Callable[[list[float]], bool], otherwise: Callable[[], Tensor]
) -> Tensor:
    """What the host chooses by numbers of the device, (n,) in float64: `expected` if it accepts them, as it mostly
    does, else what it makes `otherwise`, a tensor of the same form.

    The rest of a captured step may be launched before the numbers are known. What the host computes from the choice
    are host values, or numbers of later steps.
    """
    if _current.tape is None:
        return expected if accepts(numbers.tolist()) else otherwise()
    return _current.tape.decided(numbers, expected, accepts, otherwise)


def reading(tensor: Tensor) -> Any:
    """A number of the device: a float, or a placeholder for one."""
    return float(tensor) if _current.tape is None else _current.tape.reading(tensor)


def defer(make: Callable[..., T], *arguments: Any) -> T:
    """What the host computes from readings: now, or once they are known."""
    if _current.tape is None:
        return make(*arguments)
    found: Any = _current.tape.defer(make, arguments)
    return found  # type: ignore[no-any-return]  # a placeholder


def host_value(make: Callable[[], T]) -> T:
    """A value that the host computes during a step."""
    if _current.tape is None:
        return make()
    found: Any = _current.tape.host_value(make)
    return found  # type: ignore[no-any-return]  # a placeholder


def overlapped(*kept: Tensor | None) -> AbstractContextManager[Overlap]:
    """A context for work that may overlap with what follows until it is joined; `kept`: the earlier tensors it
    reads.
    """
    if _current.tape is None:
        return nullcontext(_DONE)
    return _current.tape.overlapped(tuple(t for t in kept if t is not None))


def join() -> None:
    """Wait for all overlapped work."""
    if _current.tape is not None:
        _current.tape.join()


def keep_up() -> None:
    """Numbers of each step are read before the step after the next begins."""
    if _current.tape is not None:
        _current.tape.keep_up()


def at_end(do: Callable[[], None]) -> None:
    """Work of the host after each step, when it may read the new state."""
    if _current.tape is None:
        do()
    else:
        _current.tape.at_end(do)


_DONE = Overlap()
