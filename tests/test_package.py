"""The package as it is imported, installed and typed: what is light, and what is found."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import typer

import nhgd
from nhgd.cli._program import COMMANDS, Program, app
from tests.commands import invoke

LIGHT = "import sys; from nhgd.cli import main; sys.argv = ['nhgd', *{args!r}]\ntry: main()\nfinally: print('torch' in sys.modules)"


def lines(code: str) -> list[str]:
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    return found.stdout.splitlines()


@pytest.mark.parametrize("args", [["--version"], ["--help"]], ids=" ".join)
def test_the_command_line_answers_without_torch(args):
    *said, imported = lines(LIGHT.format(args=args))
    assert said
    assert imported == "False"


def test_completion_names_the_commands_without_torch():
    code = (
        "import os; os.environ |= {'_NHGD_COMPLETE': 'complete_bash', 'COMP_WORDS': 'nhgd ', 'COMP_CWORD': '1'}\n"
        + LIGHT.format(args=[])
    )
    *said, imported = lines(code)
    assert set(said) == set(COMMANDS)
    assert imported == "False"


def test_completion_offers_options_and_the_values_they_take():
    code = (
        "import os, sys, runpy; from nhgd.cli import main; sys.argv = ['nhgd']\n"
        "for words in ('run quadratic --met', 'run quad', 'run cleaning --preset pap', 'run l2 --method aid-c'):\n"
        "    given = {'COMP_WORDS': f'nhgd {words}', 'COMP_CWORD': str(len(words.split()))}\n"
        "    os.environ |= {'_NHGD_COMPLETE': 'complete_bash'} | given\n"
        "    try: main()\n"
        "    except SystemExit: print('|')\n"
    )
    offered = "\n".join(lines(code)).split("|")
    options, tasks, presets, methods = (part.split() for part in offered[:4])
    assert options == ["--method"]
    assert tasks == ["quadratic"]
    assert presets == ["paper"]
    assert methods == ["aid-cg"]


def test_a_plain_import_does_not_wait_for_torch_and_knows_every_name():
    code = (
        "import sys, nhgd; print('torch' in sys.modules); from nhgd import *; print(Solver.__name__, callable(check))"
    )
    assert lines(code) == ["False", "Solver True"]


@pytest.mark.parametrize("first", ["import nhgd._check, nhgd._plan", "from nhgd._check import Report", "pass"])
def test_check_and_plan_are_functions_whatever_was_imported_first(first):
    code = f"{first}\nimport nhgd; print(nhgd.check.__module__, nhgd.plan.__module__, nhgd.check is nhgd.check)"
    assert lines(code) == ["nhgd._check nhgd._plan True"]


def test_dir_shows_what_can_be_used_and_nothing_else():
    shown = [name for name in dir(nhgd) if not name.startswith("__")]
    assert shown == sorted(nhgd.__all__)
    assert {"LabelCleaner", "DatasetDistiller", "Solver", "check"} <= set(shown)
    assert all(getattr(nhgd, name) is not None for name in shown)


def test_submodules_are_attributes_as_they_were():
    code = "import nhgd; print(nhgd.likelihood.__name__, nhgd.data.Data is nhgd.Data, nhgd.errors.InputError is nhgd.InputError)"
    assert lines(code) == ["nhgd.likelihood True True"]


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'nhgd' has no attribute 'Bilvel'"):
        _ = nhgd.Bilvel
    assert not hasattr(nhgd, "__wrapped__")


def test_without_scikit_learn_a_sentence_and_the_rest():
    hidden = "import sys; sys.modules['sklearn'] = None\nimport importlib.util as u; f = u.find_spec\n"
    hidden += "u.find_spec = lambda name, *a: None if name == 'sklearn' else f(name, *a)\n"
    code = hidden + "from nhgd import *; import nhgd; print('LabelCleaner' in dir(nhgd), Data.__name__)\n"
    code += "try: nhgd.LabelCleaner\nexcept ImportError as error: print(error)"
    assert lines(code) == ["False Data", "nhgd.LabelCleaner needs scikit-learn: pip install 'nhgd[cli]'."]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_says_what_each_says_of_itself(name):
    program = typer.main.get_command(app)
    assert isinstance(program, Program)
    context = typer.Context(program)
    shown, real = program.get_command(context, name), program.loaded(name)
    for limit in (45, 80, 200):
        assert shown.get_short_help_str(limit) == real.get_short_help_str(limit)
    assert (real.name, shown.name) == (name, name)


def test_every_command_file_is_listed():
    folder = Path(nhgd.__file__).parent / "cli"
    made = {path.stem for path in folder.glob("*.py")} & set(COMMANDS)
    assert made == set(COMMANDS)
    for name, command in COMMANDS.items():
        assert callable(getattr(importlib.import_module(f"nhgd.cli.{name}"), command.function))


def test_completion_can_be_installed():
    assert "--install-completion" in invoke("--help").stdout


def test_an_editable_install_is_a_path_that_type_checkers_follow(tmp_path):
    """Not an import hook, which they do not."""
    pytest.importorskip("setuptools", minversion="77")
    root = Path(nhgd.__file__).parent.parent
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, tmp_path)
    (tmp_path / "nhgd").mkdir()
    for name in ("__init__.py", "py.typed"):
        shutil.copy(root / "nhgd" / name, tmp_path / "nhgd")
    code = "from setuptools import build_meta; print(build_meta.build_editable('.'))"
    made = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    with zipfile.ZipFile(tmp_path / made.stdout.split()[-1]) as wheel:
        (hook,) = (name for name in wheel.namelist() if name.endswith(".pth"))
        assert wheel.read(hook).decode().strip() == str(tmp_path)


def test_the_package_was_rehearsed_on_every_python_it_names():
    """And the demo found the same on all of them: its budgets are counted, not timed."""
    kept = json.loads((Path(__file__).parents[1] / "benchmarks/results/rehearsal-cpu.json").read_text())
    rows = kept["rows"]
    assert [row["python"].rpartition(".")[0] for row in rows] == ["3.10", "3.11", "3.12", "3.13"]
    assert len({(row["demo"]["found"], row["demo"]["false_alarms"]) for row in rows}) == 1
    assert nhgd.__version__ in kept["wheel"]
