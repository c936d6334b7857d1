"""Work on records that a CUDA graph can repeat."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from nhgd.record import InnerRecord

S = TypeVar("S")


class Graphable(NamedTuple):
    """Work on a record that is the same again and again.

    Attributes:
        key: what it depends on besides the record's shapes.
        work: of the record; its result is the third argument of `observe(state, record, ready)`.
        speculative: where the work is all that is done with tensors and its result is one tensor of a few numbers to
            look at: the state to launch the next record's work from, and to solve with, before these numbers are known.
            None: there is no going on before. Which of the two it is must depend on the type of the record alone.
        finalise: with `speculative`: (state, numbers) -> the state after the record.
    """

    key: Hashable
    work: Callable[[InnerRecord], Any]
    speculative: Any = None
    finalise: Callable[[Any, list[float]], Any] | None = None


@runtime_checkable
class SupportsGraph(Protocol[S]):
    """A learned inverse with a part of `observe` that is work on tensors of fixed shapes at fixed places."""

    def graphable(self, state: S, record: InnerRecord) -> Graphable | None:
        """The part of an observation that an executor may capture as a CUDA graph; None if there is none."""
        ...

    def observe(self, state: S, record: InnerRecord, ready: Any = None) -> S:
        """The state after an inner step, given the result of that part if it is `ready`."""
        ...
