"""Label cleaning on MNIST with half of the labels random: the presets, and what perfect knowledge and none would give.

    python -m benchmarks.cleaning DATA_DIR benchmarks/results/cleaning-mnist-cpu.json
    python -m benchmarks.cleaning DATA_DIR benchmarks/results/cleaning-mnist-cpu.json --rows default
    python -m benchmarks.cleaning DATA_DIR benchmarks/results/cleaning-mnist-cpu.json --rows paper

Rows can be measured one at a time; the others in the file are kept. The bounds are the same linear model with the same ridge,
trained to the end: on all training and trusted samples, with weight 0 for those whose labels are wrong (perfect) or 1 for all
(none), and on the trusted ones alone. The default preset is the task's own; the paper's is its method with its printed
settings. Each has --budget seconds of outer steps; reading the data and the warm-up come on top, as preparation. "selected" is
the step that the evaluation split chose.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from benchmarks.environment import environment
from nhgd.paper import paper
from nhgd.task import Cleaning
from nhgd.task._classifier import Split, accuracy, fit, softmax_classifier
from nhgd.task._images import CLASSES
from nhgd.task.cleaning import LabelSets

CPU = torch.device("cpu")
COLUMNS = ("test_accuracy", "final_test_accuracy", "f1", "final_f1", "auc", "outer_loss", "overfitting", "gap")


def bound(kind: str, sets: LabelSets, l2: float) -> dict[str, Any]:
    """The test accuracy of a model trained to the end on a choice of the samples."""
    began = time.perf_counter()
    model = softmax_classifier(sets.train.x, CLASSES)
    if kind == "trusted":
        norm = fit(model, sets.trusted, l2, 3e-3)
    else:
        x, y = torch.cat([sets.train.x, sets.trusted.x]), torch.cat([sets.train.y, sets.trusted.y])
        weights = torch.ones_like(x[:, 0])
        if kind == "perfect":
            weights[: len(sets.wrong)] = (~sets.wrong).to(weights)
        norm = fit(model, Split(x, y), l2, 3e-3, weights)
    with torch.no_grad():
        found = accuracy(model(sets.test.x), sets.test.y)
    return {"metrics": {"test_accuracy": found}, "gradient": norm, "seconds": time.perf_counter() - began}


def solved(preset: str, task: Cleaning, seed: int, data: Path, budget: float) -> dict[str, Any]:
    """One run of a preset."""
    began = time.perf_counter()
    instance = task.build(seed, CPU, data)
    algorithm, settings = paper("cleaning", "nhgd") if preset == "paper" else (instance.algorithm(), {})
    solver = instance.start(algorithm, seed, **settings)
    preparation = time.perf_counter() - began
    solution = solver.run(budget=budget, progress=False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        metrics = instance.summary(solution)
    return {
        "method": repr(algorithm),
        "steps": solution.stats["steps"],
        "preparation_seconds": preparation,
        "seconds": solution.stats["seconds"],
        "total_seconds": time.perf_counter() - began,
        "metrics": metrics,
        "warnings": [str(item.message) for item in said],
    }


def table(runs: list[dict[str, Any]]) -> list[str]:
    """One line for each label, with mean and standard deviation over the seeds."""
    heads = ("accuracy, selected", "at the end", "F1, selected", "at the end", "AUC", "outer loss", "rise", "gap")
    lines = [f"| | {' | '.join(heads)} | steps |", "| --- " * (len(heads) + 2) + "|"]
    for label in dict.fromkeys(run["label"] for run in runs):
        mine = [run for run in runs if run["label"] == label]
        cells = []
        for key in COLUMNS:
            values = [run["metrics"][key] for run in mine if key in run["metrics"]]
            spread = f" ± {stdev(values):.4f}" if len(values) > 1 else ""
            cells.append(f"{mean(values):.4f}{spread}" if values else "")
        steps = [run["steps"] for run in mine if "steps" in run]
        lines.append(f"| {label} | {' | '.join(cells)} | {f'{mean(steps):.0f}' if steps else ''} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", default="bounds,default,paper", help="which to measure")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--noise", type=float, default=0.5)
    parser.add_argument("--noise-kind", default="uniform")
    parser.add_argument("--budget", type=float, default=60.0)
    parser.add_argument("--note", default="", help="what a reader should know of the machine")
    options = parser.parse_args()
    noise = {"dataset": "mnist", "noise": options.noise, "noise_kind": options.noise_kind}
    result: dict[str, Any] = {"environment": {}, "noise": noise, "budget": options.budget, "runs": []}
    if options.out.exists():
        result = json.loads(options.out.read_text(encoding="utf-8"))
        if result["noise"] != noise or result["budget"] != options.budget:
            parser.error(f"{options.out} was measured with other settings; name another file")
    result["environment"] = environment(CPU)
    result["note"] = options.note or result.get("note", "")
    order = ["perfect", "none", "trusted", "default", "paper"]
    words = {"perfect": "perfect weights", "none": "no cleaning", "trusted": "trusted samples alone"}
    for row in options.rows.split(","):
        for seed in range(options.seeds):
            for kind in order[:3] if row == "bounds" else [row]:
                task = Cleaning.preset("default" if kind in words else kind).with_settings(noise)
                label = words.get(kind, f"preset {kind}")
                if kind in words:
                    found = bound(kind, task.load(seed, CPU, options.data), task.l2)
                else:
                    found = solved(kind, task, seed, options.data, options.budget)
                kept = [run for run in result["runs"] if (run["label"], run["seed"]) != (label, seed)]
                runs = [*kept, {"label": label, "seed": seed} | found]
                place = {words.get(kind, f"preset {kind}"): i for i, kind in enumerate(order)}
                result["runs"] = sorted(runs, key=lambda run: (place[run["label"]], run["seed"]))
                options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
                shown = {key: round(value, 4) for key, value in found["metrics"].items() if key in COLUMNS}
                print(label, seed, shown, f"{found.get('total_seconds', found['seconds']):.0f} s", flush=True)
    print("\n".join(table(result["runs"])))


if __name__ == "__main__":
    main()
