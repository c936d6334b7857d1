"""The two kinds of inverse: one learns from the inner steps, the other takes products at each solve."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar, final

import torch
from torch import Tensor
from typing_extensions import override

from nhgd import _tape as tape
from nhgd._validation import Validated
from nhgd.oracle import Oracle
from nhgd.record import FisherKind, InnerRecord, RecordKind
from nhgd.ridge import Ridge
from nhgd.variable import Variable

POOR = 0.1  # a relative residual above it is said aloud

S = TypeVar("S")


@dataclass(frozen=True)
class SolveStats:
    """Statistics of a solve.

    Attributes:
        residual: |H x - u| / |u|, or None if it would have cost an extra Hessian product.
        hvps: Hessian products spent, counted in batches.
        converged: whether the method's own stopping test was met; a method without one says whether its residual is at
            most 0.1, or True if its residual is unknown.
        notes: further results by name. Generally understood are `negative_curvature`, whether a direction with clearly
            negative curvature was found; `diverged`, whether the iteration grew; `outside`, the part of u outside the
            range of H, relative to u; and with it `cut`, the largest possible length of the part of x omitted with it,
            relative to x.
        trouble: what is wrong with x, in a sentence with the remedy, or None.
    """

    residual: float | None
    hvps: int
    converged: bool
    notes: dict[str, Any] = field(default_factory=dict)
    trouble: str | None = None


@dataclass(frozen=True)
class AbstractInverse(Validated, ABC):
    """A way to apply the inverse of the inner Hessian: a frozen dataclass of hyper-parameters.

    Derive from `Learned`, whose state follows the inner steps, or from `Iterative`, which has none. Code that accepts
    either kind calls `apply`, with the state of its `learner` if it has one. Optional abilities are in
    `nhgd.inverse.capabilities`.
    """

    name: ClassVar[str]
    steps_field: ClassVar[str | None] = None  # the field that NAME-NUMBER sets, as in cg-40; by default `steps`

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.steps_field is None and "steps" in inspect.get_annotations(cls):
            cls.steps_field = "steps"

    @property
    @abstractmethod
    def learner(self) -> Learned[Any] | None:
        """The part of it that learns from the inner steps, whose state it is applied with; None where nothing does."""

    @abstractmethod
    def apply(self, state: Any, u: Tensor, oracle: Oracle, start: Tensor | None = None) -> tuple[Tensor, SolveStats]:
        """x close to H^{-1} u, (D,), at a point. `start` is a first guess, which those that iterate use."""

    def memory(self, theta: Variable) -> int:
        """Bytes of the state and of a solve, beyond the graph of one inner gradient; three vectors by default."""
        return vector_bytes(theta, 3)


@dataclass(frozen=True)
class Learned(AbstractInverse, Generic[S]):
    """An inverse that learns from the inner steps: `init`, `observe` and `solve` with a state of type S.

    It declares what it needs of an inner step, which computes nothing else. A solve needs only the ridge of its point.
    A state that can be saved, moved or sent derives from `State`.
    """

    @property
    @abstractmethod
    def records(self) -> RecordKind:
        """Which record of the inner step `observe` takes: "batch", "raw", "sample" or "layer"."""

    @property
    def fisher(self) -> FisherKind:
        """The Fisher matrix that the records are of."""
        return "empirical"

    @abstractmethod
    def init(self, theta: Variable) -> S:
        """The state before any inner step."""

    @abstractmethod
    def observe(self, state: S, record: InnerRecord) -> S:
        """The state after an inner step. The one given may be changed in place: keep a copy of it by
        `state.clone()`.
        """

    @abstractmethod
    def solve(self, state: S, u: Tensor, ridge: Ridge) -> tuple[Tensor, SolveStats]:
        """x close to H^{-1} u, (D,), from the learnt state and the ridge."""

    @final
    @property
    @override
    def learner(self) -> Learned[S]:
        return self

    @final
    @override
    def apply(self, state: S, u: Tensor, oracle: Oracle, start: Tensor | None = None) -> tuple[Tensor, SolveStats]:
        """Solve with the ridge of the point; no start is needed."""
        return self.solve(state, u, oracle.ridge)


@dataclass(frozen=True)
class Iterative(AbstractInverse):
    """An inverse without a state: each solve asks the oracle for the products it needs."""

    squares: ClassVar[bool] = True  # whether a solve squares entries of u, which could underflow or overflow

    @abstractmethod
    def solve(self, u: Tensor, oracle: Oracle, start: Tensor | None = None) -> tuple[Tensor, SolveStats]:
        """x close to H^{-1} u, (D,), at a point, optionally from a first guess."""

    @final
    @property
    @override
    def learner(self) -> None:
        pass

    @final
    @override
    def apply(self, state: Any, u: Tensor, oracle: Oracle, start: Tensor | None = None) -> tuple[Tensor, SolveStats]:
        """Solve, for u of any length."""
        if not self.squares:
            return self.solve(u, oracle, start)
        return at_usual_scale(u, start, lambda u, start: self.solve(u, oracle, start))


def at_usual_scale(
    u: Tensor, start: Tensor | None, solve: Callable[[Tensor, Tensor | None], tuple[Tensor, SolveStats]]
) -> tuple[Tensor, SolveStats]:
    """The x of a solve that is linear in u, also where u is so short or so long that squares of its entries would
    underflow or overflow.

    There u and the start are multiplied by a power of two, twice by half of it, and x is divided by it.
    """
    most = u.abs().amax()
    bound = 2.0 ** (math.frexp(torch.finfo(u.dtype).max)[1] // 4)
    half: float | Tensor
    if tape.tape() is None:
        size = float(most)
        if size == 0 or not math.isfinite(size) or 1 / bound < size < bound:
            return solve(u, start)
        half = 2.0 ** -(math.frexp(size)[1] // 2)
    else:  # where no number may be read
        unusual = (most > 0) & torch.isfinite(most) & ((most <= 1 / bound) | (most >= bound))
        half = torch.exp2(-torch.log2(torch.where(unusual, most, 1.0)).div(2).floor())
    x, stats = solve(u * half * half, None if start is None else start * half * half)
    return x / half / half, stats


def vector_bytes(theta: Variable, count: int = 1) -> int:
    """The size of `count` vectors (D,) of theta's dtype."""
    return count * theta.numel * theta.dtype.itemsize
