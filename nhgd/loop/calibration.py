"""How much of a run's inner steps its curvature takes."""

from __future__ import annotations

from dataclasses import replace

from nhgd._budget import Budget, priced, prices_of
from nhgd._cost import Operation, Shape
from nhgd._recording.recorder import Recorder
from nhgd._tree import map_tensors, tensors
from nhgd.data.batch import Batch, common_length
from nhgd.errors import NhgdError
from nhgd.inverse._learned.periods import Periodic
from nhgd.inverse.capabilities import with_learner
from nhgd.loop.loop import Loop
from nhgd.objective import Objective
from nhgd.problem import Bilevel
from nhgd.record import LayerStatistics


def calibrate(loop: Loop, steps: int | None = None) -> None:
    """Let the loop use its inverse within its `overhead`, where it has one to keep to.

    Nothing is timed: the operations of one inner step are counted, and priced by constants. What was decided is in the loop's
    inverse, and so in the run's stats: giving it back repeats the run.

    Args:
        loop: that a run has just begun.
        steps: of an inner loop; None: the loop's own.
    """
    inverse = loop.inverse
    learner = None if inverse is None else inverse.learner
    if inverse is None or not isinstance(learner, Periodic) or learner.overhead is None or learner.effort is not None:
        return
    problem = loop.problem
    batch = loop.inner.peek()  # the run itself draws as if nobody had looked; of a team, all draw the same
    device = problem.theta.device
    with problem.guarded(seed=0):
        with priced(device) as found:
            Objective(problem, batch).step()
        samples = common_length(batch) or problem.losses(batch).values.numel()
        shape = Shape.of(problem.theta, samples, places(problem, batch))
    numbers = sum(t.numel() for t in tensors(batch))
    beside = [Operation("pass", 4 * numbers), Operation("pass", 6 * shape.numel), Operation("call", times=30)]
    prices = prices_of(device)
    inner = found.seconds + prices.of(beside, found.seconds)  # a batch is gathered, and theta moves
    count = loop.settings.inner_steps if steps is None else steps
    effort = Budget(shape, found.seconds, inner, count, prices).effort(learner)
    if effort is not None:
        loop.use(with_learner(inverse, replace(learner, **{"effort": effort})))


def places(problem: Bilevel, batch: Batch) -> dict[str, int] | None:
    """How many places each layer sees of a sample, from the record of two: BatchNorm may need more than one."""
    if common_length(batch) is None or problem.theta.root is None:
        return None
    try:
        few = map_tensors(lambda t: t[:2] if t.ndim else t, batch)
        record = Recorder(problem, "layer", couples=False).step(few).record
    except (NhgdError, RuntimeError, IndexError, ValueError):  # what learns from layers will say why
        return None
    layers = record.layers if isinstance(record, LayerStatistics) else ()
    return {layer.weight: layer.inputs.shape[1] for layer in layers}
