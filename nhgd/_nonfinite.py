"""Why numbers became infinite or undefined, judged from where the step began."""

from __future__ import annotations

import torch

from nhgd.algorithm import Loop, StepInfo
from nhgd.data.batch import first_bad
from nhgd.errors import InputError, NhgdError, NonFiniteError
from nhgd.losses import check_weight


def check_losses(info: StepInfo) -> None:
    """Refuse a step whose losses are not finite."""
    for name, value in (("the inner loss", info.inner_loss), ("the outer loss", info.outer_loss)):
        if not abs(value) < float("inf"):
            raise NonFiniteError(name)


def root_cause(loop: Loop, error: NonFiniteError) -> NhgdError:
    """The error a user needs: what became non-finite, at which step, and why. theta and v have been put back."""
    problem, step = loop.problem, loop.clock.k + 1
    try:  # whose square roots the records hold
        check_weight(problem.lowest_weight())
    except InputError as negative:
        return negative
    batches = [("inner", batch) for batch in loop.recent] + [("outer", loop.outer.last)]
    for level, batch in batches:
        bad = first_bad(batch)
        if bad:
            found = InputError(
                f"Outer step {step}: an {level} batch contains nan or inf: {bad}. Remove or impute it first."
            )
            found.step = step
            return found
    error = _at_start(loop, error)
    said = str(error)
    what = f"numbers became non-finite. {said}" if said.endswith(".") else f"{said} became non-finite."
    diverged = NonFiniteError(
        f"Outer step {step}: {what} theta and v were put back to where this step began. Lower inner_lr or outer_lr, add"
        " l2, or project theta (project=R)."
    )
    diverged.step = step
    return diverged


def _at_start(loop: Loop, error: NonFiniteError) -> NonFiniteError:
    """The same error, or a better one if the fault is already visible where the step began, at finite theta and v."""
    problem = loop.problem
    try:
        with problem.guarded(seed=0), torch.no_grad():
            for batch in loop.recent:
                problem.losses(batch).check_finite()
            outer = loop.outer.last
            if outer is not None and not bool(torch.isfinite(problem.outer_value(outer))):
                return NonFiniteError("the outer loss")
    except InputError as bad_loss:
        return NonFiniteError(str(bad_loss))
    return error
