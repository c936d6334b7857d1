"""Control of the heat equation by nhgd and by the methods it is compared with.

    python -m benchmarks.pde benchmarks/results/pde-h200.json --device cuda
    python -m benchmarks.pde benchmarks/results/pde-quick-cpu.json --presets quick --seeds 3 --others ""

The presets run to the end with their own method. Then nhgd and every method of --others run in the paper's setting (50
full-batch Adam steps of 1e-3 for each outer step, the same pretrained state, Adam 0.01 outside, falling over the last third)
for --steps outer steps or --cap seconds. Broyden takes 30 products and the Neumann series 40; truncated unrolling
differentiates the last 5 steps, which must be plain gradient steps. The measure is the true objective, from a solution of the
equation with the learnt source, next to its lower bound. A row's seconds are those of the outer steps; preparation is
pretraining and the quadratic forms of the true objective.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.environment import environment
from nhgd._memory import synchronise
from nhgd.errors import NonFiniteError
from nhgd.task import PDE
from nhgd.task._parser import convert, kinds

PLAIN = ("truncated", "itd")  # methods that take plain gradient steps alone


def solved(
    task: PDE,
    device: torch.device,
    label: str,
    method: Any = None,
    seed: int = 0,
    steps: int | None = None,
    cap: float | None = None,
    theta: Tensor | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """One run, its numbers at the end and some on the way."""
    if task.threads is not None and device.type == "cpu":  # as the command line does
        torch.set_num_threads(task.threads)
    synchronise(device)
    started = time.perf_counter()
    instance = task.build(seed, device)
    if theta is not None:
        instance.problem.theta.assign(theta)
    solver = instance.start(method, seed, **settings)
    synchronise(device)
    preparation = time.perf_counter() - started
    steps = instance.steps if steps is None else steps
    failed = None
    try:
        solution = solver.run(steps=steps, budget=cap, progress=False)
    except NonFiniteError as error:
        failed, solution = str(error), solver.solution()
    history = solution.history
    times = sorted(b["seconds"] - a["seconds"] for a, b in pairwise(history))
    row = {
        "label": label,
        "seed": seed,
        "steps": len(history),
        "result": failed or solution.result,
        "preparation_seconds": preparation,
        "seconds": solution.stats["seconds"],
        "total_seconds": time.perf_counter() - started,
        "milliseconds_a_step": 1e3 * times[len(times) // 2] if times else None,
        "oracle_calls": solution.stats["oracle_calls"],
        "algorithm": solution.stats["algorithm"],
        "inverse": solution.stats["inverse"],
        "metrics": instance.summary(solution) if history else {},
        "course": [
            {k: h[k] for k in ("step", "seconds", "outer_loss", "inner_loss", "true_objective_grid", "true_objective")}
            for h in history
            if h["step"] % 10 == 0
        ],
    }
    found = row["metrics"]
    print(
        f"{label:<34} seed {seed}  {len(history):>4} steps  {row['preparation_seconds']:6.1f} +{row['seconds']:7.1f} s"
        f"  {row['milliseconds_a_step'] or 0:7.1f} ms a step  true {found.get('true_objective_grid', 0):.5f} (grid)"
        f" {found.get('true_objective', 0):.5f}  net {found.get('objective_net', 0):.5f}"
        f"  inner {found.get('inner_loss', 0):.1e} fresh {found.get('fresh_loss', 0):.1e}  {row['result']}",
        flush=True,
    )
    return row


def compared(
    device: torch.device, methods: list[str], steps: int, cap: float, changes: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Methods in the paper's setting, all from the same pretrained state."""
    task = PDE.preset("paper").with_settings({"hold": 2 / 3} | changes)
    instance = task.build(0, device)
    theta = instance.problem.theta.flat()
    task = task.with_settings({"pretraining": 0})
    for name in ("nhgd", *methods):
        own: dict[str, Any] = {"inner_optimizer": None} if name in PLAIN else {}
        yield solved(task, device, f"{name}, 50 inner steps", name, 0, steps, cap, theta, **own)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--presets", default="default")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--others", default="aid-broyden,aid-neumann-40,truncated,aid-identity")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--cap", type=float, default=60.0)
    parser.add_argument("--set", action="append", default=[], help="a setting of the task, for presets and others")
    parser.add_argument("--note", default="", help="what a reader should know of the machine")
    options = parser.parse_args()
    device = torch.device(options.device)
    known = kinds(PDE)
    changes = {key: convert(key, text, known[key]) for key, text in (pair.split("=", 1) for pair in options.set)}
    words = f"--device {options.device} --presets {options.presets} --seeds {options.seeds} --others '{options.others}'"
    result: dict[str, Any] = {
        "command": f"python -m benchmarks.pde OUT {words} --steps {options.steps} --cap {options.cap:g}",
        "changes": changes,
        "note": options.note,
        "environment": environment(device),
        "runs": [],
    }
    if device.type == "cuda":  # the first kernels and libraries are loaded outside of any clock
        tiny = PDE(interior=64, side=8, initial=8, times=5, pretraining=2)
        tiny.build(0, device).start().run(steps=2)

    def write() -> None:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    for preset in filter(None, options.presets.split(",")):
        for seed in range(options.seeds):
            task = PDE.preset(preset).with_settings(changes)
            result["runs"].append(solved(task, device, f"nhgd, preset {preset}", seed=seed))
            write()
    methods = [name for name in options.others.split(",") if name]
    if methods:
        for row in compared(device, methods, options.steps, options.cap, changes):
            result["runs"].append(row)
            write()


if __name__ == "__main__":
    main()
