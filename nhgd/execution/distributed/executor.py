"""Curvature kept by other processes."""

from __future__ import annotations

import atexit
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, ClassVar, final

from torch import Tensor

from nhgd.data_parallel import Team
from nhgd.errors import InputError, NhgdError, NonFiniteError, RunError, positive
from nhgd.execution._remote import asking
from nhgd.execution.base import AbstractExecutor, Curvature, Report, Traffic
from nhgd.execution.distributed.assignment import Division
from nhgd.execution.distributed.channel import FOREVER, Lane, Message, as_text
from nhgd.execution.distributed.protocol import Tag, Word, heard
from nhgd.execution.distributed.rendezvous import Arrival, Membership, arrive, join
from nhgd.execution.distributed.roles import Roles, check_counts
from nhgd.execution.distributed.server import Serving
from nhgd.execution.distributed.wire import Layout, from_message, shapes, size_of, to_bytes, to_message
from nhgd.execution.inline import Inline
from nhgd.inverse._learned.damping import resolve_damping
from nhgd.inverse._learned.kronecker import AbstractKronecker
from nhgd.inverse._learned.state import State
from nhgd.inverse.base import AbstractInverse, SolveStats
from nhgd.record import InnerRecord
from nhgd.ridge import Ridge
from nhgd.variable import Variable

LAYOUTS = 64  # of records that both sides remember; others are sent again with each record


@final
class Distributed(AbstractExecutor):
    """In other processes: curvature ranks fold the records in while the inner ranks go on.

    All processes run the same program. Ranks 0 to workers - 1 share the inner loop, the others keep curvature. During the
    inner loop records travel one way; at its end u goes there and x comes back. The cross derivative stays where theta is.

    Args:
        max_lag, stale: as for every executor.
        workers: how many processes share the inner loop; None: all that keep no curvature.
        curvature_ranks: how many processes keep curvature. Layers are divided over several by the cost of their
            eigendecompositions, which Kronecker-factored inverses allow. 0: none, the workers keep it themselves.
        timeout: seconds without a sign of life after which a process counts as lost, and the run ends.
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
    ) -> None:
        super().__init__(max_lag, stale)
        check_counts(workers, curvature_ranks)
        positive("Distributed", timeout=timeout)
        self._counts = workers, curvature_ranks
        self.timeout = timeout
        self.last_resort: Callable[[str], None] | None = None  # called when a process is lost, from another thread
        self._arrival: Arrival | None = None
        self._member: Membership | None = None
        self._local: Inline | None = None  # where the workers keep curvature themselves
        self._serving: Serving | None = None
        self._lanes: list[Lane] = []
        self._replies: list[deque[Message]] = []
        self._credits: list[int] = []
        self._layouts: dict[tuple[int, Layout], tuple[int, int]] = {}  # the number and the size of the last ones
        self._moving: set[int] = set()
        self._messages = 0  # sent on the lane of records
        self._carried = 0  # bytes between the curvature ranks and the other inner ranks

    @property
    def roles(self) -> Roles:
        """Who will do what, as far as it is known before the processes have met: one inner rank where nobody said more."""
        return Roles(self._counts[0] or 1, self._counts[1]) if self._member is None else self._member.roles

    # Joining.

    def arrive(self) -> None:
        """Give the first sign of life, once. What comes before `join`, such as reading data, may take as long as it likes."""
        if self._arrival is None:
            self._arrival = arrive(*self._counts, self.timeout)
            if self.last_resort is not None:
                self._arrival.pulse.on_loss(self.last_resort)
            atexit.register(_close, weakref.ref(self))

    def join(self, theta: Variable) -> None:
        """Meet the others, once."""
        if self._member is not None:
            return
        self.arrive()
        assert self._arrival is not None
        self._member = join(self._arrival, theta.device)
        self.traffic.processes = self._member.roles.world
        if self._member.is_inner and self._member.team_group is not None:
            self.team = Team.of(self._member.team_group, FOREVER.total_seconds())
        if self._counts[1] == 0:
            self._local = Inline(team=self.team)

    @property
    def serves(self) -> bool:
        """Whether this process keeps curvature rather than running the inner loop."""
        return self._member is not None and not self._member.is_inner

    @property
    def leads(self) -> bool:
        """Whether this is the process that speaks for all."""
        return self._member is None or self._member.rank == 0

    def start(self, inverse: AbstractInverse, theta: Variable, v: Variable | None = None) -> None:
        """Join the others, the first time, and have them make the first state."""
        self.join(theta)
        member = self._here()
        self._inverse, self._theta = inverse, theta
        for variable in (theta, v):
            if variable is not None:
                self._moving |= {leaf.untyped_storage().data_ptr() for leaf in variable.leaves}
        if self._local is not None:
            self._local.start(inverse, theta, v)
            return
        learner = inverse.learner
        if learner is None:
            raise InputError(
                f"{inverse.name} learns nothing from the inner steps, so a curvature rank would have nothing to do. Use"
                " curvature_ranks=0 to share the inner loop alone, or an inverse that learns, such as kfac."
            )
        if self.serves:
            if self._serving is None:
                self._serving = Serving(member.channel, member.roles, member.rank, learner, theta, self.max_lag)
            self._serving.inverse = learner
            return
        if not self._lanes:
            self._lanes = [member.channel.listen(keeper, Tag.REPLIES) for keeper in member.roles.keepers]
            self._replies = [deque() for _ in self._lanes]
            self._credits = [0] * len(self._lanes)
        self._learner = learner
        self._division = Division(learner, theta, member.roles.curvature)
        self._tell(Word.START)

    # The inner rank.

    def _tell(self, word: Word, text: Any = None, tensors: Any = None) -> None:
        """Send something other than a record, in its order, from the first inner rank."""
        member = self._here()
        if member.rank != 0:
            return
        self._messages += 1
        for part, keeper in enumerate(member.roles.keepers):
            given = [t.cpu() for t in (tensors(part) if callable(tensors) else tensors or ())]
            told = text(part) if callable(text) else text
            content = as_text([told or {}, shapes(given)]) if told or given else None
            member.channel.post(keeper, Tag.RECORDS, word, 0, content, given, self.traffic.records + 1)

    def _here(self) -> Membership:
        if self._member is None:
            raise RunError("The distributed executor is closed, or was not started. Make a new one for another run.")
        self._member.pulse.engage()
        return self._member

    @contextmanager
    def scope(self) -> Iterator[None]:
        """An outer step. One in which a process was lost fails, whatever it computed.

        A wait on a GPU that was broken off ends as if all were well, with numbers that are not those of all workers.
        """
        yield
        self._here().channel.check()

    def begin(self) -> None:
        """Tell the inverse that a new outer step begins."""
        self._here()
        if self._local is not None:
            self._local.begin()
            return
        self._tell(Word.BEGIN)

    def submit(self, record: InnerRecord) -> None:
        """Send the record; wait while more than `max_lag` are on their way."""
        if self._local is not None:
            self._local.submit(record)
            return
        member = self._here()
        self.traffic.records += 1
        self._send(record, member)
        lag = self.traffic.records - min(self._credits)
        if lag > self.max_lag or member.channel.failure is not None:
            self._collect()
            lag = self.traffic.records - min(self._credits)
        self.traffic.largest_lag = max(self.traffic.largest_lag, min(lag, self.max_lag))
        if lag > self.max_lag:
            self._wait(lambda: self.traffic.records - min(self._credits) <= self.max_lag)

    def _send(self, record: InnerRecord, member: Membership) -> None:
        for part, keeper in enumerate(member.roles.keepers):
            layout, tensors = Layout.of(self._division.share(record, part))
            if member.rank != 0 and not layout.is_part:
                return  # every worker has the whole of it, and one of them is enough
            tensors = [t.clone() if t.untyped_storage().data_ptr() in self._moving else t for t in tensors]
            key = part, layout
            text = None
            if key not in self._layouts:
                # The number of the oldest is given to the new one, by which the other side forgets the same.
                full = len(self._layouts) >= LAYOUTS
                place = self._layouts.pop(next(iter(self._layouts)))[0] if full else len(self._layouts)
                self._layouts[key] = place, size_of(layout.shapes)
                text = as_text([layout.to_text(), []])
            number, size = self._layouts[key]
            self.traffic.bytes_sent += size
            if tensors and tensors[0].is_cuda:
                tensors = [to_bytes(tensors)]  # here, on the stream that makes them
            member.channel.post(keeper, Tag.RECORDS, Word.RECORD, number, text, tensors, self.traffic.records)
        self._messages += 1

    def _collect(self) -> bool:
        """Look at what came back: credits are noted, answers are kept."""
        member = self._member
        assert member is not None
        for part, lane in enumerate(self._lanes):
            inbox = member.channel.inbox[lane]
            while inbox:
                message = inbox.popleft()
                if message.kind == Word.CREDIT:
                    self._credits[part] = message.number
                else:
                    self._credits[part] = message.text.get("records", self._credits[part])
                    self._replies[part].append(message)
            member.channel.arrived(lane.source, Tag.RECORDS, self._credits[part])
        return all(self._replies)

    def _wait(self, ready: Callable[[], Any]) -> None:
        began = time.perf_counter()
        try:
            self._here().channel.wait(lambda: (self._collect(), ready())[1])
        finally:
            self.traffic.waited_seconds += time.perf_counter() - began

    def _request(self, word: Word, text: Any = None, tensors: Any = None, overtake: bool = False) -> list[Message]:
        """Ask every curvature rank and wait for the answers; of several inner ranks the first asks for all."""
        member = self._here()
        if member.rank == 0:
            for part, keeper in enumerate(member.roles.keepers):
                given = () if tensors is None else tensors(part)
                need = 0 if overtake else self._messages
                self.traffic.bytes_sent += member.channel.send(keeper, Tag.REQUESTS, word, text, given, need)
        self._wait(self._collect)
        for keeper in member.roles.keepers:
            member.channel.arrived(keeper, Tag.REQUESTS, 0)
        found = [replies.popleft() for replies in self._replies]
        self.traffic.curvature_seconds = max([self.traffic.curvature_seconds, *(_seconds(m) for m in found)])
        carried = [m.text.get("carried", []) for m in found]
        self._carried = sum(size for sizes in carried for rank, size in enumerate(sizes) if rank != member.rank)
        for message in found:
            if message.kind == Word.ERROR:
                raise heard(message.text)
        return found

    def drain(self) -> None:
        """Wait until every record sent is in the state."""
        if self._local is None:
            self._request(Word.DRAIN)

    def snapshot(self) -> tuple[Any, int]:
        """A token of the state as it stands now, which is kept for the solves that follow, and how much it lacks."""
        if self._local is not None:
            return self._local.snapshot()
        found = self._request(Word.MARK, overtake=True)
        return True, self.traffic.records - min(message.text["records"] for message in found)

    def inner_loop_ended(self) -> bool:
        """Whether other processes keep the curvature."""
        return self._local is None or self._local.inner_loop_ended()

    def curvature(self) -> Curvature:
        """What an outer step solves with. Without `stale` the solve itself waits for the records: one answer, not two."""
        if self._local is not None:
            return self._local.curvature()
        if self.stale:
            return super().curvature()
        return Curvature(self.solving, False, 0)

    @property
    def solving(self) -> AbstractInverse:
        """A stand-in for the inverse that asks the curvature ranks."""
        return self._inverse if self._local is not None else asking(self._inverse, self._ask)

    def _ask(self, marked: Any, u: Tensor, ridge: Ridge) -> tuple[Tensor, SolveStats]:
        text: dict[str, Any] = {"marked": marked, "damping": None}
        learner = self._learner
        divided = self._division.parts > 1 and isinstance(learner, AbstractKronecker) and learner.damping is None
        if divided and not ridge.positive:
            # The default damping is a share of the mean diagonal of the whole model, of which each rank knows a part.
            parts = self._request(Word.DIAGONAL, {"marked": marked}, overtake=marked)
            text["damping"] = resolve_damping(None, ridge, sum(message.text["mean"] for message in parts))
        found = self._request(
            Word.SOLVE,
            text,
            lambda part: [self._division.gather(u.detach(), part).cpu(), ridge.tensor(u.dtype).cpu()],
            overtake=marked,
        )
        self.traffic.bytes_sent += sum(message.size for message in found)
        x = self._division.scatter([message.tensors[0] for message in found])
        told = found[0].text
        stats = SolveStats(
            told.get("residual"), told.get("hvps", 0), told.get("converged", True), told.get("notes", {})
        )
        return x, stats

    def keep(self) -> Any:
        """The state itself, put together from the parts of all curvature ranks; elsewhere than in rank 0 its kind alone."""
        if self._local is not None:
            return self._local.keep()
        if not self.leads:
            return self._learner.init(self._theta)
        fresh, device = self._learner.init(self._theta), self._theta.device
        found = [from_message(message.text, message.tensors, fresh, device) for message in self._request(Word.KEEP)]
        return self._division.whole(found)

    def restore(self, state: Any) -> None:
        """Send the state back to where it is kept, each rank its part."""
        if self._local is not None:
            self._local.restore(state)
            return
        if self.serves:
            return
        if not isinstance(state, State):
            raise InputError(f"{self._inverse.name} has a state that cannot be sent. Let its class derive from State.")
        parts = [to_message(self._division.own(state, part)) for part in range(self._division.parts)]
        self._tell(Word.RESTORE, lambda part: parts[part][0], lambda part: parts[part][1])

    # The end.

    def serve(self) -> Report:
        """Keep curvature until the inner ranks have finished; what the first of them reports."""
        member = self._here()
        if self._serving is None:
            raise InputError(
                "This method has no inverse that learns, so a curvature rank would have nothing to do. Use curvature_ranks=0 to"
                " share the inner loop alone."
            )
        last = self._serving.serve()
        member.pulse.release()
        return Report(last.text, last.tensors)

    def finish(self, report: Callable[[], Report]) -> None:
        """Let the curvature ranks go, with a report of the first inner rank."""
        if self._member is None:
            return
        member = self._here()
        text, tensors = report() if member.rank == 0 else Report({}, [])
        found = Report(text, [t.cpu() for t in tensors])
        for keeper in member.roles.keepers:
            content = as_text([found.text, shapes(found.tensors)])
            member.channel.post(keeper, Tag.RECORDS, Word.FINISH, 0, content, found.tensors, self.traffic.records + 1)
        self._messages += 1
        unreached = member.channel.flush(self.timeout)
        member.channel.check()
        if unreached:
            names = " and ".join(map(member.roles.called, unreached))
            raise RunError(
                f"{names} could not be told that the run has ended: nothing arrived there for {self.timeout:g} s, though it gives"
                " signs of life. Look at the network between the machines, or allow more time by timeout."
            )
        # What was sent may still have been lost on the way: they say so themselves when they have it.
        while not member.pulse.acknowledged(member.roles.keepers):
            member.channel.check()
            time.sleep(0.005)
        member.pulse.release()

    def fail(self, error: BaseException) -> None:
        """Tell the others why this process stops, and leave them."""
        if self._arrival is not None:
            reason = error.reason if isinstance(error, NhgdError) else str(error)
            interrupted = isinstance(error, KeyboardInterrupt)
            self._arrival.pulse.say("it was interrupted." if interrupted else reason or type(error).__name__)
            self.close()

    def root_cause(self, error: NhgdError) -> NhgdError:
        """The error itself, or the loss of a process behind it: what others see of that first is a broken connection."""
        member = self._member
        if member is None or not isinstance(error, RunError):
            return error
        if isinstance(error, NonFiniteError):
            # Where another is lost, and has not met with the same, the numbers may be those of a wait that was broken off.
            lost = member.channel.failure
            return error if lost is None or " stopped: " in lost else RunError(lost)
        deadline = time.monotonic() + 3.0
        while self.team.size > 1 and member.channel.failure is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return error if member.channel.failure is None else RunError(member.channel.failure)

    def agreed(self, inverse: AbstractInverse) -> AbstractInverse:
        """The inverse with the settings that the first process has chosen for it."""
        if self._member is None:
            return inverse
        own = inverse.learner
        assert own is not None
        plain = {f.name: getattr(own, f.name) for f in fields(own)}
        chosen = self._member.agree({k: x for k, x in plain.items() if x is None or isinstance(x, (bool, int, float))})
        return inverse.with_learner(replace(own, **chosen))

    def measured(self) -> Traffic:
        """What was done so far; bytes are records, u, the ridge and x of all inner ranks, and what this one sent to its team."""
        if self._local is not None:
            return replace(self._local.measured(), processes=self.traffic.processes)
        found = super().measured()
        return replace(found, bytes_sent=found.bytes_sent + self._carried + self.team.bytes_sent)

    def close(self) -> None:
        """Leave the others."""
        arrival, self._arrival = self._arrival, None
        member, self._member = self._member, None
        if arrival is None:
            return
        if arrival.pulse.engaged:  # nobody finished: the others must not take this for the end
            arrival.pulse.say("it left before the run was finished.")
        if member is None:
            arrival.pulse.stop()
        else:
            member.leave()


def _seconds(message: Message) -> float:
    return float(message.text.get("seconds", 0.0))


def _close(ref: weakref.ref[Distributed]) -> None:
    """At the end of the program: threads that wait inside torch must not outlive it."""
    executor = ref()
    if executor is not None:
        executor.close()
