"""The constants by which a budget for curvature is decided: how long operations take on one machine, measured once.

    OMP_NUM_THREADS=1 taskset -c 1 python -m benchmarks.prices benchmarks/results/prices-cpu.json
    python -m benchmarks.prices benchmarks/results/prices-NAME.json --device cuda

Each is the least of several times, in CPU time on a CPU. `nhgd/_prices.py` has rounded figures from these files as constants,
so that the same shapes give the same decisions on every machine. The price of a call is measured as the shortest operation and
entered as several times that, because what Python does around an operation takes longer than the operation.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import environment
from nhgd._memory import synchronise
from nhgd._prices import prices_of


def least(action: Callable[[], Any], device: torch.device, repeats: int = 7) -> float:
    """Seconds of an action: the least of a few times."""
    clock = time.thread_time if device.type == "cpu" else time.perf_counter
    action()
    found = []
    for _ in range(repeats):
        synchronise(device)
        started = clock()
        action()
        synchronise(device)
        found.append(clock() - started)
    return min(found)


def measured(device: torch.device) -> dict[str, Any]:
    """Seconds of products, decompositions, passes over memory and calls, by their sizes."""
    generator = torch.Generator().manual_seed(0)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    products = {}
    for m, k, n in (
        (512, 512, 512),
        (785, 1000, 785),
        (785, 64, 785),
        (10, 785, 785),
        (1000, 784, 10),
        (1569, 128, 1569),
    ):
        a, b = matrix(m, k), matrix(k, n)
        products[f"{m} x {k} x {n}"] = least(lambda a=a, b=b: a @ b, device) / (m * k * n)  # type: ignore[misc]  # a lambda with defaults
    eigh, cholesky = {}, {}
    for n in (64, 145, 256, 513, 785, 1569):
        a = matrix(2 * n, n)
        a = a.T @ a / n
        eigh[str(n)] = least(lambda a=a: torch.linalg.eigh(a), device, 3)  # type: ignore[misc]  # a lambda with defaults
        cholesky[str(n)] = least(lambda a=a: torch.linalg.cholesky_ex(a), device, 3)  # type: ignore[misc]  # a lambda with defaults
    numbers = {}
    for n in (2**16, 2**20, 2**22, 2**24):
        a, b = matrix(n), matrix(n)
        numbers[str(n)] = least(lambda a=a, b=b: a.lerp(b, 0.1), device) / (3 * n)  # type: ignore[misc]  # a lambda with defaults
    one = matrix(1)
    return {
        "seconds_a_multiplication": products,
        "eigh_seconds": eigh,
        "cholesky_seconds": cholesky,
        "seconds_a_number": numbers,
        "call_seconds": least(lambda: [one + one for _ in range(100)], device) / 100,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    device = torch.device(given.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    found = {"environment": environment(device), "measured": measured(device), "written": asdict(prices_of(device))}
    given.out.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
