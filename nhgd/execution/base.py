"""Where curvature is kept up to date."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from nhgd.inverse.base import AbstractInverse
from nhgd.record import InnerRecord
from nhgd.variable import Variable


@dataclass
class Traffic:
    """What an executor did: processes taking part, bytes sent, seconds the inner loop waited for it."""

    processes: int = 1
    bytes_sent: int = 0
    waited_seconds: float = 0.0


class AbstractExecutor(ABC):
    """Takes the records of the inner steps and keeps the state of an inverse.

    Every backend must give, once drained, the state that `Inline` gives.
    """

    name: ClassVar[str]

    def __init__(self) -> None:
        self.traffic = Traffic()

    @abstractmethod
    def start(self, inverse: AbstractInverse, theta: Variable) -> None:
        """Make the first state."""

    @abstractmethod
    def begin(self) -> None:
        """A new outer step begins."""

    @abstractmethod
    def submit(self, record: InnerRecord) -> None:
        """Hand over the record of an inner step."""

    @abstractmethod
    def snapshot(self) -> tuple[Any, int]:
        """The state now, and how many submitted records it does not contain yet."""

    @abstractmethod
    def restore(self, state: Any) -> None:
        """Go on from a state that `snapshot` gave, after `start` and with nothing outstanding; the executor owns it now."""

    @abstractmethod
    def drain(self) -> None:
        """Wait until the state contains every submitted record."""

    @abstractmethod
    def close(self) -> None:
        """Let go of threads, streams and peers."""

    @classmethod
    def summary(cls) -> str:
        """The first line of the docstring."""
        return (cls.__doc__ or "").strip().splitlines()[0]
