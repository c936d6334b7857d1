"""`nhgd sweep`: what a trial is, what is searched, and storages that workers share, are killed in, and go on with."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import nhgd
from nhgd.report import report
from nhgd.tuning import SAMPLERS, Found, space, storage
from tests.commands import answer, invoke, refusal, strict_json

optuna = pytest.importorskip("optuna")
TINY = {"method": "soba", "budget": "60g", "space": {"outer_lr": (0.01, 0.3, "log")}}
WORDS = (
    "sweep",
    "quadratic",
    "--method",
    "soba",
    "--budget",
    "60g",
    "--device",
    "cpu",
    "--space",
    "outer_lr=0.01..0.3:log",
)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Every command runs in an empty folder."""
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)


def value_of(seed, **settings):
    """The selection metric of one run, by the library alone."""
    instance = nhgd.task.resolve("quadratic").build(seed, torch.device("cpu"))
    solution = instance.start("soba", seed, **settings).run(stop=[nhgd.stop.Gradients(60)])
    return instance.summary(solution)["true_outer_loss"]


def test_a_trial_is_the_mean_of_runs_and_the_best_is_the_lowest():
    found = nhgd.sweep("quadratic", trials=3, seeds=2, pruner="none", settings={"inner_lr": 0.3}, **TINY)
    assert [row["state"] for row in found.trials] == ["complete"] * 3
    assert "; tpe, no pruning" in str(found)
    for row in found.trials:
        expected = [value_of(seed, inner_lr=0.3, **row["parameters"]) for seed in (0, 1)]
        assert row["value"] == pytest.approx(sum(expected) / 2, rel=1e-12)
    best = min(found.trials, key=lambda row: row["value"])
    assert found.best == {
        "parameters": {"inner_lr": 0.3} | best["parameters"],
        **{key: best[key] for key in ("value", "number", "metrics")},
    }
    again = nhgd.sweep("quadratic", trials=3, seeds=2, pruner="none", settings={"inner_lr": 0.3}, **TINY)
    assert [(row["parameters"], row["value"]) for row in again.trials] == [
        (row["parameters"], row["value"]) for row in found.trials
    ]


def test_a_sweep_in_python_writes_what_the_command_writes(tmp_path):
    nhgd.sweep("quadratic", trials=2, **TINY, out=tmp_path / "a")
    invoke(*WORDS, "--trials", "2", "--out", str(tmp_path / "b"))
    here, there = ({file.name for file in (tmp_path / name).iterdir()} for name in "ab")
    assert here == there
    assert {"best.json", "report.html"} <= here


def test_a_sweep_goes_on_up_to_its_number_of_trials_and_not_beyond():
    whole = nhgd.sweep("quadratic", trials=6, **TINY)
    for count in (2, 6, 5):
        found = nhgd.sweep("quadratic", trials=count, storage="sqlite:///parts.db", **TINY)
    assert len(found.trials) == 6
    assert [(row["number"], row["parameters"], row["value"], row["state"]) for row in found.trials] == [
        (row["number"], row["parameters"], row["value"], row["state"]) for row in whole.trials
    ]
    with pytest.raises(nhgd.InputError, match="its budget is 60g, not 70g"):
        nhgd.sweep("quadratic", storage="sqlite:///parts.db", **(TINY | {"budget": "70g"}))
    journal = nhgd.sweep("quadratic", trials=6, storage="journal:parts.log", **TINY)
    assert [row["value"] for row in journal.trials] == [row["value"] for row in whole.trials]


def test_the_first_trial_is_the_tasks_own_and_the_space_lies_around_it():
    found = nhgd.sweep("quadratic", "nhgd", trials=1, budget="60g")
    instance = nhgd.task.resolve("quadratic").build(0, torch.device("cpu"))
    own = instance.solver_settings()
    assert found.trials[0]["parameters"] == {
        "outer_lr": own["outer_lr"],
        "inner_lr": own["inner_lr"],
        "inverse.damping": "auto",
    }
    for key, (low, high) in found.about["ranges"].items():
        assert low < own[key] < high
    assert set(found.about["space"]) == {"outer_lr", "inner_lr", "inverse.damping"}
    assert set(nhgd.sweep("quadratic", "soba", trials=1, budget="60g").about["space"]) == {"outer_lr", "inner_lr"}


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_stays_in_the_space(name):
    more = {"space": {"outer_lr": (0.01, 0.3, "log"), "inner_steps": "2..4"}, "sampler": name, "pruner": "none"}
    found = nhgd.sweep("quadratic", trials=5, **(TINY | more))
    assert len(found.trials) == 5
    for row in found.trials:
        assert 0.01 <= row["parameters"]["outer_lr"] <= 0.3
        assert row["parameters"]["inner_steps"] in (2, 3, 4)
    assert len({str(row["parameters"]) for row in found.trials}) == 5


def test_a_grid_is_tried_once_and_ends():
    more = {"space": {"outer_lr": "0.01..0.1:log:2", "inner_lr": [0.1, 0.3]}, "sampler": "grid", "pruner": "none"}
    found = nhgd.sweep("quadratic", trials=50, **(TINY | more))
    tried = sorted((row["parameters"]["outer_lr"], row["parameters"]["inner_lr"]) for row in found.trials)
    assert tried == [(0.01, 0.1), (0.01, 0.3), (0.1, 0.1), (0.1, 0.3)]


def test_a_trial_worse_than_half_of_the_others_is_pruned():
    """Optuna's own median rule over what was reported, at the same parts of the budget."""
    found = nhgd.sweep("quadratic", trials=10, storage="sqlite:///a.db", **(TINY | {"budget": "200g"}))
    trials = trials_in("sqlite:///a.db")
    pruned = [trial for trial in trials if trial.state.name == "PRUNED"]
    assert pruned
    for trial in pruned:
        assert trial.last_step >= 2
        before = [
            one.intermediate_values[trial.last_step]
            for one in trials
            if one.state.name == "COMPLETE" and one.number < trial.number and trial.last_step in one.intermediate_values
        ]
        assert min(trial.intermediate_values.values()) > sorted(before)[(len(before) - 1) // 2]
    assert {row["number"] for row in found.trials if row["state"] == "pruned"} == {trial.number for trial in pruned}


def test_a_failing_trial_is_kept_with_its_error_and_the_others_count():
    more = {"space": {"outer_lr": [0.1, 1e200]}, "sampler": "grid"}
    found = nhgd.sweep("quadratic", trials=2, **(TINY | more))
    bad = next(row for row in found.trials if row["parameters"]["outer_lr"] == 1e200)
    assert bad["state"] == "failed"
    assert "non-finite" in bad["error"]
    assert found.best["parameters"] == {"outer_lr": 0.1}
    with pytest.raises(nhgd.RunError, match=r"None of 2 trials ended well\. The first error: Outer step"):
        nhgd.sweep("quadratic", trials=2, **(TINY | {"space": {"outer_lr": (1e199, 1e200)}}))


def test_the_best_settings_are_those_of_a_run_with_params():
    found = answer(*WORDS, "--trials", 3, "--set", "inner_steps=3", "--out", "a")
    assert {"best", "trials"} <= set(found)
    assert {"parameters", "value"} <= set(found["best"])
    assert strict_json(Path("a/sweep.json").read_text()) | {"out": "a"} == found
    for name in ("trials.png", "parameters.pdf", "trials.svg", "trials.csv", "report.html", "sweep.db"):
        assert Path("a", name).stat().st_size > 100
    run = answer("run", "quadratic", "--params", "a/best.json", "--steps", 2)
    assert run["method"] == "soba"
    assert run["settings"]["solver"]["outer_lr"] == found["best"]["parameters"]["outer_lr"]
    assert run["settings"]["solver"]["inner_steps"] == 3
    shown = invoke(*WORDS, "--trials", 4, "--set", "inner_steps=3", "--out", "a")
    assert "4 of 4: outer_lr=" in shown.stderr
    assert "Use the best: nhgd run quadratic --params a/best.json" in shown.stdout
    page = report("a").read_text()
    assert "quadratic by soba: 4 trials" in page
    Path("a/sweep.json").write_text(json.dumps(found | {"trials": [{"number": "<b>"}]}))
    with pytest.raises(nhgd.InputError, match="number should be a number"):
        report("a")


def test_a_preset_is_remembered():
    assert answer(*WORDS, "--trials", 1, "--preset", "quick", "--out", "a")["preset"] == "quick"
    assert "Add --preset quick" in refusal("run", "quadratic", "--params", "a/best.json")
    assert answer("run", "quadratic", "--preset", "quick", "--params", "a/best.json", "--steps", 1)["steps"] == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--space", "outer_lr=1..0"), "first end must be below the second"),
        (("--space", "outer_lr=0..1:log"), "has no logarithm"),
        (("--space", "outer_lr=0..1:lug"), "is no range"),
        (("--space", "outer_lr=0.1..1:log:1"), "at least 2 points"),
        (("--space", "outer_lr=0.1,0.1"), "name a value twice"),
        (("--space", "inner_lr=0.1,0.2", "--space", "inner_lr=0.3"), "--space inner_lr is given twice"),
        (("--space", "outer_lr"), "--space takes key=value"),
        (("--space", "outr_lr=0..1"), "Did you mean 'outer_lr'"),
        (("--space", "inner_steps=2.5..4"), "inner_steps must be a whole number"),
        (("--space", "inner_steps=0..4"), "inner_steps must be a whole number of at least 1"),
        (("--set", "outer_lr=1"), "both searched and set"),
        (("--sampler", "tp"), "Did you mean 'tpe'"),
        (("--pruner", "mean"), "Did you mean 'median'"),
        (("--trials", 0), "trials must be a whole number from 1"),
        (("--seeds", "a"), "--seeds is a count"),
        (("--method", "sobaa"), "Did you mean 'soba'"),
        (("--storage", "here"), "no address of a storage"),
        (("--storage", "nosql://x"), "cannot be used"),
        (("--storage", "journal:no/such/sweep.log"), "there is no folder"),
        (("--storage", "redis://localhost:1"), "redis"),
    ],
)
def test_refused_before_anything_runs(options, words, monkeypatch):
    def fail(*_, **__):
        raise AssertionError("a step was taken")

    monkeypatch.setattr(nhgd.Solver, "run", fail)
    monkeypatch.setattr(storage, "ATTEMPTS", 1)
    base = WORDS[:-2] if "--space" in options else WORDS
    assert words in refusal(*base, "--trials", 2, *options)


def test_a_password_is_shown_nowhere():
    said = refusal(*WORDS, "--storage", "nosql://me:secret@host/db")
    assert "secret" not in said
    assert storage.hidden("postgresql://me:se:cr@et@host/db") == "postgresql://me:***@host/db"


@pytest.mark.parametrize("text", ["0.01..1:log", "1..5", "-1..1", "1e-3..1e2:log", ".5..2"])
def test_ranges_are_read_as_written(text):
    low, _, high = text.removesuffix(":log").partition("..")
    found = space.parsed([f"a={text}"])["a"]
    assert (found.low, found.high, found.log) == (float(low), float(high), text.endswith(":log"))
    assert found == space.of_python({"a": (float(low), float(high), *(["log"] if found.log else []))})["a"]


def test_importance_needs_trials_that_differ():
    pytest.importorskip("sklearn")
    found = nhgd.sweep("quadratic", trials=12, pruner="none", **TINY)
    assert found.importance.keys() == {"outer_lr"}
    assert math.isclose(sum(found.importance.values()), 1)
    one = Found(found.about, found.trials[:1], found.best, {})
    assert "Share of each" in str(found)
    assert "Share of each" not in str(one)


def worker(address, trials, budget="60g"):
    """Another process that takes trials."""
    words = ["sweep", "quadratic", "--method", "soba", "--space", "outer_lr=0.01..0.3:log", "--pruner", "none"]
    words += ["--budget", budget, "--trials", str(trials), "--storage", address, "--json"]
    environment = os.environ | {"PYTHONPATH": str(Path(nhgd.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "nhgd", *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def study_in(address):
    kept = storage.opened(address)
    try:
        yield optuna.load_study(study_name="quadratic by soba", storage=kept)
    finally:
        storage.closed(kept)


def trials_in(address):
    try:
        with study_in(address) as study:
            return study.trials
    except Exception:  # while the tables are made
        return []


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_killed_worker_loses_one_trial_which_is_repeated():
    address = "sqlite:///a.db"
    with worker(address, 3, budget="1000000000g") as process:  # whose first trial never ends
        while not any(trial.params for trial in trials_in(address)) and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    (left,) = trials_in(address)
    assert left.state.name == "RUNNING"
    with study_in(address) as study:
        asked = study.user_attrs["nhgd:asked"]
        study.set_user_attr("nhgd:asked", asked | {"budget": "60g"})  # so that this test ends
    found = nhgd.sweep("quadratic", trials=3, storage=address, pruner="none", **TINY)
    assert [row["state"] for row in found.trials] == ["complete"] * 3
    assert found.trials[0]["parameters"] == left.params
    assert found.trials[0]["number"] == 1


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_worker_that_is_asked_to_end_says_where_its_trials_are():
    address = "sqlite:///a.db"
    with worker(address, 3, budget="1000000000g") as process:
        while not any(trial.params for trial in trials_in(address)) and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        said = process.communicate()[1]
    assert process.returncode == 130
    assert "The finished trials are in sqlite:///a.db; the same command goes on from there." in said
    assert [trial.state.name for trial in trials_in(address)] == ["FAIL", "WAITING"]


def shared(address, trials=12):
    """Two workers at once; their answers, and the trials."""
    with worker(address, trials) as one, worker(address, trials) as other:
        ended = [process.communicate() for process in (one, other)]
    assert [process.returncode for process in (one, other)] == [0, 0], ended
    found = trials_in(address)
    good = [trial for trial in found if trial.state.name == "COMPLETE"]
    assert len(good) == trials
    assert {trial.user_attrs["nhgd:worker"]["process"] for trial in good} == {one.pid, other.pid}
    assert len({trial.params["outer_lr"] for trial in good}) == trials  # they do not repeat each other
    assert max(len(json.loads(text)["trials"]) for text, _ in ended) == trials
    return good


@pytest.mark.slow
def test_two_workers_share_a_file():
    shared("sqlite:///a.db")


@pytest.fixture
def postgres():
    """A PostgreSQL server of its own, as Debian's package has it; its address."""
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not places:
        pytest.skip("needs PostgreSQL (on Debian: apt-get install postgresql)")
    pytest.importorskip("psycopg")
    programs = places[-1].parent
    # Not in pytest's folder, which is root's alone: the server refuses to be run by root.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        user = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
        if user:
            subprocess.run(["chown", "postgres", folder], check=True)
        quiet = {"check": True, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": "/"}
        subprocess.run([*user, str(programs / "initdb"), "-D", folder, "-U", "sweeper", "-A", "trust"], **quiet)
        options = f"-c listen_addresses='' -c unix_socket_directories={folder}"
        control = [*user, str(programs / "pg_ctl"), "-D", folder, "-l", f"{folder}/log", "-w"]
        subprocess.run([*control, "-o", options, "start"], **quiet)
        try:
            yield f"postgresql://sweeper@/postgres?host={folder}"
        finally:
            subprocess.run([*control, "-m", "immediate", "stop"], **quiet)


@pytest.mark.slow
def test_two_workers_share_a_real_postgresql_and_one_may_be_killed(postgres):
    shared(postgres)
    with worker(postgres, 14, budget="60g") as process:
        time.sleep(0.5)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    found = nhgd.sweep("quadratic", trials=16, storage=postgres, pruner="none", **TINY)
    assert len(found.trials) == 16
    assert all(row["state"] == "complete" for row in found.trials)
