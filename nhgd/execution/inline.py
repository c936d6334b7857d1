"""Curvature kept in the thread of the inner loop."""

from __future__ import annotations

from typing import Any, ClassVar, final

from typing_extensions import override

from nhgd import _tape as tape
from nhgd._beside import forget
from nhgd.data_parallel import AbstractTeam, Team
from nhgd.execution._divided import DividedLayers
from nhgd.execution._remote import asking
from nhgd.execution._stopwatch import Stopwatch
from nhgd.execution.base import AbstractExecutor, Curvature, Traffic
from nhgd.execution.group import Group
from nhgd.inverse._learned import concurrent
from nhgd.inverse._learned.division import SupportsDivision
from nhgd.inverse.base import AbstractInverse
from nhgd.inverse.capabilities import begun, reduces
from nhgd.record import InnerRecord, gathered
from nhgd.variable import Variable


@final
class Inline(AbstractExecutor):
    """In the inner loop's own thread: each record is folded in before the next inner step.

    Args:
        team: the workers that share the inner batches. What a batch adds to the curvature is summed over them.
        divide: False: each worker keeps the whole curvature. True: of N workers each keeps the factors and inverses of
            about an Nth of the layers, and solves with these. For K-FAC, without checkpoints.
    """

    name: ClassVar[str] = "inline"
    background: ClassVar[bool] = False

    def __init__(
        self,
        max_lag: int | None = None,
        stale: bool = False,
        team: AbstractTeam | None = None,
        divide: bool = False,
    ) -> None:
        super().__init__(max_lag, stale)
        self.group = Group(team)
        self.divide = divide
        self._divided: DividedLayers | None = None
        self.traffic.processes = self.group.team.size

    @override
    def start(self, inverse: AbstractInverse, theta: Variable, v: Variable | None = None) -> None:
        super().start(inverse, theta, v)
        self._state: Any = None if self.learner is None else self.learner.init(theta)
        team, learner = self.group.team, self.learner
        self._divided = None
        if self.divide and learner is not None and isinstance(team, Team):
            self._divided = DividedLayers(learner, theta, team)
        self._busy = Stopwatch(theta.device)
        self._later: list[concurrent.Later] = []

    @property
    @override
    def holds_all(self) -> bool:
        return not self.divide or self.group.team.size == 1

    @override
    def begin(self) -> None:
        self._settle()
        if self.learner is not None:
            self._state = begun(self.learner, self._state)

    @override
    def submit(self, record: InnerRecord) -> None:
        assert self.learner is not None
        if self._divided is not None:
            with self._busy.running():
                self._state = self._divided.observe(self._state, record)
            self._count()
            return
        taken = record if reduces(self.learner) else gathered(record)
        self._settle()
        if tape.tape() is None:
            with self._busy.running(), concurrent.deferring() as self._later:
                self._state = self.learner.observe(self._state, taken)
        else:
            self._state = self.learner.observe(self._state, taken)
        tape.effect(self._count)

    def _settle(self) -> None:
        """Wait for what the last record has left to be finished before its state is used."""
        for finish in self._later:
            with self._busy.running():
                self._state = finish(self._state)
            forget()
        self._later = []

    def _count(self) -> None:
        self.traffic.records += 1

    @override
    def state(self, wait: bool = False) -> tuple[Any, int]:
        self._settle()
        return self._state, 0

    @override
    def curvature(self) -> Curvature:
        """The current state, with its preparation for the solve divided among workers if possible."""
        if self._divided is not None:
            return Curvature(asking(self.inverse, self._divided.solve), self._state, 0)
        self._settle()
        state, pool = self._state, self.group.pool
        if pool is not None and isinstance(self.learner, SupportsDivision):
            state = self.learner.divided(state, pool)
        return Curvature(self.inverse, state, 0)

    @override
    def restore(self, state: Any) -> None:
        self._state, self._later = state, []

    @override
    def measured(self) -> Traffic:
        """The work so far; the inner loop waited for all of it."""
        if hasattr(self, "_busy"):
            self.traffic.curvature_seconds += self._busy.take()
            self.traffic.waited_seconds = self.traffic.curvature_seconds
        self.traffic.bytes_sent = self.group.team.bytes_sent
        return super().measured()
