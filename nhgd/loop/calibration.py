"""How much of a run's inner steps its curvature takes."""

from __future__ import annotations

import warnings
from dataclasses import replace
from math import ceil
from typing import Any

import torch

from nhgd._budget import Budget, affordable_passes
from nhgd._cost import Operation
from nhgd._prices import Priced, Prices, prices_of
from nhgd._recording.recorder import Recorder
from nhgd._shape import Shape
from nhgd._tree import map_tensors, tensors
from nhgd.data.batch import Batch, common_length
from nhgd.errors import InputError, NhgdError
from nhgd.inverse._learned.kronecker import AbstractKronecker
from nhgd.inverse._learned.periods import Periodic
from nhgd.inverse.capabilities import couples, with_learner
from nhgd.inverse.fisher_window import MANY_ROWS, FisherWindow
from nhgd.loop.loop import Loop
from nhgd.objective import Objective, OracleCalls
from nhgd.problem import FEW, Bilevel
from nhgd.record import LayerStatistics

REPEATED_CALL = 2e-6  # seconds of one operation of a captured step, beside its work


def calibrate(loop: Loop, steps: int | None = None) -> None:
    """Let the loop use its inverse within its `overhead`, if it has one.

    Nothing is timed: the operations of one inner step are counted, and priced by constants. The decision is in the
    loop's inverse, and so in the run's stats: giving it back repeats the run.

    Args:
        loop: that a run has just begun.
        steps: that count as an inner loop, where a solve follows each of them; None: those of the loop's own.
    """
    inverse = loop.inverse
    learner = None if inverse is None else inverse.learner
    if inverse is None or not isinstance(learner, Periodic) or learner.overhead is None or learner.effort is not None:
        return
    problem = loop.problem
    batch = loop.inner.peek()  # the run's own draws do not change; all workers of a team draw the same
    device = problem.theta.device
    prices = prices_of(device)
    if loop.repeats:
        prices = replace(prices, call=REPEATED_CALL)
    count = loop.settings.inner_steps if steps is None else steps
    with problem.guarded(seed=0, twice=False):
        gradient = _priced(problem, batch, prices)
        samples = common_length(batch) or problem.losses(batch).values.numel()
        shape = Shape.of(problem.theta, samples, places(problem, batch), problem.ridge_coefficients())
        learner, roots = of_all_roots(learner, problem, batch, affordable_passes(learner.overhead, count))
        passes = further_passes(learner, problem, batch)
    if isinstance(learner, AbstractKronecker):
        shape = shape.in_blocks(learner.largest)
    if roots is not None:
        shape = replace(shape, outputs=roots)
    numbers = sum(t.numel() for t in tensors(batch))
    beside = [Operation("pass", 4 * numbers), Operation("pass", 6 * shape.numel), Operation("call", times=30)]
    inner = gradient + prices.of(beside, gradient)  # a batch is gathered, and theta moves
    taken = 1 if passes is None else passes
    effort = Budget(shape, gradient, inner, count, prices, taken, single=steps is not None).effort(learner)
    if effort is not None and loop.repeats and effort.every > count:  # always at the same steps of an inner loop
        effort = replace(effort, every=count * ceil(effort.every / count))
    if effort is not None or learner is not inverse.learner:
        loop.use(with_learner(inverse, replace(learner, **{"effort": effort})))


def _priced(problem: Bilevel, batch: Batch, prices: Prices) -> float:
    """Seconds of an inner gradient; of a large model, extrapolated from those of a few samples."""
    some = [problem.few(batch), problem.few(batch, 2 * FEW)]
    counts = [common_length(few) for few in some if few is not None]
    found = list[float]()
    for given in some if len(counts) == 2 else [batch]:
        with Priced(prices) as priced:
            Objective(problem, given).step()
        found.append(priced.seconds)
    samples = common_length(batch)
    if len(found) == 1 or samples is None:
        return found[0]
    return found[0] + (found[1] - found[0]) / FEW * (samples - FEW)


def of_all_roots(learner: Periodic[Any], problem: Bilevel, batch: Batch, most: int) -> tuple[Periodic[Any], int | None]:
    """A window with fisher="auto", made exact if a record of all roots takes few enough passes, and the number of
    roots.

    The number is None if unknown. A single root equals its random sign, without noise.
    """
    if not isinstance(learner, FisherWindow) or learner.fisher != "auto" or learner.records == "batch":
        return learner, None
    roots = roots_of(problem, batch, max(1, min(most, MANY_ROWS // learner.window)))
    if roots is None:
        return learner, None
    exact = replace(learner, fisher="exact")
    passes = further_passes(exact, problem, batch)
    return (exact, roots) if passes is not None and (roots == 1 or passes <= most) else (learner, None)


def roots_of(problem: Bilevel, batch: Batch, most: int) -> int | None:
    """The number of the likelihood's roots for a sample, if it has at most `most` outputs; None otherwise."""
    if problem.likelihood is None:
        return None
    with torch.enable_grad():
        losses = problem.losses(batch)
        if losses.outputs is None or losses.outputs.numel() > most * len(losses.outputs):
            return None
        try:
            return len(problem.likelihood.roots(losses.outputs, losses.values))
        except (InputError, RuntimeError):  # a record that needs them will report why
            return None


def further_passes(learner: Periodic[Any], problem: Bilevel, batch: Batch) -> int | None:
    """How many backward passes a record takes beyond that of the inner step; None if it cannot be made."""
    calls, found = OracleCalls(), list[int]()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the run's own record will report it
            # Of a large model, few samples show it, unless each of them takes a pass of its own.
            few = [problem.few(batch), problem.few(batch, 2 * FEW)]
            for given in few if None not in few else []:
                found.append(_passes_of(learner, problem, given, calls))
            if len(set(found)) != 1:
                found = [_passes_of(learner, problem, batch, calls)]
    except (NhgdError, RuntimeError, IndexError, ValueError):  # the run's own record will report why
        return None
    return found[0]


def _passes_of(learner: Periodic[Any], problem: Bilevel, batch: Batch, calls: OracleCalls) -> int:
    recorder = Recorder(problem, learner.records, learner.fisher, calls, couples(learner))
    recorder.step(batch)  # the first record may change the others
    first = calls.inner_gradients
    recorder.step(batch)
    return calls.inner_gradients - first - 1


def samples_of_product(many_places: bool, batch_objective: bool) -> int:
    """Of a Hessian product that a large model can afford now and then: few, as its graph holds every attention score;
    fewer where the many places of a sample make up for it, and samples are not normalised by each other.
    """
    return FEW // 2 if many_places and not batch_objective else FEW


def places(problem: Bilevel, batch: Batch) -> dict[str, int] | None:
    """How many places each layer sees of a sample, from the record of two: BatchNorm may need more than one."""
    if common_length(batch) is None or problem.theta.root is None:
        return None
    try:
        few = map_tensors(lambda t: t[:2] if t.ndim else t, batch)
        record = Recorder(problem, "layer", couples=False).step(few).record
    except (NhgdError, RuntimeError, IndexError, ValueError):  # inverses that learn from layers will report why
        return None
    layers = record.layers if isinstance(record, LayerStatistics) else ()
    return {layer.weight: layer.inputs.shape[1] for layer in layers}
