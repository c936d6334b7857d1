"""Small problems are computed on one thread, and nobody's number of threads is left changed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import nhgd
from nhgd import _threads as threads
from nhgd._cost import largest
from nhgd.checkpoint import SavedCheckpoint
from nhgd.inverse.base import Learned
from tests import catalogue

SEVERAL = 3


@pytest.fixture
def by_default(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Several threads, as if torch had chosen them by itself."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "_FIRST", SEVERAL)
    monkeypatch.setattr(threads, "_usual", lambda: {SEVERAL})
    before = torch.get_num_threads()
    torch.set_num_threads(SEVERAL)
    yield
    torch.set_num_threads(before)


def watched(samples: int = 6) -> tuple[nhgd.Bilevel, list[Tensor], list[int]]:
    """A problem that notes how many threads it is computed on."""
    seen: list[int] = []

    def inner(theta: Tensor, v: Tensor, x: Tensor) -> Tensor:
        seen.append(torch.get_num_threads())
        return (x @ theta - v).square().sum(1)

    theta, v = (torch.zeros(3, 2, dtype=torch.float64), torch.ones(2, dtype=torch.float64))
    torch.manual_seed(0)
    x = torch.randn(samples, 3, dtype=torch.float64)
    return nhgd.Bilevel(inner, lambda theta, v, x: (theta - 1).square().sum() + v.sum(), theta, v, l2=0.1), [x], seen


@pytest.mark.usefixtures("by_default")
@pytest.mark.parametrize("method", ["nhgd", "aid-cg", "soba"])
def test_the_steps_of_a_small_problem_run_on_one_thread_and_the_number_is_put_back(method: str) -> None:
    problem, data, seen = watched()
    noted: list[int] = []

    def metrics(theta: Any, v: Any) -> dict[str, float]:
        noted.append(torch.get_num_threads())
        return {}

    solver = nhgd.Solver(problem, data, data, method=method, metrics=metrics)
    seen.clear()
    for _ in zip(range(2), solver, strict=False):
        assert torch.get_num_threads() == SEVERAL
    assert set(seen) == set(noted) == {1}
    solution = solver.run(steps=1)
    assert solution.stats["threads"] == 1
    assert torch.get_num_threads() == SEVERAL


@pytest.mark.usefixtures("by_default")
def test_a_number_that_is_said_between_two_steps_is_kept_to_from_then_on() -> None:
    problem, data, seen = watched()
    solver = nhgd.Solver(problem, data, data, method="aid-cg")
    solver.step()
    assert seen[-1] == 1
    torch.set_num_threads(2)
    seen.clear()
    solver.step()
    assert set(seen) == {2}
    assert solver.solution().stats["threads"] == 2


@pytest.mark.usefixtures("by_default")
def test_the_number_is_put_back_after_an_error() -> None:
    problem, data, seen = watched()
    solver = nhgd.Solver(problem, data, data, method="aid-cg", inner_lr=1e200)
    with pytest.raises(nhgd.NhgdError):
        solver.run(steps=5)
    assert seen[-1] == 1
    assert torch.get_num_threads() == SEVERAL


@pytest.mark.usefixtures("by_default")
def test_a_large_problem_keeps_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, data, seen = watched()
    monkeypatch.setattr(threads, "SMALL", 10.0)
    solution = nhgd.Solver(problem, data, data, method="aid-cg").run(steps=1)
    assert set(seen) == {SEVERAL}
    assert solution.stats["threads"] == SEVERAL


@pytest.mark.usefixtures("by_default")
@pytest.mark.parametrize("said", ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "set_num_threads"])
def test_a_number_that_somebody_has_said_is_kept_to(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, data, seen = watched()
    expected = SEVERAL
    if said == "set_num_threads":
        expected = 2
        torch.set_num_threads(2)
    else:
        monkeypatch.setenv(said, str(SEVERAL))
    solution = nhgd.Solver(problem, data, data, method="aid-cg").run(steps=1)
    nhgd.hypergradient(problem, data[0], data[0])
    assert set(seen) == {expected}
    assert solution.stats["threads"] == expected


def test_the_number_that_torch_chooses_by_itself_is_told_from_a_choice() -> None:
    """In a process of its own, because the environment counts when torch is imported."""
    program = """
import os, sys, torch
if sys.argv[1] != "before":
    import nhgd
    from nhgd import _threads as threads
if sys.argv[1] != "nothing":
    torch.set_num_threads(1 + torch.get_num_threads())
import nhgd
from nhgd import _threads as threads
print(threads.are_chosen())
"""
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    for when, expected in (("nothing", "False"), ("before", "True"), ("after", "True")):
        found = subprocess.run(
            [sys.executable, "-c", program, when], env=environment, capture_output=True, text=True, check=True
        )
        assert found.stdout.split() == [expected], when


@pytest.mark.usefixtures("by_default")
def test_hypergradient_check_and_plan_take_one_thread_too() -> None:
    problem, (x,), seen = watched()
    for call in (
        lambda: nhgd.hypergradient(problem, x, x),
        lambda: nhgd.check(problem, x, x, inverses=["cg", "fisher_window"]),
        lambda: nhgd.plan(problem, inner_batch=x, inverses=["cg"]),
    ):
        seen.clear()
        call()
        assert seen[-1] == 1
        assert torch.get_num_threads() == SEVERAL


class Watching(Learned[None]):
    """Notes on how many threads a record is folded in, and in which thread."""

    name = "watching"
    records = "batch"

    def __init__(self, seen: list[tuple[int, str]]) -> None:
        object.__setattr__(self, "seen", seen)

    def init(self, theta: Any) -> None:
        return None

    def observe(self, state: None, record: Any) -> None:
        self.seen.append((torch.get_num_threads(), threading.current_thread().name))  # type: ignore[attr-defined]

    def solve(self, state: None, u: Tensor, ridge: Any) -> Any:
        return u, nhgd.inverse.SolveStats(None, 0, True)


@pytest.mark.usefixtures("by_default")
@pytest.mark.parametrize("execution", ["inline", "thread"])
def test_curvature_is_kept_on_as_many_threads_as_the_steps(execution: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for small, expected in ((threads.SMALL, 1), (1.0, SEVERAL)):
        monkeypatch.setattr(threads, "SMALL", small)
        problem, data, _ = watched()
        folded: list[tuple[int, str]] = []
        solver = nhgd.Solver(problem, data, data, nhgd.algorithm.AID(inverse=Watching(folded)), execution=execution)
        solver.run(steps=2)
        solver.close()
        assert {count for count, _ in folded} == {expected}
        assert ({name for _, name in folded} == {"nhgd curvature"}) == (execution == "thread")
        assert torch.get_num_threads() == SEVERAL


@pytest.mark.usefixtures("by_default")
def test_a_checkpoint_tells_the_threads_of_the_steps_and_a_resumed_run_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, data, _ = watched()
    whole, *_ = watched()
    expected = nhgd.Solver(whole, data, data, method="aid-cg").run(steps=4)
    nhgd.Solver(problem, data, data, method="aid-cg", checkpoint=tmp_path / "a").run(steps=2)
    assert SavedCheckpoint(tmp_path / "a").document["threads"] == 1
    monkeypatch.setattr(threads, "SMALL", 0.0)  # its first batch would not be called small any more
    again, _, seen = watched()
    solver = nhgd.Solver.resume(tmp_path / "a", again, data, data)  # a warning of other arithmetic would be an error
    seen.clear()
    found = solver.run(steps=4)
    assert set(seen) == {1}
    assert found.stats["threads"] == 1
    assert torch.equal(found.v, expected.v)


@pytest.mark.usefixtures("by_default")
def test_a_resumed_run_says_so_when_its_threads_are_other_ones(tmp_path: Path) -> None:
    problem, data, _ = watched()
    nhgd.Solver(problem, data, data, method="aid-cg", checkpoint=tmp_path / "a").run(steps=2)
    torch.set_num_threads(2)
    with pytest.warns(UserWarning, match=r"1 thread\(s\); now it is .* and 2"):
        nhgd.Solver.resume(tmp_path / "a", watched()[0], data, data)


def test_the_largest_operation_is_told_by_shapes() -> None:
    a, b = torch.ones(100, 200), torch.ones(200, 300)
    with threads.LargestOperation() as found:
        assert (a @ b.mT.mT + 1).shape == (100, 300)
    assert found.flops == 2 * 100 * 200 * 300
    with threads.LargestOperation() as found:
        a.sum()
    assert found.flops == threads.PER_NUMBER * (100 * 200 + 1)
    with threads.LargestOperation() as found:
        torch.nn.functional.conv2d(torch.ones(8, 3, 20, 20), torch.ones(16, 3, 5, 5))
    assert found.flops == 2 * 8 * 16 * 16 * 16 * 3 * 25


def test_the_work_of_an_inverse_makes_a_problem_large() -> None:
    theta = catalogue.mlp_module()[0].theta
    assert largest(None, theta, 64) == largest(nhgd.inverse.Identity(), theta, 64) == 0
    wide = nhgd.Bilevel(
        lambda m, v, x: m(x).square().sum(1),
        lambda m, v, x: v,
        torch.nn.Linear(784, 10),
        torch.zeros(()),
    ).theta
    assert largest(nhgd.inverse.KFAC(), wide, 1000, steps=10) > threads.SMALL > largest(nhgd.inverse.CG(), wide, 1000)
