"""How a process joins the others: its rank, a process group of its own, and a pulse."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.rendezvous import rendezvous

from nhgd.errors import InputError, NhgdError, RunError
from nhgd.execution.channel import FOREVER, Channel, interrupt
from nhgd.execution.protocol import Tag
from nhgd.execution.pulse import Pulse
from nhgd.execution.roles import Roles

PATIENCE = 60.0  # seconds, at least, until everyone has arrived: programs start at different speeds
_joined = 0  # how often this process joined; the same everywhere, because all processes run the same program


@dataclass
class Membership:
    """This process among the others."""

    roles: Roles
    rank: int
    pulse: Pulse
    channel: Channel
    team_group: Any  # of the inner ranks, or None where there is only one
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
            lost = self.pulse.lost()
            if lost is not None:
                raise RunError(lost)
            time.sleep(0.01)
        found: dict[str, Any] = json.loads(self.store.get(key))
        return found

    def leave(self) -> None:
        """End the threads; who leaves has done its part, or has said why not."""
        self.pulse.release()
        self.channel.close()
        self.pulse.stop()


def join(workers: int | None, curvature: int, timeout: float, device: torch.device) -> Membership:
    """Join the others; torch.distributed is started from the environment where it is not running."""
    global _joined
    _joined += 1
    patience = max(PATIENCE, 2 * timeout)
    if not dist.is_available():
        raise InputError("This PyTorch has no torch.distributed. Use execution='thread' instead.")
    if not dist.is_initialized():
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise InputError(
                "distributed execution needs several processes, and this one was started alone (no"
                f" {', '.join(missing)} in its environment). Start the program by torchrun --nproc-per-node"
                f" {(workers or 1) + curvature} PROGRAM, or use the command line: nhgd run TASK --execution distributed."
            )
        world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
        roles = Roles.of(world, workers, curvature)  # before anyone waits for anyone
        limit = timedelta(seconds=patience)
        store, _, _ = _interruptible(lambda: next(rendezvous("env://", timeout=limit)))
        pulse = _pulse(store, roles, rank, timeout, patience)
        _interruptible(
            lambda: dist.init_process_group(_backend(), store=store, rank=rank, world_size=world, timeout=limit), pulse
        )
    else:
        roles, rank = Roles.of(dist.get_world_size(), workers, curvature), dist.get_rank()
        pulse = _pulse(dist.distributed_c10d._get_default_store(), roles, rank, timeout, patience)

    def groups() -> tuple[Any, Any, Any]:
        """Everybody; everybody on NCCL; the inner ranks."""
        wire = dist.new_group(backend="gloo", timeout=FOREVER)
        nccl = dist.new_group(backend="nccl") if device.type == "cuda" and "nccl" in _backend() else None
        kind = "nccl" if nccl is not None else "gloo"
        team = dist.new_group(list(roles.inner), backend=kind, timeout=FOREVER) if roles.workers > 1 else None
        return wire, nccl, team

    wire, nccl, team = _interruptible(groups, pulse)
    channel = Channel(wire, rank, pulse, nccl, Tag.RECORDS)
    if team is not None and rank < roles.workers:
        channel.interrupts.append(lambda: interrupt(team, rank))
    return Membership(roles, rank, pulse, channel, team, _store(dist.distributed_c10d._get_default_store()))


def _pulse(store: Any, roles: Roles, rank: int, timeout: float, patience: float) -> Pulse:
    """A pulse that beats, as everyone's does."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    pulse = Pulse(_store(store), roles, rank, timeout, None if agent else 0)
    _interruptible(lambda: pulse.start(patience))
    pulse.engage()
    return pulse


def _backend() -> str:
    """gloo for main memory, NCCL beside it where every process of this machine has a GPU of its own."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    enough = torch.cuda.is_available() and dist.is_nccl_available() and torch.cuda.device_count() >= local
    return "cpu:gloo,cuda:nccl" if enough else "gloo"


def _store(given: Any) -> Any:
    """A connection of our own to the store of the process group."""
    prefix = f"nhgd/{_joined}"
    if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        with suppress(RuntimeError, ValueError):
            store = TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                is_master=False,
                timeout=timedelta(seconds=PATIENCE),
            )
            return PrefixStore(f"{prefix}/{attempt}", store)
    return PrefixStore(prefix, given.clone() if hasattr(given, "clone") else given)


def _interruptible(work: Callable[[], Any], pulse: Pulse | None = None) -> Any:
    """Do something that waits inside torch, in another thread, so that Ctrl-C and a lost process end it."""
    found: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="nhgd joining", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
        lost = pulse.lost() if pulse is not None and thread.is_alive() else None
        if lost is not None:
            raise RunError(lost)
    if errors and isinstance(errors[0], NhgdError):
        raise errors[0]
    if errors:
        why = str(errors[0]).splitlines()[0] if str(errors[0]) else type(errors[0]).__name__
        raise RunError(f"The processes could not be connected: {why}.") from errors[0]
    return found[0]
