"""The pages of the documentation site: their examples run, and all of them are in its navigation."""

from __future__ import annotations

import json
import re
import sys
import warnings
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def run(name: str) -> dict[str, object]:
    """The names that a page's examples leave, run in their order."""
    text = (DOCS / name).read_text(encoding="utf-8")
    space: dict[str, object] = {"__name__": "page"}
    for block in re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        exec(compile(block, name, "exec", dont_inherit=True), space)
    return space


def test_the_first_problem_finds_the_features_that_matter():
    space = run("first-steps.md")
    v, history = space["v"], space["solution"].history
    assert history[-1]["outer_loss"] < history[0]["outer_loss"]
    assert v[:4].mean() < v[4:].mean() - 1
    rows = {row["inverse"]: row for row in space["report"].rows}
    assert rows["cg"]["cosine"] > 0.9999 > rows["identity"]["cosine"]


@pytest.mark.filterwarnings("ignore::nhgd.InverseWarning")  # cg, where the model is not convex
def test_the_parts_of_a_problem_of_ones_own_fit(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    space = run("own-problem.md")
    assert len(space["solution"].history) == 20
    assert 0 <= space["solution"].history[-1]["accuracy"] <= 1
    assert [row["method"] for row in space["table"].costs] == ["nhgd", "aid-cg", "stocbio", "soba"]
    assert (tmp_path / "methods.png").stat().st_size > 10_000


def test_the_comparison_and_the_sweep_of_the_page_run():
    pytest.importorskip("optuna")
    space = run("comparing.md")
    assert [row["method"] for row in space["table"].costs] == ["aid-cg", "stocbio", "soba"]
    assert space["table"].complete
    assert space["found"].best["parameters"].keys() == {"outer_lr"}


def test_the_three_ways_to_a_hypergradient_agree():
    """`solved` gives what `hypergradient` gives, and the learnt curvature about the same direction."""
    space = run("own-loop.md")
    expected = space["found"].grad  # v was 0 then, so the penalty of the page adds nothing
    torch.testing.assert_close(space["v"].grad, expected)
    exact = space["nhgd"].hypergradient(
        space["problem"], space["everything"], (space["x_judge"], space["y_judge"]), inverse="exact"
    )
    assert torch.cosine_similarity(space["learnt"].grad, exact.grad, dim=0) > 0.8


def test_the_theory_of_the_page_of_mathematics_runs(capsys):
    space = run("maths.md")
    assert space["T"] == 19_899_259_587
    assert "inner steps suffice" in capsys.readouterr().out


class Trackers:
    """What the examples for W&B and MLflow ask of those packages, which are too large to install for a page."""

    def __init__(self):
        self.rows = []

    @contextmanager
    def init(self, project):
        yield self

    def log(self, row, step):
        self.rows.append((step, row["outer_loss"]))

    log_metrics = log


def test_loggers_see_every_step(monkeypatch, tmp_path):
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    trackers = SimpleNamespace(wandb=Trackers(), mlflow=Trackers())
    trackers.mlflow.start_run = partial(trackers.mlflow.init, project=None)
    for name, tracker in vars(trackers).items():
        monkeypatch.setitem(sys.modules, name, tracker)
    space = run("callbacks.md")
    lines = (tmp_path / "runs/ridge/history.jsonl").read_text().splitlines()
    expected = [(row["step"], row["outer_loss"]) for row in map(json.loads, lines)]
    assert trackers.wandb.rows == trackers.mlflow.rows == expected
    assert len(expected) == 3
    assert space["solution"].result == "stopped"
    assert any(path.name.startswith("events") for path in (tmp_path / "runs/ridge").iterdir())


@pytest.mark.slow
def test_the_trackers_themselves_take_the_rows(monkeypatch, tmp_path):
    pytest.importorskip("wandb")
    pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of those packages
        run("callbacks.md")
        import mlflow

        (found,) = mlflow.search_runs(output_format="list")
        assert found.data.metrics["outer_loss"] > 0
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


def test_every_example_of_an_extension_works():
    space = run("extending.md")
    rows = {row["inverse"]: row for row in space["report"].rows}
    assert rows["chebyshev"]["cosine"] > 0.9999
    assert rows["plain_diagonal"]["cosine"] > rows["identity"]["cosine"]
    assert space["solution"].history[-1]["v_error"] < 1e-3
    assert space["rows"][-1]["error"] < 0.7 * space["rows"][0]["error"]
    assert torch.equal(*space["ends"])


def test_the_harmful_samples_of_the_page_of_influence_are_the_wrong_ones():
    space = run("influence.md")
    assert space["wrong"][space["found"].harmful(10)].sum() >= 9  # of twenty among two hundred


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"([\w/-]+\.md)", (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("nav:")[1]))
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert listed == pages | {f"notebooks/{path.stem}.md" for path in (DOCS / "notebooks").glob("*.ipynb")}


@pytest.mark.parametrize("page", sorted((DOCS / "api").glob("*.md")), ids=lambda page: page.stem)
def test_what_the_reference_names_exists(page):
    for name in re.findall(r"^::: (\S+)", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
        import pydoc

        assert pydoc.locate(name) is not None, name
