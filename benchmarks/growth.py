"""How the cost of an outer step grows: time and memory against parameters, samples, inner steps and the window.

    OMP_NUM_THREADS=1 python -m benchmarks.growth measure benchmarks/results/growth-cpu.json
    python -m benchmarks.growth draw docs/growth.png

A weight for each sample of an MLP classifier, with random numbers for data. One size varies at a time, in powers of two, and
the others stay at the middle of their range. Time is CPU time, the median of several outer steps, which the sizes take in
turns; memory is the most that torch held at once in the first two of them, data included. Slopes are fitted on double
logarithms, to the upper half of the sizes, where fixed costs count less; a slope of 1 is linear.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nhgd
from benchmarks.environment import environment
from nhgd._memory import PeakMemory
from nhgd.algorithm import NHGD
from nhgd.inverse import FisherWindow

AXES: dict[str, list[int]] = {
    "width": [32, 64, 128, 256, 512, 1024],
    "samples": [2_000, 4_000, 8_000, 16_000, 32_000, 64_000],
    "inner_steps": [16, 32, 64, 128, 256, 512, 1024, 2048],
    "window": [32, 64, 128, 256, 512, 1024],
}
MIDDLE = {"width": 128, "samples": 8_000, "inner_steps": 10, "window": 128}
COLUMNS, CLASSES, BATCH, STEPS, FIRST = 64, 10, 256, 13, 2


def inner(model: nn.Module, v: Tensor, batch: Any) -> nhgd.Losses:
    x, y, index = batch
    z = model(x)
    return nhgd.Losses(F.cross_entropy(z, y, reduction="none"), weights=v[index], outputs=z)


def outer(model: nn.Module, v: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def made(given: dict[str, int], full: bool, window: bool) -> nhgd.Solver:
    """A run at its start."""
    torch.manual_seed(0)
    count = given["samples"]
    x, y = torch.randn(count + 500, COLUMNS), torch.randint(CLASSES, (count + 500,))
    net = nn.Sequential(nn.Linear(COLUMNS, given["width"]), nn.Tanh(), nn.Linear(given["width"], CLASSES))
    method: Any = NHGD(FisherWindow(window=given["window"], overhead=None)) if window else "nhgd"
    return nhgd.Solver(
        nhgd.Bilevel(inner, outer, net, torch.full((count,), 0.5), l2=1e-3, likelihood="categorical"),
        nhgd.Data(x[:count], y[:count], batch=count if full else BATCH),
        nhgd.Data(x[count:], y[count:]),
        method=method,
        inner_steps=given["inner_steps"],
        outer_lr=0.1,
        project_v=(0, 1),
    )


def measured(axis: str, sizes: list[int]) -> list[dict[str, float]]:
    """Seconds and megabytes of an outer step where one size is not the middle one; not both in the same run."""
    full, window = axis == "samples", axis == "window"
    megabytes = []
    for size in sizes:
        with PeakMemory() as memory:
            made(MIDDLE | {axis: size}, full, window).run(steps=2, progress=False)
        megabytes.append(memory.bytes / 2**20)
    runs = [made(MIDDLE | {axis: size}, full, window) for size in sizes]
    spent: list[list[float]] = [[] for _ in runs]
    for _ in range(STEPS):  # in turns, so that what else the machine does meets all of them
        for run, seconds in zip(runs, spent, strict=True):
            started = time.process_time()
            run.step()
            seconds.append(time.process_time() - started)
    return [
        {"size": size, "parameters": run.problem.theta.numel, "seconds": median(seconds[FIRST:]), "megabytes": held}
        for size, run, seconds, held in zip(sizes, runs, spent, megabytes, strict=True)
    ]


def slope(points: list[dict[str, float]], key: str, by: str) -> float:
    """Of the upper half, on double logarithms."""
    some = points[len(points) // 2 :]
    x, y = ([math.log(p[name]) for p in some] for name in (by, key))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


def measure(out: Path) -> None:
    found: dict[str, Any] = {}
    for axis, sizes in AXES.items():
        measured(axis, sizes[:1])  # what a process does once
        points = measured(axis, sizes)
        by = "parameters" if axis == "width" else "size"
        slopes = {key: slope(points, key, by) for key in ("seconds", "megabytes")}
        found[axis] = {"points": points, "by": by, "slopes": slopes}
        print(axis, slopes, flush=True)
    text = {"environment": environment(torch.device("cpu")), "middle": MIDDLE, "batch": BATCH, "axes": found}
    out.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")


def draw(result: dict[str, Any], out: Path) -> None:
    """A panel for each axis, with both slopes."""
    from nhgd.plot.rates import draw as panels_drawn

    panels = []
    for axis, found in result["axes"].items():
        points, by = found["points"], found["by"]
        x = [p[by] for p in points]
        lines = [
            {"label": f"{key}, slope {found['slopes'][key]:.2f}", "x": x, "y": [p[key] for p in points]}
            for key in ("seconds", "megabytes")
        ]
        title = "parameters" if axis == "width" else axis.replace("_", " ")
        panels.append({"title": title, "x": title, "y": "CPU seconds, megabytes", "lines": lines})
    panels_drawn([out], "Growth of an outer step", panels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("measure").add_argument("out", type=Path)
    drawing = commands.add_parser("draw")
    drawing.add_argument("out", type=Path)
    drawing.add_argument("--result", type=Path, default=Path("benchmarks/results/growth-cpu.json"))
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if given.command == "measure":
        torch.set_num_threads(1)
        measure(given.out)
    else:
        draw(json.loads(given.result.read_text(encoding="utf-8")), given.out)


if __name__ == "__main__":
    main()
