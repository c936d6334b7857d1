"""Outer steps captured as CUDA graphs, compared with the same steps in eager mode and with a hand-written loop.

    python -m benchmarks.captured benchmarks/results/captured-h200.json --data DATA_DIR

MNIST cleaning with one weight a sample: a softmax model 784-10 on 50,000 samples in batches of 1,024, ten inner steps, and an
outer batch of 5,000 trusted samples. Without --data the images are random numbers of the same shapes. The first steps of a
run, in which models are inspected and steps captured, are not timed; the next --steps outer steps are, including reading the
losses. The floor is written by hand: the inner loop, the two outer gradients and the cross product of the identity.
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
from nhgd.data.idx import find, read_images

SAMPLES, TRUSTED, BATCH, INNER = 50_000, 5_000, 1024, 10
METHODS: dict[str, Any] = {
    "aid-identity": "aid-identity",
    "aid-cg-10": "aid-cg-10",
    "nhgd": "nhgd",
    "nhgd-refined": "nhgd-refined",
    "soba": "soba",
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

    return timed(step, steps)


def timed(step: Any, steps: int) -> float:
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / steps


def measured(x: Tensor, y: Tensor, method: Any, compile: str | bool, first: int, steps: int) -> dict[str, Any]:
    torch.cuda.reset_peak_memory_stats()
    run = solver(x, y, method, compile)
    started = time.perf_counter()
    run.run(steps=first, progress=False)
    torch.cuda.synchronize()
    began = time.perf_counter()
    solution = run.run(steps=steps, progress=False)
    torch.cuda.synchronize()
    ended = time.perf_counter()
    per_step = sorted(row["inner_seconds"] for row in solution.history[first:])
    return {
        "milliseconds": 1e3 * (ended - began) / steps,
        "median_milliseconds": 1e3 * per_step[len(per_step) // 2],
        "first_seconds": began - started,
        "megabytes": torch.cuda.max_memory_allocated() / 2**20,
        "outer_loss": solution.history[-1]["outer_loss"],
        "losses": [row["outer_loss"] for row in solution.history],
        "v": run.problem.v.flat().cpu(),
        "inverse": solution.stats["inverse"],
        "compile": solution.stats["compile"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--first", type=int, default=200, help="outer steps before the clock starts")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--methods", default=",".join(METHODS))
    given = parser.parse_args()
    device = torch.device("cuda")
    x, y = images(given.data, device)
    found: dict[str, Any] = {"floor": {"milliseconds": 1e3 * floor(x, y, 100)}}
    print("floor", found, flush=True)
    for name in given.methods.split(","):
        pair: dict[str, Any] = {}
        for compile in (False, "graph"):
            try:
                share = 0.2 if compile is False else 1.0
                pair[str(compile)] = measured(
                    x, y, METHODS[name], compile, int(given.first * share), int(given.steps * share)
                )
            except Exception as error:
                traceback.print_exc()
                pair[str(compile)] = {"error": repr(error)}
        if all("v" in one for one in pair.values()):
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
        text = {"environment": environment(device), "settings": vars(given), "methods": found}
        given.out.write_text(json.dumps(text, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
