"""Every inverse on MNIST label cleaning: its error against the exact hypergradient, and the time of an outer step.

    python -m benchmarks.cleaning_inverses DATA_DIR benchmarks/results/cleaning-inverses-NAME.json [--device cuda]

50,000 training samples, half of them given a random class, one weight a sample, a softmax classifier with bias
(D = 7,850), lambda = 1e-4, standardised pixels. The inner problem is solved by L-BFGS. Errors are in float64, with learnt
inverses taught by ten batches of 1,024 and products over all data. Times of outer steps (ten inner steps of 1,024, products
on one batch) are in float32: medians with synchronised clocks after a warm-up, all methods in one process.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import nhgd
from benchmarks.environment import environment
from nhgd._memory import synchronise
from nhgd.algorithm import AID, NHGD
from nhgd.inverse import EKFAC, KFAC, FisherDense, FisherDiagonal, FisherWindow, refined, resolve
from nhgd.task import Cleaning

LITERAL = FisherDense(form="inverse", update="ema", beta=0.8, records="raw", warm="reset")


def inverses(device: torch.device) -> dict[str, Any]:
    named = {
        "identity": resolve("identity"),
        "neumann, 10": resolve("neumann-10"),
        "neumann, 40": resolve("neumann-40"),
        "cg, 10": resolve("cg-10"),
        "cg, 40": resolve("cg-40"),
        "fisher_diagonal": FisherDiagonal(beta=None),
        "fisher_window, 10,240 samples, damping 0.01": FisherWindow(window=10_240, damping=0.01),
        "kfac": KFAC(beta=None),
        "ekfac": EKFAC(beta=None),
        "kfac, exact Fisher": KFAC(beta=None, fisher="exact"),
        "refined(kfac, 1)": refined(KFAC(beta=None), 1),
        "refined(kfac, 3)": refined(KFAC(beta=None), 3),
        "refined(kfac, 5)": refined(KFAC(beta=None), 5),
        "refined(kfac, 10)": refined(KFAC(beta=None), 10),
    }
    if device.type == "cuda":  # A alone takes half a gigabyte and a second for each inner step on two cores
        named = {"identity": named.pop("identity"), "the paper's literal update": LITERAL} | named
    return named


def errors(device: torch.device, data: str, weights: str) -> dict[str, Any]:
    instance = Cleaning.preset("paper").with_settings({"dtype": "float64"}).build(0, device, data)
    sets, v = instance.sets, instance.problem.v.given
    if weights == "near the truth":
        v.copy_(torch.where(sets.wrong, 0.05, 0.95))
    norm = instance.solve_inner()
    torch.manual_seed(0)
    training_batches = list(islice(instance.inner_data, 10))
    chosen = inverses(device)
    report = nhgd.check(
        instance.problem, instance.full_inner, instance.full_outer, list(chosen.values()), learn_from=training_batches
    )
    rows = [row | {"inverse": name} for row, name in zip(report.rows, chosen, strict=True)]
    for row in rows:
        print(
            f"{weights:>15} {row['inverse']:<45}",
            row["error"] or f"{row['cosine']:.4f} {row['relative_error']:.3g} {row['hvps']}",
            flush=True,
        )
    print(report.reference, report.advice, flush=True)
    return {
        "weights": weights,
        "inner_gradient": norm,
        "reference": report.reference,
        "fisher_distance": report.fisher_distance,
        "fisher_residual": report.fisher_residual,
        "rows": rows,
    }


def cost(device: torch.device, data: str, repeats: int) -> list[dict[str, Any]]:
    methods: dict[str, Any] = {
        "aid-identity (floor)": AID(resolve("identity")),
        "nhgd (kfac)": NHGD(),
        "nhgd (kfac, factors every 5th step)": NHGD(KFAC(factor_every=5)),
        "nhgd-refined (5)": NHGD(refine=5),
        "nhgd-window (1,024)": NHGD(FisherWindow()),
        "aid-cg (10)": AID(resolve("cg-10"), warm_solve=False),
        "aid-cg (40)": AID(resolve("cg-40"), warm_solve=False),
        "aid-neumann (10, phi given)": AID(nhgd.inverse.Neumann(10, phi=0.01)),
        "aid-neumann (40, phi given)": AID(nhgd.inverse.Neumann(40, phi=0.01)),
    }
    if device.type == "cuda":
        methods["nhgd-paper"] = NHGD(LITERAL)
    solvers = {}
    for name, method in methods.items():
        instance = Cleaning.preset("paper").build(0, device, data)
        solvers[name] = nhgd.Solver(
            instance.problem, instance.inner_data, instance.outer_data, method=method, **instance.solver_settings()
        )
        solvers[name].run(steps=3)
    times: dict[str, list[float]] = {name: [] for name in solvers}
    for _ in range(repeats):  # in turn, so that a slow moment of the machine meets all of them
        for name, solver in solvers.items():
            synchronise(device)
            started = time.perf_counter()
            solver.step()
            synchronise(device)
            times[name].append(time.perf_counter() - started)
    rows = []
    floor = None
    for name, found in times.items():
        ordered = sorted(found)
        median = ordered[len(ordered) // 2]
        floor = floor or median
        rows.append(
            {
                "method": name,
                "milliseconds": 1e3 * median,
                "tenth": 1e3 * ordered[len(ordered) // 10],
                "ninetieth": 1e3 * ordered[9 * len(ordered) // 10],
                "ratio": median / floor,
            }
        )
        print(f"{name:<40} {1e3 * median:8.2f} ms  x {median / floor:.2f}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=31)
    options = parser.parse_args()
    device = torch.device(options.device)
    result = {
        "command": f"python -m benchmarks.cleaning_inverses DATA_DIR OUT --device {options.device} --repeats {options.repeats}",
        "environment": environment(device),
        "cost": cost(device, options.data, options.repeats),
        "errors": [errors(device, options.data, weights) for weights in ("all 0.5", "near the truth")],
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
