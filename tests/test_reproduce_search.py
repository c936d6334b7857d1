"""Runs in worker processes, and the search of two step sizes, one after the other."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import dataclass, replace

import pytest
import torch

from nhgd.comparison.comparison import Comparison
from nhgd.comparison.grid import of_python
from nhgd.comparison.store import Store
from nhgd.comparison.table import Table
from nhgd.comparison.trial import blank, measured
from nhgd.comparison.workers import Workers
from nhgd.errors import InputError
from nhgd.reproduce import Request
from nhgd.reproduce.tables.plan import Stage, plan_of
from nhgd.reproduce.tables.tuning import tuned
from nhgd.task import AbstractTask, Quadratic
from tests.test_reproduce_tables import ABOUT, made

LISTED = {"inner_lr": [0.01, 0.03, 0.1, 0.3, 1.0], "outer_lr": [0.003, 0.01, 0.03, 0.1, 0.3]}


def comparison(methods=("aid-cg", "soba"), seeds=2, settings=None, task="quadratic", budget="3 steps"):
    return Comparison.of(
        task, methods if isinstance(methods, dict) else list(methods), seeds, budget, of_python(settings), "quick" if isinstance(task, str) else "default",
        "cpu", None, 1, 2, None, 0,
    )  # fmt: skip


@dataclass(frozen=True)
class Stuck(AbstractTask):
    """A task whose data never come, or whose process ends, by its seed."""

    name = "stuck"

    def build(self, seed, device, data=None):
        if seed == 1:
            os._exit(7)
        if seed == 2:
            time.sleep(60)
        return Quadratic().build(seed, device, data)


@pytest.fixture(scope="module")
def workers():
    with Workers(2) as found:
        yield found


@pytest.mark.slow
def test_workers_find_what_this_process_finds(workers, tmp_path):
    asked = comparison()
    (tmp_path / "a").mkdir()
    store = Store(tmp_path / "a", asked.asked())
    found = {trial.key: run for trial, run in workers.measured(asked.trials(), store)}
    assert len(found) == 4
    for trial in asked.trials():
        here = measured(trial)
        assert found[trial.key]["metrics"] == here["metrics"]
        assert [point["outer_loss"] for point in found[trial.key]["points"]] == [
            point["outer_loss"] for point in here["points"]
        ]
        assert store.load(trial)["metrics"] == here["metrics"]  # it was written where it was measured
    table = asked.table(tmp_path / "a", workers=Workers(1))  # nothing is left to do, so no process is started
    assert len(table.runs) == 4


@pytest.mark.slow
def test_a_worker_that_dies_or_hangs_costs_its_own_run():
    trials = comparison(["aid-cg"], seeds=4, task=Stuck()).trials()
    with Workers(2, limit=25) as workers:
        found = {trial.seed: run for trial, run in workers.measured(trials, None)}
        assert found[0]["error"] is None
        assert found[3]["error"] is None
        assert "The process of the run ended, with 7" in found[1]["error"]
        assert "given up after 25 seconds" in found[2]["error"]


def test_workers_that_nobody_waits_for_are_ended():
    with Workers(1, limit=30) as workers:
        runs = workers.measured(comparison(["aid-cg"], seeds=1).trials(), None)
        workers._hand_out(iter(comparison(["aid-cg"], seeds=1).trials()), None)
        process = workers._workers[0].process
        runs.close()
    assert not process.is_alive()


def bowl(inner, outer):
    """Runs whose selection loss is least at these step sizes."""

    def run(method, settings):
        loss = abs(torch.log10(torch.tensor(settings["inner_lr"] / inner[method]))) + abs(
            torch.log10(torch.tensor(settings["outer_lr"] / outer[method]))
        )
        return made(method, 0, [0.1, 0.2], settings=dict(settings), metrics={"evaluation_loss": float(loss)})

    return run


def test_the_search_finds_the_best_of_both_axes_and_tells_methods_apart():
    run, asked = bowl({"a": 1.0, "b": 0.1}, {"a": 0.01, "b": 0.3}), []

    def staged(stage):
        chosen = comparison(stage.methods, seeds=1, settings=stage.settings, task="cleaning")
        asked.append([(trial.label, trial.settings) for trial in chosen.trials()])
        return Table(ABOUT, [run(label, settings) for label, settings in asked[-1]])

    methods = {"a": "aid-cg", "b": "soba"}
    stage = Stage("cleaning", methods, "1s", settings=LISTED, alternating=True)
    found = tuned(stage, staged)
    best = {label: runs[0]["settings"] for label, runs in found.chosen.items()}
    assert best == {"a": {"inner_lr": 1.0, "outer_lr": 0.01}, "b": {"inner_lr": 0.1, "outer_lr": 0.3}}
    assert [len(some) for some in asked] == [10, 10, 3]  # b's inner step size has not moved
    assert {label for label, _ in asked[2]} == {"a"}
    keys = [json.dumps([one["method"], one["settings"]], sort_keys=True) for one in found.runs]
    assert len(keys) == len(set(keys)) == 20  # what two sweeps share counts once


def test_a_method_with_one_inner_step_size_is_searched_along_the_other_alone():
    run, asked = bowl({"a": 1.0, "b": 0.1}, {"a": 0.01, "b": 0.1}), []

    def staged(stage):
        chosen = comparison(stage.methods, seeds=1, settings=stage.settings, task="cleaning")
        asked.append([(trial.label, trial.settings) for trial in chosen.trials()])
        return Table(ABOUT, [run(label, settings) for label, settings in asked[-1]])

    settings = LISTED | {"b:inner_lr": 0.1}
    found = tuned(Stage("cleaning", {"a": "aid-cg", "b": "soba"}, "1s", settings=settings, alternating=True), staged)
    assert found.chosen["b"][0]["settings"] == {"inner_lr": 0.1, "outer_lr": 0.1}
    assert [sum(label == "b" for label, _ in some) for some in asked] == [5, 0, 0]
    assert (
        tuned(Stage("cleaning", {"a": "aid-cg"}, "1s", settings=LISTED, alternating=True), lambda stage: None) is None
    )


def test_full_searches_alternate_and_quick_ones_do_not(tmp_path):
    assert plan_of("cleaning", False, tmp_path).grid.alternating
    assert plan_of("pde", False, None).grid.alternating
    assert not plan_of("cleaning", True, None).grid.alternating


def test_refusals_are_sentences():
    with pytest.raises(InputError, match="jobs is a number of processes"):
        Workers(0)
    with pytest.raises(InputError, match="seeds must be a whole number of at least 1"):
        Request("cleaning", seeds=0)
    with pytest.raises(InputError, match="theory is no table, so jobs would be ignored"):
        Request("theory", jobs=2)
    with pytest.raises(InputError, match="longest is a time"):
        Request("cleaning", longest="20 steps")
    assert Request("theory").jobs == 1


def test_what_failed_stays_in_a_table_that_has_no_time_left(tmp_path):
    """It is tried again where there is time, and else shown as it was."""
    asked = comparison(["aid-cg"], seeds=1)
    (tmp_path / "runs").mkdir()
    store = Store(tmp_path, asked.asked())
    trial = asked.trials()[0]
    store.keep(trial, blank(trial) | {"error": "It ended.", "steps": 3})
    assert store.load(trial) is None
    assert store.load(trial, failed=True)["error"] == "It ended."
    assert [run["error"] for run in asked.table(tmp_path, until=-math.inf, suffixes=()).runs] == ["It ended."]
    assert [run["error"] for run in asked.table(tmp_path, suffixes=()).runs] == [None]


def test_a_widened_grid_is_found_again_without_time(tmp_path):
    asked = replace(comparison(["aid-cg"], seeds=1, settings={"outer_lr": [1e-6, 2e-6]}), widen=2)
    made = asked.table(tmp_path, suffixes=())
    assert len(made.runs) == 4  # two of them beyond the end
    again = asked.table(tmp_path, suffixes=(), until=-math.inf)
    assert [run["settings"] for run in again.runs] == [run["settings"] for run in made.runs]
