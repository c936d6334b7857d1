"""A curvature rank for an inner loop on a GPU: over gloo through main memory, and over NCCL.

NCCL refuses two processes on one GPU of one machine, so that they are given out for two machines.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import pytest
import torch

import nhgd
from nhgd.algorithm import NHGD
from nhgd.execution import Distributed
from nhgd.inverse import EKFAC, KFAC, FisherWindow
from tests.processes import together
from tests.test_distributed import BATCH, INNER, STEPS, facts, problem_of, small

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
INVERSES = {"kfac": KFAC(), "ekfac": EKFAC(), "window": FisherWindow(window=24)}


def solved(execution: Any, inverse: Any, device: str) -> dict[str, Any]:
    problem, (x, y, _), (a, b) = problem_of(small)
    moved = nhgd.Bilevel(
        problem.inner, problem.outer, problem.theta.given.to(device), problem.v.given.to(device), l2=0.02
    )
    data = nhgd.Data(x.to(device), y.to(device), batch=BATCH)
    solver = nhgd.Solver(
        moved,
        data,
        [(a.to(device), b.to(device))],
        method=NHGD(inverse),
        execution=execution,
        inner_steps=INNER,
        outer_lr=1.0,
    )
    try:
        found = facts(solver, solver.run(steps=STEPS))
        if isinstance(execution, Distributed):
            found["nccl"] = execution.group.messenger.device_group is not None
        return found
    finally:
        solver.close()


def on_gpu(rank: int, size: int, nccl: bool) -> dict[str, Any]:
    if nccl:
        os.environ |= {"NCCL_HOSTID": f"machine {rank}", "LOCAL_WORLD_SIZE": "1", "NCCL_SOCKET_IFNAME": "lo"}
    else:
        os.environ["LOCAL_WORLD_SIZE"] = "1000"  # never a GPU for each
    found = {name: solved("inline", inverse, "cuda") for name, inverse in INVERSES.items()}
    for lag in (0, 3):
        found |= {f"{name} {lag}": solved(Distributed(max_lag=lag), i, "cuda") for name, i in INVERSES.items()}
    return found


@cache
def answers(nccl: bool) -> list[dict[str, Any]]:
    return together(on_gpu, 2, nccl, limit=150)


@pytest.mark.parametrize("name", [f"{name} {lag}" for name in INVERSES for lag in (0, 3)])
@pytest.mark.parametrize("nccl", [False, True], ids=["gloo", "nccl"])
def test_a_curvature_rank_of_a_gpu_gives_the_inline_run_of_that_gpu(name: str, nccl: bool) -> None:
    for found in answers(nccl):
        expected = found[name.split()[0]]
        assert found[name]["nccl"] == nccl
        for key in ("v", "theta"):
            torch.testing.assert_close(
                torch.tensor(found[name][key]), torch.tensor(expected[key]), rtol=1e-12, atol=1e-12
            )
