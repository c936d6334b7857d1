"""What a second CUDA stream is worth: an outer step inline and with curvature on a side stream.

    python -m benchmarks.streams benchmarks/results/streams-NAME.json

Synthetic data of MNIST's size. For each case, in one process, medians with a synchronised device after a warm-up:

    inner      one outer step whose records are made and thrown away, with the identity in place of the inverse
    curvature  the records of one outer step folded in and one system solved, nothing else running
    inline     one outer step as it is
    stream     one outer step with the records folded in on the side stream

`ratio` is stream over the larger of inner and curvature: 1 would be perfect overlap. `busy` is the part of the time for
which each by itself keeps the card busy, from the profiler's kernel times: where the two add up to more than 1 there is no
room for both, and their sum, as `floor` of the ratio, is what overlap can reach.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import nhgd
from benchmarks.environment import environment
from nhgd.algorithm import NHGD
from nhgd.execution import AbstractExecutor, Inline, Stream
from nhgd.execution.elsewhere import solve_there
from nhgd.inverse import KFAC, AbstractInverse, FisherDense, Identity
from nhgd.recorder import Recorder

DEVICE = torch.device("cuda")


class Discarding(AbstractExecutor):
    """Takes records and throws them away; the Hessian is taken as the identity."""

    name = "discarding"

    def start(self, inverse: Any, theta: Any, v: Any = None) -> None:
        pass

    def begin(self) -> None:
        pass

    def submit(self, record: Any) -> None:
        pass

    def snapshot(self) -> Any:
        return None, 0

    def restore(self, state: Any) -> None:
        pass

    def drain(self) -> None:
        pass

    def close(self) -> None:
        pass

    @property
    def solving(self) -> AbstractInverse:
        return Identity()


def weighted(model: nn.Module, v: torch.Tensor, batch: Any) -> nhgd.Losses:
    x, y, i = batch
    z = model(x)
    return nhgd.Losses(F.cross_entropy(z, y, reduction="none"), v[i], z)


def trusted(model: nn.Module, v: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def problem(widths: list[int], samples: int = 20_000) -> tuple[nhgd.Bilevel, tuple[torch.Tensor, torch.Tensor], Any]:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    model = nn.Sequential(*layers[:-1]).to(DEVICE)
    x, y = torch.randn(samples, widths[0], device=DEVICE), torch.randint(10, (samples,), device=DEVICE)
    v = torch.full((samples,), 0.5, device=DEVICE)
    return nhgd.Bilevel(weighted, trusted, model, v, l2=1e-4, likelihood="categorical"), (x, y), (x[:1024], y[:1024])


def median(found: list[float]) -> float:
    return sorted(found)[len(found) // 2]


def outer_step(
    make: Callable[[], Any], inverse: AbstractInverse, executor: AbstractExecutor, batch: int, steps: int, times: int
) -> tuple[float, dict[str, Any]]:
    """The median time of an outer step, and how the last one was divided."""
    bilevel, data, outer = make()
    solver = nhgd.Solver(
        bilevel,
        nhgd.Data(*data, batch=batch),
        [outer],
        method=NHGD(inverse),
        inner_steps=steps,
        inner_lr=1e-3,
        outer_lr=1e-3,
        execution=executor,
    )
    found = []
    for index in range(times + 8):  # the first ones make graphs
        torch.cuda.synchronize()
        began = time.perf_counter()
        row = solver.step()
        torch.cuda.synchronize()
        if index >= 8:
            found.append(time.perf_counter() - began)
    _, kernels = busy(solver.step)
    solver.close()
    keys = ("inner_seconds", "curvature_seconds", "waited_seconds", "overlap", "lag", "bytes_sent")
    return median(found), {key: row[key] for key in keys} | {"busy": kernels / median(found)}


def alone(make: Callable[[], Any], inverse: AbstractInverse, batch: int, steps: int, times: int) -> tuple[float, float]:
    """Seconds that the curvature of one outer step takes, and the part of them for which the card is busy."""
    bilevel, data, _ = make()
    recorder = Recorder(bilevel, inverse.records, inverse.fisher)
    batches = cycle(list(islice(nhgd.Data(*data, batch=batch), 20_000 // batch)))
    state = inverse.init(bilevel.theta)
    u = torch.randn_like(bilevel.theta.flat())
    ridge = bilevel.ridge_diagonal()
    found, shares = [], []
    for index in range(times + 3):
        # Anew each time, because a record keeps what was computed from it; and from many batches, because factors of low
        # rank are decomposed faster than those of a run.
        records = [recorder.step(next(batches)).record for _ in range(steps)]

        def work(state: Any, records: Any = records) -> Any:
            state = inverse.begin(state)
            for record in records:
                state = inverse.observe(state, record)
            solve_there(inverse, state, u, ridge)
            return state

        if index == 2:
            state, share = busy(partial(work, state))
            shares.append(share)
            continue
        torch.cuda.synchronize()
        began = time.perf_counter()
        state = work(state)
        torch.cuda.synchronize()
        if index > 2:
            found.append(time.perf_counter() - began)
    return median(found), shares[0] / median(found)


def busy(work: Callable[[], Any]) -> tuple[Any, float]:
    """What the work gives, and the seconds of its kernels."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        result = work()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    total, last = 0.0, 0.0
    for start, end in spans:
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return result, total / 1e6


def measure(
    name: str, widths: list[int], inverse: AbstractInverse, batch: int, steps: int, times: int
) -> dict[str, Any]:
    def make() -> Any:
        return problem(widths)

    parameters = sum(p.numel() for p in make()[0].theta.leaves)
    inner, by_itself = outer_step(make, inverse, Discarding(), batch, steps, times)
    curvature, share = alone(make, inverse, batch, steps, times)
    inline, _ = outer_step(make, inverse, Inline(), batch, steps, times)
    stream, division = outer_step(make, inverse, Stream(), batch, steps, times)
    row = {
        "case": name,
        "parameters": parameters,
        "batch": batch,
        "inner_steps": steps,
        "inverse": repr(inverse),
        "milliseconds": {
            "inner": 1e3 * inner,
            "curvature": 1e3 * curvature,
            "inline": 1e3 * inline,
            "stream": 1e3 * stream,
        },
        "busy": {"inner": by_itself["busy"], "curvature": share, "stream": division["busy"]},
        "ratio": stream / max(inner, curvature),
        "floor": max(1.0, (by_itself["busy"] * inner + share * curvature) / max(inner, curvature)),
        "speedup_over_inline": inline / stream,
        "last_step": division,
    }
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--times", type=int, default=15)
    given = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    softmax, mlp = [784, 10], [784, 2048, 2048, 2048, 10]
    literal = FisherDense(form="inverse", update="ema", beta=0.8, records="raw", warm="reset")
    rows: list[dict[str, Any]] = []
    for name, widths, inverse, batch, times in (
        ("dense, the paper's rank-one update", softmax, literal, 1024, given.times),
        ("dense, matrix form, per-sample rows", softmax, FisherDense(), 1024, given.times),
        ("dense, matrix form, per-sample rows, batch 256", softmax, FisherDense(), 256, given.times),
        ("K-FAC, MLP, bases beside the loop", mlp, KFAC(invert_every=10, invert_phase=1), 1024, 9),
        ("K-FAC, MLP, bases beside the loop, batch 8192", mlp, KFAC(invert_every=10, invert_phase=1), 8192, 9),
        ("K-FAC, MLP, Cholesky at the solve", mlp, KFAC(solver="cholesky"), 1024, given.times),
        ("K-FAC, MLP, Cholesky at the solve, batch 8192", mlp, KFAC(solver="cholesky"), 8192, given.times),
    ):
        try:
            rows.append(measure(name, widths, inverse, batch, 10, times))
        except Exception as error:  # one case that fails must not lose the others
            rows.append({"case": name, "error": f"{type(error).__name__}: {error}"})
            print(rows[-1], flush=True)
        given.out.write_text(json.dumps({"environment": environment(DEVICE), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
