"""How often curvature can be refreshed within a share of the inner step's time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from nhgd._memory import synchronise
from nhgd._recording.recorder import Recorder
from nhgd.execution.group import Group
from nhgd.inverse._learned.periods import Periodic
from nhgd.inverse.base import AbstractInverse
from nhgd.inverse.capabilities import with_learner
from nhgd.loop.loop import Loop
from nhgd.objective import Objective
from nhgd.record import InnerRecord


def calibrate(loop: Loop) -> None:
    """Let the loop use its inverse with periods chosen by measurement, where that has an `overhead` to keep to.

    What was chosen is in the loop's inverse, and so in the run's stats: giving it back repeats the run.
    """
    inverse = loop.inverse
    learner = None if inverse is None else inverse.learner
    if inverse is None or not isinstance(learner, Periodic) or learner.overhead is None:
        return
    problem = loop.problem
    batch = loop.objective(loop.inner.peek()).batch  # the run itself draws as if nobody had looked
    recording = Recorder(problem, learner.records, learner.fisher, couples=learner.couples)

    def recorded() -> InnerRecord:
        record = recording.step(batch).record
        assert record is not None
        return record

    with problem.guarded(seed=0):
        state = learner.observe(learner.init(problem.theta), recorded())
        inner = _median(lambda: Objective(problem, batch).step(), problem.theta.device)
        both = _median(lambda: learner.observe(state, recorded()), problem.theta.device)
        invert = _median(lambda: learner.decompose(state), problem.theta.device)
    # The first worker's clock decides for all. They divide the decompositions among them.
    inner, both, invert = (loop.division.agreed(seconds) for seconds in (inner, both, invert / loop.division.workers))
    chosen = learner.with_periods(inner_seconds=inner, factor_seconds=max(both - inner, 1e-9), invert_seconds=invert)
    loop.use(_agreed(loop.executor.group, with_learner(inverse, chosen)))


def _agreed(group: Group, inverse: AbstractInverse) -> AbstractInverse:
    """The inverse with the periods that the first process has chosen for it."""
    own = inverse.learner
    assert own is not None
    plain = {field.name: getattr(own, field.name) for field in fields(own)}
    chosen = group.agreed({k: x for k, x in plain.items() if x is None or isinstance(x, (bool, int, float))})
    return with_learner(inverse, replace(own, **chosen))


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
