"""What a second CUDA stream gains: an outer step inline, and with curvature on a side stream.

    python -m benchmarks.streams benchmarks/results/streams-NAME.json

Synthetic data of MNIST's size. For each case, in one process and in turn, medians with a synchronised device after a
warm-up:

    inner      one outer step whose records are made and thrown away, with the identity as its inverse
    curvature  the records of one outer step folded in and one system solved, nothing else running
    inline     one outer step as it is
    stream     one outer step with the records folded in on the side stream

`ratio` is stream over the larger of inner and curvature: 1 is perfect overlap. `busy` is the share of the time for which each by
itself keeps the card busy, from the profiler's kernel times. Where the two add up to more than 1 there is no room for both, and
their sum, the `floor` of the ratio, is the best that overlap can reach.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import nhgd
from benchmarks.environment import environment
from nhgd._recording.recorder import Recorder
from nhgd.algorithm import NHGD
from nhgd.execution import AbstractExecutor, Inline, Stream
from nhgd.inverse import KFAC, AbstractInverse, FisherDense, Identity, Learned
from nhgd.inverse.capabilities import begun
from nhgd.oracle import Oracle

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


def quartiles(found: list[float]) -> list[float]:
    ranked = sorted(found)
    return [ranked[len(ranked) // 4], ranked[3 * len(ranked) // 4]]


def outer_step(
    make: Callable[[], Any], inverse: AbstractInverse, executor: AbstractExecutor, batch: int, steps: int
) -> nhgd.Solver:
    """A run of which one outer step is timed after another."""
    bilevel, data, outer = make()
    return nhgd.Solver(
        bilevel,
        nhgd.Data(*data, batch=batch),
        [outer],
        method=NHGD(inverse),
        inner_steps=steps,
        inner_lr=1e-3,
        outer_lr=1e-3,
        execution=executor,
    )


class Alone:
    """The curvature of one outer step after another, with nothing beside it."""

    def __init__(self, make: Callable[[], Any], inverse: Learned[Any], batch: int, steps: int) -> None:
        self.bilevel, data, _ = make()
        self.inverse, self.steps = inverse, steps
        self.recorder = Recorder(self.bilevel, inverse.records, inverse.fisher)
        self.batches = cycle(list(islice(nhgd.Data(*data, batch=batch), 20_000 // batch)))
        self.state = inverse.init(self.bilevel.theta)
        self.u = torch.randn_like(self.bilevel.theta.flat())
        self.ridge = Oracle(self.bilevel, [None]).ridge

    def prepare(self) -> None:
        # Anew each time, because a record keeps what was computed from it; and from many batches, because factors of low
        # rank are decomposed faster than those of a run.
        self.records = [self.recorder.step(next(self.batches)).record for _ in range(self.steps)]

    def step(self) -> None:
        self.state = begun(self.inverse, self.state)
        for record in self.records:
            assert record is not None
            self.state = self.inverse.observe(self.state, record)
        self.inverse.solve(self.state, self.u, self.ridge)


def busy(work: Callable[[], Any]) -> float:
    """The seconds for which at least one kernel of the work runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end) for event in profile.events() if event.device_type.name == "CUDA"
    )
    total, last = 0.0, 0.0
    for start, end in spans:
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total / 1e6


def measure(name: str, widths: list[int], inverse: Learned[Any], batch: int, steps: int, times: int) -> dict[str, Any]:
    def make() -> Any:
        return problem(widths)

    curvature = Alone(make, inverse, batch, steps)
    parameters = curvature.bilevel.theta.numel
    runs: dict[str, Any] = {
        "inner": outer_step(make, inverse, Discarding(), batch, steps),
        "curvature": curvature,
        "inline": outer_step(make, inverse, Inline(), batch, steps),
        "stream": outer_step(make, inverse, Stream(), batch, steps),
    }
    found: dict[str, list[float]] = {key: [] for key in runs}
    # One of each in turn, because the speed of the host drifts by more than what is to be seen.
    for index in range(times + 8):  # the first ones make graphs
        for key, run in runs.items():
            curvature.prepare()
            torch.cuda.synchronize()
            began = time.perf_counter()
            run.step()
            torch.cuda.synchronize()
            if index >= 8:
                found[key].append(time.perf_counter() - began)
    times_of = {key: median(seconds) for key, seconds in found.items()}
    shares = {}
    for key, run in runs.items():
        curvature.prepare()
        shares[key] = busy(run.step) / times_of[key]
    last = runs["stream"].history[-1]
    for key in ("inner", "inline", "stream"):
        runs[key].close()
    larger = max(times_of["inner"], times_of["curvature"])
    both = sum(shares[key] * times_of[key] for key in ("inner", "curvature"))
    row = {
        "case": name,
        "parameters": parameters,
        "batch": batch,
        "inner_steps": steps,
        "inverse": repr(inverse),
        "rounds": times,
        "milliseconds": {key: 1e3 * seconds for key, seconds in times_of.items()},
        "milliseconds_quartiles": {key: [1e3 * q for q in quartiles(seconds)] for key, seconds in found.items()},
        "busy": shares,
        "ratio": times_of["stream"] / larger,
        "ratio_quartiles": quartiles(
            [s / max(i, c) for s, i, c in zip(found["stream"], found["inner"], found["curvature"], strict=True)]
        ),
        "floor": max(1.0, both / larger),
        "speedup_over_inline": times_of["inline"] / times_of["stream"],
        "last_step": {
            key: last[key]
            for key in ("inner_seconds", "curvature_seconds", "waited_seconds", "overlap", "lag", "bytes_sent")
        },
    }
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--times", type=int, default=15, help="rounds; of the shortest case five times as many, of long ones a third"
    )
    parser.add_argument("--cases", type=int, nargs="*", help="numbers of the cases to run, from 0; default: all")
    given = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    softmax, mlp = [784, 10], [784, 2048, 2048, 2048, 10]
    literal = FisherDense(form="inverse", update="ema", beta=0.8, records="raw", warm="reset")
    rows: list[dict[str, Any]] = []
    cases = [
        ("dense, the paper's rank-one update", softmax, literal, 1024, 5 * given.times),
        ("dense, inverse form, per-sample rows", softmax, FisherDense(form="inverse", warm="reset"), 1024, given.times),
        ("dense, matrix form, per-sample rows", softmax, FisherDense(), 1024, given.times),
        ("dense, matrix form, per-sample rows, batch 256", softmax, FisherDense(), 256, given.times),
        (
            "K-FAC, MLP, bases beside the loop, batch 256",
            mlp,
            KFAC(invert_every=10, invert_phase=1),
            256,
            max(9, given.times // 3),
        ),
        (
            "K-FAC, MLP, bases beside the loop",
            mlp,
            KFAC(invert_every=10, invert_phase=1),
            1024,
            max(9, given.times // 3),
        ),
        (
            "K-FAC, MLP, bases beside the loop, batch 8192",
            mlp,
            KFAC(invert_every=10, invert_phase=1),
            8192,
            max(9, given.times // 3),
        ),
        ("K-FAC, MLP, Cholesky at the solve", mlp, KFAC(solver="cholesky"), 1024, given.times),
        ("K-FAC, MLP, Cholesky at the solve, batch 8192", mlp, KFAC(solver="cholesky"), 8192, given.times),
    ]
    for index in given.cases or range(len(cases)):
        name, widths, inverse, batch, times = cases[index]
        try:
            rows.append(measure(name, widths, inverse, batch, 10, times))
        except Exception as error:  # one case that fails must not lose the others
            rows.append({"case": name, "error": f"{type(error).__name__}: {error}"})
            print(rows[-1], flush=True)
        given.out.write_text(json.dumps({"environment": environment(DEVICE), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
