"""A function run in N processes that form a gloo group, with a time limit.

Starting a process and importing torch takes seconds, so a test file asks many questions of one group.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

LIMIT = 300.0  # a busy machine with two cores takes a minute


def _work(
    function: Callable[..., Any],
    rank: int,
    size: int,
    meeting: str,
    answer: Connection,
    limit: float,
    args: tuple[Any, ...],
) -> None:
    # Where it stands just before it is killed.
    trace = Path(f"{meeting} {rank}").open("w")  # noqa: SIM115
    faulthandler.dump_traceback_later(max(1.0, limit - 5.0), file=trace)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
        answer.send((True, function(rank, size, *args)))
    except BaseException:
        answer.send((False, traceback.format_exc()))
    answer.close()
    # Without waiting for peers that may be gone: what is to be known was sent.
    os._exit(0)


def _read(trace: Path) -> str:
    return trace.read_text() if trace.exists() else "it did not come so far"


def _context() -> Any:
    """A server that has imported what takes long, and forks; where there is none, fresh processes."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "nhgd", "sklearn.datasets", "tests.catalogue"])
    return context


def together(
    function: Callable[..., Any], size: int, *args: Any, limit: float = LIMIT, lost: tuple[int, ...] = ()
) -> list[Any]:
    """What `function(rank, size, *args)` returns on each of `size` ranks; it is sent by pickle, so arrays, not tensors.

    The first failure, or the end of the time, kills all processes and is raised here. Ranks in `lost` may end without an
    answer, which is then None.
    """
    context = _context()
    answers: list[Any] = [None] * size
    with tempfile.TemporaryDirectory() as folder:
        pairs = [context.Pipe(duplex=False) for _ in range(size)]
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"  # the processes inherit it
        try:
            processes = [
                context.Process(
                    target=_work,
                    args=(function, rank, size, str(Path(folder) / "meeting"), pairs[rank][1], limit, args),
                    daemon=True,
                )
                for rank in range(size)
            ]
            for process in processes:
                process.start()
        finally:
            if before is None:
                del os.environ["OMP_NUM_THREADS"]
            else:
                os.environ["OMP_NUM_THREADS"] = before
        for _, end in pairs:
            end.close()
        try:
            waiting = {pairs[rank][0]: rank for rank in range(size)}
            failures: list[str] = []
            end = time.monotonic() + limit
            while waiting:
                ready = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
                if not ready:
                    traces = [f"rank {rank}: {_read(Path(folder) / f'meeting {rank}')}" for rank in range(size)]
                    failures.append("\n".join([f"ranks {sorted(waiting.values())} gave no answer in time", *traces]))
                    break
                for connection in ready:
                    assert isinstance(connection, Connection)
                    rank = waiting.pop(connection)
                    try:
                        good, answers[rank] = connection.recv()
                    except EOFError:
                        good, answers[rank] = rank in lost, None
                    if not good:
                        failures.append(f"rank {rank} failed: {answers[rank] or 'it ended without an answer'}")
                        end = min(
                            end, time.monotonic() + 5.0
                        )  # the others may know more: they lost this one, or it them
            assert not failures, "\n".join(failures)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
            for connection, _ in pairs:
                connection.close()
    return answers
