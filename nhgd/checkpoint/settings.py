"""The settings in a checkpoint: which are stored, which must be given again, and whether they agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nhgd import schedule
from nhgd._tree.encoding import Decoder, Encoder, difference, full_name, in_words, is_opaque
from nhgd.algorithm import ALGORITHMS, AbstractAlgorithm, prepared
from nhgd.checkpoint import schema
from nhgd.errors import InputError, unknown
from nhgd.inverse import INVERSES
from nhgd.inverse._learned.effort import Effort
from nhgd.problem import Bilevel

# They change reports or where curvature is kept, but not the results.
FREE = ("execution", "max_lag", "metrics", "metrics_every", "checkpoint_every")
# The types of settings read from a file; the solver checks values, and those that are passed.
_PLAIN: dict[str, schema.Check] = {
    "inner_steps": schema.count_from_1,
    "accumulate": schema.count_from_1,
    "metrics_every": schema.count_from_1,
    "seed": schema.count,
    "execution": schema.text,
    "max_lag": schema.optional(schema.count),
    "outer_clip": schema.optional(schema.number),
}
_WHERE = ("checkpoint", "overwrite", "on_step")
_NO_SETTINGS = ("self", "problem", "inner_data", "outer_data", *_WHERE)  # of the arguments of a solver


def own_classes() -> dict[str, type]:
    """The package's own classes that settings may hold: methods, inverses, schedules, and the effort of a budget."""
    schedules = [c for c in vars(schedule).values() if isinstance(c, type) and issubclass(c, schedule.Schedule)]
    return {full_name(c): c for c in (*ALGORITHMS._own.values(), *INVERSES._own.values(), *schedules, Effort)}


def encoded(arguments: Mapping[str, Any], algorithm: AbstractAlgorithm) -> dict[str, Any]:
    """The arguments of a solver as JSON; functions and the like are noted but not stored."""
    given = {name: value for name, value in arguments.items() if name not in _NO_SETTINGS} | {"method": algorithm}
    return {name: Encoder(opaque=True).encode(value, name) for name, value in given.items()}


def to_continue(path: Path, stored: Mapping[str, Any], given: Mapping[str, Any], problem: Bilevel) -> dict[str, Any]:
    """The settings of the resumed run: given ones, which must equal the stored ones, and the other stored ones."""
    chosen = dict(given)
    known = own_classes()
    for name, value in given.items():
        if name in _WHERE:
            continue
        if name not in stored:
            raise unknown("setting of a Solver", name, stored)
        if name in FREE:
            continue
        if name == "method":
            value = prepared(value, problem)
        found = difference(stored[name], Encoder(opaque=True).encode(value, name), name)
        if found is not None:
            where, was, now = found
            raise InputError(
                f"{where} was {in_words(was)} when {path} was written, and {in_words(now)} is given now. A resumed"
                f" run keeps its settings: omit {name}, or give the same value."
            )
    missing = [name for name, node in stored.items() if name not in given and not _held(node, known)]
    if missing:
        raise InputError(
            f"A checkpoint cannot hold {' and '.join(f'{name} ({_kind(stored[name])})' for name in missing)}. Pass"
            f" the same again: Solver.resume(..., {', '.join(f'{name}=...' for name in missing)})."
        )
    for name, node in stored.items():
        if name not in given:
            chosen[name] = value = Decoder({}, known, torch.device("cpu")).decode(node)
            _PLAIN.get(name, schema.anything)(value, name)
            if is_dataclass(value):
                schema.announced(value, name)
                chosen[name] = remade(value)
    return chosen


def remade(value: Any) -> Any:
    """The same settings, made anew, so that values from a file pass the checks of their classes."""
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: remade(getattr(value, f.name)) for f in fields(value) if f.init})
    return value


def _held(node: Any, known: Mapping[str, type]) -> bool:
    """Whether a stored setting can be restored."""
    if isinstance(node, list):
        return all(_held(item, known) for item in node)
    if not isinstance(node, dict):
        return True
    if "class" in node and node["class"] not in known:
        return False
    return not is_opaque(node) and all(_held(item, known) for item in node.values())


def _kind(node: Any) -> str:
    return in_words(node) if isinstance(node, dict) and "opaque" in node else f"the given {in_words(node)}"
