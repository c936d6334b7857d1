"""Where curvature is kept up to date."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from nhgd._validation import validated
from nhgd.errors import InputError, NhgdError
from nhgd.execution.group import Group
from nhgd.inverse.base import AbstractInverse, Learned
from nhgd.record import InnerRecord
from nhgd.variable import Variable


@dataclass
class Traffic:
    """The work and communication of an executor so far.

    Attributes:
        processes: how many take part.
        records: how many were handed over.
        bytes_sent: between devices or processes.
        curvature_seconds: spent keeping the curvature, wherever that is.
        waited_seconds: for which the inner loop waited.
        largest_lag: the most records that were outstanding after one was handed over, since the last reading.
    """

    processes: int = 1
    records: int = 0
    bytes_sent: int = 0
    curvature_seconds: float = 0.0
    waited_seconds: float = 0.0
    largest_lag: int = 0

    @property
    def overlap(self) -> float:
        """The part of the curvature's time that the inner loop did not wait for, between 0 and 1."""
        if self.curvature_seconds <= 0:
            return 0.0
        return min(1.0, max(0.0, 1 - self.waited_seconds / self.curvature_seconds))

    def since(self, earlier: Traffic) -> Traffic:
        """The difference of two readings."""
        return Traffic(
            self.processes,
            self.records - earlier.records,
            self.bytes_sent - earlier.bytes_sent,
            self.curvature_seconds - earlier.curvature_seconds,
            self.waited_seconds - earlier.waited_seconds,
            self.largest_lag,
        )


class Curvature(NamedTuple):
    """The curvature that an algorithm solves with: the inverse, its state, and the number of missing records."""

    inverse: AbstractInverse
    state: Any
    lag: int


class AbstractExecutor(ABC):
    """Takes the records of the inner steps and keeps the state of an inverse.

    Every backend must give, once it has every record, the state that `Inline` gives. To write one, extend `start` and
    implement `begin`, `submit`, `state` and `restore`, and `close` if it holds resources. A backend that works
    concurrently with the inner loop may implement `SupportsOverlap`.

    Args:
        max_lag: how many records may be outstanding before `submit` waits; 0: it waits for each. None: the backend's
            own.
        stale: whether an outer step takes the current state at the end of the inner loop, with records outstanding; by
            default it waits for them, so that the result is that of the inline run.

    Attributes:
        inverse: the inverse in use.
        learner: the part of it that learns, whose state this is; None where nothing does, and then nothing is
            submitted.
        traffic: counters of the backend's work.
        group: the processes that take part.
    """

    name: ClassVar[str]
    # Whether curvature is updated concurrently with the inner loop, so that it can lag
    background: ClassVar[bool] = True
    gathers: ClassVar[bool] = False  # whether it also brings workers together, who share the inner loop of any method
    usual_lag: ClassVar[int] = 8
    user: object = None  # a token of the solver that used it last
    inverse: AbstractInverse
    learner: Learned[Any] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = validated(vars(cls)["__init__"])  # type: ignore[method-assign]  # its arguments checked

    @validated
    def __init__(self, max_lag: int | None = None, stale: bool = False) -> None:
        if max_lag is not None and (not isinstance(max_lag, int) or isinstance(max_lag, bool) or max_lag < 0):
            raise InputError(f"max_lag must be a whole number of at least 0, got {max_lag!r}.")
        if not self.background and (max_lag or stale):
            raise InputError(
                f"{self.name} execution folds every record in at once, so it has no lag to bound. Omit max_lag and"
                " stale, or use execution='thread'."
            )
        self.max_lag = self.usual_lag if max_lag is None else max_lag
        self.stale = stale
        self.traffic = Traffic()
        self.group = Group()

    def start(self, inverse: AbstractInverse, theta: Variable, v: Variable | None = None) -> None:
        """Keep the state of this inverse from now on; a backend creates the first one here.

        Records may share memory with theta and v, which will move.
        """
        self.inverse, self.learner = inverse, inverse.learner

    @abstractmethod
    def begin(self) -> None:
        """Start a new outer step: after the records before it, `begun` is due (`nhgd.inverse.capabilities`)."""

    @abstractmethod
    def submit(self, record: InnerRecord) -> None:
        """Hand over the record of an inner step; waits only while more than `max_lag` are outstanding."""

    @abstractmethod
    def state(self, wait: bool = False) -> tuple[Any, int]:
        """The state, and how many submitted records it does not contain yet: none, where all are waited for."""

    @abstractmethod
    def restore(self, state: Any) -> None:
        """Go on from a state that `keep` gave, here or in another backend, after `start`; the executor owns it now."""

    def keep(self) -> Any:
        """The state itself, every submitted record in it, for a checkpoint. Where `state` gives a token, it is
        fetched.
        """
        return self.state(wait=True)[0]

    @property
    def holds_all(self) -> bool:
        """Whether `keep` can give the whole curvature in one process, as a checkpoint needs it."""
        return True

    def curvature(self) -> Curvature:
        """The curvature to solve with: all submitted records, unless `stale` is set."""
        return Curvature(self.inverse, *self.state(wait=not self.stale))

    def measured(self) -> Traffic:
        """A copy of the work done so far; starts a new largest lag."""
        found = Traffic(**vars(self.traffic))
        self.traffic.largest_lag = 0
        return found

    def root_cause(self, error: NhgdError) -> NhgdError:
        """The error, or its cause: an error of another process, or a deferred one of the curvature."""
        return self.group.root_cause(error)

    def close(self) -> None:  # noqa: B027
        """Release threads, streams and peers."""


@runtime_checkable
class SupportsOverlap(Protocol):
    """An executor that processes records while the inner loop runs."""

    def scope(self) -> AbstractContextManager[None]:
        """The setting of an outer step in the inner loop's thread."""
        ...

    def inner_loop_ended(self) -> bool:
        """Prepare for the solve, at the end of the inner loop; whether the solve will wait for records."""
        ...

    def raise_deferred(self) -> None:
        """Raise deferred errors of the curvature before v moves."""
        ...


def scope_of(executor: AbstractExecutor) -> AbstractContextManager[None]:
    """The setting of an outer step in the inner loop's thread."""
    return executor.scope() if isinstance(executor, SupportsOverlap) else nullcontext()
