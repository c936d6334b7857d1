"""Outer steps captured as CUDA graphs, compared with the same steps in eager mode and with a hand-written loop.

    python -m benchmarks.captured benchmarks/results/captured-h200.json --data DATA_DIR
    python -m benchmarks.captured OUT.json --data DATA_DIR --tasks cleaning,distillation,pde --methods ""

MNIST cleaning with one weight a sample: a softmax model 784-10 on 50,000 samples in batches of 1,024, ten inner steps, and an
outer batch of 5,000 trusted samples. Without --data the images are random numbers of the same shapes. The first steps of a
run, in which models are inspected and steps captured, are not timed; the next --steps outer steps are, including reading the
losses. A step of a kind that the run meets for the first or the second time is rehearsed, which takes as long as some eager
ones; there are as many kinds as places of the shorter last batch in an inner loop, with and without a record of curvature.
`rehearsed` counts those among the timed steps, and `replayed_milliseconds` is the mean of the others, of which
`longest_replayed_milliseconds` is the longest. The floor is written by hand: the inner loop, the two outer gradients and the
cross product of the identity.

--tasks runs presets of `nhgd run` from beginning to end, with the seconds of their outer steps, and when they reached some
values of a metric; metrics and preparation do not count, and are given beside them.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nhgd
from benchmarks.environment import environment
from nhgd._memory import synchronise
from nhgd.algorithm import NHGD
from nhgd.data.idx import find, read_images
from nhgd.inverse import KFAC
from nhgd.task import PDE, Cleaning, Distillation

SAMPLES, TRUSTED, BATCH, INNER = 50_000, 5_000, 1024, 10
METHODS: dict[str, Any] = {
    "aid-identity": "aid-identity",
    "aid-cg-10": "aid-cg-10",
    "nhgd": "nhgd",
    "nhgd-refined": "nhgd-refined",
    "nhgd, products": NHGD(KFAC(solver="products", iterations=12, fisher="auto")),
    "soba": "soba",
}
TASKS: dict[str, Any] = {"cleaning": Cleaning, "distillation": Distillation, "pde": PDE}
# A metric with the values whose times are asked for.
TARGETS: dict[str, tuple[str, tuple[float, ...]]] = {
    "distillation": ("loop_test_accuracy", (0.80, 0.84, 0.85)),
    "pde": ("true_objective_grid", (0.0238, 0.0225)),
}


def images(data: Path | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Pixels, standardised, and labels of which half are drawn anew."""
    count, generator = SAMPLES + TRUSTED, torch.Generator().manual_seed(0)
    if data is None:
        x = torch.randn(count, 784, generator=generator)
        y = (x @ torch.randn(784, 10, generator=generator)).argmax(1)
    else:
        folder = find("mnist", data, cached=False)
        assert folder is not None
        read = read_images(folder)
        x = torch.tensor(read.train_images[:count]).float().flatten(1) / 255
        y = torch.tensor(read.train_labels[:count]).long()
        x = (x - x.mean()) / x.std()
    wrong = torch.rand(SAMPLES, generator=generator) < 0.5
    y[:SAMPLES] = torch.where(wrong, torch.randint(10, (SAMPLES,), generator=generator), y[:SAMPLES])
    return x.to(device), y.to(device)


def inner(model: nn.Module, v: Tensor, batch: Any) -> nhgd.Losses:
    x, y, i = batch
    z = model(x)
    return nhgd.Losses(F.cross_entropy(z, y, reduction="none"), weights=v[i], outputs=z)


def outer(model: nn.Module, v: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def solver(x: Tensor, y: Tensor, method: Any, compile: str | bool) -> nhgd.Solver:
    torch.manual_seed(0)
    model = nn.Linear(784, 10).to(x.device)
    problem = nhgd.Bilevel(
        inner, outer, model, torch.full((SAMPLES,), 0.5, device=x.device), l2=1e-4, likelihood="categorical"
    )
    return nhgd.Solver(
        problem,
        nhgd.Data(x[:SAMPLES], y[:SAMPLES], batch=BATCH),
        nhgd.Data(x[SAMPLES:], y[SAMPLES:]),
        method=method,
        inner_steps=INNER,
        inner_lr=0.05,
        outer_lr=1.0,
        project_v=(0, 1),
        compile=compile,
    )


def floor(x: Tensor, y: Tensor, steps: int) -> float:
    """Seconds of an outer step written by hand."""
    model = nn.Linear(784, 10).to(x.device)
    v = torch.full((SAMPLES,), 0.5, device=x.device, requires_grad=True)
    leaves = list(model.parameters())

    def step() -> None:
        for _ in range(INNER):
            i = torch.randint(SAMPLES, (BATCH,), device=x.device)
            loss = (v.detach()[i] * F.cross_entropy(model(x[i]), y[i], reduction="none")).mean()
            loss = loss + 1e-4 * sum(p.square().sum() for p in leaves)
            with torch.no_grad():
                for p, g in zip(leaves, torch.autograd.grad(loss, leaves), strict=True):
                    p.sub_(g, alpha=0.05)
        u = torch.autograd.grad(F.cross_entropy(model(x[SAMPLES:]), y[SAMPLES:]), leaves)
        loss = (v[i] * F.cross_entropy(model(x[i]), y[i], reduction="none")).mean()
        g = torch.autograd.grad(loss, leaves, create_graph=True)
        (cross,) = torch.autograd.grad(g, v, u)
        with torch.no_grad():
            v.add_(cross).clamp_(0, 1)

    return timed(step, steps, x.device)


def timed(step: Any, steps: int, device: torch.device) -> float:
    for _ in range(3):
        step()
    synchronise(device)
    started = time.perf_counter()
    for _ in range(steps):
        step()
    synchronise(device)
    return (time.perf_counter() - started) / steps


def measured(x: Tensor, y: Tensor, method: Any, compile: str | bool, first: int, steps: int) -> dict[str, Any]:
    if x.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    run = solver(x, y, method, compile)
    started = time.perf_counter()
    run.run(steps=first, progress=False)
    synchronise(x.device)
    replayed = run.solution().stats["compile"]["repeated"]
    began = time.perf_counter()
    solution = run.run(steps=steps, progress=False)
    synchronise(x.device)
    ended = time.perf_counter()
    per_step = sorted(row["inner_seconds"] for row in solution.history[first:])
    rehearsed = 0 if compile is False else steps - (solution.stats["compile"]["repeated"] - replayed)
    others = per_step[: len(per_step) - rehearsed] or per_step
    return {
        "rehearsed": rehearsed,
        "replayed_milliseconds": 1e3 * sum(others) / len(others),
        "longest_replayed_milliseconds": 1e3 * others[-1],
        "milliseconds": 1e3 * (ended - began) / steps,
        "median_milliseconds": 1e3 * per_step[len(per_step) // 2],
        "first_seconds": began - started,
        "megabytes": torch.cuda.max_memory_allocated() / 2**20 if x.is_cuda else None,
        "outer_loss": solution.history[-1]["outer_loss"],
        "losses": [row["outer_loss"] for row in solution.history],
        "v": run.problem.v.flat().cpu(),
        "inverse": solution.stats["inverse"],
        "compile": solution.stats["compile"],
    }


def preset(name: str, data: Path | None, device: torch.device) -> dict[str, Any]:
    """The default preset of a task, once."""
    began = time.perf_counter()
    instance = TASKS[name]().build(0, device, None if name == "pde" else data)
    run = instance.start(metrics_every=10)  # so that steps may be launched ahead of the host
    synchronise(device)
    prepared = time.perf_counter() - began
    solution = run.run(steps=instance.steps, progress=False)
    curve = TASKS[name].curve
    return {
        "preparation_seconds": prepared,
        "seconds": solution.stats["seconds"],
        "steps": solution.stats["steps"],
        "summary": instance.summary(solution),
        "compile": solution.stats["compile"],
        "reached": reached(name, solution.history),
        "curve": [(row["seconds"], row.get(curve)) for row in solution.history if row.get(curve) is not None],
    }


def reached(name: str, history: list[dict[str, Any]]) -> dict[str, Any]:
    """When each target was reached first: by outer steps and seconds, or None."""
    metric, targets = TARGETS.get(name, ("", ()))
    found: dict[str, Any] = {}
    for target in targets:
        good = [row for row in history if metric in row and (row[metric] - target) * (-1 if name == "pde" else 1) >= 0]
        found[f"{metric} {target}"] = {"step": good[0]["step"], "seconds": good[0]["seconds"]} if good else None
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--first", type=int, default=200, help="outer steps before the clock starts")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--methods", default=";".join(METHODS), help="separated by semicolons")
    parser.add_argument(
        "--eager", type=float, default=0.2, help="the share of the steps to take eagerly, too; 0 for none"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tasks", default="", help=f"presets to run, of {', '.join(TASKS)}")
    given = parser.parse_args()
    device = torch.device(given.device)
    x, y = images(given.data, device)
    found: dict[str, Any] = {"floor": {"milliseconds": 1e3 * floor(x, y, 100)}}
    print("floor", found, flush=True)
    for name in filter(None, given.methods.split(";")):
        pair: dict[str, Any] = {}
        for compile in (False, "graph") if given.eager else ("graph",):
            try:
                share = given.eager if compile is False else 1.0
                pair[str(compile)] = measured(
                    x, y, METHODS[name], compile, int(given.first * share), int(given.steps * share)
                )
            except Exception as error:
                traceback.print_exc()
                pair[str(compile)] = {"error": repr(error)}
        if len(pair) == 2 and all("v" in one for one in pair.values()):
            a, b = (one.pop("losses") for one in pair.values())
            pair["difference"] = max(abs(p - q) / abs(p) for p, q in zip(a, b, strict=False))
            for one in pair.values():
                if isinstance(one, dict):
                    one.pop("v")
        for one in pair.values():
            if isinstance(one, dict):
                one.pop("v", None), one.pop("losses", None)
        found[name] = pair
        print(name, json.dumps(pair), flush=True)
        write(given, device, found, {})
    tasks: dict[str, Any] = {}
    for name in filter(None, given.tasks.split(",")):
        try:
            tasks[name] = preset(name, given.data, device)
        except Exception as error:
            traceback.print_exc()
            tasks[name] = {"error": repr(error)}
        print(name, json.dumps({key: value for key, value in tasks[name].items() if key != "curve"}), flush=True)
        write(given, device, found, tasks)


def write(given: argparse.Namespace, device: torch.device, found: dict[str, Any], tasks: dict[str, Any]) -> None:
    text = {"environment": environment(device), "settings": vars(given), "methods": found}
    if tasks:
        text["tasks"] = tasks
    given.out.write_text(json.dumps(text, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
