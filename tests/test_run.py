"""What `nhgd run` leaves in its folder, says while it works, and takes from a file."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

import nhgd
from nhgd._provenance import commit
from tests.commands import answer, invoke, refusal, strict_json

QUICK = ("run", "quadratic", "--preset", "quick", "--steps", "3", "--device", "cpu")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)


def test_the_folder_says_what_was_run_and_where():
    done = answer(*QUICK, "--seed", 2, "--set", "inner_steps=7", "--out", "r s")
    about = strict_json(Path("r s/run.json").read_text())
    assert shlex.split(about["command"])[:3] == ["nhgd", "run", "quadratic"]
    again = answer(*shlex.split(about["command"])[1:-1])  # without its --json, which `answer` adds
    assert again["metrics"] == done["metrics"]
    assert (about["task"], about["seed"], about["steps"], about["execution"]) == ("quadratic", 2, 3, "inline")
    assert about["settings"] == done["settings"]
    assert about["settings"]["solver"]["inner_steps"] == 7
    assert about["versions"]["nhgd"] == nhgd.__version__
    assert about["machine"]["device"] == "cpu"
    assert about["date"].endswith("+00:00")
    assert about["git"] is None


def test_the_commit_of_the_folder_is_known():
    def git(*words):
        who = ["-c", "user.name=n", "-c", "user.email=n@n", "-c", "commit.gpgsign=false"]
        done = subprocess.run(["git", *who, *words], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "-q")
    assert commit(Path.cwd()) is None  # nothing is committed yet
    Path("a").write_text("a")
    git("add", "a")
    git("commit", "-qm", "a")
    assert commit(Path.cwd()) == {"commit": git("rev-parse", "HEAD"), "changed": False}
    Path("a").write_text("b")
    assert commit(Path.cwd())["changed"] is True
    assert commit(Path("nowhere")) is None


def test_the_history_grows_with_the_run_and_replaces_an_earlier_one(monkeypatch):
    answer(*QUICK, "--out", "r")
    seen = []
    advance = nhgd.Solver._advance

    def look(self, *given):
        names = sorted(path.name for path in Path("r").iterdir())
        seen.append((len(Path("r/history.jsonl").read_text().splitlines()), "result.json" in names))
        return advance(self, *given)

    monkeypatch.setattr(nhgd.Solver, "_advance", look)
    answer(*QUICK, "--out", "r")
    assert seen == [(3, True), (1, False), (2, False)]  # the earlier run stays until the first step of the next


def test_a_run_that_fails_midway_leaves_its_history(monkeypatch):
    advance = nhgd.Solver._advance

    def fail(self, *given):
        if self.loop.clock.k == 2:
            raise nhgd.RunError("The power failed.")
        return advance(self, *given)

    monkeypatch.setattr(nhgd.Solver, "_advance", fail)
    assert invoke(*QUICK, "--out", "r").exit_code == 1
    assert sorted(path.name for path in Path("r").iterdir()) == ["history.jsonl", "run.json"]
    assert len(Path("r/history.jsonl").read_text().splitlines()) == 2


def test_a_resumed_run_has_the_whole_history():
    words = (*QUICK[:-4], "--device", "cpu", "--checkpoint", "c", "--out", "r")
    answer(*words, "--steps", 2)
    found = invoke(*words, "--steps", 4, "--resume", "--json")
    assert found.exit_code == 0
    rows = [json.loads(line) for line in Path("r/history.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]


def test_off_a_terminal_lines_tell_how_far_it_is():
    said = invoke(*QUICK).stderr.splitlines()
    assert said[0] == "quadratic: preparing the data; 0:00 gone"
    assert any(line.startswith("quadratic: 0 %, step 1, outer ") and "v error" in line for line in said)
    assert invoke(*QUICK, "--no-progress").stderr == ""
    assert "step 1" in invoke(*QUICK, "--json", "--progress").stderr


def test_settings_from_a_file_are_those_of_set():
    Path("p.json").write_text(json.dumps({"outer_lr": 0.25, "inner_steps": 3, "inverse.steps": 5}))
    by_file = answer(*QUICK, "--params", "p.json")
    by_hand = answer(*QUICK, "--set", "outer_lr=0.25", "--set", "inner_steps=3", "--set", "inverse.steps=5")
    assert by_file["settings"] == by_hand["settings"]
    assert by_file["metrics"] == by_hand["metrics"]
    over = answer(*QUICK, "--params", "p.json", "--set", "outer_lr=0.5")
    assert (over["settings"]["solver"]["outer_lr"], over["settings"]["solver"]["inner_steps"]) == (0.5, 3)


def test_a_file_names_its_method_and_its_task():
    found = {"task": "quadratic", "method": "aid-cg-5", "value": 1.0, "parameters": {"outer_lr": 0.25}}
    Path("p.json").write_text(json.dumps(found))
    assert answer(*QUICK, "--params", "p.json")["method"] == "aid-cg-5"
    sentence = refusal(*QUICK, "--method", "aid", "--params", "p.json")
    assert "was found for the method aid-cg-5, not for aid" in sentence
    assert "for the task quadratic, not for l2" in refusal("run", "l2", "--params", "p.json")


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "is no JSON"), ("[1]", "must be a JSON object"), ('{"a": [1]}', "must be a JSON object"), (None, "cannot")],
)
def test_a_file_that_is_no_use_is_refused(text, words):
    if text is not None:
        Path("p.json").write_text(text)
    assert words in refusal(*QUICK, "--params", "p.json")


def test_an_unknown_setting_of_a_file_is_refused():
    Path("p.json").write_text('{"outer_rl": 1}')
    assert "Did you mean outer_lr?" in refusal(*QUICK, "--params", "p.json").replace("'", "")


def test_tensorboard_is_written_beside_the_rest():
    pytest.importorskip("tensorboard")
    assert "Add --out DIR" in refusal(*QUICK, "--tensorboard")
    answer(*QUICK, "--tensorboard", "--out", "r")
    assert any(name.startswith("events.out.tfevents") for name in os.listdir("r/tensorboard"))
