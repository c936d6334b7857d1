"""Step sizes over time, shared by every method and both levels."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import TypeAlias, final

from torch import Tensor
from typing_extensions import override

from nhgd._validation import Validated, not_negative, positive
from nhgd.errors import InputError


@dataclass
class Clock:
    """The position of a run.

    Attributes:
        t: the inner step within the current outer step, from 0.
        k: the outer step, from 0.
        total: inner steps taken since the start of the run.
        done: the part of the steps or of the budget that is used up, 0 to 1; 0 when neither is known.
    """

    t: int = 0
    k: int = 0
    total: int = 0
    done: float = 0.0


@dataclass(frozen=True)
class Schedule(Validated, ABC):
    """A step size as a function of the clock."""

    @abstractmethod
    def rate(self, clock: Clock) -> float:
        """The step size now."""


Rate: TypeAlias = float | Schedule | Callable[[int], float]


@final
@dataclass(frozen=True)
class Constant(Schedule):
    """The same step size throughout."""

    lr: float

    def __post_init__(self) -> None:
        positive("A constant step size", lr=self.lr)

    @override
    def rate(self, clock: Clock) -> float:
        return self.lr


@final
@dataclass(frozen=True)
class Strong(Schedule):
    """The decaying inner step for a mu-strongly convex, L-smooth inner problem.

        eta_t = 4 / (mu (t + 8 L^2 / mu^2)),     t restarting with every outer step

    >>> round(Strong(mu=1.0, smoothness=1.0).rate(Clock(t=0)), 3)
    0.5

    References: Natural Hypergradient Descent, lemma on projected SGD (eta_t = 4 / (mu (t + q)), q = 8 L^2 / mu^2).
    """

    mu: float
    smoothness: float

    def __post_init__(self) -> None:
        positive("The decaying step size", mu=self.mu, smoothness=self.smoothness)
        if self.mu > self.smoothness:
            raise InputError(f"mu ({self.mu}) cannot exceed the smoothness constant ({self.smoothness}).")

    @override
    def rate(self, clock: Clock) -> float:
        return 4.0 / (self.mu * (clock.t + 8.0 * (self.smoothness / self.mu) ** 2))


@final
@dataclass(frozen=True)
class Power(Schedule):
    """A falling power of the outer step, as the single-loop papers use.

        lr_k = lr (offset / (k + offset))^power,     lr / (k + 1)^power for the default offset of 1

    A power of 0 is a constant step. Of c_in and c_out, which the single-loop papers tune, each is the power of one level.
    The larger the offset, the longer the step stays near lr.

    >>> Power(1.0, 0.5).rate(Clock(k=3)), Power(1.0, 1.0, offset=10).rate(Clock(k=10))
    (0.5, 0.5)

    References: M. Hong, H.-T. Wai, Z. Wang, Z. Yang, A two-timescale stochastic algorithm framework for bilevel
    optimization, 2023, theorem 1 (powers 3/5 outside and 2/5 inside); M. Dagreou, P. Ablin, S. Vaiter, T. Moreau, A
    framework for bilevel optimization that enables stochastic and global variance reduction algorithms, 2022, theorems 1
    and 2 (1/2 for both).
    """

    lr: float
    power: float
    offset: float = 1.0

    def __post_init__(self) -> None:
        positive("A power step size", lr=self.lr, offset=self.offset)
        not_negative("A power step size", power=self.power)

    @override
    def rate(self, clock: Clock) -> float:
        return self.lr / float((clock.k / self.offset + 1) ** self.power)


@final
@dataclass(frozen=True)
class Decay(Schedule):
    """lr falling to `final` times lr along half a cosine, over the steps or the budget of the run.

    It is constant for the first `hold` of the run.

    >>> Decay(1.0, final=0.0).rate(Clock(done=0.5))
    0.5
    """

    lr: float
    final: float = 0.0
    hold: float = 0.0

    def __post_init__(self) -> None:
        positive("A decaying step size", lr=self.lr)
        not_negative("A decaying step size", final=self.final, hold=self.hold)
        if self.hold >= 1:
            raise InputError(f"A decaying step size: hold must be below 1, got {self.hold}.")

    @override
    def rate(self, clock: Clock) -> float:
        x = min(max((clock.done - self.hold) / (1 - self.hold), 0.0), 1.0)
        return self.lr * (self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * x)))


@final
@dataclass(frozen=True)
class ByStep(Schedule):
    """A function of the outer step, given by the user."""

    function: Callable[[int], float]

    @override
    def rate(self, clock: Clock) -> float:
        lr = float(self.function(clock.k))
        positive("A step size", lr=lr)
        return lr


def as_schedule(rate: Rate, name: str) -> Schedule:
    """A schedule from a number, from a function of the outer step, or from itself."""
    if isinstance(rate, Schedule):
        return rate
    if callable(rate):
        return ByStep(rate)
    if isinstance(rate, Tensor) and rate.requires_grad:
        raise InputError(
            f"{name} is a tensor that carries a gradient, but step sizes are not learnt. Pass float({name}), or a"
            " function of the outer step."
        )
    if isinstance(rate, Tensor) and rate.ndim == 0:
        rate = float(rate)
    if not isinstance(rate, Real) or isinstance(rate, bool):
        kind = f"a tensor of shape {tuple(rate.shape)}" if isinstance(rate, Tensor) else repr(rate)
        raise InputError(f"{name} must be a number above 0, a schedule or a function of the outer step, got {kind}.")
    if not 0 < float(rate) < float("inf"):
        raise InputError(f"{name} must be above 0, got {rate}.")
    return Constant(float(rate))
