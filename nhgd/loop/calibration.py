"""How often curvature can be refreshed within a share of the inner step's time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from nhgd._memory import synchronise
from nhgd._recording.recorder import Recorder
from nhgd.inverse import AbstractInverse, Refined
from nhgd.loop.loop import Loop
from nhgd.objective import Objective


def calibrate(loop: Loop) -> None:
    """Let the loop use its inverse with periods chosen by measurement, where that has an `overhead` to keep to.

    What was chosen is in the loop's inverse, and so in the run's stats: giving it back repeats the run.
    """
    inverse: Any = loop.inverse
    if inverse is None or getattr(inverse, "overhead", None) is None:
        return
    learner: Any = inverse.inverse if isinstance(inverse, Refined) else inverse
    problem = loop.problem
    batch = loop.objective(loop.inner.peek()).batch  # the run itself draws as if nobody had looked
    recording = Recorder(problem, inverse.records, inverse.fisher, couples=inverse.couples)
    with problem.guarded(seed=0):
        state = inverse.observe(inverse.init(problem.theta), recording.step(batch).record)
        inner = _median(lambda: Objective(problem, batch).step(), problem.theta.device)
        both = _median(lambda: inverse.observe(state, recording.step(batch).record), problem.theta.device)
        layers = state.inputs if hasattr(learner, "decomposed") else ()
        invert = _median(lambda: [learner.decomposed(state, layer) for layer in layers], problem.theta.device)
    # The first worker's clock decides for all. They divide the decompositions among them.
    inner, both, invert = (loop.division.agreed(seconds) for seconds in (inner, both, invert / loop.division.workers))
    chosen: AbstractInverse = inverse.with_periods(
        inner_seconds=inner, factor_seconds=max(both - inner, 1e-9), invert_seconds=invert
    )
    loop.use(loop.executor.agreed(chosen))


def _median(work: Callable[[], Any], device: Any, times: int = 5) -> float:
    work()
    found = []
    for _ in range(times):
        synchronise(device)
        started = time.perf_counter()
        work()
        synchronise(device)
        found.append(time.perf_counter() - started)
    return sorted(found)[times // 2]
