"""Optional capabilities of inverses: a protocol for each, and the default for an inverse without it.

An inverse that has one of these methods need not say so: it is enough that the method is there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from nhgd._recording.sampling import Sampling
from nhgd._recording.streaming import Fold
from nhgd.inverse.base import AbstractInverse, Iterative, Learned
from nhgd.oracle import Oracle
from nhgd.record import LayerRecord
from nhgd.ridge import Ridge
from nhgd.variable import Variable

S = TypeVar("S")


@runtime_checkable
class SupportsLabel(Protocol):
    """An inverse with a short name that distinguishes it in a table."""

    @property
    def label(self) -> str:
        """The name."""
        ...


@runtime_checkable
class CountsProducts(Protocol):
    """An inverse whose solve takes Hessian products."""

    @property
    def products(self) -> int | None:
        """How many at most; None when it depends on D."""
        ...


@runtime_checkable
class Warns(Protocol):
    """An inverse that not every theta suits."""

    def warnings_for(self, theta: Variable) -> list[str]:
        """What someone planning to use it on theta should know, in a few words each."""
        ...


@runtime_checkable
class Wraps(Protocol):
    """An inverse around another, such as `Refined`."""

    @property
    def inverse(self) -> AbstractInverse:
        """The one inside."""
        ...

    def with_learner(self, learner: Learned[Any]) -> AbstractInverse:
        """The same with another part that learns, in the one inside."""
        ...


@runtime_checkable
class FollowsHorizon(Protocol):
    """An inverse that can leave its damping to the run it is a part of."""

    @property
    def follows_horizon(self) -> bool:
        """Whether the damping of the run's horizon is added to the matrix it solves with."""
        ...


@runtime_checkable
class FactorisesProducts(Protocol):
    """An iterative inverse with work at a point that serves many right-hand sides."""

    def operator(self, oracle: Oracle) -> Callable[[Tensor], Tensor]:
        """u -> x at a point, with that work done once."""
        ...


@runtime_checkable
class FactorisesState(Protocol):
    """A learned inverse with work on its state that serves many right-hand sides."""

    def operator(self, state: Any, ridge: Ridge) -> Callable[[Tensor], Tensor]:
        """u -> x, with that work done once."""
        ...


@runtime_checkable
class SettlesInSecondWalk(Protocol):
    """A learned inverse that gains from a second walk over the same batches at the same theta."""

    def settled(self, state: Any) -> tuple[Learned[Any], Any]:
        """How the second walk is observed, and the state it starts from, given the state after the first."""
        ...


@runtime_checkable
class SupportsBegin(Protocol[S]):
    """A learned inverse that heeds outer steps."""

    def begin(self, state: S) -> S:
        """The state at the start of an outer step's inner loop; called once for each, before its first `observe`."""
        ...


@runtime_checkable
class SkipsSteps(Protocol):
    """A learned inverse that takes a record of some inner steps only."""

    def needs_record(self, step: int) -> bool:
        """Whether the record of this inner step is to be made at all; steps count from 0 over the whole run."""
        ...


@runtime_checkable
class TakesSamples(Protocol):
    """A learned inverse that takes a part of a record of layers."""

    def sampling(self, step: int) -> Sampling | None:
        """How much of this inner step's record is taken; None: everything."""
        ...


@runtime_checkable
class FoldsLayers(Protocol):
    """A learned inverse that needs a layer of a record for a moment alone."""

    def fold(
        self, layer: LayerRecord, weights: Tensor | None, samples: int, like: tuple[Tensor, ...] | None = None
    ) -> tuple[Tensor, ...]:
        """What it wants of a layer, of samples with these weights, (B,).

        like: what it made of a layer with the same inputs, if there was one.
        """
        ...


@runtime_checkable
class KeepsLess(Protocol):
    """A learned inverse that holds less while inner steps are taken than while it learns or solves."""

    def kept(self, theta: Variable) -> int:
        """The bytes that stay."""
        ...


@runtime_checkable
class SharesInputs(Protocol):
    """A learned inverse that keeps what layers with the same inputs have in common once."""

    def saved(self, theta: Variable, layers: Collection[str]) -> tuple[int, int]:
        """The bytes that `memory` and `kept` count for these layers although another has the same inputs."""
        ...


@runtime_checkable
class Couples(Protocol):
    """A learned inverse that knows which rows of a record it multiplies."""

    @property
    def couples(self) -> bool:
        """Whether products of one parameter's rows with another's matter, so that rows must be gradients of samples.

        Where not, a record may take them from two passes, and from the batch objective where BatchNorm couples the
        samples.
        """
        ...


@runtime_checkable
class Reduces(Protocol):
    """A learned inverse that takes records of some samples of a batch."""

    @property
    def reduces(self) -> bool:
        """Whether `observe` takes its means by `batch_mean`; otherwise it is handed the record of the whole batch."""
        ...


def label(inverse: AbstractInverse) -> str:
    """A short name that distinguishes the inverse in a table."""
    return inverse.label if isinstance(inverse, SupportsLabel) else inverse.name


def products(inverse: AbstractInverse) -> int | None:
    """How many Hessian products a solve takes at most; None when it depends on D."""
    return inverse.products if isinstance(inverse, CountsProducts) else 0


def warnings_for(inverse: AbstractInverse, theta: Variable) -> list[str]:
    """What someone planning to use this inverse on theta should know, in a few words each."""
    return inverse.warnings_for(theta) if isinstance(inverse, Warns) else []


def with_learner(inverse: AbstractInverse, learner: Learned[Any]) -> AbstractInverse:
    """The same inverse with another part that learns; itself where nothing does."""
    if isinstance(inverse, Wraps) and not isinstance(inverse, Learned):
        return inverse.with_learner(learner)
    return inverse if inverse.learner is None else learner


def follows_horizon(inverse: AbstractInverse | None) -> bool:
    """Whether the damping of a run's horizon is added to the matrix it solves with."""
    return isinstance(inverse, FollowsHorizon) and inverse.follows_horizon


def operator(learner: Learned[S], state: S, ridge: Ridge) -> Callable[[Tensor], Tensor]:
    """u -> x for many right-hand sides; an inverse that factorises does so once."""
    if isinstance(learner, FactorisesState):
        factorised: Callable[[Tensor], Tensor] = learner.operator(state, ridge)
        return factorised
    return lambda u: learner.solve(state, u, ridge)[0]


def preconditioner(inverse: AbstractInverse, state: Any, oracle: Oracle) -> Callable[[Tensor], Tensor]:
    """u -> x for many right-hand sides at one point. One that wraps another needs no products of its own for it."""
    if isinstance(inverse, Learned):
        return operator(inverse, state, oracle.ridge)
    if isinstance(inverse, Wraps):
        return preconditioner(inverse.inverse, state, oracle)
    if isinstance(inverse, Iterative) and isinstance(inverse, FactorisesProducts):
        return inverse.operator(oracle)
    return lambda u: inverse.apply(state, u, oracle)[0]


def begun(learner: Learned[S], state: S) -> S:
    """The state at the start of an outer step's inner loop."""
    if isinstance(learner, SupportsBegin):
        found: S = learner.begin(state)
        return found
    return state


def needs_record(learner: Learned[Any], step: int) -> bool:
    """Whether the record of this inner step is to be made at all; steps count from 0 over the whole run."""
    return not isinstance(learner, SkipsSteps) or learner.needs_record(step)


def needs_records(learner: Learned[Any], steps: Iterable[int]) -> bool:
    """Whether the record of any of these inner steps is to be made."""
    return not isinstance(learner, SkipsSteps) or any(map(learner.needs_record, steps))


def sampling(learner: Learned[Any], step: int) -> Sampling | None:
    """How much of this inner step's record is taken, if it holds layers; None: everything."""
    return learner.sampling(step) if isinstance(learner, TakesSamples) else None


def fold(learner: Learned[Any]) -> Fold | None:
    """What a learner makes of a layer where its score arrives; None: it needs whole records."""
    return learner.fold if isinstance(learner, FoldsLayers) else None


def kept(inverse: AbstractInverse, theta: Variable) -> int:
    """The bytes that stay while inner steps are taken; of an inverse that learns nothing, those of its last x."""
    if isinstance(inverse, KeepsLess):
        return inverse.kept(theta)
    return theta.numel * theta.dtype.itemsize if inverse.learner is None else inverse.memory(theta)


def saved(inverse: AbstractInverse, theta: Variable, layers: Collection[str]) -> tuple[int, int]:
    """The bytes that it does not need, in all and while inner steps are taken, because these layers share their
    inputs.
    """
    return inverse.saved(theta, layers) if isinstance(inverse, SharesInputs) else (0, 0)


def couples(learner: Learned[Any]) -> bool:
    """Whether products of one parameter's rows with another's matter to it."""
    return not isinstance(learner, Couples) or learner.couples


def reduces(learner: Learned[Any]) -> bool:
    """Whether it takes the record of some samples of a batch."""
    return isinstance(learner, Reduces) and learner.reduces
