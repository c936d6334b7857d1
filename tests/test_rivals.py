"""The race of libraries: its exact hypergradient, its workers and its table, on a job small enough to be quick."""

from __future__ import annotations

import argparse

import numpy as np
import pytest
import torch

import nhgd
from benchmarks import rival_job, rivals
from tests.idx_files import image_set, write


def test_the_exact_hypergradient_is_that_of_the_implicit_formula(tmp_path):
    exact = rivals.small_problem(tmp_path / "small.npz")
    with np.load(tmp_path / "small.npz") as small:
        arrays = {name: torch.from_numpy(small[name]) for name in small.files}
    theta = torch.nn.Linear(20, 10, bias=False).double()
    theta.weight.data.copy_(arrays["theta"])
    problem = nhgd.Bilevel(rival_job.inner, rival_job.outer, theta=theta, v=arrays["v"], l2=1e-4)
    batches = (arrays["x"], arrays["y"], torch.arange(200)), (arrays["outer_x"], arrays["outer_y"])
    found = nhgd.hypergradient(problem, *batches, inverse="exact").grad
    assert torch.allclose(found, exact, rtol=1e-6, atol=1e-9)


def test_a_race_of_workers_in_turns(tmp_path):
    folder = write(tmp_path / "mnist", image_set(train=5400))
    given = argparse.Namespace(data=folder, environments=tmp_path, block=1, seconds=0.0)
    (run,) = rivals.raced(0, ["by hand"], given, tmp_path)
    assert run["steps"] == 1
    assert run["size"] > 0
    assert 0 <= run["auc"] <= 1
    found = rivals.accuracies(["by hand"], tmp_path, tmp_path)["by hand"]
    assert found["relative_error"] > 0.5  # the identity is no inverse
    assert -1 <= found["cosine"] <= 1


def test_a_target_that_is_not_reached_is_later_than_any_other():
    runs = [{"seconds_to_0.944": value} for value in (1.0, None, 3.0)]
    assert rivals.middle(runs, "seconds_to_0.944") == 3.0
    assert rivals.middle(runs[1:2], "seconds_to_0.944") is None


def test_a_library_that_fails_is_no_row():
    curve = [{"seconds": 1.0, "auc": 0.5, "test_accuracy": 0.1}]
    whole = {"steps": 10, "milliseconds": 100.0, "later_milliseconds": 100.0, "curve": curve, **curve[0]}
    runs = [{"name": "by hand", "seed": 0, **whole}, {"name": "Betty CG", "seed": 0, "error": "it ended", "curve": []}]
    result = {"runs": runs, "accuracy": {"by hand": {"relative_error": 1.0}}}
    assert [row["name"] for row in rivals.summary(result)] == ["by hand"]
    assert rivals.table(result).count("\n") == 2
    assert rivals.summary(result)[0]["ratio"] == pytest.approx(1.0)


def test_ratios_are_left_out_without_the_loop_written_by_hand():
    run = {"name": "nhgd", "seed": 0, "milliseconds": 2.0, "later_milliseconds": 1.0, "auc": 0.9, "test_accuracy": 0.8}
    by_hand = run | {"name": "by hand", "milliseconds": 4.0, "later_milliseconds": 4.0}
    alone, beside = (rivals.summary({"runs": runs, "accuracy": {}})[-1] for runs in ([run], [by_hand, run]))
    assert alone["ratio"] is None
    assert (beside["ratio"], beside["later_ratio"]) == (0.5, 0.25)
