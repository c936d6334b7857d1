"""The executor whose curvature is kept by other processes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar, final

from torch import Tensor
from typing_extensions import override

from nhgd._validation import positive
from nhgd.errors import InputError, RunError
from nhgd.execution._remote import asking
from nhgd.execution.assignment import Assignment
from nhgd.execution.base import AbstractExecutor, Curvature, Traffic
from nhgd.execution.distributed.client import Client
from nhgd.execution.distributed.group import Processes
from nhgd.execution.distributed.messages import Message, Word
from nhgd.execution.distributed.roles import Roles, check_counts
from nhgd.execution.distributed.server import Server
from nhgd.execution.distributed.wire import from_message, to_message
from nhgd.execution.inline import Inline
from nhgd.inverse._learned.damping import resolve_damping
from nhgd.inverse._learned.kronecker import AbstractKronecker
from nhgd.inverse._learned.state import State
from nhgd.inverse.base import AbstractInverse, SolveStats
from nhgd.record import InnerRecord
from nhgd.ridge import Ridge
from nhgd.variable import Variable


@final
class Distributed(AbstractExecutor):
    """Curvature in other processes: curvature ranks fold in the records while the inner ranks continue.

    All processes run the same program. Ranks 0 to workers - 1 share the inner loop, the others keep curvature. During
    the inner loop records travel one way; at its end u goes there and x comes back. The cross derivative stays where
    theta is.

    Args:
        max_lag, stale: as for every executor.
        workers: how many processes share the inner loop; None: all that keep no curvature.
        curvature_ranks: how many processes keep curvature. Layers are divided over several by the cost of their
            eigendecompositions, which Kronecker-factored inverses allow. 0: none, the workers keep it themselves.
        timeout: seconds to wait for another process before it counts as lost and the run ends. It must be longer than
            an inner step, the metrics and a checkpoint take.
        divide: with curvature_ranks=0, whether each worker keeps only the factors and inverses of its own layers; see
            `Inline`.
    """

    name: ClassVar[str] = "distributed"
    gathers: ClassVar[bool] = True

    def __init__(
        self,
        max_lag: int | None = None,
        stale: bool = False,
        workers: int | None = None,
        curvature_ranks: int = 1,
        timeout: float = 30.0,
        divide: bool = False,
    ) -> None:
        super().__init__(max_lag, stale)
        check_counts(workers, curvature_ranks)
        if divide and curvature_ranks:
            raise InputError(
                "divide=True divides the curvature over the workers, so there are no curvature ranks. Set"
                " curvature_ranks=0; several curvature ranks divide it too."
            )
        self.divide = divide
        positive("Distributed", timeout=timeout)
        self.timeout = timeout
        self.group: Processes = Processes(workers, curvature_ranks, timeout)
        self._local: Inline | None = None  # where the workers keep curvature themselves

    @property
    def roles(self) -> Roles:
        """The roles of the ranks, as far as they are known before the processes meet; one inner rank by default."""
        return self.group.roles

    @override
    def start(self, inverse: AbstractInverse, theta: Variable, v: Variable | None = None) -> None:
        """Meet the other processes if necessary, and create the first state."""
        self.group.join(theta)
        super().start(inverse, theta, v)
        self._theta = theta
        if self.roles.curvature == 0:
            self._local = Inline(team=self.group.team, divide=self.divide)
            self._local.start(inverse, theta, v)
            return
        learner = self.learner
        if learner is None:
            raise InputError(
                f"{inverse.name} learns nothing from the inner steps, so a curvature rank would have nothing to do. Use"
                " curvature_ranks=0 to share the inner loop alone, or an inverse that learns, such as kfac."
            )
        group, messenger = self.group, self.group.messenger
        if messenger is None:
            raise RunError("The distributed executor is closed. Make a new one for another run.")
        self._assignment = Assignment(learner, theta, self.roles.curvature)
        if group.serves:
            group.server = group.server or Server(messenger, learner, theta, self.max_lag)
            group.server.inverse = learner
            return
        group.client = group.client or Client(messenger, self.max_lag, self.traffic)
        group.client.tell(Word.START)

    @property
    @override
    def holds_all(self) -> bool:
        return not self.divide

    @property
    def _client(self) -> Client:
        assert self.group.client is not None
        return self.group.client

    @override
    def begin(self) -> None:
        if self._local is not None:
            self._local.begin()
        else:
            self._client.tell(Word.BEGIN)

    @override
    def submit(self, record: InnerRecord) -> None:
        """Send the record; wait while more than `max_lag` are on their way."""
        if self._local is not None:
            self._local.submit(record)
        else:
            self._client.submit([self._assignment.part_of(record, part) for part in range(self._assignment.parts)])

    @override
    def state(self, wait: bool = False) -> tuple[Any, int]:
        """A token of the current state, which is kept for the following solves, and the number of missing records."""
        if self._local is not None:
            return self._local.state(wait)
        if wait:
            self._client.ask(Word.DRAIN)
        found = self._client.ask(Word.MARK, overtake=True)
        return True, self.traffic.records - min(message.text["records"] for message in found)

    def scope(self) -> AbstractContextManager[None]:
        """Nothing is special about it."""
        return nullcontext()

    def inner_loop_ended(self) -> bool:
        """True: other processes keep the curvature."""
        return self._local is None

    def raise_deferred(self) -> None:
        """Nothing to do: errors arrive with the answers."""

    @override
    def curvature(self) -> Curvature:
        """The curvature to solve with. Unless `stale`, the solve itself waits for the records, which saves a round
        trip.
        """
        if self._local is not None:
            return self._local.curvature()
        marked, lag = self.state() if self.stale else (False, 0)
        return Curvature(asking(self.inverse, self._ask), marked, lag)

    def _ask(
        self, state: Any, u: Tensor, ridge: Ridge, error: Tensor | None = None
    ) -> tuple[Tensor, SolveStats | None]:
        marked = state
        text: dict[str, Any] = {"marked": marked, "damping": None}
        learner = self.learner
        follows = isinstance(learner, AbstractKronecker) and learner.damping in (None, "auto")
        if self._assignment.parts > 1 and follows and not ridge.positive and error is None:
            # The default damping is a share of the mean diagonal of the whole model, and each rank knows only a part.
            parts = self._client.ask(Word.DIAGONAL, lambda part: ({"marked": marked}, ()), overtake=marked)
            text["damping"] = resolve_damping(None, ridge, sum(message.text["mean"] for message in parts))
        more = [] if error is None else [error.cpu()]
        found = self._client.ask(
            Word.SOLVE,
            lambda part: (text, [self._assignment.gather(u.detach(), part).cpu(), ridge.tensor(u.dtype).cpu(), *more]),
            overtake=marked,
        )
        self.traffic.bytes_sent += sum(message.data.numel() for message in found)
        x = self._assignment.scatter([message.tensors()[0] for message in found])
        return x, _stats(found[0]) if error is None else None

    @override
    def keep(self) -> Any:
        """The state, assembled from all curvature ranks; on ranks other than 0 only its form."""
        if self._local is not None:
            return self._local.keep()
        assert self.learner is not None
        fresh = self.learner.init(self._theta)
        if not self.group.leads:
            return fresh
        found = [
            from_message(message.text, message.tensors(), fresh, self._theta.device)
            for message in self._client.ask(Word.KEEP, alone=True)
        ]
        return self._assignment.whole(found)

    @override
    def restore(self, state: Any) -> None:
        """Send the state back to the curvature ranks, each its part."""
        if self._local is not None:
            self._local.restore(state)
            return
        if self.group.serves:
            return
        if not isinstance(state, State):
            raise InputError(f"{self.inverse.name} has a state that cannot be sent. Let its class derive from State.")
        self._client.tell(Word.RESTORE, lambda part: to_message(self._assignment.own(state, part)))

    @override
    def measured(self) -> Traffic:
        """The work so far. Bytes count records, u, the ridge and x of all inner ranks, and what this rank sent to
        its team.
        """
        world = self.roles.world
        if self._local is not None:
            return replace(self._local.measured(), processes=world)
        found = super().measured()
        carried = 0 if self.group.client is None else self.group.client.carried
        return replace(found, processes=world, bytes_sent=found.bytes_sent + carried + self.group.team.bytes_sent)

    @override
    def close(self) -> None:
        self.group.close()


def _stats(reply: Message) -> SolveStats:
    text = reply.text
    return SolveStats(text.get("residual"), text.get("hvps", 0), text.get("converged", True), text.get("notes", {}))
