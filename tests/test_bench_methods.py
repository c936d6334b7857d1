"""`nhgd bench`: methods side by side from the command line, killed and resumed, and what is refused before anything runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import nhgd
from nhgd.cli import _completion
from tests.commands import answer, invoke, refusal, strict_json

TINY = ("bench", "quadratic", "--methods", "aid-cg,soba", "--seeds", "0-1", "--budget", "60g", "--device", "cpu")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Every command runs in an empty folder."""
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)


def test_the_command_gives_what_the_function_gives():
    found = answer(
        *TINY, "--set", "outer_lr=0.03,0.1", "--set", "soba:inner_lr=0.1", "--out", "a", "--target", "v_error=3"
    )
    table = nhgd.bench(
        "quadratic",
        ["aid-cg", "soba"],
        [0, 1],
        "60g",
        settings={"outer_lr": [0.03, 0.1], "soba:inner_lr": 0.1},
        target=("v_error", 3.0),
    )
    assert [(row["method"], row["seed"], row["settings"], row["metrics"]) for row in found["rows"]] == [
        (row["method"], row["seed"], row["settings"], row["metrics"]) for row in table.rows
    ]
    assert [(row["method"], row["metric"], row["mean"]) for row in found["summary"]] == [
        (row["method"], row["metric"], row["mean"]) for row in table.summary
    ]
    assert found["target"]["value"] == 3
    assert found["provenance"]["versions"]["nhgd"] == nhgd.__version__
    kept = strict_json(Path("a/bench.json").read_text())
    assert kept | {"out": "a"} == found
    assert "<html" in Path("a/report.html").read_text()
    for file in ("table.txt", "table.tex", "summary.csv", "rows.csv", "curves.png", "curves.svg", "bars.pdf"):
        assert Path("a", file).stat().st_size > 100
    shown = invoke(*TINY, "--set", "outer_lr=0.03,0.1", "--set", "soba:inner_lr=0.1", "--out", "a")
    assert "8 of 8 runs were done before." in shown.stderr
    assert Path("a/table.txt").read_text().splitlines()[2].split()[0] in shown.stdout
    assert "a/report.html" in shown.stdout


def test_what_the_runs_of_the_first_seed_drew_is_on_the_page():
    words = ("--preset", "quick", "--methods", "aid-cg,soba", "--seeds", "2", "--budget", "60g", "--out", "a")
    found = answer("bench", "cleaning", *words)
    drawn = [row["method"] for row in found["rows"] if row.get("folder")]
    assert drawn == ["aid-cg", "soba"]
    for row in found["rows"]:
        assert all(Path("a", row["folder"], name).exists() for name in row.get("pictures", []))
    assert Path("a/report.html").read_text().count("data:image/png;base64,") == 2


def test_a_method_that_never_ends_well_is_an_error_after_the_others():
    result = invoke(*TINY, "--set", "soba:outer_lr=1e200", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert {row["method"] for row in found["rows"] if row["error"] is None} == {"aid-cg"}
    assert "No run of soba ended well. The first error: Outer step" in result.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--methods", "nhgd,aid-cgg"), "Did you mean 'aid-cg'"),
        (("--methods", ","), "no methods to compare"),
        (("--seeds", "4-0"), "a range such as 0-4"),
        (("--budget", "10 stars"), "'500g'"),
        (("--target", "accuracy"), "--target takes a metric and a value"),
        (("--target", "v_error=nan"), "--target takes a metric and a value"),
        (("--target", "accuracy=0.9"), "no metric of quadratic. It has"),
        (("--set", "outer_lr"), "--set takes key=value"),
        (("--set", "outer_lr=0.1,"), "not a list of values"),
        (("--set", "outer_lr=0.1", "--set", "outer_lr=0.3"), "Give all of its values at once: --set outer_lr=0.1,0.3"),
        (("--set", "bsa:outer_lr=1"), "not compared here"),
        (("--jobs", 0), "jobs is a number of processes"),
        (("--widen", 9), "widen is at most 8"),
        (("--steps", 3), "Use --budget"),
        (("--seed", 3), "Use --seeds"),
        (("--method", "soba"), "Use --methods"),
        (("--rounds", 3), "--execution inline,thread"),
        (("--execution", "thread"), "--methods compares methods"),
    ],
)
def test_refused_before_anything_runs(options, words, monkeypatch):
    def fail(*_, **__):
        raise AssertionError("a step was taken")

    monkeypatch.setattr(nhgd.Solver, "run", fail)
    assert words in refusal(*TINY, *options, "--out", "never")


def test_methods_are_completed_within_a_list():
    assert "aid-cg,soba" in _completion.method_list("aid-cg,so")


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_comparison_that_is_killed_goes_on_where_it_was():
    """Killed once a run is kept; the finished runs are not repeated."""
    environment = os.environ | {"PYTHONPATH": str(Path(nhgd.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "nhgd", *TINY, "--out", "a"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not list(Path("a/runs").glob("*.json")) and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    kept = {path.name: path.read_bytes() for path in Path("a/runs").glob("*.json")}
    assert kept
    found = answer(*TINY, "--out", "a")
    assert [row["error"] for row in found["rows"]] == [None] * 4
    assert {name: Path("a/runs", name).read_bytes() for name in kept} == kept
    assert not list(Path("a").rglob(".draft-*"))


def test_a_target_is_checked_without_a_warning():
    """Metrics of a task may turn the parameters themselves into numbers."""
    said = invoke("bench", "l2", "--preset", "quick", "--methods", "soba", "--device", "cpu", "--target", "foo=1")
    assert said.exit_code == 2
    assert said.stderr.startswith("Error: The target foo is no metric of l2.")
