"""The addresses on which the processes of a run listen: loopback, unless told otherwise."""

from __future__ import annotations

import ipaddress
import socket
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore


def keep_store(host: str, port: int, limit: float, shared: bool = False) -> Any:
    """A store that listens on this address alone; torch's own would listen on every interface.

    `shared` lets several of one process stand at one port.
    """
    options: dict[str, Any] = {
        "is_master": True,
        "timeout": timedelta(seconds=limit),
        "wait_for_workers": False,
        "multi_tenant": shared,
    }
    try:
        listening = _listening(host, port)
    except OSError:
        if not shared:
            raise
        return TCPStore(host, port, **options)  # one of this process already listens there, or torch reports why not
    return TCPStore(host, listening.getsockname()[1], **options, master_listen_fd=listening.detach())


def _listening(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(1024)
    except OSError:
        made.close()
        raise
    return made


def find_store(host: str, port: int, limit: float) -> Any:
    """The store of another process at an address; None if nothing answers within the time limit.

    torch's own client would fill the screen with its attempts, and may try for longer.
    """
    deadline = time.monotonic() + limit
    while (left := deadline - time.monotonic()) > 0:
        with suppress(OSError, RuntimeError):
            socket.create_connection((host, port), timeout=left).close()
            patience = timedelta(seconds=max(left, 1.0))
            store = TCPStore(host, port, is_master=False, timeout=patience, wait_for_workers=False)
            store.set_timeout(timedelta(seconds=limit))
            return store
        time.sleep(min(0.1, left))
    return None


def is_local(host: str) -> bool:
    """Whether an address is on this machine's loopback.

    >>> is_local("127.0.0.1"), is_local("192.0.2.1")
    (True, False)
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return all(ipaddress.ip_address(address[0]).is_loopback for *_, address in found)
    except (OSError, ValueError):
        return False


def stay_local(environment: Any) -> None:
    """Let gloo and NCCL connect processes by the loopback interface, unless the environment names another."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if names:
        for backend in ("GLOO", "NCCL"):
            environment.setdefault(f"{backend}_SOCKET_IFNAME", names[0])
