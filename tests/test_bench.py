"""`nhgd bench --execution`: executions side by side, what is said of each, and what is refused before anything runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import nhgd
from nhgd.cli._executions import _quartiles, _rows
from nhgd.execution import Device
from nhgd.report import report
from tests.commands import answer, invoke, refusal, strict_json

QUICK = (
    *("bench", "l2", "--preset", "quick", "--device", "cpu"),
    *("--execution", "inline,thread", "--steps", "3", "--warmup", "1", "--rounds", "2"),
)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Every command runs in an empty folder."""
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)


def test_executions_are_measured_and_find_what_inline_finds():
    printed = answer(*QUICK, "--execution", "thread,device:cpu", "--out", "a")
    kept = strict_json(Path("a/bench.json").read_text())
    assert {key: value for key, value in kept.items() if key != "trials"} == printed
    assert Path("a/bench.png").read_bytes().startswith(b"\x89PNG")
    page = Path("a/report.html").read_text()
    assert report("a").read_text() == page
    assert all(word in page for word in ("--execution thread,device:cpu", "scikit-learn"))  # the command, the versions
    assert "l2 (quick) by nhgd: 3 executions" in page
    assert "device:cpu" in page
    rows = {row["execution"]: row for row in printed["rows"]}
    assert list(rows) == ["inline", "thread", "device:cpu"]

    instance = nhgd.task.resolve("l2", "quick").build(0, torch.device("cpu"))
    there = Device("cpu")
    solver = instance.start("nhgd", 0, there)
    solution = solver.run(steps=4)
    solver.close()
    sent = sum(row["bytes_sent"] for row in solution.history[1:])  # the first outer step warms up
    assert all(row["outer_loss"] == solution.history[-1]["outer_loss"] for row in rows.values())
    assert all(row["equal"] and row["difference"] == 0 for row in rows.values())
    assert [row["bytes_sent"] for row in rows.values()] == [0, 0, sent / 3]
    assert rows["inline"]["overlap"] == 0
    assert rows["inline"]["speedup"] == 1

    # Every execution once in each round, every step in two parts.
    assert sorted(trial["execution"] for trial in kept["trials"]) == sorted([*rows] * 2)
    for trial in kept["trials"]:
        assert len(trial["milliseconds"]) == 3
        for whole, inner, waited in zip(trial["milliseconds"], trial["inner"], trial["waited"], strict=True):
            assert whole == pytest.approx(inner + waited) or (inner == 0 and waited > whole)
    for name, row in rows.items():
        times = sorted(t for trial in kept["trials"] if trial["execution"] == name for t in trial["milliseconds"])
        assert row["milliseconds"] == (times[2] + times[3]) / 2
        assert times[0] <= row["quartiles"][0] <= row["milliseconds"] <= row["quartiles"][1] <= times[-1]


def test_settings_go_to_the_executions_that_have_them():
    printed = answer(*QUICK, "--execution", "inline,thread", "--set", "max_lag=0", "--set", "inner_steps=2")
    assert printed["settings"]["executions"] == {"inline": {}, "thread": {"max_lag": 0}}
    assert printed["settings"]["solver"]["inner_steps"] == 2
    assert [row["largest_lag"] for row in printed["rows"]] == [0, 0]
    assert "max_lag" in refusal(*QUICK, "--execution", "inline", "--set", "max_lag=3")
    assert "max_lagg" in refusal(*QUICK, "--execution", "inline,thread", "--set", "max_lagg=3")


def test_rows_over_rounds():
    def trial(times, v, **more):
        parts = {"inner": times, "waited": times, "curvature": times}
        rest = {"overlap": 0.5, "largest_lag": 2, "bytes_sent": 8.0, "processes": 1, "outer_loss": 1.0}
        return {"milliseconds": times, "v": v} | parts | rest | more

    rows = _rows(
        {
            "inline": [trial([4.0, 2.0], [1.0, -1.0]), trial([6.0, 8.0], [1.0, -1.0])],
            "thread": [trial([1.0, 3.0], [1.0, -1.0]), trial([2.0, 4.0], [1.25, -3.0], largest_lag=5)],
        }
    )
    assert [(row["milliseconds"], row["quartiles"]) for row in rows] == [(5.0, [3.5, 6.5]), (2.5, [1.75, 3.25])]
    assert [row["speedup"] for row in rows] == [1.0, 2.0]
    assert [(row["difference"], row["equal"]) for row in rows] == [(0.0, True), (2.0, False)]
    assert [row["largest_lag"] for row in rows] == [2, 5]
    assert _quartiles([7.0]) == (7.0, 7.0, 7.0)


def test_for_people():
    shown = invoke(*QUICK, "--rounds", 1).stdout
    assert "l2 by nhgd, seed 0, on cpu" in shown
    assert "thread" in shown
    assert "curvature ms" in shown


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--execution", "thread,stream"), "stream execution needs theta on a CUDA device"),
        (("--execution", "thread,thred"), "Did you mean 'thread'"),
        (("--execution", ","), "--execution is empty"),
        (("--execution", "device:cuda:9"), "There is no device cuda:9"),
        (("--method", "aid"), "learns nothing from the inner steps"),
        (("--steps", 0), "--steps must be a whole number of at least 1"),
        (("--warmup", -1), "--warmup must be a whole number of at least 0"),
        (("--rounds", 0), "--rounds must be a whole number of at least 1"),
    ],
)
def test_refused_before_anything_runs(options, words, monkeypatch):
    def fail(*_):
        raise AssertionError("a step was taken")

    monkeypatch.setattr(nhgd.Solver, "step", fail)
    assert words in refusal(*QUICK, *options, "--out", "never")


def test_neither_kind_of_comparison_replaces_the_other():
    Path("methods").mkdir()
    Path("methods/comparison.json").write_text("{}")
    assert "a comparison of methods, which would be replaced" in refusal(*QUICK, "--out", "methods")
    Path("executions").mkdir()
    Path("executions/bench.json").write_text("{}")
    words = ("bench", "quadratic", "--methods", "soba", "--budget", "20g", "--out", "executions")
    assert "bench.json would be replaced" in refusal(*words)


@pytest.mark.slow
@pytest.mark.filterwarnings(  # torch leaves the files open into which the processes write
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore:unclosed file:ResourceWarning"
)
def test_distributed_is_launched_and_finds_what_inline_finds():
    printed = answer(*QUICK, "--execution", "distributed", "--rounds", 1)
    inline, distributed = printed["rows"]
    assert distributed["processes"] == 2
    assert distributed["bytes_sent"] > 0
    assert distributed["difference"] < 1e-6
    assert distributed["outer_loss"] == pytest.approx(inline["outer_loss"])


@pytest.mark.parametrize("threads", [1, 2])
def test_two_sides_with_more_threads_than_cores_are_noted(threads, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for command in (
            (*QUICK, "--execution", "thread"),
            ("run", "l2", "--preset", "quick", "--method", "nhgd", "--execution", "thread"),
        ):
            said = invoke(*command, "--steps", "1").stderr
            assert ("2 threads each, on 2 cores" in said and "OMP_NUM_THREADS=1" in said) == (threads == 2)
    finally:
        torch.set_num_threads(before)
