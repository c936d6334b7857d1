"""How the processes of a run meet, and what is said of those that do not come: one real process, and stand-ins for others."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore

from nhgd.errors import PeerError, RunError
from nhgd.execution.distributed import group
from nhgd.execution.distributed.address import keep_store, stay_local
from nhgd.execution.distributed.group import Processes
from nhgd.variable import Variable

TIMEOUT = 0.5


@pytest.fixture
def place(monkeypatch):
    """A function that makes this process a rank of so many, without an agent; it gives the port of their store."""
    monkeypatch.setattr(group, "ROLL_CALL_SECONDS", 0.3)
    monkeypatch.setattr(group, "START_SECONDS", 0.0)
    monkeypatch.setattr(group, "CONNECTING_SECONDS", 0.0)
    monkeypatch.setattr(group, "_joined", 0)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    local: dict[str, str] = {}
    stay_local(local)
    for name, value in local.items():  # what joining would set, and leave behind
        monkeypatch.setenv(name, value)

    def make(rank: int, world: int, port: int | None = None) -> int:
        if port is None:
            with socket.create_server(("127.0.0.1", 0)) as found:
                port = found.getsockname()[1]
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world))
        monkeypatch.setenv("MASTER_PORT", str(port))
        return port

    return make


def words(store: Any) -> PrefixStore:
    """Where the processes that join for the first time leave words."""
    return PrefixStore("nhgd/1", PrefixStore("nhgd/attempt/0", store))


KEEPER = """
import time
from torch._C._distributed_c10d import PrefixStore
from nhgd.execution.distributed.address import keep_store
store = keep_store("127.0.0.1", 0, limit=60.0)
PrefixStore("nhgd/1", PrefixStore("nhgd/attempt/0", store)).set("here/0", "")
print(store.port, flush=True)
time.sleep(600)
"""


@pytest.fixture
def keeper() -> Iterator[subprocess.Popen[str]]:
    """A first rank that keeps the store at a port of its choice, which it says, and that has arrived."""
    process = subprocess.Popen([sys.executable, "-c", KEEPER], stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


def join(workers: int = 1) -> None:
    Processes(workers, 1, TIMEOUT).join(Variable(nn.Linear(2, 1), "theta"))


def test_the_limit_of_an_arrival_is_the_timeout_and_who_does_not_come_is_named(place):
    place(rank=0, world=2)
    with pytest.raises(PeerError, match=r"^Rank 1 \(curvature\) did not arrive within 0\.5 s\.") as caught:
        join()
    assert (caught.value.rank, caught.value.role, caught.value.silent) == (1, "curvature", TIMEOUT)


def test_those_who_came_are_not_named(place):
    port = place(rank=0, world=4)
    there = keep_store("127.0.0.1", port, limit=5.0, shared=True)
    words(there).set("here/1", "")
    with pytest.raises(PeerError, match=r"^Rank 2 \(inner\) and Rank 3 \(curvature\) did not arrive within 0\.5 s\."):
        join(workers=3)


def test_the_first_rank_is_missed_where_nobody_keeps_the_store(place):
    place(rank=1, world=2)
    with pytest.raises(PeerError, match=r"^Rank 0 \(inner\) did not arrive within 0\.5 s\.") as caught:
        join()
    assert (caught.value.rank, caught.value.role) == (0, "inner")


def test_the_first_rank_is_missed_where_its_store_takes_calls_and_does_not_answer(place):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place(rank=1, world=2, port=silent.getsockname()[1])
        with pytest.raises(PeerError, match=r"^Rank 0 \(inner\) did not arrive within 0\.5 s\."):
            join()


def test_a_rank_that_came_and_went_silent_before_it_was_connected_is_named(place):
    port = place(rank=0, world=3)
    there = keep_store("127.0.0.1", port, limit=5.0, shared=True)
    for key in ("here/1", "here/2", "left/1"):
        words(there).set(key, "null")
    with pytest.raises(PeerError, match=r"^Rank 2 \(curvature\) did not answer within 0\.5 s\.") as caught:
        join(workers=2)
    assert caught.value.rank == 2
    assert not dist.is_initialized()


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="pauses a process")
def test_the_first_rank_is_named_where_it_is_paused_before_all_are_connected(place, keeper, monkeypatch):
    """torch waits without a limit for the answer of a store whose keeper is paused, or cut off."""
    monkeypatch.setattr(group, "START_SECONDS", 60.0)
    arrive = Processes._arrive

    def arrive_and_pause_it(self: Processes, limit: float, left: float) -> None:
        arrive(self, limit, left)
        os.kill(keeper.pid, signal.SIGSTOP)  # which has nothing left to answer
        os.waitpid(keeper.pid, os.WUNTRACED)

    monkeypatch.setattr(Processes, "_arrive", arrive_and_pause_it)
    place(rank=1, world=2, port=int(keeper.stdout.readline()))
    with pytest.raises(PeerError, match=r"^Rank 0 \(inner\) did not answer within 0\.5 s\.") as caught:
        join()
    assert (caught.value.rank, caught.value.role) == (0, "inner")


def test_a_network_that_connects_nobody_is_said_to_be_so(place):
    port = place(rank=0, world=2)
    there = keep_store("127.0.0.1", port, limit=5.0, shared=True)
    for key in ("here/1", "left/1"):
        words(there).set(key, "null")
    with pytest.raises(
        PeerError, match=r"^Rank 1 \(curvature\) arrived, but could not be connected to Rank 0 \(inner\)"
    ):
        join()


def test_a_port_that_is_taken_is_named(place):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = place(rank=0, world=2, port=other.getsockname()[1])
        with pytest.raises(RunError, match=rf"^Rank 0 \(inner\) cannot listen at 127\.0\.0\.1:{port}\."):
            join()


def test_others_may_take_longer_to_start(place, monkeypatch):
    monkeypatch.setattr(group, "START_SECONDS", 0.5)
    place(rank=0, world=2)
    with pytest.raises(PeerError, match=r"^Rank 1 \(curvature\) did not arrive within 1 s\."):
        join()


def test_those_whom_an_agent_watches_may_take_longer_still(place, monkeypatch):
    monkeypatch.setattr(group, "WATCHED_START_SECONDS", 1.5)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    there = keep_store("127.0.0.1", 0, limit=5.0)
    place(rank=0, world=2, port=there.port)
    with pytest.raises(PeerError, match=r"^Rank 1 \(curvature\) did not arrive within 2 s\."):
        join()


def test_an_agents_store_that_is_not_there_is_named(place, monkeypatch):
    monkeypatch.setattr(group, "WATCHED_START_SECONDS", 0.0)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    port = place(rank=1, world=2)
    with pytest.raises(RunError, match=rf"^The store of the agent at 127\.0\.0\.1:{port}.* within 0\.5 s\."):
        join()
