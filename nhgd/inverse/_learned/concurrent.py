"""Eigendecompositions of many matrices at the same time on a GPU, which a single one leaves mostly idle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

Decompose = Callable[[str, Tensor], tuple[Tensor, Tensor]]
WORKERS = 8  # threads, each with a stream of its own
FEWEST = 4  # matrices that are worth it
SMALLEST = 33  # rows; smaller ones torch decomposes together


def pays(matrices: Sequence[Tensor]) -> bool:
    """Whether the decompositions of these matrices, (G, n, n) each, take less time beside each other."""
    many = sum(len(matrix) for matrix in matrices if matrix.shape[1] >= SMALLEST)
    return many >= FEWEST and all(matrix.device.type == "cuda" for matrix in matrices)


def decomposed_beside(named: Sequence[tuple[str, Tensor]], decompose: Decompose) -> list[tuple[Tensor, Tensor]]:
    """What `decompose` makes of each named matrix, (G, n, n), by threads that wait for the device on their own."""
    pieces = [(name, matrix[i : i + 1]) for name, matrix in named for i in range(len(matrix))]
    device = pieces[0][1].device
    on_gpu = device.type == "cuda"
    main = torch.cuda.current_stream(device) if on_gpu else None

    def work(worker: int) -> list[tuple[Tensor, Tensor]]:
        # The largest first would not matter: neighbours are alike, and each worker takes every eighth.
        mine = pieces[worker::WORKERS]
        with torch.no_grad():
            if main is None:
                return [decompose(*piece) for piece in mine]
            stream = torch.cuda.Stream(device)
            stream.wait_stream(main)
            with torch.cuda.device(device), torch.cuda.stream(stream):
                found = [decompose(*piece) for piece in mine]
            stream.synchronize()
            return found

    with ThreadPoolExecutor(WORKERS) as threads:
        by_worker = list(threads.map(work, range(min(WORKERS, len(pieces)))))
    flat = [by_worker[i % WORKERS][i // WORKERS] for i in range(len(pieces))]
    result, at = list[tuple[Tensor, Tensor]](), 0
    for _, matrix in named:
        mine = flat[at : at + len(matrix)]
        at += len(matrix)
        # Copies in the memory of this stream: that of the others is used again once they have waited for it.
        result.append((torch.cat([values for values, _ in mine]), torch.cat([vectors for _, vectors in mine])))
    return result
