"""Commands as a user gives them, and what must hold however they end."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from nhgd.cli._program import app
from nhgd.errors import listed


def invoke(*args):
    return CliRunner().invoke(app, [str(a) for a in args], catch_exceptions=False)


def strict_json(text):
    """Parse JSON as JavaScript would: NaN is no number."""

    def refuse(name):
        raise AssertionError(f"{name} in the JSON")

    return json.loads(text, parse_constant=refuse)


def answer(*args):
    """The JSON object of a command that must succeed; standard output must hold nothing else."""
    result = invoke(*args, "--json")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    return strict_json(result.stdout)


def refusal(*args, code=2):
    """The sentence of a command that must fail, on both streams, with nothing written."""
    (sentence,) = refusals(*args, code=code)
    return sentence


def refusals(*args, code=2):
    """The same of a command that may name several problems: all of them."""
    before = sorted(Path.cwd().parent.rglob("*"))
    result = invoke(*args, "--json")
    assert result.exit_code == code, result.stdout + result.stderr
    said = strict_json(result.stdout)
    sentences = said.get("problems", [said["error"]])
    assert "problems" not in said or said["error"] == listed(sentences)[0]
    assert result.stderr == "Error: " + "\n  ".join(listed(sentences)) + "\n"
    assert all("\n" not in sentence for sentence in sentences)
    assert "Traceback" not in result.stderr
    assert sorted(Path.cwd().parent.rglob("*")) == before
    plain = invoke(*args, *(["--no-progress"] if args[0] == "run" else []))
    assert (plain.exit_code, plain.stdout, plain.stderr) == (code, "", result.stderr)
    return sentences
