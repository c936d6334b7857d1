"""Teaching an online inverse from batches, at one fixed point."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nhgd._recording.recorder import Recorder
from nhgd._surroundings import library_settings
from nhgd.data.batch import Batch
from nhgd.inverse.base import AbstractInverse
from nhgd.inverse.capabilities import couples
from nhgd.objective import OracleCalls
from nhgd.problem import Bilevel


def learn(
    inverse: AbstractInverse,
    problem: Bilevel,
    batches: Iterable[Batch],
    seed: int = 0,
    calls: OracleCalls | None = None,
    state: Any = None,
) -> Any:
    """The state of `inverse` after it has observed one inner gradient for each batch, from its first state or from a
    given one; None where nothing in it learns. theta does not move.
    """
    learner = inverse.learner
    if learner is None:
        return None
    state = learner.init(problem.theta) if state is None else state
    recorder = Recorder(problem, learner.records, learner.fisher, calls, couples(learner))
    with library_settings(), problem.guarded(seed):
        for batch in batches:
            record = recorder.step(batch).record
            assert record is not None
            state = learner.observe(state, record)
    return state
