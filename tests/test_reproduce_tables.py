"""`nhgd reproduce` of the paper's tables: every row is there, figures are those of the runs, and a killed command goes on."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from statistics import fmean, stdev

import pytest
import torch

from benchmarks import reproduction
from nhgd.comparison.budget import Allowance
from nhgd.comparison.table import Table
from nhgd.comparison.trial import Trial, measured
from nhgd.paper import TABLE
from nhgd.reproduce import EXPERIMENTS, Request, reproduce
from nhgd.reproduce.tables import Asked, table
from nhgd.reproduce.tables.claimed import CLAIMED
from nhgd.reproduce.tables.experiment import _ends
from nhgd.reproduce.tables.plan import CARRIED, LAST, plan_of
from nhgd.reproduce.tables.rows import curves, fair_row, first_in_time, printed_row
from nhgd.reproduce.tables.text import text
from nhgd.reproduce.theory.experiment import claims
from nhgd.task import PDE
from tests.commands import refusal

TABLES = [name for name in EXPERIMENTS if name not in ("theory", "parallel")]
ABOUT = {
    "task": "cleaning", "preset": "", "unit": " steps", "budget_words": "3 outer steps", "device": "cpu",
    "headline": "test_accuracy", "curve": "test_accuracy", "selection": "evaluation_loss", "methods": [],
}  # fmt: skip


def asked(experiment, **changes):
    return Asked(
        **{"experiment": experiment, "quick": True, "data": None, "seconds": None, "device": "cpu", "seed": 0} | changes
    )


def made(method, seed, accuracies, seconds_a_step=1.0, **changes):
    """A run of one evaluation a step."""
    points = [
        {
            "step": k,
            "seconds": seconds_a_step * k,
            "gradients": 10.0 * k,
            "test_accuracy": value,
            "outer_loss": 1 - value,
        }
        for k, value in enumerate(accuracies)
    ]
    run = {
        "method": method, "seed": seed, "settings": {}, "metrics": {"test_accuracy": accuracies[-1]}, "points": points,
        "error": None, "warnings": [], "steps": len(accuracies) - 1, "seconds": points[-1]["seconds"], "gradients": 10.0,
        "oracle_calls": {}, "step_cost": {"seconds": seconds_a_step, "gradients": 10.0}, "peak_megabytes": 2.0 + seed,
    }  # fmt: skip
    return run | changes


@pytest.mark.parametrize("experiment", TABLES)
def test_every_row_of_the_paper_is_in_both_protocols(experiment, monkeypatch):
    monkeypatch.setenv("NHGD_DATA", "somewhere")
    plan = plan_of(experiment, False, None)
    assert set(CLAIMED[experiment]) <= set(plan.printed.methods)
    assert set(CLAIMED[experiment]) <= set(plan.grid.methods)
    if experiment != "pde":
        assert set(CLAIMED[experiment]) == set(TABLE[experiment])
        assert {"nhgd", "nhgd-refined", "nhgd, natural inner", "nhgd_single", CARRIED} <= {
            *plan.grid.methods,
            *plan.printed.methods,
        }
        assert plan.printed.budget == "1000 steps"
    for key in [key for key in plan.grid.settings if ":" not in key]:
        assert len(plan.grid.settings[key]) == 5
    assert plan.grid.widen > 0
    assert plan.seeds == 5


def test_averages_are_those_of_the_last_fifty_steps():
    """By hand: 80 steps of which the last 50 count, the start never does, and a failed run is said."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.rand(81, generator=generator, dtype=torch.float64).tolist() for _ in range(2)]
    runs = [made("a", seed, value) for seed, value in enumerate(values)]
    failed = made("a", 2, [0.5, 0.5], error="It ended.", steps=1)
    row = printed_row(Table(ABOUT, [*runs, failed]), "a", "test_accuracy")
    means = [fmean(value[-LAST:]) for value in values]
    assert row["test_accuracy"] == pytest.approx(fmean(means))
    assert row["test_accuracy_over_seeds"] == pytest.approx(stdev(means))
    assert row["test_accuracy_within"] == pytest.approx(fmean([stdev(value[-LAST:]) for value in values]))
    assert row["outer_loss"] == pytest.approx(1 - row["test_accuracy"])
    assert (row["seeds"], row["failed"], row["error"]) == (2, 1, "It ended.")
    assert row["peak_megabytes"] == 4.0
    short = printed_row(Table(ABOUT, [made("a", 0, [0.1, 0.5, 0.7])]), "a", "test_accuracy")
    assert short["test_accuracy"] == pytest.approx(0.6)
    assert printed_row(Table(ABOUT, runs), "b", "test_accuracy") is None


def test_figures_average_over_the_last_steps():
    run = made("a", 0, [0.0, 1.0, 0.0, 1.0])
    assert curves(Table(ABOUT, [run]), "test_accuracy", 2)["a"]["median"] == [0.0, 0.5, 0.5, 0.5]
    assert curves(Table(ABOUT, [run]), "test_accuracy", 1)["a"]["median"] == [0.0, 1.0, 0.0, 1.0]


def test_who_is_first_in_time_and_whether_it_is_one_of_ours():
    rise = [0.0, 0.5, 0.95, 1.0]  # the target is 0.9, which step 2 reaches

    def of(ours, *theirs):
        runs = [made("nhgd", seed, rise, pace) for seed, pace in enumerate(ours)]
        runs += [made("soba", seed, rise, pace) for seed, pace in enumerate(theirs)]
        runs += [made("nhgd-paper", seed, rise, 0.01) for seed in range(len(ours))] if not theirs else []
        return first_in_time(Table(ABOUT, runs))

    assert of((1.0, 1.0), 2.0, 2.0)["held"]
    behind = of((2.0, 2.0), 1.0, 1.0)
    assert (behind["first"], behind["ours"], behind["held"]) == ("soba", "nhgd", False)
    assert behind["seconds"]["soba"] == {"mean": 2.0, "standard_error": 0.0}
    near = of((1.1, 1.1), 0.8, 1.2)  # 2.2 against 2.0 with a standard error of 0.4
    assert (near["first"], near["held"]) == ("soba", True)
    literal = of((1.0, 1.0))  # the paper's own method is not one of the library's
    assert (literal["first"], literal["ours"], literal["held"]) == ("nhgd-paper", "nhgd", False)


def test_a_fair_row_has_what_it_took():
    runs = [made("nhgd", seed, [0.0, 0.5, 1.0], settings={"outer_lr": 0.1}) for seed in range(2)]
    row = fair_row(Table(ABOUT, runs), "nhgd")
    assert row["settings"] == {"outer_lr": 0.1}
    assert row["metrics"]["test_accuracy"] == {"mean": 1.0, "deviation": 0.0}
    assert (row["to_target"]["seconds"], row["steps"], row["milliseconds_per_step"]) == (2.0, 2, 1e3)
    failed = [made("nhgd", 0, [0.0, 0.1], error="It ended.")]
    assert fair_row(Table(ABOUT, failed), "nhgd")["error"] == "It ended."


def test_the_memory_of_a_run_has_the_paper_s_matrix():
    """A is D x D in float64, and a step makes at most a few more."""
    run = measured(
        Trial("quadratic", "default", "nhgd-paper", "nhgd-paper", 0, {}, Allowance(1.0, " steps"), memory=True)
    )
    other = measured(Trial("quadratic", "default", "aid-cg", "aid-cg", 0, {}, Allowance(1.0, " steps"), memory=True))
    assert run["steps"] == 1
    assert 0 < other["peak_megabytes"] < run["peak_megabytes"] < 100
    assert "peak_megabytes" not in measured(
        Trial("quadratic", "default", "aid-cg", "aid-cg", 0, {}, Allowance(1.0, " steps"))
    )


def test_a_budget_in_outer_steps_is_kept_and_evaluated_evenly():
    run = measured(Trial("quadratic", "quick", "aid-cg", "aid-cg", 0, {}, Allowance.read("12 steps"), points=4))
    assert (run["steps"], [point["step"] for point in run["points"]]) == (
        12,
        [0, 1, 3, 6, 9, 12],
    )  # the first step is always one


def test_what_is_kept_holds_what_the_page_says_of_it():
    """The theorems' slopes as they must be, the paper's own numbers beside ours, and no claim without its figure."""
    theory = reproduction.read("theory")
    assert not theory["quick"]
    assert theory["effort"]["runs"] == 200
    assert all(row["held"] for row in claims(theory))
    for experiment in TABLES:
        found = reproduction.read(experiment)
        assert not found["quick"]
        assert found["environment"]["gpu"] == "NVIDIA H200"
        assert (found["jobs"], found["beside"]) == (4, 12)
        for row in found["rows"]:
            base = "nhgd-paper" if row["method"] == CARRIED else row["method"]
            expected = CLAIMED[experiment].get(base)
            assert row["paper"] == (None if expected is None else expected._asdict())
    assert "place" in reproduction.claims()


def test_stages_share_the_time():
    ends = _ends(["printed", "grid", "seeds", "own"], 100.0, 55.0)
    assert ends == {"printed": 115.0, "grid": 135.0, "seeds": 150.0, "own": 155.0}
    assert _ends(["grid", "seeds"], 0.0, 60.0)["seeds"] == 60.0
    assert set(_ends(["own"], 0.0, None).values()) == {None}


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    place = tmp_path_factory.mktemp("cleaning")
    return table(asked("cleaning", smallest=True), place), place


def test_a_table_is_what_its_runs_say(kept):
    found, place = kept
    json.dumps(found, allow_nan=False)
    assert found["complete"]
    rows = {row["method"]: row for row in found["rows"]}
    runs = [json.loads(path.read_text()) for path in (place / "printed" / "runs").glob("*.json")]
    for run in runs:
        last = [point["outer_loss"] for point in run["points"][1:]]
        assert len(last) == 2
        assert rows[run["method"]]["printed"]["outer_loss"] == pytest.approx(fmean(last))
        assert rows[run["method"]]["printed"]["peak_megabytes"] == run["peak_megabytes"]
    assert {run["method"] for run in runs} == {"nhgd-paper", CARRIED, "aid-cg-10"}
    described = next(run for run in runs if run["method"] == "aid-cg-10")["described"]
    assert (described["solver"]["inner_lr"], described["solver"]["outer_lr"], described["method"]["batches"]) == (
        0.01,
        0.5,
        5,
    )
    assert rows["nhgd-paper"]["paper"]["test_accuracy"] == 0.918
    assert set(rows["nhgd"]["fair"]["settings"]) == {"inner_lr", "outer_lr"}
    assert found["protocols"]["fair"]["seeds"] == [1, 2]  # not the one that was tuned on
    tuned = json.loads((place / "grid" / "bench.json").read_text())
    best = min((row for row in tuned["tried"] if row["method"] == "nhgd"), key=lambda row: row["selection"])
    assert rows["nhgd"]["fair"]["settings"] == best["settings"]
    assert found["environment"]["torch"] == torch.__version__
    said = text(found)
    assert "0.9180 ± 0.0003" in said
    assert CARRIED in said


def test_a_killed_command_goes_on_where_it_was(kept, monkeypatch):
    found, place = kept
    lost = next((place / "seeds" / "runs").glob("nhgd-seed1*"))
    lost.unlink()
    heard = []
    again = table(asked("cleaning", smallest=True), place, heard.append)
    made_now = [words for words in heard if ", seed " in words]
    assert len(made_now) == 1
    assert "nhgd, seed 1" in made_now[0]
    assert lost.exists()
    assert [row["printed"] for row in again["rows"]] == [row["printed"] for row in found["rows"]]
    monkeypatch.setattr("nhgd.comparison.store.measured", lambda trial: pytest.fail("a run was repeated"))
    shown = table(asked("cleaning", smallest=True, only="own"), place)
    assert shown["complete"]
    assert set(shown["runs"]) == {"own"}
    assert [row["printed"] for row in shown["rows"]] == [row["printed"] for row in found["rows"]]


def test_time_that_is_up_leaves_a_part_and_says_so(tmp_path):
    found = table(asked("distillation-5", smallest=True, seconds=1e-9), tmp_path)
    assert not found["complete"]
    assert found["runs"]["own"]["done"] == 0
    assert "runs were made; the same command" in text(found)
    assert not (tmp_path / "own").exists()


def test_a_control_problem_is_pretrained_once(monkeypatch):
    task = PDE.preset("quick").with_settings(
        {"inner": "adam", "pretraining": 2, "interior": 16, "side": 4, "initial": 4}
    )
    first = task.build(0, torch.device("cpu")).problem.theta.flat()
    monkeypatch.setattr("nhgd.task.pde.control.adam", lambda *args: pytest.fail("pretrained again"))
    other = task.with_settings({"outer_lr": 0.5, "inner_steps": 3}).build(0, torch.device("cpu")).problem.theta
    assert torch.equal(other.flat(), first)
    other.assign(torch.zeros_like(first))
    assert torch.equal(task.build(0, torch.device("cpu")).problem.theta.flat(), first)
    monkeypatch.undo()
    assert not torch.equal(task.build(1, torch.device("cpu")).problem.theta.flat(), first)
    assert not torch.equal(
        task.with_settings({"inner_lr": 0.01}).build(0, torch.device("cpu")).problem.theta.flat(), first
    )


def test_refusals_are_sentences(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "pde reads no files" in refusal("reproduce", "pde", "--quick", "--data", tmp_path)
    assert "theory is no table" in refusal("reproduce", "theory", "--only", "own")
    assert "no part of a table called 'paper'" in refusal("reproduce", "cleaning", "--only", "paper")
    assert "takes a fixed number of outer steps" in refusal("reproduce", "parallel", "--seconds", "5")
    assert "no folder was given" in refusal("reproduce", "cleaning")


def test_torch_and_numpy_are_enough():
    """The script for a bare machine, with everything else out of reach."""
    program = (
        "import sys\n"
        "for name in ('typer', 'rich', 'matplotlib', 'pandas', 'joblib', 'optuna'): sys.modules[name] = None\n"
        "from nhgd.reproduce.tables import Asked, table\n"
        "from nhgd.reproduce.tables.text import text\n"
        "found = table(Asked('pde', True, None, 1e-9, 'cpu', 0, 'own', smallest=True), None)\n"
        "from nhgd.reproduce.command import main\n"
        "assert main(['pde', '--data', 'nowhere']) == 2\n"
        "print(found['complete'], len(text(found)) > 100)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


@pytest.mark.slow
@pytest.mark.parametrize("experiment", TABLES)
def test_the_smallest_of_every_table(experiment, tmp_path):
    found = table(asked(experiment, smallest=True), tmp_path)
    assert found["complete"]
    assert all(row["printed"] or row["fair"] for row in found["rows"])
    assert math.isfinite(found["seconds"])


@pytest.mark.slow
@pytest.mark.parametrize("experiment", [*TABLES, "parallel"])
def test_a_quick_one_is_done_in_its_time(experiment, tmp_path):
    found = reproduce(Request(experiment, quick=True, out=tmp_path))
    assert (tmp_path / f"{experiment}.json").exists()
    assert found["quick"]


def test_algorithm_2_gives_the_serial_result_and_says_what_it_took(monkeypatch):
    """Without the two processes, whose equality tests/test_distributed.py examines."""
    from nhgd.reproduce import parallel as experiment

    monkeypatch.setattr(experiment, "ROUNDS", 1)
    monkeypatch.setattr(experiment, "_in_two_processes", lambda *args: experiment._taken(*args, "thread"))
    found = experiment.parallel(True, None, "cpu", steps=2)
    rows = {row["execution"]: row for row in found["rows"]}
    assert set(rows) == {"inline", "thread", "distributed"}
    assert rows["thread"]["largest_difference_of_v"] == 0
    assert rows["inline"]["speedup"] == 1
    assert found["dimension"] == 650
    assert found["best_speedup"] >= 1
    assert "Perfect overlap" in experiment.text(found)
