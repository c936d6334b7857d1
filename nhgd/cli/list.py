"""`nhgd list`: every name that the other commands accept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from nhgd._registry import summary
from nhgd._results import jsonable
from nhgd.algorithm import ALGORITHMS, AbstractAlgorithm, presets
from nhgd.cli._options import Json
from nhgd.cli._output import console, print_json, table
from nhgd.execution import EXECUTIONS
from nhgd.inverse import INVERSES
from nhgd.task import TASKS


def list_names(as_json: Json = False) -> None:
    """Methods, inverses, tasks and executions, each with one line."""
    inverses = _summaries(INVERSES)
    methods = _summaries(ALGORITHMS)
    methods += [{"name": name, "summary": _variant(made)} for name, made in presets().items()]
    methods += [{"name": f"aid-{row['name']}", "summary": f"aid with: {row['summary']}"} for row in inverses]
    answer = {
        "methods": methods,
        "inverses": inverses,
        "tasks": _summaries(TASKS),
        "executions": _summaries(EXECUTIONS),
    }
    if as_json:
        print_json(answer)
        return
    out = console()
    for kind, rows in answer.items():
        listed = table(kind, "name", "what it is", left=2)
        for row in rows:
            listed.add_row(row["name"], row["summary"])
        out.print(listed)
        out.print()
    out.print("A number behind the name of an inverse sets its steps: cg-40, aid-neumann-20, refined-kfac-10.")


def _summaries(registry: Mapping[str, Any]) -> list[dict[str, str]]:
    return [{"name": name, "summary": summary(cls)} for name, cls in registry.items()]


def _variant(made: AbstractAlgorithm) -> str:
    """How a preset differs from the method it is of."""
    changes = []
    for f in fields(made):
        value: Any = getattr(made, f.name)
        usual = f.default_factory() if f.default_factory is not MISSING else f.default
        if value != usual:
            shown = jsonable(value)
            changes.append(f"{f.name} {shown['name'] if isinstance(shown, dict) else shown}")
    return f"{made.name} with {', '.join(changes)}" if changes else made.summary()
