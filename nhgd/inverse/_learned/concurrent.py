"""Eigendecompositions of many matrices at the same time on a GPU, which a single one leaves mostly idle.

Those that only the next solve needs also run beside the inner steps until then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Decompose = Callable[[str, Tensor], tuple[Tensor, Tensor]]
Later = Callable[[Any], Any]  # from a state to the one with what has been computed meanwhile
WORKERS = 8  # threads, each with a stream of its own
FEWEST = 4  # matrices that are worth it
SMALLEST = 33  # rows; smaller ones torch decomposes together


def pays(matrices: Sequence[Tensor]) -> bool:
    """Whether the decompositions of these matrices, (G, n, n) each, take less time beside each other."""
    many = sum(len(matrix) for matrix in matrices if matrix.shape[1] >= SMALLEST)
    return many >= FEWEST and all(matrix.device.type == "cuda" for matrix in matrices)


def decomposed_beside(named: Sequence[tuple[str, Tensor]], decompose: Decompose) -> list[tuple[Tensor, Tensor]]:
    """What `decompose` makes of each named matrix, (G, n, n), by threads that wait for the device on their own."""
    return begun_beside(named, decompose)()


def begun_beside(
    named: Sequence[tuple[str, Tensor]], decompose: Decompose
) -> Callable[[], list[tuple[Tensor, Tensor]]]:
    """The same, as a function that waits for what has begun. The matrices must not change meanwhile."""
    pieces = [(name, matrix[i : i + 1]) for name, matrix in named for i in range(len(matrix))]
    device = pieces[0][1].device
    ready = torch.cuda.Event() if device.type == "cuda" else None
    if ready is not None:
        ready.record(torch.cuda.current_stream(device))

    def work(worker: int) -> list[tuple[Tensor, Tensor]]:
        # The largest first would not matter: neighbours are alike, and each worker takes every eighth.
        mine = pieces[worker::WORKERS]
        with torch.no_grad():
            if ready is None:
                return [decompose(*piece) for piece in mine]
            stream = torch.cuda.Stream(device)
            stream.wait_event(ready)
            with torch.cuda.device(device), torch.cuda.stream(stream):
                found = [decompose(*piece) for piece in mine]
            stream.synchronize()
            return found

    threads = ThreadPoolExecutor(WORKERS)
    under_way = [threads.submit(work, worker) for worker in range(min(WORKERS, len(pieces)))]
    threads.shutdown(wait=False)

    def finished() -> list[tuple[Tensor, Tensor]]:
        by_worker = [some.result() for some in under_way]
        flat = [by_worker[i % WORKERS][i // WORKERS] for i in range(len(pieces))]
        result, at = list[tuple[Tensor, Tensor]](), 0
        for _, matrix in named:
            mine = flat[at : at + len(matrix)]
            at += len(matrix)
            # Copies in the memory of this stream: that of the others is used again once they have waited for it.
            result.append((torch.cat([values for values, _ in mine]), torch.cat([vectors for _, vectors in mine])))
        return result

    return finished


class _Current(threading.local):
    later: list[Later] | None = None


_current = _Current()


@contextmanager
def deferring() -> Iterator[list[Later]]:
    """A context in which decompositions that nobody waits for may only begin: what finishes them is in the list."""
    before, _current.later = _current.later, list[Later]()
    try:
        yield _current.later
    finally:
        _current.later = before


def later() -> list[Later] | None:
    """The list of the innermost such context; None outside of one."""
    return _current.later
