"""What a shell offers for a word that is being typed."""

from __future__ import annotations

from collections.abc import Iterable

import typer

from nhgd.algorithm import names
from nhgd.execution import EXECUTIONS
from nhgd.task import TASKS


def tasks(incomplete: str) -> list[str]:
    """Names of tasks."""
    return _beginning(incomplete, TASKS)


def methods(incomplete: str) -> list[str]:
    """Names of methods."""
    return _beginning(incomplete, names())


def method_list(incomplete: str) -> list[str]:
    """Names of methods, the last of several with commas between them."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in methods(last)]


def executions(incomplete: str) -> list[str]:
    """Names of executions."""
    return _beginning(incomplete, EXECUTIONS)


def presets(ctx: typer.Context, incomplete: str) -> list[str]:
    """Presets of the task that was named before; of all tasks if none was."""
    named = [word for word in (str(ctx.params.get("task")), *ctx.args) if word in TASKS]
    chosen = [TASKS[named[0]]] if named else TASKS.values()
    return _beginning(incomplete, dict.fromkeys(name for task in chosen for name in task.presets))


def _beginning(incomplete: str, known: Iterable[str]) -> list[str]:
    return [name for name in known if name.startswith(incomplete)]
