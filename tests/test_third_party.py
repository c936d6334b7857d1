"""Methods and tasks of another package, really installed: listed, resolved and run as those of the house; broken ones left out."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import nhgd
from nhgd.algorithm import names, resolve
from nhgd.inverse import INVERSES

SOURCE = Path(__file__).parent / "third_party"

# One process says all there is to know, because importing torch takes longer than everything else here.
CODE = """
import json, torch, nhgd
from typer.testing import CliRunner
from nhgd.cli._program import app
from nhgd.task import Quadratic

said = []

def command(*args, code=0):
    done = CliRunner().invoke(app, [*args, "--json"], catch_exceptions=False)
    assert done.exit_code == code, done.stderr
    said.append(done.stderr)
    return json.loads(done.stdout)

state = torch.get_rng_state()
drawn = [command("run", "drawn", "--seed", seed, "--device", "cpu")["initial"]["outer_loss"] for seed in "001"]
assert torch.equal(torch.get_rng_state(), state)
run = ("run", "quadratic", "--preset", "quick", "--steps", "5", "--device", "cpu", "--method")
instance = Quadratic.preset("quick").build(0, torch.device("cpu"))
settings = instance.solver_settings() | {"outer_lr": 0.25}
nhgd.Solver(instance.problem, instance.inner_data, instance.outer_data, method="signed", **settings).run(steps=1)
print(json.dumps({
    "list": command("list"),
    "runs": {method: command(*run, method) for method in (
        "signed", "aid-halved", "aid-steepest", "aid-steepest-10", "aid-steepest-2")},
    "unknown": command("run", "quadratic", "--method", "aid-halvd", code=2),
    "drawn": drawn,
    "said": "".join(said),
    "v": instance.problem.v.given.abs().tolist(),
}))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process says that has the package in a folder of its own, installed by pip without the network."""
    place = tmp_path_factory.mktemp("third_party")
    shutil.copytree(SOURCE, place / "source", ignore=shutil.ignore_patterns("__pycache__"))
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(place / "site"), str(place / "source")]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    environment = os.environ | {"PYTHONPATH": str(place / "site")}
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_is_listed_beside_the_methods_of_the_house(told: dict[str, Any]) -> None:
    found = {kind: {row["name"]: row["summary"] for row in rows} for kind, rows in told["list"].items()}
    assert found["methods"]["signed"] == "Move v by the sign of a crude hypergradient."
    assert found["inverses"]["halved"] == "The Hessian taken as twice the identity."
    own = {"halved", "steepest", "steepest-2"}
    assert found["methods"].keys() - set(names()) == {"signed", *(f"aid-{name}" for name in own)}
    assert found["inverses"].keys() - set(INVERSES) == own


@pytest.mark.parametrize("method", ["signed", "aid-halved"])
def test_it_runs_by_name_on_the_command_line(told: dict[str, Any], method: str) -> None:
    found = told["runs"][method]
    assert found["method"] == method
    assert found["steps"] == found["oracle_calls"]["cross"] == 5
    assert found["metrics"]["outer_loss"] < found["initial"]["outer_loss"]


def test_a_number_after_its_name_sets_its_steps(told: dict[str, Any]) -> None:
    inverse = {n: told["runs"][f"aid-steepest{n}"]["settings"]["method"]["inverse"] for n in ("", "-10")}
    assert inverse == {"": {"name": "steepest", "steps": 3}, "-10": {"name": "steepest", "steps": 10}}
    assert told["runs"]["aid-steepest-10"]["oracle_calls"]["hvps"] == 5 * 10


def test_a_name_that_ends_in_a_number_is_that_name(told: dict[str, Any]) -> None:
    assert told["runs"]["aid-steepest-2"]["settings"]["method"]["inverse"] == {"name": "halved"}


def test_it_runs_by_name_in_python(told: dict[str, Any]) -> None:
    """v moves by outer_lr in every coordinate, which none of the house does."""
    assert told["v"] == [0.25] * 3


def test_where_it_is_not_installed_its_name_is_unknown() -> None:
    with pytest.raises(nhgd.InputError, match=r"There is no method called 'signed'\."):
        resolve("signed")


def test_what_is_broken_is_named_with_its_package_and_left_out(told: dict[str, Any]) -> None:
    said = [line for line in told["said"].splitlines() if line.startswith("Warning: The inverse")]
    for name, why in (
        ("raising", "could not be loaded (RuntimeError: this package is broken)"),
        ("leaving", "could not be loaded (SystemExit: 0)"),
        ("absent", "could not be loaded (AttributeError: module 'nhgd_third_party' has no attribute 'NoSuchName')"),
        ("wrong", "is not a subclass of AbstractInverse"),
        ("cg", "has the same name as one of nhgd itself, which is used instead"),
    ):
        sentence = f"Warning: The inverse '{name}' of the package nhgd-third-party 1.0 {why}."
        assert sum(line.startswith(sentence) for line in said) == 1, said
    assert len(said) == 5
    assert "Did you mean 'aid-halved'?" in told["unknown"]["error"]


def test_a_task_that_draws_from_the_global_generators_is_seeded(told: dict[str, Any]) -> None:
    first, again, other = told["drawn"]
    assert first == again != other
