"""Where curvature is kept up to date, one file for each backend."""

from __future__ import annotations

from nhgd.execution.base import AbstractExecutor, Traffic
from nhgd.execution.inline import Inline
from nhgd.registry import Registry

EXECUTIONS = Registry("execution", AbstractExecutor, list(vars().values()))


def resolve(execution: str | AbstractExecutor) -> AbstractExecutor:
    """An executor from its name, or itself."""
    if isinstance(execution, AbstractExecutor):
        return execution
    made = EXECUTIONS[execution]()
    assert isinstance(made, AbstractExecutor)
    return made


__all__ = ["EXECUTIONS", "AbstractExecutor", "Inline", "Traffic", "resolve"]
