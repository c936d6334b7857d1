"""What it costs the inner loop to hand a record to a thread or a device: `submit` alone, and the inner step around it.

    python -m benchmarks.submit_beside benchmarks/results/submit-beside-cpu.json

Records of about 10,000 numbers: batches of 64 through one Linear layer, 146 to 10, and through three, 48 to 28 to 18 to 10,
float32. The inner step is the whole of it: batch, forward, backward, record, optimiser. Curvature runs meanwhile; every 8 steps
its records are waited for outside the clock, so that no waiting is timed. Medians over all steps after a warm-up, the backends
in turns in one process, one torch thread for each side. With `inline`, `submit` is the curvature itself, and its step without
that is the plain inner step. Two threads share Python's lock, so an inner step with curvature running takes longer than a plain
one; the share of either is given. benchmarks/submit.py measures handing a record to another process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nhgd
from benchmarks.environment import environment
from nhgd._tree import tensors
from nhgd.execution import AbstractExecutor, Device, Inline, Thread
from nhgd.inverse import KFAC
from nhgd.loop.loop import Loop
from nhgd.loop.settings import LoopSettings

BATCH, SAMPLES = 64, 4096
MODELS = {"one layer": (146, 10), "three layers": (48, 28, 18, 10)}
WARMUP, STEPS, BETWEEN = 48, 400, 8
BACKENDS: dict[str, Callable[[], AbstractExecutor]] = {
    "inline": Inline,
    "thread": lambda: Thread(max_lag=BETWEEN),
    "device:cpu": lambda: Device("cpu", max_lag=BETWEEN),
}


def weighted(model: nn.Module, v: Tensor, batch: Any) -> nhgd.Losses:
    x, y, i = batch
    return nhgd.Losses(F.cross_entropy(model(x), y, reduction="none"), weights=v[i])


def outer(model: nn.Module, v: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def measured(widths: tuple[int, ...], executor: AbstractExecutor) -> dict[str, Any]:
    """Seconds of every inner step and of every `submit`, and the numbers in a record."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    x, y = torch.randn(SAMPLES, widths[0]), torch.randint(10, (SAMPLES,))
    problem = nhgd.Bilevel(weighted, outer, nn.Sequential(*layers[:-1]), torch.full((SAMPLES,), 0.5), l2=1e-3)
    loop = Loop(problem, nhgd.Data(x, y, batch=BATCH), [(x, y)], LoopSettings(inner_lr=1e-2), executor, KFAC())
    submit = executor.submit
    submits: list[float] = []
    sizes: list[int] = []

    def timed(record: Any) -> None:
        began = time.perf_counter()
        submit(record)
        submits.append(time.perf_counter() - began)
        if not sizes:
            sizes.append(sum(t.numel() for t in tensors(record)))

    executor.submit = timed  # type: ignore[method-assign]  # with a clock around it
    steps = []
    for index in range(WARMUP + STEPS):
        if index % BETWEEN == 0:
            executor.drain()
        began = time.perf_counter()
        loop.inner_step()
        steps.append(time.perf_counter() - began)
    executor.close()
    return {"steps": steps[WARMUP:], "submits": submits[WARMUP:], "numbers": sizes[0]}


def row(model: str, execution: str, trials: list[dict[str, Any]], plain: float) -> dict[str, Any]:
    step, submit = (statistics.median(s for trial in trials for s in trial[key]) for key in ("steps", "submits"))
    return {
        "model": model,
        "execution": execution,
        "numbers": trials[0]["numbers"],
        "inner_step_microseconds": 1e6 * step,
        "submit_microseconds": 1e6 * submit,
        "plain_step_microseconds": 1e6 * plain,
        "share": submit / step,
        "share_of_plain": submit / plain,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for model, widths in MODELS.items():
        trials: dict[str, list[dict[str, Any]]] = {name: [] for name in BACKENDS}
        for _ in range(given.rounds):
            for name, make in BACKENDS.items():
                trials[name].append(measured(widths, make()))
        inline = [(s, c) for trial in trials["inline"] for s, c in zip(trial["steps"], trial["submits"], strict=True)]
        plain = statistics.median(step - curvature for step, curvature in inline)
        rows += [row(model, name, some, plain) for name, some in trials.items()]
    result = {"environment": environment(torch.device("cpu")), "batch": BATCH, "rows": rows}
    given.out.write_text(json.dumps(result, indent=2) + "\n")
    for one in rows:
        print(json.dumps(one))


if __name__ == "__main__":
    main()
