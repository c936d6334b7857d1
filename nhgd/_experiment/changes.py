"""`--set key=value`: whose setting is it, and what does the text mean?"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, get_type_hints

import torch

from nhgd._solver import Solver
from nhgd.algorithm import ALGORITHMS, AbstractAlgorithm, LoopSettings
from nhgd.algorithm import resolve as resolve_method
from nhgd.errors import InputError, unknown
from nhgd.execution import EXECUTIONS
from nhgd.inverse import INVERSES, AbstractInverse
from nhgd.inverse import resolve as resolve_inverse
from nhgd.task import AbstractTask
from nhgd.task._parser import convert, kinds

# Set by other options, or not available on the command line.
_NOT_SETTINGS = {
    "self",
    "problem",
    "inner_data",
    "outer_data",
    "method",
    "execution",
    "seed",
    "metrics",
    "on_step",
    "checkpoint",
    "checkpoint_every",
    "overwrite",
}


def parse(
    pairs: Sequence[str] | None, option: str = "--set", example: str = "inner_steps=20", once: bool = False
) -> dict[str, str]:
    """key=value texts as a dict; the last of a key holds, or with `once` a second one is refused.

    >>> parse(["noise=0.3", "inverse.steps=10"])
    {'noise': '0.3', 'inverse.steps': '10'}
    """
    found: dict[str, str] = {}
    for pair in pairs or ():
        key, sign, value = pair.partition("=")
        if not sign or not key.strip():
            raise InputError(f"{option} takes key=value, for example {option} {example}; got {pair!r}.")
        if once and key.strip() in found:
            raise InputError(
                f"{option} {key.strip()} is given twice. Give all of its values at once: {option}"
                f" {key.strip()}={found[key.strip()]},{value}."
            )
        found[key.strip()] = value
    return found


def solver_kinds() -> dict[str, Any]:
    """The settings of the solver that can be given as text, with the types each may have."""
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(Solver.__init__).parameters.items():
        if name not in _NOT_SETTINGS:
            whole = isinstance(parameter.default, int)
            found[name] = int if whole else float | tuple[float, float] | str | None
    return found


def for_execution(name: str, changes: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The settings of an executor, and the changes that are not its own. A key may carry its place:
    execution.max_lag.
    """
    kind: Any = EXECUTIONS[name.partition(":")[0]]
    hints = get_type_hints(kind.__init__)
    known = {key: hint for key, hint in hints.items() if key not in ("return", "team", "device")}
    own = {key.removeprefix("execution."): text for key, text in changes.items()}
    for key in changes:
        if key.startswith("execution.") and key.removeprefix("execution.") not in known:
            raise unknown("setting", key, [f"execution.{name}" for name in known])
    given = {key: convert(key, text, known[key]) for key, text in own.items() if key in known}
    return given, {key: text for key, text in changes.items() if key.removeprefix("execution.") not in known}


def for_task(task: AbstractTask, changes: Mapping[str, str]) -> tuple[AbstractTask, dict[str, str]]:
    """The task with its own settings changed, and the changes that are not its own."""
    known = kinds(type(task))
    own = {key.removeprefix("task."): text for key, text in changes.items() if key.removeprefix("task.") in known}
    rest = {key: text for key, text in changes.items() if key.removeprefix("task.") not in known}
    return task.with_settings(own), rest


def for_run(
    task: AbstractTask, algorithm: AbstractAlgorithm, changes: Mapping[str, str]
) -> tuple[dict[str, Any], AbstractAlgorithm]:
    """Settings of the solver, and the method with its own and its inverse's settings changed.

    A key is looked up in the solver, then in the method, then in its inverse, then in the inverse that one refines.
    A name before a dot says where: solver.inner_lr, method.batches, inverse.damping, inverse.inverse.damping.
    """
    solver: dict[str, Any] = {}
    # A change of the inverse itself comes first: the others may be settings of the new one.
    for key in sorted(changes, key=lambda key: key not in ("inverse", "method.inverse")):
        text = changes[key]
        places = {"solver": solver_kinds(), **_places(algorithm)}
        where, _, name = key.rpartition(".")
        place = where if where else next((p for p, known in places.items() if name in known), "")
        if place not in places or name not in places[place]:
            raise unknown("setting", key, _all_keys(task, places, "." in key))
        value = convert(key, text, places[place][name])
        if place == "solver":
            solver[name] = _optimizer(value) if name.endswith("_optimizer") else value
        else:
            algorithm = _changed(algorithm, [] if place == "method" else place.split("."), name, value)
    return solver, algorithm


def check_early(task: AbstractTask, method: str | AbstractAlgorithm | None, changes: Mapping[str, str]) -> None:
    """Refuse, before a task is built, which may take minutes, a method or a change that would be refused after it.

    Which method and which inverse a task chooses by itself is known only then; so a change passes that any of them
    takes.
    """
    methods = ALGORITHMS if method is None else (method,)
    bases = [resolve_method(name) for name in methods]
    known = {f.name for f in fields(LoopSettings)}
    first = {key: text for key, text in changes.items() if key in ("inverse", "method.inverse")}
    made = [found for base in bases for found in _variants(base, task, first)]
    for key in changes.keys() - first.keys():
        solver: dict[str, Any] = {}
        refusals: list[InputError] = []
        for algorithm in made:
            try:
                solver, _ = for_run(task, algorithm, {key: changes[key]})
                break
            except InputError as error:
                refusals.append(error)
        else:
            # If some have such a setting, their complaint about the value is the better message.
            said = [error for error in refusals if error.unknown != "setting"]
            raise (said or refusals)[0]
        LoopSettings(**{name: value for name, value in solver.items() if name in known})


def _variants(base: AbstractAlgorithm, task: AbstractTask, first: Mapping[str, str]) -> list[AbstractAlgorithm]:
    """The method with the requested inverse; if it leaves the choice to the task, with each possible one."""
    if first:
        return [for_run(task, base, first)[1]]
    if "inverse" in kinds(type(base)) and getattr(base, "inverse", None) is None:
        inverses = (resolve_inverse(name) for name in INVERSES)
        return [base, *(_changed(base, [], "inverse", inverse) for inverse in inverses)]
    return [base]


def of_inverses(
    inverses: Mapping[str, AbstractInverse], changes: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """The changes that address one of these inverses, such as cg.steps, and the others."""
    own = {key: text for key, text in changes.items() if key.rpartition(".")[0] in inverses}
    return own, {key: text for key, text in changes.items() if key not in own}


def for_inverses(
    task: AbstractTask, inverses: Mapping[str, AbstractInverse], changes: Mapping[str, str]
) -> dict[str, AbstractInverse]:
    """Inverses with settings changed by cg.steps=100 and the like."""
    found = dict(inverses)
    for key, text in changes.items():
        which, _, name = key.rpartition(".")
        if which not in found or name not in kinds(type(found[which])):
            places = {which: kinds(type(inverse)) for which, inverse in inverses.items()}
            dotted = [f"{which}.{name}" for which, known in places.items() for name in known]
            raise unknown("setting", key, [*kinds(type(task)), *dotted])
        found[which] = replace(found[which], **{name: convert(key, text, kinds(type(found[which]))[name])})
    return found


def _places(algorithm: AbstractAlgorithm) -> dict[str, dict[str, Any]]:
    """Everything in a method that has settings: itself, its inverse, and the inverse within that."""
    found = {"method": kinds(type(algorithm))}
    path, inverse = "inverse", getattr(algorithm, "inverse", None)
    while isinstance(inverse, AbstractInverse):
        found[path] = kinds(type(inverse))
        path, inverse = f"{path}.inverse", getattr(inverse, "inverse", None)
    return found


def _changed(thing: Any, path: list[str], name: str, value: Any) -> Any:
    """A copy of nested frozen dataclasses with one field changed."""
    if not path:
        return replace(thing, **{name: value})
    return replace(thing, **{path[0]: _changed(getattr(thing, path[0]), path[1:], name, value)})


def _all_keys(task: AbstractTask, places: Mapping[str, Mapping[str, Any]], dotted: bool) -> list[str]:
    """Every key that would have been understood, written as the user writes: with its place or without."""
    everywhere = {"task": kinds(type(task)), **places}
    if dotted:
        return [f"{place}.{name}" for place, known in everywhere.items() for name in known]
    return list(dict.fromkeys(name for known in everywhere.values() for name in known))


def _optimizer(name: Any) -> type[torch.optim.Optimizer] | None:
    known = {
        key.lower(): cls
        for key, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
    }
    if name is None:
        return None
    if str(name).lower() not in known:
        raise unknown("optimiser", str(name).lower(), known)
    return known[str(name).lower()]
