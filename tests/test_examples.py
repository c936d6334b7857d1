"""Every example runs, at tiny size, from the command that it names."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


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
        assert not list(tmp_path.iterdir())

    def test_names_its_command(self, path):
        said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        assert f"python examples/{path.name}" in said
