"""What a command refuses, it refuses before it prepares anything."""

from __future__ import annotations

import pytest

from nhgd._experiment import Experiment
from nhgd.paper import paper
from nhgd.task import PDE, TASKS, Cleaning, Distillation, Quadratic
from tests.commands import answer, refusal


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Every command runs in an empty folder, in which nothing may be left."""
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)


@pytest.fixture
def unbuilt(monkeypatch):
    """Tasks that must not be built."""

    def build(self, *_, **__):
        raise AssertionError(f"{self.name} was built")

    for task in (PDE, Cleaning, Distillation, Quadratic):
        monkeypatch.setattr(task, "build", build)


@pytest.mark.parametrize("task", ["pde", "cleaning", "quadratic"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "intererior=3"], "There is no setting called 'intererior'"),
        (["--set", "inner_steps=0"], "inner_steps must be a whole number"),
        (["--set", "inner_steps=many"], "inner_steps must be a whole number"),
        (["--set", "solver.outer_lr=-1"], "outer_lr must be above 0"),
        (["--set", "inverse.damping=-1", "--method", "nhgd"], "damping"),
        (["--set", "inverse.damping=x"], "inverse.damping must be a number"),
        (["--set", "strength=-1", "--method", "bome"], "strength must be above 0"),
        (["--set", "strength=1", "--method", "nhgd"], "There is no setting called 'strength'"),
        (["--set", "inverse=kfacc"], "There is no inverse called 'kfacc'. Did you mean 'kfac'"),
        (["--set", "inverse=cg", "--set", "inverse.stepps=3", "--method", "nhgd"], "There is no setting"),
        (["--method", "nhdg"], "There is no method called 'nhdg'"),
        (["--set", "outer_optimizer=adamm"], "There is no optimiser called 'adamm'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_setting_is_refused_before_the_task_is_built(unbuilt, task, arguments, message):
    assert message in refusal("run", task, *arguments)
    if not {"inverse=kfacc", "nhdg"} & set(arguments) and task == "pde":
        assert message in refusal("bench", task, "--execution", "inline,thread", "--method", "nhgd", *arguments)


@pytest.mark.parametrize(
    "change",
    [
        "inverse.damping=0.1",
        "inverse.steps=3",
        "refine=2",
        "K=3",
        "outer_lr=0.1",
        "project_v=0,1",
        "outer_optimizer=adam",
    ],
)
def test_what_some_method_takes_is_left_until_it_is_known_which(change):
    """A task may choose method and inverse by itself."""
    from nhgd._experiment.changes import check_early, for_task, parse

    for name in TASKS:
        chosen, rest = for_task(TASKS[name].preset("default"), parse([change]))
        check_early(chosen, None, rest)


def test_the_advice_to_pass_beta_can_be_followed():
    """beta = 0 is printed, and cannot be run; the change reaches the method before that is refused."""
    preset = ("distillation", "--preset", "paper-5", "--method", "nhgd-paper")
    assert "Pass beta=0.7" in refusal("run", *preset)
    for key in ("beta", "inverse.beta"):
        chosen, _ = Experiment.chosen("distillation", "paper-5", "nhgd-paper", {key: "0.7"}, lambda rest: (None, rest))
        assert chosen.printed() == ("nhgd-paper", *paper("distillation-5", "nhgd-paper", 0.7))
        small = ("--set", "dataset=digits", "--set", "per_class=1", "--steps", "1", "--set", f"{key}=0.7")
        found = answer("run", *preset, *small)
        assert found["settings"]["method"]["inverse"]["beta"] == 0.7
        assert found["method"] == "nhgd-paper"


def test_a_method_the_paper_does_not_have_there_is_refused_before_the_data_are_read(unbuilt):
    said = refusal("run", "distillation", "--preset", "paper-5", "--method", "stocbio")
    assert "The paper has no stocBiO on distillation-5" in said
