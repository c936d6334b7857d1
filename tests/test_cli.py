"""The command line: what it answers, how it fails, and what it leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import nhgd
from nhgd._experiment.changes import for_run, for_task
from nhgd._results import jsonable
from nhgd.algorithm import names as method_names
from nhgd.cli import demo as demo_command
from nhgd.execution import EXECUTIONS
from nhgd.inverse import INVERSES
from nhgd.task import TASKS
from nhgd.task._labels import detection_scores
from tests import idx_files
from tests.commands import answer, invoke, refusal, strict_json

QUICK = ("run", "l2", "--preset", "quick", "--steps", "3", "--device", "cpu")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Every command runs in an empty folder, and no data folder is set or cached."""
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.delenv("NHGD_DATA", raising=False)
    monkeypatch.setenv("NHGD_CACHE", str(tmp_path / "cache"))


def test_version_and_help():
    assert invoke("--version").stdout == f"nhgd {nhgd.__version__}\n"
    for command in ("list", "run", "check", "demo"):
        assert command in invoke("--help").stdout
        assert "--json" in invoke(command, "--help").stdout


def test_without_a_command_help_is_shown_and_the_usage_is_wrong():
    result = invoke()
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Commands:" in result.stderr


def test_list_names_everything_that_is_registered():
    found = answer("list")
    assert [row["name"] for row in found["methods"]] == method_names()
    for kind, registry in (("inverses", INVERSES), ("tasks", TASKS), ("executions", EXECUTIONS)):
        assert [row["name"] for row in found[kind]] == list(registry)
    assert all(row["summary"] and set(row) == {"name", "summary"} for rows in found.values() for row in rows)
    shown = invoke("list").stdout
    assert all(row["name"] in shown for rows in found.values() for row in rows)


def test_run_lowers_the_outer_loss_and_writes_nothing():
    found = answer("run", "l2", "--method", "aid", "--steps", 50)
    assert found["metrics"]["outer_loss"] < found["initial"]["outer_loss"]
    assert (found["task"], found["method"], found["seed"], found["steps"]) == ("l2", "aid", 0, 50)
    assert found["result"] == "steps"
    assert found["out"] is None
    assert {"name", "processes", "bytes_sent", "waited_seconds"} <= set(found["execution"])
    calls = found["oracle_calls"]
    # One outer gradient and one cross product a step; 20 inner gradients, and one more for the graph of the products.
    assert (calls["outer_gradients"], calls["cross"], calls["inner_gradients"]) == (50, 50, 50 * 21)
    assert calls["gradients"] == calls["inner_gradients"] + calls["outer_gradients"]
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize("method", ["nhgd", "nhgd-refined", "aid-cg-5", "aid-identity"])
def test_run_equals_the_library(method):
    found = answer(*QUICK, "--method", method, "--seed", 3)
    instance = nhgd.task.resolve("l2", "quick").build(3, torch.device("cpu"))
    solution = instance.start(method, seed=3).run(steps=3)
    assert found["metrics"] == instance.summary(solution)
    assert found["initial"]["outer_loss"] == solution.history[0]["outer_loss"]


def test_run_takes_the_number_of_steps_of_the_task_when_none_is_given():
    found = answer("run", "quadratic", "--preset", "quick")
    assert found["steps"] == nhgd.task.resolve("quadratic", "quick").build(0, torch.device("cpu")).steps


def test_run_stops_with_its_budget():
    found = answer("run", "quadratic", "--preset", "quick", "--budget", "0.05s")
    assert found["result"] == "budget"
    assert found["seconds"] >= 0.05


def test_run_for_people():
    shown = invoke(*QUICK).stdout
    assert "l2 by aid" in shown
    assert "test accuracy" in shown


def test_out_holds_the_result_the_history_and_the_curve():
    printed = answer(*QUICK, "--out", "deep/er")
    folder = Path("deep/er")
    assert sorted(p.name for p in folder.iterdir()) == ["curve.png", "history.jsonl", "result.json", "run.json"]
    assert strict_json((folder / "result.json").read_text()) == printed
    assert printed["out"] == "deep/er"
    rows = [strict_json(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[0]["outer_loss"] == printed["initial"]["outer_loss"]
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert strict_json((folder / "result.json").read_text())["settings"]["task"]["dataset"] == "synthetic"


def test_a_second_run_replaces_the_files_of_the_first():
    answer(*QUICK, "--out", "a")
    second = answer(*QUICK, "--seed", 1, "--out", "a")
    assert strict_json(Path("a/result.json").read_text()) == second
    assert len(list(Path("a").iterdir())) == 4


def test_settings_reach_the_task_the_solver_the_method_and_its_inverse():
    pairs = ["features=3", "inner_steps=2", "batches=all", "steps=7", "warm_start=no", "project_v=-3,-1"]
    found = answer(*QUICK, *(part for pair in pairs for part in ("--set", pair)))["settings"]
    assert found["task"]["features"] == 3
    assert (found["solver"]["inner_steps"], found["solver"]["project_v"]) == (2, [-3.0, -1.0])
    assert (found["method"]["batches"], found["method"]["warm_start"]) == ("all", False)
    assert (found["method"]["inverse"]["name"], found["method"]["inverse"]["steps"]) == ("cg", 7)


def test_settings_by_their_place():
    task = nhgd.task.resolve("cleaning")
    # The task has l2, the inverse has steps and damping, and a new inverse counts before its own settings.
    task, rest = for_task(task, {"l2": "0.5", "inverse.damping": "0.1", "inverse": "cg-3", "solver.outer_lr": "2"})
    solver, method = for_run(task, nhgd.algorithm.resolve("nhgd"), rest)
    assert task.l2 == 0.5
    assert solver == {"outer_lr": 2.0}
    assert method.inverse == nhgd.inverse.CG(steps=3, damping=0.1)
    _, deep = for_run(task, nhgd.algorithm.resolve("aid-refined"), {"inverse.inverse.damping": "0.2", "steps": "4"})
    assert deep.inverse == nhgd.inverse.refined(nhgd.inverse.KFAC(damping=0.2), steps=4)
    solver, _ = for_run(task, nhgd.algorithm.resolve("aid"), {"outer_optimizer": "adamw", "project": "none"})
    assert solver == {"outer_optimizer": torch.optim.AdamW, "project": None}


def test_check_lists_every_inverse_and_says_what_it_means():
    found = answer("check", "l2", "--preset", "quick")
    assert [row["inverse"] for row in found["rows"]] == list(INVERSES)
    keys = {"cosine", "relative_error", "milliseconds", "megabytes", "hvps", "residual", "converged", "error"}
    assert all(keys <= set(row) for row in found["rows"])
    by_name = {row["inverse"]: row for row in found["rows"]}
    assert by_name["exact"]["relative_error"] < 1e-12
    assert by_name["identity"]["relative_error"] > 0.01
    assert found["inner_gradient"] < 1e-11
    assert found["advice"]
    assert (found["task"], found["seed"]) == ("l2", 0)
    assert found["reference"]["method"] == "dense solve"


def test_check_takes_names_with_numbers_and_settings_of_an_inverse():
    found = answer(
        "check", "l2", "--preset", "quick", "--inverses", "cg-2, cg", "--set", "cg.steps=2", "--set", "decoys=1"
    )
    first, second = found["rows"]
    assert (first["inverse"], second["inverse"]) == ("cg-2", "cg")
    assert first["hvps"] == second["hvps"] == 2
    assert first["cosine"] == second["cosine"]
    shown = invoke("check", "l2", "--preset", "quick", "--inverses", "cg,identity").stdout
    assert all(word in shown for word in ("cosine", "identity", "inner optimum"))


def test_nan_and_inf_become_null():
    assert jsonable({"a": float("nan"), "b": [float("-inf"), 1.0], "c": (torch.tensor([1.0]),)}) == {
        "a": None,
        "b": [None, 1.0],
        "c": [[1.0]],
    }
    # Without noise there is no wrong label to find, so the area under the curve is undefined.
    cleaning = ("run", "cleaning", "--preset", "quick", "--steps", 1, "--set", "noise=0", "--set", "dataset=digits")
    assert answer(*cleaning)["metrics"]["auc"] is None


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("rnu", "l2"), ["command", "'rnu'", "Did you mean 'run'?"]),
        ((*QUICK, "--stepz", "3"), ["There is no option --stepz.", "Did you mean --steps?"]),
        (("run", "l3"), ["task called 'l3'", "Did you mean 'l2'?"]),
        (("run",), ["Missing argument", "TASK"]),
        ((*QUICK, "--method", "aid-cgg"), ["method called 'aid-cgg'", "Did you mean 'aid-cg'?"]),
        ((*QUICK, "--method", "ngd"), ["Did you mean 'nhgd'?"]),
        (("run", "l2", "--preset", "quik"), ["preset of l2", "Did you mean 'quick'?"]),
        (("check", "l2", "--preset", "quik"), ["preset of l2", "Did you mean 'quick'?"]),
        (("check", "l2", "--inverses", "cg,kfacc"), ["inverse called 'kfacc'", "Did you mean 'kfac'?"]),
        (("check", "l2", "--inverses", ","), ["--inverses is empty"]),
        (("check", "l2", "--inverses", "cg", "--set", "cg.stepz=3"), ["Did you mean 'cg.steps'?"]),
        (("check", "l2", "--inverses", "cg", "--set", "identity.scale=3"), ["setting called 'identity.scale'"]),
        (("check", "l2", "--inverses", "cg", "--set", "cg.steps=0"), ["CG: steps must be"]),
        ((*QUICK, "--execution", "inlin"), ["execution called 'inlin'", "Did you mean 'inline'?"]),
        ((*QUICK, "--device", "cdua"), ["device called 'cdua'", "Did you mean 'cuda'?"]),
        ((*QUICK, "--device", "cpu:1"), ["device called 'cpu:1'"]),
        ((*QUICK, "--steps", "0"), ["--steps must be a whole number of at least 1, got 0."]),
        ((*QUICK, "--steps", "many"), ["Invalid value for '--steps'"]),
        ((*QUICK, "--budget", "soon"), ["A budget is a time", "'soon'"]),
        ((*QUICK, "--budget", "0s"), ["A budget is a time"]),
        ((*QUICK, "--seed", "-1"), ["--seed must be a whole number"]),
        ((*QUICK, "--set", "inner_stepz=3"), ["Did you mean 'inner_steps'?"]),
        ((*QUICK, "--set", "feature=3"), ["Did you mean 'features'?"]),
        ((*QUICK, "--set", "inverse.stepz=3"), ["Did you mean 'inverse.steps'?"]),
        ((*QUICK, "--set", "wram_start=no"), ["Did you mean 'warm_start'?"]),
        ((*QUICK, "--set", "inner_steps"), ["--set takes key=value", "'inner_steps'"]),
        ((*QUICK, "--set", "inner_steps=0"), ["inner_steps must be a whole number of at least 1, got 0."]),
        ((*QUICK, "--set", "inner_steps=2.5"), ["inner_steps must be a whole number, got '2.5'."]),
        ((*QUICK, "--set", "inner_lr=-0.1"), ["inner_lr must be above 0, got -0.1."]),
        ((*QUICK, "--set", "outer_lr=nan"), ["outer_lr must be above 0, got nan."]),
        ((*QUICK, "--set", "inverse.damping=-1"), ["CG: damping must be 0 or more, got -1.0."]),
        ((*QUICK, "--set", "batches=0"), ["AID: batches must be"]),
        ((*QUICK, "--set", "batches=few"), ["AID: batches must be"]),
        ((*QUICK, "--set", "warm_start=maybe"), ["warm_start must be true or false, got 'maybe'."]),
        ((*QUICK, "--set", "project_v=1,0"), ["project_v must be a box (low, high)"]),
        ((*QUICK, "--set", "outer_optimizer=adamm"), ["Did you mean 'adam'?"]),
        ((*QUICK, "--method", "nhgd", "--set", "cross=finall"), ["Did you mean 'final'?"]),
        ((*QUICK, "--method", "nhgd", "--set", "inverse=kfacc"), ["Did you mean 'kfac'?"]),
        ((*QUICK, "--set", "samples=3"), ["l2: samples must be at least 10"]),
        (("run", "l2", "--data", "."), ["l2 reads no files"]),
        (("run", "cleaning", "--set", "train=many"), ["train must be a whole number or none, got 'many'."]),
        (("run", "cleaning", "--set", "inner_lr=0"), ["inner_lr must be above 0, got 0.0."]),
        (("run", "cleaning", "--set", "noise_kind=filp"), ["Did you mean 'flip'?"]),
        (("run", "cleaning", "--set", "train=5000"), ["there are only 1797 samples"]),
        (("run", "cleaning", "--set", "dataset=digits", "--data", "."), ["--data would be ignored"]),
        (("run", "cleaning", "--preset", "paper"), ["MNIST was requested, but no folder was given."]),
        (("demo", "--seed", "-3"), ["--seed must be a whole number"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_refused_in_one_sentence(args, words):
    writing = ("--out", "results") if args[0] == "run" and len(args) > 1 else ()
    sentence = refusal(*args, *writing)
    assert all(word in sentence for word in words), sentence


def test_no_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    sentence = refusal("run", "l2", "--device", "cuda", "--out", "results")
    assert sentence == "PyTorch cannot use a CUDA device here. Use --device cpu."


def test_an_output_folder_that_cannot_be_is_found_out_before_the_run(monkeypatch):
    def never(*_, **__):
        raise AssertionError("of the saved run")

    monkeypatch.setattr(nhgd.Solver, "run", never)
    Path("file").write_text("mine")
    Path("dangling").symlink_to("nowhere")
    for place in ("file", "file/below", "file/far/below", "dangling/below"):
        assert place in refusal(*QUICK, "--out", place)
    assert Path("file").read_text() == "mine"
    assert "file" in refusal("demo", "--out", "file/below")
    if Path("/proc/self").exists():  # where even root cannot make a folder
        assert "/proc/nhgd" in refusal(*QUICK, "--out", "/proc/nhgd")


def test_a_run_that_fails_exits_with_1_and_leaves_nothing():
    sentence = refusal("run", "quadratic", "--set", "inner_lr=1e30", "--steps", 5, "--out", "a/b", code=1)
    assert "non-finite" in sentence
    assert "Outer step" in sentence


def test_a_disk_that_fails_midway_leaves_no_half_file(monkeypatch):
    def fail(path, *_):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("nhgd.cli._run_folder.draw_history", fail)
    result = invoke(*QUICK, "--out", "a")
    assert result.exit_code == 1
    assert "No space left on device" in result.stderr
    assert sorted(p.name for p in Path("a").iterdir()) == ["history.jsonl", "result.json", "run.json"]


def test_ctrl_c(monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(nhgd.Solver, "run", interrupt)
    assert refusal(*QUICK, "--out", "a/b", code=130) == "Stopped by Ctrl-C. Nothing was written."


def test_a_warning_is_one_line_on_standard_error(monkeypatch):
    original = nhgd.Solver.run

    def warn(self, **settings):
        warnings.warn("Mind the step.", nhgd.InverseWarning, stacklevel=2)
        return original(self, **settings)

    monkeypatch.setattr(nhgd.Solver, "run", warn)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        result = invoke(*QUICK, "--json")
    assert result.exit_code == 0
    assert result.stderr == "Warning: Mind the step.\n"
    assert strict_json(result.stdout)["steps"] == 3


CLEANING = ("run", "cleaning", "--steps", "2", "--set", "inner_steps=2", "--set", "batch=32")


def test_cleaning_reads_idx_files_plain_and_packed_from_either_place(tmp_path, monkeypatch):
    arrays = idx_files.image_set()
    plain = idx_files.write(tmp_path / "plain", arrays)
    packed = idx_files.write(tmp_path / "packed" / "mnist", arrays, packed=True).parent
    first = answer(*CLEANING, "--data", plain)
    assert first["metrics"]["wrong_labels"] == 40  # 40 % of the 100 that are for training
    assert answer(*CLEANING, "--data", packed)["metrics"] == first["metrics"]
    monkeypatch.setenv("NHGD_DATA", str(packed))
    assert answer(*CLEANING)["metrics"] == first["metrics"]
    paper = answer(*CLEANING, "--preset", "paper", "--method", "nhgd-paper")
    assert paper["settings"]["method"]["batches"] == 5
    # What the user names counts before what the environment says.
    assert answer(*CLEANING, "--data", plain, "--seed", 1)["metrics"] != first["metrics"]


def spoilt(name, change):
    """An image set in which the bytes of one file are changed."""

    def make(folder):
        idx_files.write(folder, idx_files.image_set())
        (folder / name).write_bytes(change((folder / name).read_bytes()))
        return folder

    return make


def packed_and_cut(folder):
    idx_files.write(folder, idx_files.image_set(), packed=True)
    path = folder / f"{idx_files.NAMES[0]}.gz"
    path.write_bytes(path.read_bytes()[:-50])
    return folder


def with_arrays(**changes):
    def make(folder):
        arrays = idx_files.image_set()
        for key, change in changes.items():
            name = idx_files.NAMES[int(key[1:])]
            arrays[name] = change(arrays[name])
        return idx_files.write(folder, arrays)

    return make


def labelled_17(labels):
    labels[3] = 17
    return labels


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: folder / "nothing", ["There is no folder"]),
        (lambda folder: folder, ["holds no mnist", "train-images-idx3-ubyte(.gz)"]),
        (spoilt(idx_files.NAMES[0], lambda b: b[:-1]), ["truncated or corrupt", "4320 bytes, but it holds 4319"]),
        (spoilt(idx_files.NAMES[0], lambda b: b + b"x"), ["truncated or corrupt", "holds more"]),
        (spoilt(idx_files.NAMES[1], lambda b: b[:6]), ["ends within its header"]),
        (spoilt(idx_files.NAMES[2], lambda b: b""), ["is not an IDX file", "nothing"]),
        (spoilt(idx_files.NAMES[2], lambda b: b"\x89PNG" + b), ["is not an IDX file", "89504e47"]),
        (spoilt(idx_files.NAMES[1], lambda b: b"\0\0\x0d" + b[3:]), ["IDX file of another kind", "00000d01"]),
        (spoilt(idx_files.NAMES[0], lambda b: b[:4] + b"\xff" * 12 + b[16:]), ["not an image set"]),
        (packed_and_cut, ["is not a whole gzip file"]),
        (with_arrays(_1=labelled_17), ["train label 3 is 17", "between 0 and 9"]),
        (with_arrays(_1=lambda labels: labels[:-1]), ["120 train images but 119 labels"]),
        (with_arrays(_0=lambda images: images[:, 0]), ["do not hold images and labels (2 and 1 axes)"]),
        (with_arrays(_2=lambda images: images[:, :3]), ["must have the same size", "6 x 6 and 3 x 6"]),
        (with_arrays(_2=lambda images: images[:0], _3=lambda labels: labels[:0]), ["test files hold no samples"]),
        (with_arrays(_0=lambda images: 0 * images), ["all pixels of the training images are equal"]),
    ],
)
def test_spoilt_data_is_refused(make, words, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    sentence = refusal(*CLEANING, "--data", make(folder), "--out", "results")
    assert all(word in sentence for word in words), sentence


def small_demo(monkeypatch):
    monkeypatch.setattr(demo_command, "STEPS", 8)
    monkeypatch.setattr(demo_command, "METHODS", ("aid-identity", "nhgd"))
    monkeypatch.setattr(demo_command, "TASK", replace(demo_command.TASK, train=400))


def test_demo_counts_right_and_draws_a_picture(monkeypatch):
    small_demo(monkeypatch)
    threads = torch.get_num_threads()
    printed = answer("demo", "--out", "shown")
    assert torch.get_num_threads() == threads
    assert sorted(p.name for p in Path("shown").iterdir()) == ["demo.png", "report.html", "result.json", "runs"]
    assert {p.parent.name for p in Path("shown").glob("runs/*/result.json")} == {"aid-identity", "nhgd"}
    assert "nhgd" in Path(printed["report"]).read_text()
    assert Path("shown/demo.png").read_bytes().startswith(b"\x89PNG")
    assert strict_json(Path("shown/result.json").read_text()) | {"report": "shown/report.html"} == printed
    assert printed["wrong"] == 160  # 40 % of 400
    # F1 from the counts and F1 from the weights must agree.
    precision = printed["found"] / (printed["found"] + printed["false_alarms"])
    recall = printed["found"] / printed["wrong"]
    first, second = printed["methods"]
    assert first["f1"] == pytest.approx(2 * precision * recall / (precision + recall))
    assert first["test_accuracy"] == printed["accuracy"]["cleaned"]
    assert (first["method"], second["method"]) == ("aid-identity", "nhgd")
    assert printed["accuracy"]["cleaned"] > printed["accuracy"]["as_given"]


def test_demo_for_people(monkeypatch):
    small_demo(monkeypatch)
    shown = invoke("demo")
    assert shown.exit_code == 0
    assert Path("nhgd-demo/demo.png").is_file()
    assert all(words in shown.stdout for words in ("Wrong labels found", "nhgd-demo/demo.png", "nhgd check cleaning"))


def test_demo_keeps_the_weights_of_the_step_that_the_evaluation_split_chose(monkeypatch):
    small_demo(monkeypatch)
    sets = demo_command.TASK.load(0, torch.device("cpu"))
    cleaned = demo_command.clean("aid-identity", 0, sets, nhgd.stop.Steps(8))
    rows = cleaned.solution.history
    best = min(rows, key=lambda row: row["evaluation_loss"])
    assert {key: best[key] for key in ("f1", "auc", "recall")} == {
        key: value
        for key, value in detection_scores(cleaned.weights, sets.wrong).items()
        if key in ("f1", "auc", "recall")
    }


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_the_whole_demo_beats_both_honest_references(seed):
    accuracy = answer("demo", "--seed", seed)["accuracy"]
    assert accuracy["cleaned"] > max(accuracy["as_given"], accuracy["trusted_alone"]) + 0.02
    assert accuracy["cleaned"] < accuracy["perfect"] + 0.02


def script(text, *args, **extra):
    command = [sys.executable, "-c", text, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | extra, check=False)


def test_the_console_script_as_a_process():
    result = script("from nhgd.cli import main; main()", *QUICK, "--out", "a", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    assert strict_json(result.stdout) == strict_json(Path("a/result.json").read_text())


def test_the_core_alone_says_what_the_command_line_needs():
    result = script("import sys; sys.modules['typer'] = None\nfrom nhgd.cli import main; main()", "list")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == "The command line needs: pip install 'nhgd[cli]'\n"
