"""The house itself: who may import whom, who is listed where, and what its docstrings promise."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import nhgd
from nhgd._registry import Registry
from nhgd.algorithm import ALGORITHMS
from nhgd.execution import EXECUTIONS
from nhgd.hypergradients import ESTIMATORS
from nhgd.inverse import INVERSES
from nhgd.task import TASKS
from tests import catalogue

# A file imports from the rows above its own and from its own folder. A new noun needs a place here.
ORDER = """
    errors
    _validation _path _tape _html
    _beside _kernels _registry _duration ridge stop schedule _memory _progress _callbacks _interruption _randomness _stagnation _surroundings
    _scaling
    _tree
    plot _turned
    data likelihood
    _shards
    variable
    losses
    problem
    record
    objective
    data_parallel oracle
    _threads
    _recording
    inverse
    _shape
    _cost
    _prices
    _budget
    hypergradients execution
    _solved _observing _influence
    loop
    algorithm
    checkpoint
    _results
    loggers _provenance
    _solution _nonfinite
    _peers
    _captured
    _start _outer_step
    _solver
    _reference
    _diagnosis
    _check _plan task theory
    _along
    paper
    _experiment
    comparison
    reproduce tuning
    report sklearn
    _bench _sweep
    cli
"""
RANK = {name: rank for rank, row in enumerate(ORDER.split("\n")) for name in row.split()}
ROOT = Path(nhgd.__file__).parent
FILES = sorted(
    f.relative_to(ROOT)
    for f in ROOT.rglob("*.py")
    if f.relative_to(ROOT).parts[0] not in ("__init__.py", "__main__.py")
)


def noun(path: str) -> str:
    """The second part of nhgd.inverse.cg: inverse."""
    return path.split(".")[1]


def imports(file: Path) -> Iterator[str]:
    """The nouns of the house that a file imports, wherever in it."""
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} uses a relative import"
            modules = [node.module or ""] if node.module != "nhgd" else [f"nhgd.{a.name}" for a in node.names]
        else:
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        yield from (noun(m) for m in modules if m.startswith("nhgd."))


@pytest.mark.parametrize("file", FILES, ids=str)
def test_a_file_imports_only_from_its_left(file: Path) -> None:
    own = file.parts[0].removesuffix(".py")
    assert own in RANK, f"give {own} a place in ORDER"
    wrong = [name for name in imports(file) if name != own and RANK[name] >= RANK[own]]
    assert not wrong, f"{file} imports {wrong}"


def test_a_plain_import_is_light() -> None:
    heavy = ("typer", "rich", "matplotlib", "sklearn", "scipy", "safetensors", "optuna", "pooch")
    code = f"import sys, nhgd; print([m for m in {heavy} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def modules(package: ModuleType) -> list[ModuleType]:
    return [importlib.import_module(m.name) for m in pkgutil.iter_modules(package.__path__, package.__name__ + ".")]


@pytest.mark.parametrize("registry", [INVERSES, ESTIMATORS], ids=lambda registry: registry.kind)
def test_every_file_of_a_kind_is_listed(registry: Registry) -> None:
    package = nhgd.inverse if registry is INVERSES else nhgd.hypergradients
    written = {
        cls.name: cls
        for module in modules(package)
        for cls in vars(module).values()
        if inspect.isclass(cls)
        and cls.__module__ == module.__name__
        and issubclass(cls, registry.base)
        and "name" in vars(cls)
    }
    assert written == registry._own
    assert all(getattr(package, cls.__name__) is cls for cls in written.values())


def test_every_listed_member_sits_the_exam() -> None:
    assert {case.name for case in catalogue.INVERSES} == set(INVERSES._own)
    assert {case.name for case in catalogue.HYPERGRADIENTS} == set(ESTIMATORS._own)
    assert {case.method.name for case in catalogue.ALGORITHMS} == set(ALGORITHMS)
    assert {case.make().name for case in catalogue.EXECUTORS} == set(EXECUTIONS._own)
    assert {case.make().name for case in catalogue.TASKS} == set(TASKS._own)


@pytest.mark.parametrize(
    "name", [m.name for m in pkgutil.walk_packages(nhgd.__path__, "nhgd.") if not m.name.endswith("__main__")]
)
def test_the_examples_in_docstrings_run(name: str) -> None:
    module = importlib.import_module(name)
    found = doctest.testmod(module, optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
    assert found.failed == 0
