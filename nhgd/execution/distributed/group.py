"""How the processes of a run meet, what they agree on, and how one that is lost is found."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from typing_extensions import override

from nhgd.data_parallel import Alone, Team
from nhgd.errors import InputError, NhgdError, PeerError, RunError
from nhgd.execution.distributed.address import find_store, is_local, keep_store, stay_local
from nhgd.execution.distributed.client import Client
from nhgd.execution.distributed.messages import Messenger, lost
from nhgd.execution.distributed.roles import Roles
from nhgd.execution.distributed.server import Server
from nhgd.execution.group import Group, Outcome
from nhgd.variable import Variable

T = TypeVar("T")
START_SECONDS = 10.0  # extra time for slow starts, in addition to the timeout
WATCHED_START_SECONDS = 30.0  # the same where all are of one machine, and an agent sees those that die or are paused
CONNECTING_SECONDS = 5.0  # that it may take to connect those who have arrived, at least
ROLL_CALL_SECONDS = 3.0  # for the others to report, after a wait for one of them has failed
_joined = 0  # how often this process joined; the same everywhere, because all processes run the same program


@final
class Processes(Group):
    """The inner and the curvature ranks of a process group.

    Every wait for another process has a time limit. The first one begins when this process has arrived, and is longer,
    because others may take longer to start. When one is over, those that are left write into the store of the process
    group that they are there, and who has not done so is named.

    Args:
        workers, curvature: how many share the inner loop, and how many keep curvature.
        timeout: seconds to wait for another process.
    """

    def __init__(self, workers: int | None, curvature: int, timeout: float) -> None:
        super().__init__()
        self.counts, self.timeout = (workers, curvature), timeout
        self.messenger: Messenger | None = None
        self.client: Client | None = None  # on an inner rank
        self.server: Server | None = None  # on a curvature rank
        self.rank = 0
        self._roles: Roles | None = None
        self._store: Any = None
        self._groups: list[Any] = []

    @property
    def roles(self) -> Roles:
        """The roles of the ranks, as far as they are known before the processes meet; one inner rank by default."""
        return Roles(self.counts[0] or 1, self.counts[1]) if self._roles is None else self._roles

    @property
    @override
    def leads(self) -> bool:
        return self.rank == 0

    @property
    @override
    def serves(self) -> bool:
        return self._roles is not None and self.rank in self._roles.servers

    @override
    def join(self, theta: Variable) -> None:
        global _joined
        if self.messenger is not None:
            return
        _joined += 1
        if not dist.is_available():
            raise InputError("This PyTorch has no torch.distributed. Use execution='thread' instead.")
        running = dist.is_initialized()
        self.rank, world = (dist.get_rank(), dist.get_world_size()) if running else self._place()
        self._roles = roles = Roles.of(world, *self.counts)  # before anyone waits for anyone
        limit = self.timeout + (WATCHED_START_SECONDS if _is_watched() and not running else START_SECONDS)
        began = time.monotonic()
        self._store = PrefixStore(f"nhgd/{_joined}", given := self._found_store(running, limit))
        self._arrive(limit, max(self.timeout, limit - (time.monotonic() - began)))
        patience = max(self.timeout, CONNECTING_SECONDS)
        errors: list[Exception] = []

        def connect() -> bool:
            try:
                self._connect(theta.device, None if running else given, timedelta(seconds=patience))
            except (RuntimeError, ValueError) as error:
                errors.append(error)
            return not errors

        if not _within(patience + 1.0, connect):  # torch waits for the answers of a store without a limit
            raise self._unconnected(patience) from (errors[0] if errors else None)
        team = self._groups[-1] if roles.workers > 1 and not self.serves else None
        self.team = Alone() if team is None else Team.of(team, self.timeout)

    def _place(self) -> tuple[int, int]:
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            count = self.roles.world
            raise InputError(
                "distributed execution needs several processes, but this one was started alone (no"
                f" {', '.join(missing)} in its environment). Start the program by torchrun --nproc-per-node {count}"
                " PROGRAM, or use the command line: nhgd run TASK --execution distributed."
            )
        if is_local(os.environ["MASTER_ADDR"]):
            stay_local(os.environ)
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def _found_store(self, running: bool, limit: float) -> Any:
        """The store through which the processes exchange messages: of the running process group, or from the
        environment.
        """
        if running:
            return dist.distributed_c10d._get_default_store()
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if self.rank == 0 and not _agent_keeps_store():
            try:
                store = keep_store(host, port, self.timeout, shared=True)
            except (RuntimeError, OSError) as error:
                raise RunError(
                    f"{self.roles.called(0)} cannot listen at {host}:{port}. Set MASTER_ADDR to an address of its"
                    " machine, and MASTER_PORT to a free port."
                ) from error
        else:
            store = _within(limit + 1.0, lambda: find_store(host, port, limit))
            if store is None:
                raise self._unreachable(limit)
        return PrefixStore(f"nhgd/attempt/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)

    def _arrive(self, limit: float, left: float) -> None:
        """Wait for all other processes within the rest of the time limit."""
        names = {other: f"here/{other}" for other in range(self.roles.world) if other != self.rank}

        def missing() -> list[int]:
            self._store.set(f"here/{self.rank}", "")
            with suppress(RuntimeError):  # the time is over
                self._store.wait(list(names.values()), timedelta(seconds=left))
                return []
            return [other for other, name in names.items() if not self._store.check([name])]

        found = _within(left + 1.0, missing)
        if found is None:
            raise self._unreachable(limit)
        if found:
            raise self._absent(found, limit)

    def _absent(self, ranks: Sequence[int], limit: float) -> PeerError:
        names = " and ".join(map(self.roles.called, ranks))
        return PeerError(
            f"{names} did not arrive within {limit:g} s. Start all processes at once, or allow more time, such as"
            f" timeout={max(120, 4 * round(limit))}.",
            ranks[0],
            self.roles.role(ranks[0]),
            limit,
        )

    def _unreachable(self, limit: float) -> RunError:
        """Why the store does not answer: its keeper is not there."""
        if not _agent_keeps_store():
            return self._absent([0], limit)
        return RunError(
            f"The store of the agent at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}, where the processes"
            f" meet, could not be reached within {limit:g} s. Check the network between the machines."
        )

    def _connect(self, device: torch.device, store: Any, patience: timedelta) -> None:
        """Initialise torch.distributed if a store is given, and the groups: all ranks, all on NCCL, and the inner
        ranks.
        """
        if store is not None:
            world = self.roles.world
            dist.init_process_group(_backend(), store=store, rank=self.rank, world_size=world, timeout=patience)
        everybody = dist.new_group(backend="gloo", timeout=patience)
        on_device = dist.new_group(backend="nccl") if device.type == "cuda" and "nccl" in _backend() else None
        self._groups = [group for group in (everybody, on_device) if group is not None]
        if self.roles.workers > 1:
            kind = "gloo" if on_device is None else "nccl"
            self._groups.append(dist.new_group(list(self.roles.inner), backend=kind, timeout=patience))
        self.messenger = Messenger(everybody, on_device, self.roles, self.rank, self.timeout)

    def _unconnected(self, limit: float) -> PeerError:
        """Why processes that have all arrived could not be connected: who is not there any more, or the network."""
        others = [other for other in range(self.roles.world) if other != self.rank]
        names = " and ".join(map(self.roles.called, others))
        unknown = PeerError(
            f"{names} arrived, but could not be connected to {self.roles.called(self.rank)} within {limit:g} s. Check"
            " the network between them, and GLOO_SOCKET_IFNAME.",
            others[0] if len(others) == 1 else None,
            self.roles.role(others[0]) if len(others) == 1 else None,
            limit,
        )
        found = _within(ROLL_CALL_SECONDS + 1.0, lambda: self._roll_call(unknown))
        if found is None and self.rank and not _agent_keeps_store():
            return lost(self.roles, [0], limit)  # which keeps the store that does not answer
        return found or unknown

    @override
    def agreed(self, settings: dict[str, Any]) -> dict[str, Any]:
        if self.messenger is None:
            return settings
        length = torch.tensor(0)
        written = torch.frombuffer(bytearray(json.dumps(settings).encode()), dtype=torch.uint8)
        if self.rank == 0:
            length.fill_(written.numel())
        try:
            for step in range(2):
                given = (
                    length if step == 0 else written if self.rank == 0 else torch.empty(int(length), dtype=torch.uint8)
                )
                dist.broadcast(given, 0, group=self.messenger.group, async_op=True).wait(
                    timedelta(seconds=self.timeout)
                )
        except RuntimeError as error:
            raise lost(self.roles, [0], self.timeout) from error
        found: dict[str, Any] = json.loads(given.numpy().tobytes())
        return found

    @override
    def serve(self) -> Outcome:
        """Keep curvature until the inner ranks have finished; returns the outcome as the first of them tells it."""
        if self.server is None:
            raise InputError(
                "This method has no inverse that learns, so a curvature rank would have nothing to do. Use curvature_ranks=0 to"
                " share the inner loop alone."
            )
        return self.server.serve()

    @override
    def finish(self, outcome: Callable[[], Outcome]) -> None:
        if self.client is not None:
            self.client.finish(outcome() if self.rank == 0 else Outcome({}, []))

    @override
    def fail(self, error: BaseException) -> None:
        """Record why this process stops, and leave the group."""
        if self._store is not None and not isinstance(error, PeerError):
            reason = error.reason if isinstance(error, NhgdError) else str(error)
            why = "it was interrupted." if isinstance(error, KeyboardInterrupt) else reason or type(error).__name__
            _within(2.0, lambda: self._store.set(f"left/{self.rank}", json.dumps(why)))
        self.close()

    @override
    def root_cause(self, error: NhgdError) -> NhgdError:
        """The error of the process that failed first, or the name of the one that is missing."""
        # Processes that never met have no peers to inform.
        if not isinstance(error, PeerError) or self.messenger is None:
            return error
        return _within(ROLL_CALL_SECONDS + 1.0, lambda: self._roll_call(error)) or error

    def _roll_call(self, error: PeerError) -> PeerError:
        roles = self.roles
        missing = [other for other in range(roles.world) if other != self.rank]
        self._store.set(f"left/{self.rank}", "null")  # as the others: no error of its own
        deadline = time.monotonic() + ROLL_CALL_SECONDS
        while True:  # at least once, however late this process comes to it
            for other in [other for other in missing if self._store.check([f"left/{other}"])]:
                why = json.loads(self._store.get(f"left/{other}"))
                if why is not None:
                    return PeerError(f"{roles.called(other)} stopped: {why}", other, roles.role(other))
                missing.remove(other)
            if not missing or time.monotonic() >= deadline:
                break
            time.sleep(0.02)
        return lost(roles, missing, error.silent) if missing else error

    @override
    def close(self) -> None:
        """Close the connections, which waiting peers notice."""
        groups, self._groups, self.messenger = self._groups, [], None
        for user in (self.client, self.server):
            if user is not None:
                user.close()
        if isinstance(self.team, Team):
            self.team.close()
        if self.server is None or not self.server.is_receiving:
            _within(2.0, lambda: _destroy(groups))


def _within(seconds: float, work: Callable[[], T]) -> T | None:
    """The result of some work, or None if it fails or times out: a lost store may never answer."""
    found: list[T] = []

    def run() -> None:
        with suppress(RuntimeError, ValueError):
            found.append(work())

    thread = threading.Thread(target=run, name="nhgd group", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def _destroy(groups: Sequence[Any]) -> None:
    for group in groups:
        dist.destroy_process_group(group)


def _agent_keeps_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _is_watched() -> bool:
    """Whether all processes are of this machine, and their agent sees one that dies before it has arrived."""
    return _agent_keeps_store() and is_local(os.environ["MASTER_ADDR"])


def _backend() -> str:
    """gloo for main memory, and NCCL as well if every process of this machine has its own GPU."""
    known = dist.get_world_size() if dist.is_initialized() else 1  # of a group that was made without an agent
    local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", known)))
    enough = torch.cuda.is_available() and dist.is_nccl_available() and torch.cuda.device_count() >= local
    return "cpu:gloo,cuda:nccl" if enough else "gloo"
