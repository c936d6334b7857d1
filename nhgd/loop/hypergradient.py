"""The implicit hypergradient of an outer step: with the executor's curvature, damped for the horizon of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nhgd import _tape as tape
from nhgd._beside import marked
from nhgd.data.batch import Batch
from nhgd.errors import NhgdError, RunError
from nhgd.execution.base import SupportsOverlap
from nhgd.hypergradients.base import Hypergradient
from nhgd.hypergradients.implicit import implicit
from nhgd.inverse.capabilities import follows_horizon, preconditioner, significant
from nhgd.loop.calibration import samples_of_product
from nhgd.loop.horizon import Horizon
from nhgd.loop.loop import Loop, Product
from nhgd.loop.sampling_error import by_leaf, half_of
from nhgd.objective import Objective
from nhgd.oracle import Oracle
from nhgd.oracle import OuterGradient as GradientsOfOuter
from nhgd.variable import dot

ROUNDING = 100.0  # units in the last place of the outer gradient, of which a part that is left says nothing


class OuterGradient(NamedTuple):
    """The hypergradient, by how many records its curvature lagged, and notes for the row of the history."""

    found: Hypergradient
    lag: int
    notes: dict[str, Any]


def hypergradient(
    loop: Loop,
    batches: Sequence[Batch],
    start: Tensor | None = None,
    cross: Callable[[Oracle], Product] | None = None,
    horizon: Horizon | None = None,
    halves: Sequence[Tensor] = (),
    outer_batches: int = 1,
    solver: Callable[[Tensor], Tensor] | None = None,
) -> OuterGradient:
    """The hypergradient at the end of the inner loop, on these inner batches and the next outer ones.

    Everything that does not need the curvature is computed before waiting for it.

    Args:
        start: where an iterative inverse starts.
        cross: takes the oracle and returns the product of the transposed cross derivative with x; None: the oracle's
            own.
        horizon: sets the damping of an inverse with damping="auto", and how far ahead of theta the outer gradients are
            taken.
        halves: theta at the start and in the middle of the inner loop, for the horizon; nothing is taken ahead without.
        outer_batches: over how many outer batches the gradients of the outer loss are averaged.
        solver: u -> x by the curvature at hand, if it was factorised before.
    """
    executor = loop.executor
    alone = executor.background is False and loop.division.workers == 1 and tape.tape() is None
    # Numbers of the inner loop are read while a GPU works on the outer loss.
    with marked(loop.problem.theta.device, alone):
        waiting = isinstance(executor, SupportsOverlap) and executor.inner_loop_ended()
        batch = loop.outer.next()
        at = loop.oracle(batches, batch)
        others = [loop.oracle([None], loop.outer.next()) for _ in range(outer_batches - 1)]
        horizon = horizon if follows_horizon(loop.inverse) else None
        half = half_of(loop, batch, horizon)
        if horizon is not None:
            known, ridge = horizon, at.ridge.positive
            if loop.theta.asks_moments:
                tape.eager(lambda: None)  # the optimiser's moments must be complete here

        def damp() -> None:
            if horizon is not None:
                at.damp(tape.number(lambda: known.damping(loop.theta.travelled(), ridge)))

        if tape.tape() is not None:
            damp()
        try:
            outer, value = _outer(loop, [at, *others], horizon, halves, half)
            if tape.tape() is None:
                damp()  # which asks numbers of a device, that has more to do by now
            along = None if cross is None else cross(at)
            if along is None and waiting:  # else the graph would only take memory
                at.prepare()
        except NhgdError:
            raise
        except Exception as error:
            # The user's function may fail at a theta for which an earlier record already explains the error.
            own = RunError(str(error))
            cause = executor.root_cause(own)
            if cause is own:
                raise
            raise cause from error
        inverse, curvature, lag = executor.curvature()
        extra: dict[str, Any] = {}
        if horizon is not None and horizon.error is not None:
            places, whole = loop.problem.theta.slices(), outer.theta
            u, curvature = significant(inverse.learner, curvature, whole, horizon.error, places)
            size, left = dot(whole, whole), dot(u, u)
            u = torch.where(left > (ROUNDING * torch.finfo(u.dtype).eps) ** 2 * size, u, 0.0)  # what is left of zeros
            outer = replace(outer, theta=u)
            extra["significant"] = tape.reading(torch.where(size > 0, dot(u, u) / size, 1.0).sqrt())
        adjust = None
        if horizon is not None and inverse.learner is inverse:
            factorised = partial(preconditioner, inverse, curvature, at)
            adjust = partial(
                _adjusted, loop, horizon, at if along is None else _own(at), outer.theta, factorised, extra
            )
        found = implicit(at, inverse, curvature, start, along, outer, loop.solve_warnings, adjust, solver)
        notes = {
            "residual": tape.defer(lambda stats: stats.residual, found.stats),
            "poor_solve": tape.defer(lambda stats: stats.trouble is not None, found.stats),
        } | extra
        if horizon is not None and found.adjoint is not None:
            known, damping = horizon, at.damping
            notes |= {
                "damping": tape.host_value(lambda: tape.now(damping)),
                "horizon": tape.host_value(lambda: known.horizon_loops),
            }
            horizon.observe(found.adjoint)
            horizon.gain.observe(value, loop.problem.v.flatten(found.leaves), loop.problem.v.flat())
            if known.lags and (tape.tape() is not None or known.reads(loop.clock.k)):
                tape.keep_up()
                tape.defer(lambda *means: known.note(loop.clock.k, means), *map(tape.reading, known.means()))
            tape.at_end(lambda: known.read(loop.clock.k))
            tape.defer(lambda value: loop.solve_warnings.warn(known.warning_for(value)), found.value)
        return OuterGradient(found, lag, notes)


def _outer(
    loop: Loop,
    ats: Sequence[Oracle],
    horizon: Horizon | None,
    halves: Sequence[Tensor],
    half: tuple[Batch, float] | None,
) -> tuple[GradientsOfOuter, Tensor]:
    """The outer loss here on the first batch and its mean gradients where theta is going, and its mean there; with half
    of the batch also their error.
    """
    if horizon is None or not halves:
        found = [at.outer() for at in ats]
        mean = _mean(found)
        _compare(loop, horizon, mean, half)
        return replace(mean, value=found[0].value), mean.value
    start, middle = halves
    theta = loop.problem.theta
    here = theta.flat()
    # One after the other, with both points known before: a captured step makes one product of the two with the same
    # data.
    leaves = [part.clone() for part in theta.unflatten(here)]
    with loop.temporarily_at(here + horizon.ahead(middle - start, here - middle)):
        with tape.overlapped(*leaves):
            value = ats[0].outer_loss(leaves)
        mean = _mean([at.outer() for at in ats])
        _compare(loop, horizon, mean, half)
    return replace(mean, value=value), mean.value


def _compare(loop: Loop, horizon: Horizon | None, whole: GradientsOfOuter, half: tuple[Batch, float] | None) -> None:
    """Let the horizon know how far the outer gradient errs, by that of half of the batch."""
    if half is None or horizon is None:
        return
    some, factor = half
    other = loop.oracle([None], some).outer()
    horizon.erred(factor * by_leaf(other.theta - whole.theta, loop))


def _mean(found: Sequence[GradientsOfOuter]) -> GradientsOfOuter:
    """The mean over outer batches."""
    if len(found) == 1:
        return found[0]
    theta = torch.stack([one.theta for one in found]).mean(0)
    in_v = [torch.stack(leaves).mean(0) for leaves in zip(*(one.v for one in found), strict=True)]
    return GradientsOfOuter(torch.stack([one.value for one in found]).mean(), theta, in_v)


def _adjusted(
    loop: Loop,
    horizon: Horizon,
    at: Oracle,
    u: Tensor,
    solver: Callable[[], Callable[[Tensor], Tensor]],
    notes: dict[str, Any],
    x: Tensor,
    again: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """x as the horizon corrects it, now and then by Hessian products, which add notes."""
    learnt, x = x, horizon.corrected(x, u)
    steps = loop.clock.t
    if not horizon.due(loop.clock.k, steps, loop.records(loop.clock.total - steps, steps)):
        return x
    last = loop.last_gradient
    gradient = None if last is None else partial(loop.problem.theta.flatten, last)
    learner = None if loop.inverse is None else loop.inverse.learner
    places = getattr(getattr(learner, "effort", None), "places", None)
    few = _few(at, samples_of_product(places is not None, loop.batch_objective))
    better, found = horizon.measured(few, u, x, solver() if again is None else again, gradient, learnt)
    notes |= found if isinstance(found, dict) else {tape.MORE: found}
    return better


def _own(at: Oracle) -> Oracle:
    """The same oracle, with a graph of its own, that is let go where nothing else takes a product."""
    own = Oracle.over(at.objectives, calls=at.calls)
    own.damp(at.damping)
    return own


def _few(at: Oracle, samples: int) -> Oracle:
    """The oracle, or for a large model one of as many samples as a second derivative can be afforded of."""
    problem, objectives = at.problem, at.objectives
    if tape.tape() is not None or any(type(objective) is not Objective for objective in objectives):
        return at
    few = problem.few(objectives[-1].batch, samples)
    if few is None:
        return at
    smaller = Oracle.over([Objective(problem, few, objectives[-1].seed)], calls=at.calls)
    smaller.damp(at.damping)
    return smaller
