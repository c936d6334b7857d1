"""What the curvature of the default method costs, compared with the same loop without it, on three models.

    OMP_NUM_THREADS=1 taskset -c 1 python -m benchmarks.overhead DATA_DIR benchmarks/results/overhead-cpu.json

MNIST cleaning with one weight a sample on 10,000 samples: a softmax model 784-10 with batches of 1,000, an MLP 784-512-512-10
with batches of 256, and a convolutional net (1-16-32 channels, 3 x 3, two poolings, one Linear layer) with batches of 128; ten
inner steps. Each method has a problem of its own and takes its outer steps in blocks that alternate with those of the others,
in one process on one thread. The measure is CPU time summed over all outer steps, the first included, so that work done at
the start or once in a while counts. The floor is the same loop without curvature: `nhgd` with the identity as its inverse.
`aid-identity` takes the cross derivative in another way.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nhgd
from benchmarks.environment import environment
from nhgd.data.idx import find, read_images

SAMPLES = 10_000
FLOOR = "nhgd without curvature"
METHODS = ("nhgd", "aid-cg-10", "aid-identity")
FULL = "nhgd, overhead=None"


def softmax() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def mlp() -> nn.Module:
    layers = [nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    return nn.Sequential(*layers)


def convolutional() -> nn.Module:
    first = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(32 * 7 * 7, 10))


MODELS = {"softmax": (softmax, 1000), "mlp": (mlp, 256), "convolutional": (convolutional, 128)}


def inner(model: nn.Module, v: Tensor, batch: Any) -> nhgd.Losses:
    x, y, i = batch
    z = model(x)
    return nhgd.Losses(F.cross_entropy(z, y, reduction="none"), weights=v[i], outputs=z)


def outer(model: nn.Module, v: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def solver(model: str, method: Any, data: Path, inner_steps: int = 10) -> nhgd.Solver:
    """A run at its start: half of the labels are drawn anew, and every weight is 0.5."""
    make, batch = MODELS[model]
    folder = find("mnist", data, cached=False)
    assert folder is not None
    images = read_images(folder)
    x = torch.tensor(images.train_images[: SAMPLES + 2000]).float()[:, None] / 255
    y = torch.tensor(images.train_labels[: SAMPLES + 2000]).long()
    x = (x - x.mean()) / x.std()
    torch.manual_seed(0)
    wrong = torch.rand(SAMPLES) < 0.5
    noisy = torch.where(wrong, torch.randint(10, (SAMPLES,)), y[:SAMPLES])
    net = make()
    problem = nhgd.Bilevel(inner, outer, net, torch.full((SAMPLES,), 0.5), l2=1e-4, likelihood="categorical")
    return nhgd.Solver(
        problem,
        nhgd.Data(x[:SAMPLES], noisy, batch=batch),
        nhgd.Data(x[SAMPLES:], y[SAMPLES:], batch=batch),
        method=method,
        inner_steps=inner_steps,
        inner_lr=0.05,
        outer_lr=1.0,
        project_v=(0, 1),
    )


def measure(model: str, methods: dict[str, Any], data: Path, steps: int, block: int) -> dict[str, Any]:
    runs, found = {}, {}
    for name, method in methods.items():
        started = time.process_time()
        runs[name] = solver(model, method, data)
        found[name] = {"set_up_seconds": time.process_time() - started, "blocks": []}
    for _ in range(0, steps, block):
        for name, run in runs.items():
            started = time.process_time()
            for _ in range(block):
                run.step()
            found[name]["blocks"].append(time.process_time() - started)
    floor = sum(found[FLOOR]["blocks"])
    for name, run in runs.items():
        own = found[name]
        own["seconds"] = sum(own["blocks"])
        own["ratio"] = own["seconds"] / floor
        own["outer_loss"] = run.history[-1]["outer_loss"]
        own["inverse"] = run.solution().stats["inverse"]
        print(
            f"{model:<14}{name:<22}{1e3 * own['seconds'] / steps:8.2f} ms an outer step, {own['ratio']:.3f} of the floor,"
            f" first and last block {1e3 * own['blocks'][0] / block:.2f} and {1e3 * own['blocks'][-1] / block:.2f} ms,"
            f" outer loss {own['outer_loss']:.4f}",
            flush=True,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="the folder with MNIST's IDX files, or the one above")
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=40, help="outer steps of every method")
    parser.add_argument("--block", type=int, default=4, help="outer steps of one method before the next has its turn")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--full", action="store_true", help="also without a budget")
    given = parser.parse_args()
    torch.set_num_threads(1)
    floor = nhgd.algorithm.NHGD(nhgd.inverse.Identity())
    methods: dict[str, Any] = {FLOOR: floor} | {name: name for name in METHODS}
    if given.full:
        methods[FULL] = nhgd.algorithm.NHGD(nhgd.inverse.KFAC(overhead=None))
    found = {}
    for model in given.models.split(","):
        measure(model, methods, given.data, 2, 1)  # what a process does once
        load = os.getloadavg()[0]
        found[model] = {"load": load, "methods": measure(model, methods, given.data, given.steps, given.block)}
    settings = {"steps": given.steps, "block": given.block, "samples": SAMPLES}
    text = json.dumps(
        {"environment": environment(torch.device("cpu")), "settings": settings, "models": found}, indent=2
    )
    given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
