"""The README does what it says: its Python runs as written, and its commands, and those of docs/, exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import nhgd
from nhgd.cli._program import app

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)


def test_the_python_of_the_readme_runs_and_prints_what_it_says(capsys):
    space: dict[str, object] = {"__name__": "__main__"}
    first, check, solved, observing, own = blocks("python")
    exec(compile(first, "README.md", "exec", dont_inherit=True), space)
    printed, promised = (re.findall(r"\d\.\d+", text) for text in (capsys.readouterr().out, blocks("text")[0]))
    # Sums in another order change the last digits, and a hundred steps make more of that.
    assert [float(n) for n in printed] == pytest.approx([float(n) for n in promised], abs=0.03)
    exec(compile(check, "README.md", "exec", dont_inherit=True), space)
    by_name = {row["inverse"]: row for row in space["report"].rows}
    assert by_name["cg"]["cosine"] == pytest.approx(1, abs=1e-5)
    batches = (space["x"], space["y"], torch.arange(600)), (space["x_trusted"], space["y_trusted"])
    exec(compile(solved, "README.md", "exec", dont_inherit=True), space)
    expected = nhgd.hypergradient(space["problem"], *batches, inverse="cg").grad
    torch.testing.assert_close(space["weights"].grad, expected)
    exec(compile(observing, "README.md", "exec", dont_inherit=True), space)
    exact = nhgd.hypergradient(space["problem"], *batches, inverse="exact").grad
    touched = space["learnt"].grad != 0  # the last batch's samples
    assert 90 < int(touched.sum()) <= 100
    assert float(torch.cosine_similarity(space["learnt"].grad[touched], exact[touched], dim=0)) > 0.8
    exec(compile(own, "README.md", "exec", dont_inherit=True), space)
    exact = nhgd.hypergradient(space["problem"], *batches, inverse="exact").grad
    assert float(torch.cosine_similarity(space["found"].grad, exact, dim=0)) > 0.99


def test_twenty_lines_are_about_twenty():
    lines = [line for line in blocks("python")[0].splitlines() if line.strip()]
    assert len(lines) <= 24


def commands() -> list[str]:
    """Those of the README and of the pages in docs/, each once."""
    found = dict[str, None]()
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        lines = re.findall(r"^    (nhgd [^\n]*?)(?:  +[^\n]*)?$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
        found |= dict.fromkeys(lines)
    assert len(found) >= 20
    return list(found)


@pytest.mark.parametrize("command", commands())
def test_every_command_of_a_page_is_understood(command):
    """Each option is known to its command; the runs themselves are examined elsewhere."""
    _, name, *rest = shlex.split(command)
    shown = CliRunner().invoke(app, [name, "--help"]).stdout
    assert all(word in shown for word in rest if word.startswith("--"))


def test_every_example_is_listed():
    listed = re.findall(r"^    python (examples/\w+\.py)", TEXT, flags=re.MULTILINE)
    assert sorted(listed) == sorted(f"examples/{path.name}" for path in (ROOT / "examples").glob("*.py"))


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert target.startswith("http") or (ROOT / target).exists(), target


def test_make_knows_the_two_commands():
    targets = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^    make (\w+)", TEXT, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", targets, flags=re.MULTILINE)
