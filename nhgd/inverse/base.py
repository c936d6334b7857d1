"""What every inverse is: three methods around a state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from nhgd._registry import summary
from nhgd._validation import Validated
from nhgd.errors import InputError
from nhgd.oracle import Oracle
from nhgd.record import FisherKind, InnerRecord, RecordKind
from nhgd.variable import Variable

POOR = 0.1  # a relative residual above it is said aloud


@dataclass(frozen=True)
class SolveStats:
    """How a solve went.

    Attributes:
        residual: |H x - u| / |u|, or None where knowing it would have cost an extra Hessian product.
        hvps: Hessian products spent, counted in batches.
        converged: whether the method's own stopping test was met; a method without one says whether its residual is at most
            0.1, or True where it does not know its residual.
        notes: anything else worth knowing, by name. Those that every reader understands: `negative_curvature`, whether a
            direction with clearly negative curvature was met; `diverged`, whether the iteration grew; `outside`, the part of
            u, of its length, that was seen to lie outside of the range of H; `cut`, beside it, how long the part of x that
            was left out with it could be, of x's length.
        trouble: what is wrong with x, in a sentence with the remedy; None where nothing is known to be.
    """

    residual: float | None
    hvps: int
    converged: bool
    notes: dict[str, Any] = field(default_factory=dict)
    trouble: str | None = None


class Graphable(NamedTuple):
    """Work on a record that is the same again and again.

    Attributes:
        key: what it depends on beside the record's shapes.
        work: what is done with the record; its result is what `observe(state, record, ready)` takes beside the record.
        speculative: where the work is all that is done with tensors and its result is one tensor of a few numbers to look at: the
            state to launch the next record's work from, and to solve with, before these numbers are known. None: there is no
            going on before. Which of the two it is must depend on the type of the record alone.
        finalise: with `ahead`: (state, numbers) -> the state after the record.
    """

    key: Hashable
    work: Callable[[InnerRecord], Any]
    speculative: Any = None
    finalise: Callable[[Any, list[float]], Any] | None = None


@dataclass(frozen=True)
class AbstractInverse(Validated, ABC):
    """A way to apply the inverse of the inner Hessian.

    A subclass is a frozen dataclass of hyper-parameters; what evolves is a state of its own. An inverse that learns
    from the inner steps says in `records` what it needs of them; the inner step computes nothing else.
    """

    name: ClassVar[str]
    steps_field: ClassVar[str | None] = None  # the field that NAME-NUMBER sets, as in cg-40

    @property
    def label(self) -> str:
        """A short name that tells it from others of its kind in a table."""
        return self.name

    @property
    def records(self) -> RecordKind | None:
        """Which record of the inner step `observe` takes: "batch", "raw", "sample", "layer", or None for none."""
        return None

    @property
    def reduces(self) -> bool:
        """Whether `observe` takes the record of a worker's part of a batch and sums over its team.

        Otherwise the records of all workers are gathered first, and it is handed that of the whole batch.
        """
        return False

    @property
    def couples(self) -> bool:
        """Whether products of one parameter's rows with another's matter; where not, a record may take them from two passes."""
        return True

    @property
    def fisher(self) -> FisherKind:
        """Of which Fisher matrix the records are."""
        return "empirical"

    def init(self, theta: Variable) -> Any:
        """The state before any inner step."""
        return None

    def begin(self, state: Any) -> Any:
        """The state at the start of an outer step's inner loop; called once for each, before its first `observe`."""
        return state

    def needs_record(self, step: int) -> bool:
        """Whether the record of this inner step is to be made at all; steps count from 0 over the whole run."""
        return True

    def observe(self, state: Any, record: InnerRecord) -> Any:
        """The state after an inner step. The one given may be changed in place: keep a copy of it by `state.clone()`."""
        return state

    def graphable(self, state: Any, record: InnerRecord) -> Graphable | None:
        """The part of `observe` that is work on tensors of fixed shapes at fixed places, if there is one.

        An executor may capture it as a CUDA graph.
        """
        return None

    @abstractmethod
    def solve(self, state: Any, u: Tensor, at: Oracle, start: Tensor | None = None) -> tuple[Tensor, SolveStats]:
        """x close to H^{-1} u, (D,), at a point. `start` is a first guess, which iterative methods use."""

    def operator(self, state: Any, at: Oracle) -> Callable[[Tensor], Tensor]:
        """u -> x for many right-hand sides at one point; an inverse that factorises does so once, here."""
        return lambda u: self.solve(state, u, at)[0]

    def damped(self, damping: float) -> AbstractInverse:
        """The same inverse with this damping in place of its own."""
        if "damping" not in {f.name for f in fields(self)}:
            raise InputError(f"{self.name} has no damping to adapt, so it cannot precondition inner steps. Use kfac.")
        made: AbstractInverse = replace(self, **{"damping": damping})
        return made

    @abstractmethod
    def memory(self, theta: Variable) -> int:
        """Bytes held by the state and by a solve, beyond the graph of one inner gradient."""

    @property
    def products(self) -> int | None:
        """How many Hessian products a solve takes at most; None when it depends on D."""
        return 0

    def warnings_for(self, theta: Variable) -> list[str]:
        """What someone planning to use this inverse on theta should know, in a few words each."""
        return []

    @classmethod
    def summary(cls) -> str:
        """The first line of the docstring."""
        return summary(cls)


def vector_bytes(theta: Variable, count: int = 1) -> int:
    """The size of `count` vectors (D,) of theta's dtype."""
    return count * theta.numel * theta.dtype.itemsize
