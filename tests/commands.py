"""Commands as a user gives them, and what must hold however they end."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from nhgd.cli._program import app


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
    before = sorted(Path.cwd().parent.rglob("*"))
    result = invoke(*args, "--json")
    assert result.exit_code == code, result.stdout + result.stderr
    sentence = strict_json(result.stdout)["error"]
    assert result.stderr.strip() == f"Error: {sentence}"
    assert "\n" not in sentence
    assert "Traceback" not in result.stderr
    assert sorted(Path.cwd().parent.rglob("*")) == before
    plain = invoke(*args)
    assert (plain.exit_code, plain.stdout, plain.stderr) == (code, "", result.stderr)
    return sentence
