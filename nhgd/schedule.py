"""Step sizes over time, shared by every method and both levels."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeAlias, final

import torch
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

    A power of 0 is a constant step. Of c_in and c_out, which the single-loop papers tune, each is the power of one
    level. The larger the offset, the longer the step stays near lr.

    >>> Power(1.0, 0.5).rate(Clock(k=3)), Power(1.0, 1.0, offset=10).rate(Clock(k=10))
    (0.5, 0.5)

    References: M. Hong, H.-T. Wai, Z. Wang, Z. Yang, A two-timescale stochastic algorithm framework for bilevel
    optimization, 2023, theorem 1 (powers 3/5 outside and 2/5 inside); M. Dagreou, P. Ablin, S. Vaiter, T. Moreau, A
    framework for bilevel optimization that enables stochastic and global variance reduction algorithms, 2022, theorems
    1 and 2 (1/2 for both).
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
        try:
            lr = float(self.function(clock.k))
        except (TypeError, AttributeError, IndexError) as error:
            raise InputError(
                f"A step size given as a function is called with the outer step, a whole number, and failed on {clock.k}:"
                f" {type(error).__name__}: {error}. For a function of v, pass inner_lr=nhgd.schedule.Learnt(function)."
            ) from error
        positive("A step size", lr=lr)
        return lr


@final
@dataclass(frozen=True)
class Learnt(Validated):
    """An inner step size as a function of v, for methods that differentiate the inner steps: `itd` and `truncated`.

        theta_{t+1} = theta_t - function(v) grad_theta l(v, theta_t),      d/dv through both factors

    The hypergradient knows no more than the inner steps of one outer step. Where theta continues from one outer step to
    the next, it favours step sizes that pay within that time. `ITD(warm_start=False)` begins each inner loop at the
    first theta, so that the step size is learnt for a whole training run.

    Args:
        function: of v, as the problem's functions receive it, with a result above 0 and one element, such as
            `lambda v: v["log_lr"].exp()`.

    >>> Learnt(lambda v: v.exp()).at(torch.zeros(1, requires_grad=True)).item()
    1.0
    """

    function: Callable[[Any], Tensor]

    def at(self, v: Any) -> Tensor:
        """The step size at a v, 0-dimensional, with its graph."""
        rate = self.function(v)
        if not isinstance(rate, Tensor) or rate.numel() != 1:
            kind = f"shape {tuple(rate.shape)}" if isinstance(rate, Tensor) else f"type {type(rate).__name__}"
            raise InputError(f"The function of a learnt inner_lr must return a tensor with one element, not {kind}.")
        if torch.is_grad_enabled() and not rate.requires_grad:
            raise InputError(
                "The learnt inner_lr does not depend on v, so it would never change. Use the v that the function receives,"
                " without .detach() or .item(), or pass a number."
            )
        if not 0 < rate.item() < float("inf"):
            raise InputError(
                f"The learnt inner_lr is {rate.item():.3g} at the current v; it must be above 0 and finite. Pass it through"
                " exp() or softplus(), keep v in a box with project_v=(low, high), or lower outer_lr."
            )
        return rate.reshape(())


def as_schedule(rate: Rate, name: str) -> Schedule:
    """A schedule from a number, from a function of the outer step, or from itself."""
    if isinstance(rate, Schedule):
        return rate
    if callable(rate):
        return ByStep(rate)
    if isinstance(rate, Tensor) and rate.requires_grad:
        raise InputError(
            f"{name} is a tensor that carries a gradient, which would be lost. Pass float({name}), or for an inner_lr that"
            " is learnt nhgd.schedule.Learnt(function of v)."
        )
    if isinstance(rate, Tensor) and rate.ndim == 0:
        rate = float(rate)
    if not isinstance(rate, Real) or isinstance(rate, bool):
        kind = f"a tensor of shape {tuple(rate.shape)}" if isinstance(rate, Tensor) else repr(rate)
        raise InputError(f"{name} must be a number above 0, a schedule or a function of the outer step, got {kind}.")
    if not 0 < float(rate) < float("inf"):
        raise InputError(f"{name} must be above 0, got {rate}.")
    return Constant(float(rate))
