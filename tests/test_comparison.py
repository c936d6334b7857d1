"""`nhgd.bench`: equal budgets, what is kept of a run, what is chosen, and a folder that goes on after a kill."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import nhgd
from nhgd.comparison import bands, choice, trial
from nhgd.comparison.budget import Allowance
from nhgd.stop import gradient_equivalents

TINY = {"methods": ["aid-cg", "soba"], "seeds": 2, "budget": "60g"}


@pytest.fixture(scope="module")
def table():
    return nhgd.bench("quadratic", **TINY)


def test_a_budget_of_gradients_is_spent_and_no_step_more(table):
    for run in table.runs:
        assert run["result"] == "gradients"
        assert run["gradients"] >= 60
        assert run["gradients"] - run["step_cost"]["gradients"] < 60
        assert run["gradients"] == gradient_equivalents(run["oracle_calls"])
        assert run["steps"] == run["points"][-1]["step"]


def test_a_row_is_what_the_solver_alone_gives(table):
    row = table.rows[0]
    instance = nhgd.task.resolve("quadratic").build(row["seed"], torch.device("cpu"))
    solution = instance.start(row["method"], row["seed"]).run(stop=[nhgd.stop.Gradients(60)])
    assert row["metrics"] == instance.summary(solution)
    assert row["steps"] == len(solution.history)
    first = table.runs[0]["points"][0]
    start = nhgd.task.resolve("quadratic").build(row["seed"], torch.device("cpu"))
    assert (
        first
        == {"step": 0, "seconds": 0.0, "gradients": 0.0}
        | start.metrics(start.problem.theta.given, start.problem.v.given)
        | start.losses()
    )


def test_the_summary_is_over_seeds(table):
    values = [row["metrics"]["true_outer_loss"] for row in table.rows if row["method"] == "soba"]
    found = next(r for r in table.summary if (r["method"], r["metric"]) == ("soba", "true_outer_loss"))
    assert found["mean"] == pytest.approx(sum(values) / 2)
    assert found["median"] == found["mean"]
    assert found["deviation"] == pytest.approx(abs(values[0] - values[1]) / 2**0.5)
    assert json.loads(table.to_json())["rows"] == json.loads(json.dumps(table.rows))


def test_a_grid_is_chosen_from_by_its_selection_and_widened_beyond_its_edge():
    table = nhgd.bench("quadratic", ["soba"], [0], "60g", settings={"outer_lr": [0.01, 0.1]}, widen=3)
    tried = {row["settings"]["outer_lr"]: row["selection"] for row in table.tried}
    assert {0.01, 0.1, 1.0} <= set(tried)
    best = min(tried, key=tried.get)
    assert table.costs[0]["settings"] == {"outer_lr": best}
    assert [row["settings"]["outer_lr"] for row in table.tried if row["chosen"]] == [best]
    at_the_end = best in (min(tried), max(tried))
    assert bool(table.edges) == at_the_end
    assert any("widen the grid" in note for note in table.notes) == at_the_end


def test_a_method_that_fails_is_a_row_and_the_others_go_on():
    table = nhgd.bench("quadratic", ["soba"], [0], "60g", settings={"outer_lr": [0.1, 1e200]})
    bad = next(row for row in table.rows if row["settings"]["outer_lr"] == 1e200)
    assert "outer_lr" in bad["error"]
    assert bad["metrics"] == {}
    assert table.complete
    assert table.costs[0]["settings"] == {"outer_lr": 0.1}
    assert any("1 of 2 runs failed" in note for note in table.notes)
    assert not nhgd.bench("quadratic", ["soba"], [0], "60g", settings={"outer_lr": 1e200}).complete


def test_a_folder_goes_on_and_refuses_other_settings(tmp_path, monkeypatch):
    first = nhgd.bench("quadratic", **TINY, out=tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert all(f">{row['method']}<" in page for row in first.costs)
    (file,) = (tmp_path / "runs").glob("soba-seed1-*.json")
    file.unlink()
    (tmp_path / ".draft-1").mkdir()  # of a process that was killed
    measured = []
    real = nhgd.Solver.run

    def counted(solver, *args, **more):
        measured.append(solver.algorithm.name)
        return real(solver, *args, **more)

    monkeypatch.setattr(nhgd.Solver, "run", counted)
    again = nhgd.bench("quadratic", **TINY, out=tmp_path)
    assert set(measured) == {"soba"}
    assert not list(tmp_path.glob(".draft-*"))
    assert [row["metrics"] for row in again.rows] == [row["metrics"] for row in first.rows]
    assert [row["seconds"] for row in again.rows][:3] == [row["seconds"] for row in first.rows][:3]
    with pytest.raises(nhgd.InputError, match="its budget is 60g, not 70g"):
        nhgd.bench("quadratic", **(TINY | {"budget": "70g"}), out=tmp_path)
    more = nhgd.bench("quadratic", ["soba", "ttsa"], 2, "60g", out=tmp_path)
    assert ">ttsa<" in (tmp_path / "report.html").read_text()
    assert [row["metrics"] for row in more.rows][:2] == [
        row["metrics"] for row in again.rows if row["method"] == "soba"
    ]


def run_of(seed, values, method="m", error=None, settings=None):
    points = [{"step": i, "seconds": float(i), "gradients": 2.0 * i, "loss": y} for i, y in enumerate(values)]
    metrics = {} if error else {"loss": values[-1]}
    more = {"warnings": [], "error": error, "settings": settings or {}, "metrics": metrics}
    return {"method": method, "seed": seed, "points": points} | more


def test_the_last_point_of_a_run_is_its_end(table):
    """Also where no evaluation was due there; its losses are those of the summary."""
    for run in table.runs:
        assert run["points"][-1]["step"] == run["steps"]
        assert run["points"][-1]["gradients"] == run["gradients"]
        assert run["points"][-1]["outer_loss"] == run["metrics"]["outer_loss"]


def test_a_run_whose_steps_became_slow_is_evaluated_more_often():
    given = trial.Trial("quadratic", "default", "soba", "soba", 0, {}, Allowance(10.0, "s"), points=50)
    solver = SimpleNamespace(metrics_every=100)
    pace = trial._Pace(solver, given, 100)
    for seconds, evaluated, every in (
        (0.1, False, 100),
        (0.29, False, 100),
        (0.31, False, 1),
        (0.32, True, 100),
        (0.4, False, 100),
    ):
        pace.note({"seconds": seconds} | ({"full_outer_loss": 1.0} if evaluated else {}))
        assert solver.metrics_every == every


def test_bands_hold_values_and_end_with_the_shortest_run():
    a, b = run_of(0, [4.0, 2.0, 1.0]), run_of(1, [2.0, 1.0])
    found = bands.band([a, b], "loss", "gradients")
    assert found["x"] == [0.0, 2.0]
    assert found["median"] == [3.0, 1.5]
    assert found["low"] == pytest.approx([2.4, 1.2])
    assert found["high"] == pytest.approx([3.6, 1.8])
    assert bands.band([a], "missing", "step") is None


def test_the_time_to_a_target_counts_those_who_never_reach_it():
    runs = [run_of(0, [4.0, 2.0, 1.0]), run_of(1, [4.0, 1.0, 1.0]), run_of(2, [4.0, 4.0, 4.0])]
    found = bands.to_target(runs, "loss", {0: 1.5, 1: 1.5, 2: 1.5})
    assert found == {"reached": 2, "runs": 3, "seconds": 2.0, "gradients": 4.0, "step": 2.0}
    assert bands.to_target(runs[1:], "loss", {1: 1.5, 2: 1.5})["seconds"] is None
    assert bands.targets_of([*runs, run_of(0, [4.0, 0.0], "other")], "loss")[0] == pytest.approx(0.4)


def test_settings_with_fewer_failures_come_first():
    good = [run_of(seed, [3.0], settings={"lr": 1}) for seed in (0, 1)]
    half = [run_of(0, [1.0], settings={"lr": 2}), run_of(1, [1.0], settings={"lr": 2}, error="It broke.")]
    assert choice.chosen([*half, *good], "loss")[0]["settings"] == {"lr": 1}
    assert [at["edge"] for at in choice.edges([*half, *good], "loss")] == ["smallest"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"methods": ["nhdg"]}, "Did you mean"),
        ({"methods": []}, "no methods"),
        ({"seeds": []}, "seeds is empty"),
        ({"seeds": 0}, "from 1 to"),
        ({"budget": "10 stars"}, "'500g'"),
        ({"budget": "0g"}, "'500g'"),
        ({"settings": {"outer_lrr": 0.1}}, "outer_lrr"),
        ({"settings": {"outer_lr": []}}, "empty list"),
        ({"settings": {"bsa:outer_lr": 0.1}}, "not compared here"),
        ({"jobs": 0}, "jobs is"),
        ({"warmup": 1}, "at least 2"),
        ({"widen": 99}, "at most 8"),
        ({"data": "/tmp"}, "reads no files"),
        ({"device": "cud"}, "device for bench called 'cud'"),
        ({"device": "meta"}, "meta device"),
        ({"methods": [5]}, "methods must be"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(more, words, monkeypatch, tmp_path):
    monkeypatch.setattr(nhgd.Solver, "run", lambda *_, **__: pytest.fail("a step was taken"))
    with pytest.raises(nhgd.InputError, match=words):
        nhgd.bench("quadratic", **(TINY | more), out=tmp_path / "new")
    assert not Path(tmp_path / "new").exists()


def test_a_target_must_be_a_metric(table):
    other = nhgd.Table(table.about, table.runs, ("accuracy", 0.9))
    with pytest.raises(nhgd.InputError, match="true_outer_loss"):
        _ = other.target


def test_a_page_of_a_comparison_shows_what_its_runs_drew(tmp_path):
    """The pictures lie beside the runs, and the page finds them."""
    from nhgd.report import report

    task = nhgd.task.Distillation.preset("quick")
    table = nhgd.bench(task, ["nhgd"], seeds=[0], budget="2 steps", out=tmp_path / "b")
    assert table.rows[0]["pictures"] == ["images.png"]
    assert (tmp_path / "b" / table.rows[0]["folder"] / "images.png").exists()
    assert "data:image/png;base64" in report(tmp_path / "b").read_text(encoding="utf-8")


def test_latex_has_the_digits_of_the_text():
    table = nhgd.bench("quadratic", ["soba", "ttsa"], 2, "60g")
    cells = [
        cell for line in table.to_latex().splitlines() if line.startswith(("soba", "ttsa")) for cell in line.split("&")
    ]
    found = [cell.replace(r"\mathbf{", "").replace("}", "").replace("$", "").strip(" \\") for cell in cells]
    numbers = [cell.replace(r"\pm", "+-") for cell in found if r"\pm" in cell]
    assert len(numbers) >= 4
    assert all(number in table.to_text() for number in numbers)
