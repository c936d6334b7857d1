"""What is added to the diagonal in addition to the ridge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, Literal, TypeAlias, TypeVar

from torch import Tensor

from nhgd._validation import not_negative
from nhgd.errors import InputError
from nhgd.inverse.base import Learned
from nhgd.ridge import Ridge

Damping: TypeAlias = float | Literal["auto"] | None
L = TypeVar("L", bound=Learned[Any])
M = TypeVar("M", float, Tensor)
SHARE = 1e-3  # of the mean diagonal of F, where there is no ridge


def resolve_damping(damping: Damping, ridge: Ridge, mean_diagonal: M | Callable[[], M]) -> float | M:
    """The damping that is used: the one given; else none under a positive ridge and a little without one.

    Args:
        damping: what the user asked for. "auto" asks for the damping of a run's horizon, which comes with the ridge.
        ridge: that of the point.
        mean_diagonal: of F, without the ridge; or a function that computes it.

    >>> resolve_damping(None, Ridge(0.1), mean_diagonal=2.0)
    0.0
    >>> resolve_damping(None, Ridge(0.0), mean_diagonal=2.0)
    0.002
    """
    if damping is not None and damping != "auto":
        return damping
    if ridge.positive:
        return 0.0
    return SHARE * (mean_diagonal() if callable(mean_diagonal) else mean_diagonal)


def check_damping(owner: str, damping: Damping) -> None:
    """Refuse a damping that is neither a number of at least 0, nor "auto", nor None."""
    if damping is not None and damping != "auto":
        not_negative(owner, damping=damping)


def refuse_singular(owner: str, positive: float, observed: bool) -> None:
    """Refuse a diagonal, ridge plus damping, that is not `positive` for every parameter."""
    if positive:
        return
    why = (
        "the ridge and the damping are both 0 for some parameters" if observed else "it has observed no inner step yet"
    )
    raise InputError(
        f"{owner} cannot solve: {why}, so the matrix may be singular. Give the problem an l2 above 0, or pass damping="
        " a positive number."
    )


def damped(learner: L, damping: float) -> L:
    """The same inverse with this damping in place of its own."""
    if "damping" not in {f.name for f in fields(learner)}:
        raise InputError(f"{learner.name} has no adaptive damping, so it cannot precondition inner steps. Use kfac.")
    return replace(learner, **{"damping": damping})
