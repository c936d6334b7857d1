"""How good are a few learnt images, in how much time: python -m benchmarks.distillation DATA_DIR OUT.json

For each number of images a class and each seed the distillation task is run by its own method within a budget; the
schedule of the step sizes follows the budget. Accuracies are of models trained on the images from scratch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import environment
from nhgd.task import Distillation


def run(task: Distillation, seed: int, device: torch.device, data: str, budget: str) -> dict[str, Any]:
    instance = task.build(seed, device, data)
    solution = instance.start(seed=seed).run(budget=budget)
    curve = [row for row in solution.history if "loop_test_accuracy" in row]
    found = {
        "per_class": task.per_class,
        "seed": seed,
        "steps": solution.stats["steps"],
        "seconds": solution.stats["seconds"],
        "load": os.getloadavg()[0],  # of the whole machine, at the end: what others did to these numbers
        **instance.summary(solution),
        "curve": [[row["seconds"], row["loop_test_accuracy"]] for row in curve[:: max(1, len(curve) // 25)]],
    }
    print(
        f"n = {task.per_class:3}, seed {seed}: {found['steps']} steps, test accuracy {found['test_accuracy']:.4f} from scratch,"
        f" {found['loop_test_accuracy']:.4f} in the loop, {found['other_test_accuracy']:.4f} by the other architecture,"
        f" {found['random_test_accuracy']:.4f} from real images",
        flush=True,
    )
    return found


def medians(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for n in sorted({row["per_class"] for row in rows}):
        mine = [row for row in rows if row["per_class"] == n]
        keys = ("steps", "test_accuracy", "other_test_accuracy", "random_test_accuracy")
        found.append({"per_class": n} | {key: statistics.median(row[key] for row in mine) for key in keys})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("out", type=Path)
    parser.add_argument("--per-class", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--budget", default="120s")
    parser.add_argument("--preset", default="default", choices=sorted(Distillation.presets))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    task = Distillation.preset(options.preset)
    sizes = " ".join(map(str, options.per_class))
    command = (
        f"python -m benchmarks.distillation DATA_DIR OUT --per-class {sizes} --seeds {options.seeds}"
        f" --budget {options.budget} --preset {options.preset} --device {options.device} --threads {options.threads}"
    )
    head = {"command": command, "environment": environment(device), "task": asdict(task)}
    rows: list[dict[str, Any]] = []
    for n in options.per_class:
        for seed in range(options.seeds):
            rows.append(run(task.with_settings({"per_class": n}), seed, device, options.data, options.budget))
            # After each run, because all of them take long.
            result = head | {"medians": medians(rows), "rows": rows}
            options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
