"""The exam every executor takes: its run is the inline one bit for bit, in its state too, and its faults are told."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import nhgd
from nhgd.algorithm import NHGD
from nhgd.errors import NhgdError
from nhgd.inverse import KFAC
from tests import catalogue
from tests.catalogue import ExecutorCase
from tests.processes import together

INLINE, MAX_LAG = catalogue.EXECUTORS[0], 2
HERE = {case.name: case for case in catalogue.EXECUTORS}
CASES = pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=case.name,
            marks=[]
            if case.device == "cpu"
            else [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
        )
        for case in catalogue.EXECUTORS
    ],
)


def made(device: str) -> tuple[nhgd.Bilevel, nhgd.Data, list[Any]]:
    """A small classifier with one weight a sample."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double().to(device)
        (x, y), (a, b) = catalogue.classes(12, 5), catalogue.classes(8, 5)
    v = torch.zeros(12, dtype=torch.float64, device=device)
    problem = nhgd.Bilevel(catalogue.cross_entropy, catalogue.mean_cross_entropy, net, v, l2=0.02)
    return problem, nhgd.Data(x.to(device), y.to(device), batch=4), [(a.to(device), b.to(device))]


def solver_of(case: ExecutorCase, device: str, **settings: Any) -> nhgd.Solver:
    """A run of NHGD with K-FAC, whose records are many enough to be outstanding."""
    executor = case.make(max_lag=MAX_LAG) if case.make().background else case.make()
    chosen = {"inner_steps": 5, "inner_lr": 0.1, "outer_lr": 1.0} | settings
    return nhgd.Solver(*made(device), method=NHGD(KFAC()), execution=executor, **chosen)


def facts(solver: nhgd.Solver, solution: nhgd.Solution, place: Path) -> dict[str, Any]:
    """All tensors of its last checkpoint, with the state of the inverse among them, and the lags of its history."""
    newest = max(place.glob("checkpoint-*"))
    lags = [row["largest_lag"] for row in solution.history]
    return {"tensors": {k: t.numpy() for k, t in load_file(newest / "tensors.safetensors").items()}, "lags": lags}


@contextmanager
def failing_observe(after: int) -> Iterator[None]:
    """Inside, K-FAC refuses a record once it has seen so many."""
    observe, seen = KFAC.observe, []

    def refuse(self: KFAC, *given: Any) -> Any:
        seen.append(1)
        if len(seen) > after:
            raise nhgd.InputError("the factor is singular")
        return observe(self, *given)

    KFAC.observe = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        KFAC.observe = observe  # type: ignore[method-assign]


def exam(rank: int, size: int, name: str, device: str, folder: str) -> dict[str, Any]:
    """What each process of an executor sees; files are written by the one that leads."""
    case, place = HERE[name], Path(folder)
    found: dict[str, Any] = {}
    solver = solver_of(case, device, checkpoint=place / "run")
    solution = solver.run(steps=2)
    solver.close()
    solver.close()
    found["run"] = facts(solver, solution, place / "run")
    resumed = nhgd.Solver.resume(place / "inline", *made(device), execution=case.make(), checkpoint=place / "resumed")
    found["resumed"] = facts(resumed, resumed.run(steps=4), place / "resumed")
    resumed.close()
    with failing_observe(after=7):
        broken = solver_of(case, device)
        try:
            broken.run(steps=4)
        except NhgdError as error:
            found["error"], found["steps"] = str(error), len(broken.history)
        broken.close()
    return found


@cache
def answers(name: str, device: str) -> list[dict[str, Any]]:
    """The exam of each process."""
    case = HERE[name]
    with tempfile.TemporaryDirectory() as folder:
        kept = solver_of(INLINE, device, checkpoint=Path(folder) / "inline")
        kept.run(steps=2)
        kept.close()
        if case.processes == 1:
            return [exam(0, 1, name, device, folder)]
        return together(exam, case.processes, name, device, folder)


@cache
def unbroken(device: str, steps: int) -> dict[str, Any]:
    """The tensors of the inline run."""
    with tempfile.TemporaryDirectory() as folder:
        solver = solver_of(INLINE, device, checkpoint=folder)
        found = facts(solver, solver.run(steps=steps), Path(folder))
        solver.close()
    return found["tensors"]


def same(found: dict[str, Any], expected: dict[str, Any], case: ExecutorCase) -> bool:
    if found.keys() != expected.keys():
        return False
    if case.same_arithmetic:
        return all((found[key] == expected[key]).all() for key in found)
    return all(np.allclose(found[key], expected[key], rtol=1e-10, atol=1e-12) for key in found)


@CASES
def test_the_run_and_the_drained_state_are_those_of_inline_bit_for_bit(case):
    for answer in answers(case.name, case.device):
        assert same(answer["run"]["tensors"], unbroken(case.device, 2), case)
    assert any("inverse" in key or "curvature" in key for key in unbroken(case.device, 2)), "no state was compared"


@CASES
def test_a_kept_state_is_restored(case):
    for answer in answers(case.name, case.device):
        assert same(answer["resumed"]["tensors"], unbroken(case.device, 4), case)


@CASES
def test_the_lag_is_bounded(case):
    for answer in answers(case.name, case.device):
        assert max(answer["run"]["lags"]) <= (MAX_LAG if case.make().background else 0)


@CASES
def test_what_fails_behind_the_inner_loop_is_raised_in_it(case):
    found = answers(case.name, case.device)
    assert all("the factor is singular" in answer["error"] for answer in found)
    assert found[0]["steps"] == 1  # five records of the first outer step, two of the second
