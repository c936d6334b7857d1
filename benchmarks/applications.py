"""How much few-shot learning and learnt class weights gain: python -m benchmarks.applications OUT.json

Each task runs with a preset, by its own method, for several seeds: another seed is another split of classes and samples, and
another network. It takes two minutes on a free core. `--only imbalance --seeds 0` runs a part, and adds it to an existing OUT.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from benchmarks.environment import environment
from nhgd.task import resolve

# By task: the columns of its table, metric and title.
COLUMNS = {
    "fewshot": {
        "unadapted_accuracy": "no head trained",
        "pixel_test_accuracy": "head on pixels",
        "random_test_accuracy": "on the network before",
        "test_accuracy": "on learnt features",
    },
    "imbalance": {
        "unweighted_balanced_accuracy": "weights of 1",
        "inverse_balanced_accuracy": "inverse frequency",
        "balanced_accuracy": "learnt",
        "joint_unweighted_balanced_accuracy": "both sets, weights of 1",
        "joint_inverse_balanced_accuracy": "both sets, inverse frequency",
        "joint_balanced_accuracy": "both sets, learnt",
    },
}


def run(name: str, preset: str, seed: int, device: torch.device) -> dict[str, Any]:
    task = resolve(name, preset)
    began, cpu = time.perf_counter(), time.process_time()
    instance = task.build(seed, device)
    solution = instance.start(seed=seed).run(steps=instance.steps, progress=False)
    metrics = instance.summary(solution)
    found = {
        "task": name,
        "preset": preset,
        "method": instance.method,
        "seed": seed,
        "steps": solution.stats["steps"],
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu,
        "metrics": metrics,
        "settings": asdict(task),
    }
    said = ", ".join(f"{title} {metrics[key]:.3f}" for key, title in COLUMNS[name].items())
    print(f"{name}, {preset}, seed {seed}, {found['cpu_seconds']:.0f} s of CPU: {said}", flush=True)
    return found


def table(runs: Sequence[dict[str, Any]], name: str) -> str:
    """A row for each preset and seed, and the mean and standard deviation over the seeds of each preset."""
    columns = COLUMNS[name]
    chosen = [run for run in runs if run["task"] == name]
    lines = [
        f"| preset | seed | {' | '.join(columns.values())} | seconds of CPU |",
        "| --- " * (len(columns) + 3) + "|",
    ]
    for preset in dict.fromkeys(run["preset"] for run in chosen):
        mine = [run for run in chosen if run["preset"] == preset]
        for run in mine:
            cells = [f"{run['metrics'][key]:.3f}" for key in columns]
            lines.append(f"| {preset} | {run['seed']} | {' | '.join(cells)} | {run['cpu_seconds']:.0f} |")
        found = [[run["metrics"][key] for run in mine] for key in columns]
        cells = [f"{mean(values):.3f} ± {stdev(values):.3f}" for values in found]
        lines.append(f"| {preset} | all | {' | '.join(cells)} | |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", choices=list(COLUMNS))
    parser.add_argument("--presets", default="default,quick")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    given = parser.parse_args()
    runs = json.loads(given.out.read_text(encoding="utf-8"))["runs"] if given.out.exists() else []
    for name in COLUMNS if given.only is None else (given.only,):
        for preset in given.presets.split(","):
            for seed in map(int, given.seeds.split(",")):
                runs = [r for r in runs if (r["task"], r["preset"], r["seed"]) != (name, preset, seed)]
                runs.append(run(name, preset, seed, given.device))
                content = {"environment": environment(given.device), "runs": runs}
                given.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
