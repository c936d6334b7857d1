"""Why the settings of a run rule out captured steps."""

from __future__ import annotations

from nhgd.algorithm import AbstractAlgorithm, Loop
from nhgd.data.batch import common_length
from nhgd.execution import Inline
from nhgd.inverse import CG, EKFAC, KFAC, AbstractInverse, FisherDiagonal, FisherWindow, Identity, Refined
from nhgd.inverse.capabilities import label

REPEATABLE = (Identity, CG, EKFAC, KFAC, FisherDiagonal, FisherWindow)


def refusal(algorithm: AbstractAlgorithm, loop: Loop) -> str | None:
    """The reason, as a clause; None if the settings allow it."""
    problem = loop.problem
    why = algorithm.not_repeatable
    if loop.settings.accumulate > 1:
        return "micro-batches are passed over one by one"
    if why is not None:
        return why
    if problem.scaling.active:
        return "the loss scale follows from what the host reads of each pass"
    learner = None if loop.inverse is None else loop.inverse.learner
    if isinstance(learner, (KFAC, EKFAC)) and (learner.offload or learner.basis_dtype is not None):
        return f"{label(learner)} keeps its factors elsewhere, or in other digits, between its uses"
    if isinstance(learner, FisherWindow) and not _fills(loop, learner):
        return "the window holds samples of several batches, of which the host keeps account"
    if loop.inverse is not None and not _is_repeatable(loop.inverse):
        return f"the work of {label(loop.inverse)} depends on values it computes"
    if not isinstance(loop.executor, Inline) or loop.division.workers > 1:
        return f"the curvature is kept by {loop.executor.name} execution with {loop.division.workers} worker(s)"
    if callable(problem.l2):
        return "l2 is a function of v"
    if problem.theta.recurrent or problem.v.recurrent:
        return "a recurrent layer is part of the problem"
    if problem.theta.is_compiled or problem.v.is_compiled:
        return "the model is already compiled"
    for name, rule in (("project", loop.settings.project), ("project_v", loop.settings.project_v)):
        if callable(rule):
            return f"{name} is a function, which may read values on the host"
    moved = (loop.theta, loop.v) if algorithm.uses_inner_optimizer else (loop.v,)
    for part in (*moved, loop.inner, loop.outer):
        why = part.refusal()
        if why is not None:
            return why
    return None


def _fills(loop: Loop, window: FisherWindow) -> bool:
    """Whether every record takes the whole window."""
    if window.records == "batch" or not loop.inner.is_constant:
        return False
    samples = common_length(loop.inner.constant)
    return samples is not None and samples >= window.length


def _is_repeatable(inverse: AbstractInverse) -> bool:
    if isinstance(inverse, Refined):
        return _is_repeatable(inverse.inverse)
    if isinstance(inverse, KFAC) and inverse.solver == "cholesky":
        return False
    return isinstance(inverse, REPEATABLE)
