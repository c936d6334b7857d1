"""How good a few learnt images are, and how long they take: python -m benchmarks.distillation DATA_DIR OUT.json

The distillation task runs by its own method within a budget, which the schedule of the step sizes follows: one and five images
a class with three seeds each, then the paper's settings. Accuracies are of models trained from scratch on the learnt images, on
as many random training images, and on all training images.

It takes half an hour. `--only paper-5 --seeds 0` runs a part, and adds it to an existing OUT.json.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import environment
from nhgd.task import Distillation
from nhgd.task._classifier import Architecture, accuracy_of, trained
from nhgd.task.distillation import CLASSES, ImageSets, some_of_each

# By label: preset, images a class (None: the preset's), seeds, budget.
PLAN: dict[str, tuple[str, int | None, tuple[int, ...], str]] = {
    "n = 1": ("default", 1, (0, 1, 2), "120s"),
    "n = 5": ("default", 5, (0, 1, 2), "120s"),
    "paper-5": ("paper-5", None, (0,), "60s"),
    "paper-100": ("paper-100", None, (0,), "60s"),
}
RIDGES = (1e-4, 1e-3, 3e-3)  # of the model trained on all images


def run(label: str, seed: int, device: torch.device, data: str) -> dict[str, Any]:
    preset, per_class, _, budget = PLAN[label]
    task = Distillation.preset(preset).with_settings({} if per_class is None else {"per_class": per_class})
    started = time.perf_counter()
    instance = task.build(seed, device, data)
    solution = instance.start(seed=seed).run(budget=budget)
    summary = instance.summary(solution)
    seconds = time.perf_counter() - started
    sets: ImageSets = instance.sets
    curve = [row for row in solution.history if "loop_test_accuracy" in row]
    found = {
        "label": label,
        "seed": seed,
        "budget": budget,
        "steps": solution.stats["steps"],
        "seconds": solution.stats["seconds"],
        "seconds_with_data_and_scratch": seconds,
        "load": os.getloadavg()[0],  # of the whole machine, at the end: what others did to these numbers
        **summary,
        "other_random_test_accuracy": _random(Architecture(task.model).other, sets, task, seed),
        "curve": [[row["seconds"], row["loop_test_accuracy"]] for row in curve[:: max(1, len(curve) // 25)]],
        "task": asdict(task),
    }
    print(
        f"{label}, seed {seed}: {found['steps']} steps, test accuracy {found['test_accuracy']:.4f} from scratch,"
        f" {found['loop_test_accuracy']:.4f} in the loop, {found['other_test_accuracy']:.4f} by the other architecture,"
        f" {found['random_test_accuracy']:.4f} and {found['other_random_test_accuracy']:.4f} from real images",
        flush=True,
    )
    return found


def _random(architecture: Architecture, sets: ImageSets, task: Distillation, seed: int) -> float:
    """What as many random training images are worth to an architecture."""
    chosen = some_of_each(sets.y, CLASSES, task.per_class, torch.Generator().manual_seed(seed + 1))
    model, _ = trained(architecture, sets.x[chosen], sets.y[chosen], CLASSES, task.l2, seed, tol=1e-4)
    return accuracy_of(model.to(sets.x.dtype), sets.x_test, sets.y_test)


def everything(device: torch.device, data: str) -> list[dict[str, float]]:
    """The linear model trained on all training images, with several ridges."""
    sets = Distillation(per_class=1).load(0, device, data)
    found = []
    for l2 in RIDGES:
        started = time.perf_counter()
        model, norm = trained(Architecture(), sets.x, sets.y, CLASSES, l2, tol=1e-3)
        accuracy = accuracy_of(model.to(sets.x.dtype), sets.x_test, sets.y_test)
        seconds = time.perf_counter() - started
        found.append({"l2": l2, "test_accuracy": accuracy, "gradient": norm, "seconds": seconds})
        print(f"all images, l2 {l2:g}: test accuracy {accuracy:.4f}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", choices=[*PLAN, "all images"], nargs="+", default=[*PLAN, "all images"])
    parser.add_argument("--seeds", type=int, nargs="+", help="of those planned")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    command = f"python -m benchmarks.distillation DATA_DIR OUT --device {options.device} --threads {options.threads}"
    head = {"command": command, "environment": environment(device)}
    before = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    if before and before["environment"] != head["environment"]:
        parser.error(f"{options.out} was measured in another environment; name another file.")
    result = head | {"all_images": before.get("all_images", []), "runs": before.get("runs", [])}

    def save() -> None:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    for label in PLAN:
        for seed in PLAN[label][2]:
            if label in options.only and (options.seeds is None or seed in options.seeds):
                found = run(label, seed, device, options.data)
                others = [row for row in result["runs"] if (row["label"], row["seed"]) != (label, seed)]
                places = list(PLAN)
                result["runs"] = sorted([*others, found], key=lambda row: (places.index(row["label"]), row["seed"]))
                save()  # after each run, because all of them take long
    if "all images" in options.only:
        result["all_images"] = everything(device, options.data)
        save()


if __name__ == "__main__":
    main()
