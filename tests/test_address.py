"""Who may talk to the processes of a run: nobody from outside the machine, unless an address says otherwise."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from nhgd.execution.distributed.address import is_local, keep_store, stay_local

needs_proc = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="there is no list of sockets to look at")


def _address(text: str) -> str:
    """An address as the kernel writes it: hexadecimal words of 32 bits, each in the machine's own order of bytes."""
    words = [int(text[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))


def listening(pid: int) -> set[str]:
    """The addresses at which a process listens."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").glob("*"):
        with contextlib.suppress(OSError):
            found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry))
            if found:
                inodes.add(found[1])
    addresses = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in inodes:
                    addresses.add(_address(fields[1].split(":")[0]))
    return addresses


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in found.read_text().split()] if found.exists() else []


@needs_proc
def test_the_list_of_sockets_shows_one_that_is_open_to_all() -> None:
    with socket.create_server(("0.0.0.0", 0)):
        assert "0.0.0.0" in listening(os.getpid())


@needs_proc
def test_a_store_listens_at_its_address_alone() -> None:
    before = listening(os.getpid())
    store = keep_store("127.0.0.1", 0, limit=5.0)
    assert listening(os.getpid()) - before <= {"127.0.0.1"}
    other = TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=5))
    other.set("key", "value")
    assert store.get("key") == b"value"


def test_a_process_that_joins_twice_keeps_its_store_at_the_same_port() -> None:
    first = keep_store("127.0.0.1", 0, limit=5.0, shared=True)
    second = keep_store("127.0.0.1", first.port, limit=5.0, shared=True)
    second.set("key", "value")
    assert first.get("key") == b"value"


@needs_proc
def test_during_a_local_distributed_run_nothing_listens_beyond_loopback() -> None:
    command = [sys.executable, "-m", "nhgd", "run", "quadratic", "--preset", "quick", "--execution", "distributed"]
    environment = {k: v for k, v in os.environ.items() if not k.endswith("_SOCKET_IFNAME")} | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "--method", "nhgd", "--steps", "1000000", "--json"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    try:
        found: dict[int, set[str]] = {}
        end = time.monotonic() + 200
        while time.monotonic() < end and process.poll() is None:
            for pid in (process.pid, *children(process.pid)):
                found.setdefault(pid, set()).update(listening(pid))
            # The one that started them, and both, connected by gloo. Others may come and go, and listen nowhere.
            if sum(map(bool, found.values())) == 3:
                break
            time.sleep(0.05)
        assert sum(map(bool, found.values())) == 3
        for address in set().union(*found.values()):
            assert ipaddress.ip_address(address).is_loopback, address
    finally:
        process.terminate()
        process.wait()


@pytest.mark.parametrize(
    ("host", "local"), [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("10.0.0.1", False)]
)
def test_addresses_of_this_machine_alone(host: str, local: bool) -> None:
    assert is_local(host) == local


def test_the_users_interface_is_kept() -> None:
    environment = {"GLOO_SOCKET_IFNAME": "eth7"}
    stay_local(environment)
    assert environment["GLOO_SOCKET_IFNAME"] == "eth7"
