"""What an outer step must do at least, part by part, and what each way of taking it takes.

    OMP_NUM_THREADS=1 python -m benchmarks.floor benchmarks/results/floor-cpu.json --data DATA_DIR
    python -m benchmarks.floor benchmarks/results/floor-h200.json --data DATA_DIR --device cuda

MNIST cleaning as in benchmarks/rival_job.py: a linear softmax model, 50,000 samples in batches of 1,024, ten inner steps, an
outer batch of 5,000. The hand-written loops take the inner steps, the outer gradient and the cross product of the last batch,
with batches gathered by `x[index]` or as slices of shuffled memory. `without curvature` is nhgd with the identity in place of
its inverse: the same inner loop, outer gradient and cross derivative. All of them take blocks of steps in turns, in one
process; on the CPU the measure is CPU time. Launches (operations on the CPU) and synchronisations are counted by torch's
profiler in further steps. The parts are timed alone, and `bytes` and `operations` are those that the arithmetic of a part
cannot do without: every number of its inputs read once and of its results written once.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import nhgd
from benchmarks import rival_job
from benchmarks.environment import environment
from benchmarks.rival_job import BATCH, INNER_STEPS, Job
from nhgd._memory import synchronise
from nhgd.algorithm import NHGD
from nhgd.inverse import KFAC, Identity

RATE, SIZE, RIDGE = 0.1, 1000.0, 1e-4
WAYS: dict[str, Any] = {
    "without curvature": NHGD(Identity()),
    "nhgd": "nhgd",
    "nhgd, products": NHGD(KFAC(solver="products", iterations=12, fisher="auto")),
    "aid-identity": "aid-identity",
    "aid-cg-10": "aid-cg-10",
}
LAUNCHES = (
    "cudaLaunchKernel",
    "cudaLaunchKernelExC",
    "cuLaunchKernel",
    "cudaGraphLaunch",
    "cudaMemcpyAsync",
    "cudaMemsetAsync",
)
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "aten::_local_scalar_dense")


class ByHand:
    """The loop in plain torch."""

    def __init__(self, job: Job, device: torch.device, slices: bool) -> None:
        self.x, self.y = (t.to(device) for t in job.train)
        self.outer = [t.to(device) for t in job.trusted]
        self.slices = slices
        self.w = torch.zeros(10, self.x.shape[1], device=device, requires_grad=True)
        self.v = torch.full((len(self.x),), 0.5, device=device, requires_grad=True)
        self.inner_optimizer = torch.optim.SGD([self.w], lr=RATE)
        self.outer_optimizer = torch.optim.SGD([self.v], lr=SIZE)
        self.place, self.order = len(self.x), torch.arange(len(self.x), device=device)

    def batch(self) -> tuple[Tensor, Tensor, Tensor]:
        """The next 1,024 samples of a pass."""
        if self.place >= len(self.x):
            self.place, self.order = 0, torch.randperm(len(self.x)).to(self.order.device)
        here = slice(self.place, self.place + BATCH)
        self.place += BATCH
        index = self.order[here]
        if self.slices:  # of memory that is taken to be shuffled
            return self.x[here], self.y[here], index
        return self.x[index], self.y[index], index

    def loss(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """The inner objective."""
        x, y, index = batch
        losses = F.cross_entropy(F.linear(x, self.w), y, reduction="none")
        return (self.v[index] * losses).mean() + RIDGE * self.w.square().sum()

    def step(self) -> None:
        """An outer step."""
        for _ in range(INNER_STEPS):
            (self.w.grad,) = torch.autograd.grad(self.loss(self.batch()), self.w)
            self.inner_optimizer.step()
        x, y = self.outer
        (u,) = torch.autograd.grad(F.cross_entropy(F.linear(x, self.w), y), self.w)
        (gradient,) = torch.autograd.grad(self.loss(self.batch()), self.w, create_graph=True)
        (cross,) = torch.autograd.grad(gradient, self.v, u)
        self.v.grad = -cross
        self.outer_optimizer.step()
        with torch.no_grad():
            self.v.clamp_(0, 1)


def solver(job: Job, method: Any, device: torch.device, compile: str | bool) -> nhgd.Solver:
    """The same by nhgd."""
    theta = torch.nn.Linear(job.train[0].shape[1], 10, bias=False, device=device)
    torch.nn.init.zeros_(theta.weight)
    v = torch.full((len(job.right),), 0.5, device=device)
    return nhgd.Solver(
        nhgd.Bilevel(rival_job.inner, rival_job.outer, theta=theta, v=v, l2=RIDGE, likelihood="categorical"),
        nhgd.Data(*job.train, batch=BATCH, device=device),
        nhgd.Data(*job.trusted, device=device),
        method=method,
        inner_steps=INNER_STEPS,
        inner_lr=RATE,
        outer_lr=SIZE,
        outer_optimizer=torch.optim.SGD,
        project_v=(0, 1),
        compile=compile,
    )


def clock(device: torch.device) -> float:
    """CPU time, or on a device the time when its work is done."""
    if device.type == "cpu":
        return time.process_time()
    synchronise(device)
    return time.perf_counter()


def taken(runs: dict[str, Any], device: torch.device, blocks: int, block: int) -> dict[str, list[float]]:
    """Milliseconds of an outer step, in blocks that take turns."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(blocks):
        for name, run in runs.items():
            started = clock(device)
            if isinstance(run, nhgd.Solver):
                run.run(steps=block, progress=False)
            else:
                for _ in range(block):
                    run.step()
            found[name].append(1e3 * (clock(device) - started) / block)
    return found


def counted(run: Any, device: torch.device, steps: int = 4) -> dict[str, float]:
    """Launches and synchronisations of an outer step."""
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=kinds) as seen:
        for _ in range(steps):
            run.step()
        synchronise(device)
    counts = {event.key: event.count for event in seen.key_averages()}
    if device.type == "cuda":
        launched = sum(counts.get(name, 0) for name in LAUNCHES)
    else:
        launched = sum(count for name, count in counts.items() if name.startswith("aten::"))
    return {"launches": launched / steps, "synchronisations": sum(counts.get(name, 0) for name in WAITS) / steps}


def parts(job: Job, device: torch.device, times: int) -> dict[str, dict[str, float]]:
    """The parts of the loop alone, with the bytes and multiplications they cannot do without."""
    by_hand = ByHand(job, device, slices=False)
    x, _, index = by_hand.batch()
    many, classes = by_hand.outer[0], 10
    columns, parameters = x.shape[1], 10 * x.shape[1]
    score, far = (torch.randn(len(t), classes, device=device) for t in (x, many))
    w = by_hand.w.detach()
    works: dict[str, tuple[Callable[[], Any], float, float, int]] = {
        "gather": (lambda: by_hand.x.index_select(0, index), 8 * x.numel(), 0, INNER_STEPS),
        "forward": (lambda: F.linear(x, w), 4 * (x.numel() + parameters), x.numel() * classes, INNER_STEPS),
        "softmax": (lambda: F.log_softmax(score, 1), 8 * score.numel(), score.numel(), 2 * INNER_STEPS),
        "backward": (lambda: score.T @ x, 4 * (x.numel() + parameters), x.numel() * classes, INNER_STEPS),
        "inner step": (lambda: w.add(w, alpha=-RATE), 12 * parameters, parameters, INNER_STEPS),
        "outer forward": (lambda: F.linear(many, w), 4 * (many.numel() + parameters), many.numel() * classes, 1),
        "outer backward": (lambda: far.T @ many, 4 * (many.numel() + parameters), many.numel() * classes, 1),
        "cross": (lambda: (F.linear(x, w) * score).sum(1), 4 * x.numel(), x.numel() * classes, 1),
        "step of v": (lambda: by_hand.v.detach().add(1.0).clamp_(0, 1), 16 * len(job.right), 2 * len(job.right), 1),
    }
    assert columns == w.shape[1]
    found = {}
    for name, (work, size, operations, count) in works.items():
        for _ in range(3):
            work()
        spent = []
        for _ in range(times):
            started = clock(device)
            work()
            spent.append(1e3 * (clock(device) - started))
        found[name] = {"milliseconds": median(spent), "times": count, "bytes": size, "operations": operations}
    return found


def bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy of 256 MiB moves, reads and writes."""
    one, two = (torch.zeros(2**26, device=device) for _ in range(2))
    spent = []
    for _ in range(8):
        started = clock(device)
        two.copy_(one)
        spent.append(clock(device) - started)
    return 2 * one.numel() * 4 / median(spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--data", type=Path, required=True, help="a folder with the IDX files of MNIST, or one above it"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--first", type=int, default=150, help="outer steps before the clock starts")
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--block", type=int, default=5, help="outer steps of one way before the next has its turn")
    given = parser.parse_args()
    device = torch.device(given.device)
    warnings.simplefilter("ignore")
    job = rival_job.load(given.data, 0)
    runs: dict[str, Any] = {
        name: ByHand(job, device, slices) for name, slices in (("gathers", False), ("slices", True))
    }
    for name, method in WAYS.items():
        for compile in (False, "graph"):
            runs[name + (", captured" if compile else "")] = solver(job, method, device, compile)
    for run in runs.values():
        if isinstance(run, nhgd.Solver):
            run.run(steps=given.first if run._captured.mode else 5, progress=False)
        else:
            run.step()
    spent = taken(runs, device, given.blocks, given.block)
    unit = median(spent["gathers"])
    rows = {}
    for name, run in runs.items():
        rows[name] = {
            "milliseconds": sum(spent[name]) / len(spent[name]),
            "median_milliseconds": median(spent[name]),
            "ratio": sum(spent[name]) / sum(spent["gathers"]),
            "median_ratio": median(spent[name]) / unit,
            **counted(run, device),
        }
        if isinstance(run, nhgd.Solver):
            rows[name]["compile"] = run.solution().stats["compile"]
        print(f"{name:28} {rows[name]['milliseconds']:8.3f} ms {rows[name]['ratio']:.3f}", flush=True)
    result = {
        "environment": environment(device),
        "settings": {"first": given.first, "blocks": given.blocks, "block": given.block},
        "copy_bytes_per_second": bandwidth(device),
        "parts": parts(job, device, 30),
        "ways": rows,
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if torch.get_num_threads() > 1 and not torch.cuda.is_available():
        torch.set_num_threads(1)
    main()
