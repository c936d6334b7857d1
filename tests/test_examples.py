"""Every example runs, at tiny size, from the command that it names."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


def numbers(pattern, text):
    """The numbers that a pattern with groups finds, line by line."""
    return [tuple(map(float, found.groups())) for found in re.finditer(pattern, text, flags=re.MULTILINE)]


def own_problem(said):
    (before,), (after,) = numbers(r"^error .* trust: +([\d.]+)$", said)
    trust = [value for _, value in numbers(r"^ +(\d)   ([\d. ]+?)  ", said)]
    good = {0, 2, 3, 5, 7}
    assert after < 0.5 * before
    assert min(trust[i] for i in good) > max(trust[i] for i in set(range(8)) - good)


def clean_csv(said):
    ((hits, suspects, wrong),) = numbers(r"^(\d+) of the (\d+) suspects .*; (\d+) wrong", said)
    assert min(hits / suspects, hits / wrong) > 0.7  # by chance 0.15 of the suspects would be


def hyperparameters(said):
    losses = [row[2] for row in numbers(r"ridges +(\d+) +([\d.]+) +([\d.]+) ", said)]
    assert len(losses) == 3
    assert min(losses[1:]) < losses[0]  # on validation data; what many ridges do on test data is another matter


def learning_rate(said):
    *grid, (rate, loss) = [(row[0], row[2]) for row in numbers(r"^ +([\d.]+) +(\S+) +([\d.]+) +[\d.]+ +[\d.]+", said)]
    assert len(grid) == 6
    assert rate > 10 * grid[0][0]  # the first of the grid is where it began
    assert loss < min(loss for _, loss in grid)


def language_model(said):
    ((area,),) = numbers(r"^AUC of the weights: ([\d.]+);", said)
    (learnt,), (alike,) = numbers(r"^loss on other files, .*: +([\d.]+) ", said)
    assert 0 <= area <= 1  # how well so few files are told apart depends on which this Python's library has
    assert learnt < alike + 0.1


def resnet_cleaning(said):
    ((hits, suspects, wrong),) = numbers(r"^(\d+) of the (\d+) suspects .*; (\d+) wrong", said)
    assert min(hits / suspects, hits / wrong) > 0.6  # by chance 0.3 of the suspects would be


PROMISES = {
    check.__name__: check
    for check in (own_problem, clean_csv, hyperparameters, learning_rate, language_model, resnet_cleaning)
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
class TestEveryExample:
    def test_runs_and_leaves_no_files_behind(self, path, tmp_path):
        found = subprocess.run(
            [sys.executable, str(path), "--tiny"],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        assert found.returncode == 0, found.stderr
        assert found.stdout
        PROMISES.get(path.stem, bool)(found.stdout)
        assert not list(tmp_path.iterdir())

    def test_names_its_command(self, path):
        said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        assert f"python examples/{path.name}" in said


@pytest.mark.slow
def test_the_language_model_finds_the_corrupted_files():
    path = next(path for path in EXAMPLES if path.stem == "language_model")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    found = subprocess.run([sys.executable, str(path)], env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert numbers(r"^AUC of the weights: ([\d.]+);", found.stdout)[0][0] > 0.9


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [("sama",), ("f2sa-shared",), ("bome", "--inner-steps", "1", "--steps", "300")],
    ids=lambda method: method[0],
)
def test_first_order_methods_with_adamw_inside_find_the_corrupted_files(method):
    path = next(path for path in EXAMPLES if path.stem == "language_model")
    found = subprocess.run(
        [sys.executable, str(path), "--tiny", "--method", *method],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    assert numbers(r"^AUC of the weights: ([\d.]+);", found.stdout)[0][0] > 0.8
