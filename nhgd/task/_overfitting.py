"""Whether learnt weights follow the trusted samples too far."""

from __future__ import annotations

import warnings

from nhgd._solution import Row

WORST_RISE, WORST_GAP = 0.1, 0.5  # beyond either, a run is said to overfit


class OverfittingWarning(UserWarning):
    """The weights fit the trusted samples better than they generalise."""


def overfitting(first: Row, best: Row, end: Row, by_loss: bool) -> dict[str, float]:
    """How far the weights overfit the trusted samples; warns if it is too far.

    overfitting: the relative rise of the evaluation loss from its minimum while the trusted loss still fell, 0 if it
    did not. gap: how far the trusted loss is below the evaluation loss, relative, minus that after the first step. It
    warns when the one is above a tenth or the other above a half.

    Args:
        first, best, end: losses after the first step, at the lowest evaluation loss, and at the end.
        by_loss: whether one function weighs all samples already.

    >>> first = {"evaluation_loss": 0.5, "outer_loss": 0.5}
    >>> best = {"step": 5, "evaluation_loss": 0.4, "outer_loss": 0.4}
    >>> end = {"evaluation_loss": 0.42, "outer_loss": 0.315}
    >>> {key: round(value, 3) for key, value in overfitting(first, best, end, by_loss=True).items()}
    {'overfitting': 0.05, 'gap': 0.25}
    """
    fell = end["outer_loss"] < best["outer_loss"]
    rise = float(end["evaluation_loss"] / best["evaluation_loss"] - 1) if fell else 0.0
    gap = float(first["outer_loss"] / first["evaluation_loss"] - end["outer_loss"] / end["evaluation_loss"])
    if rise > WORST_RISE or gap > WORST_GAP:
        remedy = "" if by_loss else ", or weights=loss, which has two parameters in place of one for each sample"
        warnings.warn(
            f"The weights overfit the trusted samples: at the end the loss is {end['outer_loss']:.3g} on those and"
            f" {end['evaluation_loss']:.3g} on the evaluation split, up from {best['evaluation_loss']:.3g} after step"
            f" {best['step']:g}. Use the metrics of that step, the ones without final_. To reduce overfitting, use"
            f" fewer outer steps or more trusted samples{remedy}.",
            OverfittingWarning,
            stacklevel=2,
        )
    return {"overfitting": rise, "gap": gap}
