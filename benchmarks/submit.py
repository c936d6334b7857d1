"""What it costs the inner loop to hand a record to a curvature rank.

    torchrun --nproc-per-node 2 -m benchmarks.submit benchmarks/results/submit-cpu.json

A record of about 10,000 numbers: a batch of 48 through layers of 100, 50 and 10, float32. The time of `submit` alone is compared
with that of the whole inner step around it (forward, backward, record, optimiser). Waiting for a curvature rank that is behind
is back-pressure and depends on the inverse; it is excluded from both and reported separately.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import nhgd
from benchmarks.environment import environment
from nhgd._tree import tensors
from nhgd.algorithm import NHGD
from nhgd.execution import Distributed
from nhgd.inverse import KFAC, FisherDiagonal
from nhgd.record import InnerRecord

SAMPLES, BATCH, INNER, STEPS, WARM = 960, 48, 200, 6, 1


def problem() -> tuple[nhgd.Bilevel, Any, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(100, 50), nn.ReLU(), nn.Linear(50, 10))
    x, y = torch.randn(SAMPLES, 100), torch.randint(10, (SAMPLES,))

    def inner(model: Any, v: Any, batch: Any) -> nhgd.Losses:
        x, y, i = batch
        return nhgd.Losses(F.cross_entropy(model(x), y, reduction="none"), v[i].sigmoid())

    def outer(model: Any, v: Any, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return nhgd.Bilevel(inner, outer, net, torch.zeros(SAMPLES), l2=1e-3), nhgd.Data(x, y, batch=BATCH), [(x, y)]


def measured(inverse: Any, max_lag: int) -> dict[str, Any]:
    """Medians over the inner steps after the first outer step."""
    executor = Distributed(max_lag=max_lag)
    solver = nhgd.Solver(*problem(), method=NHGD(inverse), inner_steps=INNER, inner_lr=0.05, execution=executor)
    handed: list[float] = []
    waited: list[float] = []
    sizes: set[int] = set()
    whole: list[float] = []
    submit, step = executor.submit, solver.loop.inner_step

    def timed_submit(record: InnerRecord) -> None:
        sizes.add(sum(t.numel() for t in tensors(record)))
        before, began = executor.traffic.waited_seconds, time.perf_counter()
        submit(record)
        took, waits = time.perf_counter() - began, executor.traffic.waited_seconds - before
        handed.append(took - waits)
        waited.append(waits)

    def timed_step(*args: Any, **more: Any) -> torch.Tensor:
        began = time.perf_counter()
        found = step(*args, **more)
        whole.append(time.perf_counter() - began - waited[-1])
        return found

    executor.submit, solver.loop.inner_step = timed_submit, timed_step  # type: ignore[method-assign]  # with a clock around it
    solution = solver.run(steps=STEPS)
    solver.close()
    if not whole:
        return {}
    first = WARM * INNER
    shares = sum(handed[first:]) / sum(whole[first:])
    return {
        "inverse": inverse.name,
        "max_lag": max_lag,
        "numbers": max(sizes),
        "steps": len(whole) - first,
        "submit_microseconds": {
            "median": 1e6 * statistics.median(handed[first:]),
            "mean": 1e6 * statistics.fmean(handed[first:]),
        },
        "inner_step_microseconds": {
            "median": 1e6 * statistics.median(whole[first:]),
            "mean": 1e6 * statistics.fmean(whole[first:]),
        },
        "share_of_medians": statistics.median(handed[first:]) / statistics.median(whole[first:]),
        "share_of_time": shares,
        "back_pressure_microseconds": 1e6 * statistics.fmean(waited[first:]),
        "execution": solution.stats["execution"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measured(inverse, lag) for inverse in (KFAC(), FisherDiagonal()) for lag in (8, 64)]
    if os.environ["RANK"] == "0":
        content = {"environment": environment(torch.device("cpu")), "rows": rows}
        given.out.write_text(json.dumps(content, indent=1) + "\n")
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
