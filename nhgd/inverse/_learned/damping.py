"""What is added to the diagonal beside the ridge."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from nhgd.errors import InputError

SHARE = 1e-3  # of the mean diagonal of F, where there is no ridge


def resolve_damping(damping: float | None, ridge: Tensor | float, mean_diagonal: float | Callable[[], float]) -> float:
    """The damping that is used: the one given or, for None, none under a positive ridge and a little without one.

    Args:
        damping: what the user asked for.
        ridge: 2 * l2 for every coordinate, (D,), or one number for all.
        mean_diagonal: of F, without the ridge; or how it is found, where that is work.

    >>> import torch
    >>> resolve_damping(None, torch.full((3,), 0.1), mean_diagonal=2.0)
    0.0
    >>> resolve_damping(None, torch.zeros(3), mean_diagonal=2.0)
    0.002
    """
    if damping is not None:
        return damping
    if ridge > 0 if isinstance(ridge, float) else bool((ridge > 0).all()):
        return 0.0
    return SHARE * (mean_diagonal() if callable(mean_diagonal) else mean_diagonal)


def refuse_singular(owner: str, shift: Tensor, observed: bool) -> None:
    """Refuse a diagonal, ridge plus damping, that is zero for some parameter."""
    if bool((shift > 0).all()):
        return
    why = (
        "the ridge and the damping are both 0 for some parameters" if observed else "it has observed no inner step yet"
    )
    raise InputError(
        f"{owner} cannot solve: {why}, so the matrix may be singular. Give the problem an l2 above 0, or pass damping="
        " a positive number."
    )
