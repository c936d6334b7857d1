"""The paper's settings: every row is what its line says, builds, and takes steps on a small instance of its task."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

import nhgd
from nhgd.algorithm import NHGD, names, resolve
from nhgd.cli._program import app
from nhgd.inverse import CG, FisherDense, Neumann
from nhgd.paper import INNER_STEPS, OPEN, TABLE, paper
from nhgd.schedule import Power
from nhgd.task import Cleaning, Distillation
from tests import idx_files

CPU = torch.device("cpu")
TASKS = {
    "cleaning": Cleaning.preset("paper").with_settings(
        {"dataset": "digits", "train": 60, "trusted": 20, "evaluation": 20, "batch": 12}
    ),
    "distillation-5": Distillation.preset("paper-5").with_settings({"dataset": "digits", "per_class": 1}),
    "distillation-100": Distillation.preset("paper-100").with_settings(
        {"dataset": "digits", "per_class": 2, "batch": 8, "outer_batch": 100}
    ),
}
ROWS = [(task, method) for task, rows in TABLE.items() for method in rows]


def beta_of(task: str, method: str) -> float | None:
    """In place of the one that cannot be."""
    return 0.7 if (task, method) == ("distillation-5", "nhgd-paper") else None


@pytest.mark.filterwarnings("ignore::nhgd.InverseWarning")  # some of the paper's scales are too large for digits
@pytest.mark.parametrize(("task", "method"), ROWS)
def test_every_row_takes_three_steps(task, method):
    instance = TASKS[task].build(0, CPU)
    algorithm, settings = paper(task, method, beta_of(task, method))
    before = instance.problem.v.flat()
    solution = instance.start(algorithm, **settings).run(steps=3)
    assert solution.stats["steps"] == 3
    assert bool(torch.isfinite(instance.problem.v.flat()).all())
    assert not torch.equal(instance.problem.v.flat(), before)


@pytest.mark.parametrize(("task", "method"), ROWS)
def test_every_row_is_the_method_of_its_name_with_its_numbers(task, method):
    row = TABLE[task][method]
    algorithm, settings = paper(task, method, beta_of(task, method))
    assert type(algorithm) is type(resolve(method))
    first = [rate.lr if isinstance(rate, Power) else rate for rate in (settings["inner_lr"], settings["outer_lr"])]
    assert first == [row.eta, row.alpha]
    assert settings["outer_optimizer"] is None
    assert settings.get("inner_steps") == (None if method in ("ttsa", "soba") else INNER_STEPS[task])
    if method.startswith("aid-"):
        assert algorithm.batches == row.M
        assert type(algorithm.inverse) is type(resolve(method).inverse)
        number = algorithm.inverse.steps if isinstance(algorithm.inverse, CG) else algorithm.inverse.terms
        assert number == row.K == int(method.rpartition("-")[2])
        if isinstance(algorithm.inverse, Neumann):
            assert algorithm.inverse.phi == row.phi
    known = {
        "stocbio": {"K": row.K, "phi": row.phi, "mu": row.mu, "B": row.B},
        "amigo": {"K": row.K, "beta": row.beta},
        "ttsa": {"K": row.K, "phi": row.phi},
    }
    for name, value in known.get(method, {}).items():
        assert value > 0
        assert getattr(algorithm, name) == value


def test_every_method_takes_the_settings_of_the_papers_task():
    """The task hands its M to every method with a field of that name, which must mean the same in all of them."""
    instance = TASKS["cleaning"].build(0, CPU)
    for name in names():
        made = instance.algorithm(name)
        assert getattr(made, "batches", 5) == 5


def test_nhgd_is_the_literal_one():
    algorithm, settings = paper("cleaning", "nhgd")
    assert algorithm == paper("cleaning", "nhgd-paper")[0] == resolve("nhgd-paper")
    literal = FisherDense(form="inverse", update="ema", beta=0.99, records="raw", warm="reset")
    assert paper("distillation-100", "nhgd")[0] == NHGD(inverse=literal, batches=5, cross="final")
    assert settings == {"inner_lr": 0.01, "outer_lr": 0.5, "outer_optimizer": None, "inner_steps": 10}


def test_powers_where_they_are_printed():
    _, settings = paper("distillation-5", "soba")
    assert settings["inner_lr"] == Power(2.0, 0.8)
    assert settings["outer_lr"] == Power(1.9, 0.2)
    assert paper("distillation-5", "ttsa")[1]["inner_lr"] == 10.0


def test_a_beta_of_ones_own():
    algorithm, _ = paper("distillation-5", "nhgd", beta=0.7)
    assert algorithm.inverse.beta == 0.7
    assert algorithm.batches == 1


def test_what_is_left_open_is_said():
    assert all(sentence.endswith(".") for sentence in OPEN.values())
    assert {"K of AmIGO", "K of stocBiO", "phi of TTSA", "c", "M", "inner steps", "epoch", "pde"} <= OPEN.keys()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda: paper("distillation-5", "stocbio"), "Use aid-neumann-10 or aid-neumann-40"),
        (lambda: paper("distillation-5", "nhgd"), "beta = 0 for NHGD here, which divides by zero.*Pass beta=0.7"),
        (lambda: paper("distillation-5", "nhgd-paper", beta=0.0), "divides by zero"),
        (lambda: paper("cleaning", "nhgd", beta=1.0), "beta"),
        (lambda: paper("cleaning", "soba", beta=0.5), "soba is another method"),
        (lambda: paper("pde", "nhgd"), r"prints no settings of its methods on the PDE.*Use PDE.preset\('paper'\)"),
        (lambda: paper("heat", "soba"), "There is no experiment of the paper called 'heat'"),
        (lambda: paper("cleaning", "aid-cg-20"), "Did you mean 'aid-cg-10'|Did you mean 'aid-cg-40'"),
        (lambda: paper("cleaning", "bome"), "There is no method of the paper on cleaning called 'bome'"),
    ],
)
def test_refusals(bad, message):
    with pytest.raises(nhgd.InputError, match=message):
        bad()


def test_the_command_line_runs_the_papers_own_settings(tmp_path):
    """On image files of our own making: each method gets the step sizes the paper prints for it."""
    small = ["--set", "train=200", "--set", "trusted=40", "--set", "evaluation=40", "--set", "batch=50"]
    folder = idx_files.write(tmp_path / "mnist", idx_files.image_set(300, 50))
    for method, eta, alpha in ((None, 0.01, 0.5), ("aid-cg-40", 0.01, 0.1), ("soba", 0.1, 0.5)):
        chosen = [] if method is None else ["--method", method]
        result = CliRunner().invoke(
            app,
            ["run", "cleaning", "--preset", "paper", "--data", str(folder), "--steps", "2", "--json", *chosen, *small],
        )
        assert result.exit_code == 0, result.output
        answer = json.loads(result.stdout)
        assert answer["method"] == (method or "nhgd-paper")
        assert answer["settings"]["solver"]["inner_lr"] == eta
        assert answer["settings"]["solver"]["outer_lr"] == alpha
