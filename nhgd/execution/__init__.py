"""Where curvature is kept up to date, one file for each backend."""

from __future__ import annotations

import inspect
from typing import Any

from nhgd._registry import Registry
from nhgd._validation import validated
from nhgd.errors import InputError
from nhgd.execution.base import AbstractExecutor, Curvature, Traffic
from nhgd.execution.device import Device
from nhgd.execution.distributed.executor import Distributed
from nhgd.execution.inline import Inline
from nhgd.execution.stream import Stream
from nhgd.execution.thread import Thread

EXECUTIONS = Registry("execution", AbstractExecutor, list(vars().values()))


@validated
def resolve(execution: str | AbstractExecutor, **settings: Any) -> AbstractExecutor:
    """An executor from its name, with settings that are not None; or itself.

    A name may carry a device: "device:cuda:1".

    >>> resolve("thread", max_lag=2).max_lag
    2
    """
    given = {key: value for key, value in settings.items() if value is not None}
    if isinstance(execution, AbstractExecutor):
        if given:
            raise InputError(
                f"{', '.join(given)} belong to the executor: pass them to {type(execution).__name__}(...)."
            )
        return execution
    name, _, argument = execution.partition(":")
    kind = EXECUTIONS[name]
    if argument:
        given["device"] = argument
    known = inspect.signature(kind).parameters
    for key in given:
        if key not in known:
            raise InputError(f"{name} execution has no {key}. It has: {', '.join(known) or 'nothing to set'}.")
    return EXECUTIONS.make(name, **given)


__all__ = [
    "EXECUTIONS",
    "AbstractExecutor",
    "Curvature",
    "Device",
    "Distributed",
    "Inline",
    "Stream",
    "Thread",
    "Traffic",
    "resolve",
]
