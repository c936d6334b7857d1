"""How a process joins the others: its rank, a process group of its own, and a pulse."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from nhgd.errors import InputError, NhgdError, RunError
from nhgd.execution.distributed.address import is_local, keep_store, stay_local
from nhgd.execution.distributed.channel import FOREVER, Channel, abort, interrupt
from nhgd.execution.distributed.heartbeat import START, Pulse
from nhgd.execution.distributed.protocol import Tag
from nhgd.execution.distributed.roles import Roles

CONNECTING = 60.0  # seconds, at least, that torch may take to connect processes which are all alive
_joined = 0  # how often this process joined; the same everywhere, because all processes run the same program


@dataclass
class Arrival:
    """This process before it has met the others: it beats, so that one that stands still from here on is noticed."""

    roles: Roles
    rank: int
    timeout: float
    pulse: Pulse
    store: Any  # for torch.distributed, or None where that is running


@dataclass
class Membership:
    """This process among the others."""

    roles: Roles
    rank: int
    pulse: Pulse
    channel: Channel
    team_group: Any  # of the inner ranks, or None where there is only one
    groups: tuple[Any, ...]  # all that were made for this membership
    store: Any
    _agreed: int = 0

    @property
    def is_inner(self) -> bool:
        """Whether this process runs the inner loop."""
        return self.rank < self.roles.workers

    def agree(self, value: dict[str, Any]) -> dict[str, Any]:
        """The first process's value, on all of them."""
        self._agreed += 1
        key = f"agreed/{self._agreed}"
        if self.rank == 0:
            self.store.set(key, json.dumps(value))
            return value
        while not self.store.check([key]):
            self.pulse.check()
            time.sleep(0.01)
        found: dict[str, Any] = json.loads(self.store.get(key))
        return found

    def leave(self) -> None:
        """End the threads and let go of the groups; who leaves has done its part, or has said why not.

        A connection is closed when nobody needs it any more, or when nobody can. A group in which a thread still waits is
        left as it is, and so is the team's where the others may still be in it.
        """
        self.pulse.release()
        parted = self.pulse.part()
        ended = self.channel.close()
        self.pulse.stop()
        if ended and (parted or self.channel.failure is not None):
            _let_go(self.groups)


def _let_go(groups: Sequence[Any]) -> None:
    """Destroy process groups. NCCL may wait for the others in it, and a broken group may refuse: neither holds us up."""

    def work() -> None:
        for group in groups:
            with suppress(Exception):
                dist.destroy_process_group(group)

    thread = threading.Thread(target=work, name="nhgd leaving", daemon=True)
    thread.start()
    thread.join(2.0)


def arrive(workers: int | None, curvature: int, timeout: float) -> Arrival:
    """Give the first sign of life, where the store of the process group is."""
    global _joined
    _joined += 1
    if not dist.is_available():
        raise InputError("This PyTorch has no torch.distributed. Use execution='thread' instead.")
    limit = max(timeout, START)
    if dist.is_initialized():
        roles, rank = Roles.of(dist.get_world_size(), workers, curvature), dist.get_rank()
        store, given = None, dist.distributed_c10d._get_default_store()
    else:
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise InputError(
                "distributed execution needs several processes, and this one was started alone (no"
                f" {', '.join(missing)} in its environment). Start the program by torchrun --nproc-per-node"
                f" {(workers or 1) + curvature} PROGRAM, or use the command line: nhgd run TASK --execution distributed."
            )
        if is_local(os.environ["MASTER_ADDR"]):
            stay_local(os.environ)
        rank = int(os.environ["RANK"])
        roles = Roles.of(int(os.environ["WORLD_SIZE"]), workers, curvature)  # before anyone waits for anyone
        store = given = _interruptible(lambda: _tcp(rank == 0 and not _agent(), limit), roles, limit=limit)
    own = _interruptible(lambda: _store(given, limit), roles, limit=limit)
    pulse = Pulse(own, roles, rank, timeout, None if _agent() else 0)
    pulse.start()
    pulse.engage()
    return Arrival(roles, rank, timeout, pulse, store)


def join(arrival: Arrival, device: torch.device) -> Membership:
    """Meet the others; torch.distributed is started where it is not running."""
    roles, rank, pulse = arrival.roles, arrival.rank, arrival.pulse
    pulse.meet()
    if arrival.store is not None:
        limit = timedelta(seconds=max(CONNECTING, 2 * arrival.timeout))
        kept = arrival.store
        _interruptible(
            lambda: dist.init_process_group(_backend(), store=kept, rank=rank, world_size=roles.world, timeout=limit),
            roles,
            pulse,
        )

    def groups() -> tuple[Any, Any, Any]:
        """Everybody; everybody on NCCL; the inner ranks."""
        wire = dist.new_group(backend="gloo", timeout=FOREVER)
        nccl = dist.new_group(backend="nccl") if device.type == "cuda" and "nccl" in _backend() else None
        kind = "nccl" if nccl is not None else "gloo"
        team = dist.new_group(list(roles.inner), backend=kind, timeout=FOREVER) if roles.workers > 1 else None
        return wire, nccl, team

    wire, nccl, team = _interruptible(groups, roles, pulse)
    store = _interruptible(lambda: _store(dist.distributed_c10d._get_default_store(), CONNECTING), roles, pulse)
    channel = Channel(wire, rank, pulse, nccl, Tag.RECORDS)
    if team is not None and rank < roles.workers:
        channel.interrupts.append(lambda: interrupt(team, rank) if nccl is None else abort(team))
    pulse.met()
    made = tuple(group for group in (team, nccl, wire) if group is not None)
    return Membership(roles, rank, pulse, channel, team, made, store)


def _agent() -> bool:
    """Whether the store is kept by whoever started the processes, and not by the first of them."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _backend() -> str:
    """gloo for main memory, NCCL beside it where every process of this machine has a GPU of its own."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    enough = torch.cuda.is_available() and dist.is_nccl_available() and torch.cuda.device_count() >= local
    return "cpu:gloo,cuda:nccl" if enough else "gloo"


def _tcp(keeps: bool, limit: float) -> Any:
    """A connection to the store that the environment names; the process that keeps it makes it."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if keeps:
        store = keep_store(host, port, limit, shared=True)
    else:  # the pulse waits for the others, and knows who is missing
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=limit), wait_for_workers=False)
    return PrefixStore(f"nhgd/{_joined}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _store(given: Any, limit: float) -> Any:
    """A connection of our own to the store of the process group."""
    if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        with suppress(RuntimeError, ValueError):
            return _tcp(False, limit)
    return PrefixStore(f"nhgd/{_joined}", given.clone() if hasattr(given, "clone") else given)


def _interruptible(
    work: Callable[[], Any], roles: Roles, pulse: Pulse | None = None, limit: float | None = None
) -> Any:
    """Do something that waits inside torch, in another thread, so that Ctrl-C, a lost process and a limit end it."""
    found: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="nhgd joining", daemon=True)
    began = time.monotonic()
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
        if pulse is not None and thread.is_alive():
            pulse.check()
        if limit is not None and time.monotonic() > began + limit + 1:  # torch has a limit too, which comes first
            break
    if errors and isinstance(errors[0], NhgdError):
        raise errors[0]
    cause = errors[0] if errors else None
    if not found and limit is not None and time.monotonic() > began + limit - 1:
        who = "The store of the process group" if _agent() else roles.called(0)
        place = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
        raise RunError(f"{who} could not be reached at {place} within {limit:g} s.") from cause
    if errors:
        why = str(errors[0]).splitlines()[0] if str(errors[0]) else type(errors[0]).__name__
        raise RunError(f"The processes could not be connected: {why}.") from cause
    return found[0]
