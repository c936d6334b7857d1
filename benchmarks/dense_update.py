"""Bytes per second of the update of a dense inverse, against a copy on the same device.

    python -m benchmarks.dense_update benchmarks/results/dense-update-h200.json --size 12800

The inverse A is D x D in float32. A step counts as one read and one write of A, whatever it does: the share of the copy's
bandwidth is that of so many bytes in the time it took. One step computes A r, which reads A once more. Several steps that are
folded together read and write A once, and read it once more for all of their products. `torch` is the same without kernels.
Each time is that of one call on an idle device, so what the host takes to launch counts; a captured step, as a captured run
repeats it, is launched as one CUDA graph.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.environment import environment
from nhgd.inverse._learned import woodbury
from nhgd.inverse._learned.woodbury import fold_row, fold_steps

GAIN = 0.01


def milliseconds(work: Callable[[], Any], device: torch.device, times: int) -> float:
    """The median time of a call, by the device's own clock where it has one."""
    found: list[float] = []
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2)) if device.type == "cuda" else (None, None)
    for _ in range(3 + times):
        if begun is not None and ended is not None:
            torch.cuda.synchronize()  # one call on an idle device
            begun.record()
            work()
            ended.record()
            torch.cuda.synchronize()
            found.append(begun.elapsed_time(ended))
        else:
            started = time.perf_counter()
            work()
            found.append(1e3 * (time.perf_counter() - started))
    return median(found[3:])


def captured(work: Callable[[], Any]) -> Callable[[], Any]:
    """The work as one CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return graph.replay


def measured(size: int, steps: int, device: torch.device, times: int) -> dict[str, Any]:
    """Every way of taking a step, with its share of the bandwidth of a copy."""
    inverse, copy = torch.eye(size, device=device), torch.empty(size, size, device=device)
    rows = torch.randn(steps, size, device=device) / size**0.5
    traffic = 2 * inverse.numel() * inverse.element_size()
    copied = milliseconds(lambda: copy.copy_(inverse), device, times)
    kernel = device.type == "cuda" and woodbury._kernel() is not None
    found: dict[str, Any] = {
        "size": size,
        "steps": steps,
        "kernel": kernel,
        "copy": {"milliseconds": copied, "gigabytes_per_second": traffic / copied / 1e6},
    }
    original = woodbury._kernel
    for name, way in (("kernel", original), ("torch", lambda: None)):
        if name == "kernel" and not kernel:
            continue
        woodbury._kernel = way  # type: ignore[assignment]  # the other way
        try:
            step = partial(fold_row, inverse, rows[0], GAIN)
            one = milliseconds(step, device, times)
            repeated = milliseconds(captured(step), device, times) if device.type == "cuda" else one
            some = milliseconds(lambda: fold_steps(inverse, rows, [GAIN] * steps), device, times)
        finally:
            woodbury._kernel = original
        found[name] = {
            "one_step_milliseconds": one,
            "one_step_share_of_copy": copied / one,
            "captured_step_milliseconds": repeated,
            "captured_step_share_of_copy": copied / repeated,
            "folded_milliseconds": some,
            "folded_share_of_copy": steps * copied / some,
        }
        inverse.zero_().fill_diagonal_(1.0)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", type=int, default=12_800)
    parser.add_argument("--steps", type=int, default=10, help="folded together")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    device = torch.device(given.device)
    found = measured(given.size, given.steps, device, given.times)
    given.out.write_text(json.dumps({"environment": environment(device), **found}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
