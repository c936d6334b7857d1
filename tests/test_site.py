"""The pages of the documentation site: their examples run, and all of them are in its navigation."""

from __future__ import annotations

import re
from pathlib import Path

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


def test_the_parts_of_a_problem_of_ones_own_fit():
    space = run("own-problem.md")
    assert len(space["solution"].history) == 20
    assert 0 <= space["solution"].history[-1]["accuracy"] <= 1


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
    assert listed == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}


@pytest.mark.parametrize("page", sorted((DOCS / "api").glob("*.md")), ids=lambda page: page.stem)
def test_what_the_reference_names_exists(page):
    for name in re.findall(r"^::: (\S+)", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
        import pydoc

        assert pydoc.locate(name) is not None, name
