"""A default device that the caller has set is for the user's functions, not for the library's own numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import nhgd
from nhgd._surroundings import library_settings, user_settings
from tests.catalogue import mlp_module

META = torch.device("meta")  # holds no numbers: whatever is made there by mistake cannot be used


def watched() -> tuple[nhgd.Bilevel, Any, Any, set[str]]:
    """A problem that notes the default device that its functions see."""
    problem, (x, y, _), outer_batch = mlp_module()
    seen: set[str] = set()
    inner, outer = problem.inner, problem.outer

    def noted(function: Any) -> Any:
        def asking(*given: Any) -> Any:
            seen.add(torch.empty(0).device.type)
            with torch.device("cpu"):
                return function(*given)

        return asking

    problem.inner, problem.outer = noted(inner), noted(outer)
    return problem, nhgd.Data(x, y, batch=4), outer_batch, seen


def made_on_the_cpu() -> tuple[nhgd.Bilevel, Any, Any, set[str]]:
    with torch.device("cpu"):
        return watched()


@pytest.mark.parametrize("method", ["nhgd", "nhgd-window", "aid-cg", "aid-exact", "itd", "saba", "vrbo"])
@pytest.mark.filterwarnings("ignore::nhgd.InverseWarning")
def test_a_run_is_the_same_and_the_users_functions_see_their_device(method: str) -> None:
    histories = []
    for device in ("cpu", META):
        with torch.device(device):
            problem, inner, outer, seen = made_on_the_cpu()
            solver = nhgd.Solver(problem, inner, [outer], method=method, inner_steps=3)
            histories.append([row["hypergradient_norm"] for row in (solver.step(), solver.step())])
            assert seen == {torch.device(device).type}
    assert histories[0] == histories[1]


def test_single_questions_are_answered_too() -> None:
    problem, inner, outer, _ = made_on_the_cpu()
    batch = next(iter(inner))
    expected = nhgd.hypergradient(problem, batch, outer, inverse="kfac").stats.residual
    with META:
        assert nhgd.hypergradient(problem, batch, outer, inverse="kfac").stats.residual == expected
        assert len(nhgd.check(problem, batch, outer, inverses=["kfac", "exact"]).rows) == 2
        assert len(nhgd.plan(problem, batch, inverses=["kfac", "cg"]).rows) == 2


def test_data_stays_where_it_is() -> None:
    x = torch.zeros(3, 2)
    with META:
        assert nhgd.Data(x).tensors[0] is x


def test_the_settings_nest() -> None:
    with META:
        with library_settings():
            assert torch.empty(0).device.type == "cpu"
            with user_settings():
                assert torch.empty(0).device.type == "meta"
                with library_settings():
                    assert torch.empty(0).device.type == "cpu"
            assert torch.empty(0).device.type == "cpu"
        assert torch.empty(0).device.type == "meta"
    with library_settings(), user_settings():
        assert torch.empty(0).device.type == "cpu"
