"""What a checkpoint holds of a run, and how a fresh one is brought to where that run stood."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nhgd._tree.encoding import expected
from nhgd.checkpoint import schema
from nhgd.data.batch import fingerprint
from nhgd.errors import InputError
from nhgd.loop.loop import Loop
from nhgd.loop.mover import Mover
from nhgd.problem import Bilevel
from nhgd.variable import Variable


def curvature(loop: Loop) -> Any:
    """The state of the inverse with every record in it; None where there is no online inverse."""
    return None if loop.inverse is None else loop.executor.keep()


def of_loop(loop: Loop) -> dict[str, Any]:
    """Everything that moves in a loop, as a tree; tensors are those of the run itself, not copies."""
    return {
        "theta": _of_variable(loop.problem.theta),
        "v": _of_variable(loop.problem.v),
        "inner_optimiser": _of_optimiser(loop.theta.optimizer),
        "outer_optimiser": _of_optimiser(loop.v.optimizer),
        "curvature": curvature(loop),
        "recorder": loop.recorder_memory(),
        "clock": dict(vars(loop.clock)),
        "calls": {f.name: getattr(loop.calls, f.name) for f in fields(loop.calls)},
        "inner_data": loop.inner.position(),
        "outer_data": loop.outer.position(),
    }


def check_loop(loop: Loop, saved: Any, step: int) -> None:
    """Refuse what does not belong to a loop like this one after so many steps, before anything of it is changed."""

    def variable(given: Variable) -> schema.Check:
        leaves = dict(zip(given.names, given.leaves, strict=True))
        parts = {"leaves": leaves, "buffers": given.named_buffers()}
        return schema.record(
            **{
                part: schema.record(**{name: schema.tensor_like(tensor) for name, tensor in found.items()})
                for part, found in parts.items()
            }
        )

    schema.record(
        theta=variable(loop.problem.theta),
        v=variable(loop.problem.v),
        inner_optimiser=_optimiser(loop.theta),
        outer_optimiser=_optimiser(loop.v),
        curvature=lambda value, where: schema.alike(value, curvature(loop), where),
        recorder=schema.optional(
            schema.record(
                unaccounted=schema.listing(schema.text),
                layers=schema.mapping(schema.optional(schema.text)),
                slow=schema.flag,
                noisy=schema.flag,
            )
        ),
        clock=schema.like(vars(loop.clock)),
        calls=schema.like({f.name: getattr(loop.calls, f.name) for f in fields(loop.calls)}),
        inner_data=schema.position,
        outer_data=schema.position,
    )(saved, "loop")
    if saved["clock"]["k"] != step:
        raise schema.Misfit("loop/clock/k", f"the outer step, {step}")


def _optimiser(mover: Mover) -> schema.Check:
    groups = [
        schema.record(**{name: _like_setting(value) for name, value in group.items()})
        for group in _groups(mover.optimizer)
    ]
    params = [p for group in mover.optimizer.param_groups for p in group["params"]]

    def all_groups(value: Any, where: str) -> None:
        schema.listing(schema.anything, len(groups))(value, where)
        for i, (check, item) in enumerate(zip(groups, value, strict=True)):
            check(item, f"{where}/{i}")

    def state(value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise schema.Misfit(where, "the moments of each parameter")
        for index, held in value.items():
            known = type(index) is int and 0 <= index < len(params) and isinstance(held, dict)
            if not known or not all(isinstance(name, str) for name in held):
                raise schema.Misfit(f"{where}/{index}", "the moments of a parameter")
            if isinstance(mover.optimizer, torch.optim.LBFGS):
                continue  # it keeps moments of all parameters in one
            shape = params[index].shape
            for name, moment in held.items():
                if isinstance(moment, Tensor) and moment.ndim and moment.shape != shape:
                    raise schema.Misfit(f"{where}/{index}/{name}", f"of shape {tuple(shape)}")

    return schema.record(groups=all_groups, state=state)


def _like_setting(like: Any) -> schema.Check:
    """A setting of an optimiser: of the same kind, where that can be told; a step size may be a number or a tensor."""

    def look(value: Any, where: str) -> None:
        numbers = (int, float, Tensor)
        if isinstance(like, numbers) and not isinstance(like, bool):
            if not isinstance(value, numbers) or isinstance(value, bool):
                raise schema.Misfit(where, "a number")
        elif type(value) is not type(like):
            raise schema.Misfit(where, f"of the kind {type(like).__name__}")
        elif isinstance(like, (tuple, list)):
            if len(value) != len(like):
                raise schema.Misfit(where, f"{len(like)} of them")
            for i, (there, here) in enumerate(zip(value, like, strict=True)):
                _like_setting(here)(there, f"{where}/{i}")

    return look


def into_loop(loop: Loop, saved: dict[str, Any]) -> None:
    """Bring a fresh loop to where the other stood, but for its streams."""
    for role, variable in (("theta", loop.problem.theta), ("v", loop.problem.v)):
        _into_variable(variable, saved[role])
    for mover, name in ((loop.theta, "inner_optimiser"), (loop.v, "outer_optimiser")):
        _into_optimiser(mover, saved[name])
    if loop.inverse is not None:
        loop.executor.restore(saved["curvature"])
        loop.recall(saved.get("recorder"))
    for name, value in saved["clock"].items():
        setattr(loop.clock, name, value)
    for name, value in saved["calls"].items():
        setattr(loop.calls, name, value)


def classes(loop: Loop, state: Any) -> dict[str, type]:
    """The classes that the states of this method and of its inverse may hold."""
    return expected(state, curvature(loop))


def portrait(problem: Bilevel) -> dict[str, Any]:
    """What a problem must have in common with the one that a checkpoint was written for."""
    return {"device": problem.theta.device.type} | {
        variable.role: {
            "leaves": {name: _looks(leaf) for name, leaf in zip(variable.names, variable.leaves, strict=True)},
            "buffers": {name: _looks(buffer) for name, buffer in variable.named_buffers().items()},
            "frozen": {name: fingerprint(tensor) for name, tensor in variable.frozen().items()},
        }
        for variable in (problem.theta, problem.v)
    }


def check_portrait(path: Path, was: dict[str, Any], problem: Bilevel) -> None:
    """Refuse a problem with other variables, before anything of it is changed."""
    now = portrait(problem)
    if was["device"] != now["device"]:
        raise InputError(
            f"{path} was written on {was['device']}, and theta is on {now['device']} now. A run goes on where it began, because"
            " other devices round otherwise."
        )
    for role in ("theta", "v"):
        for kind, word in (("leaves", ""), ("buffers", "the buffer "), ("frozen", "the frozen ")):
            then, here = was[role][kind], now[role][kind]
            for name in {**then, **here}:
                where = f"{word}{role}" if name == role else f"{word}{role}[{name!r}]"
                if name not in here:
                    raise InputError(f"{path} holds {where}, which is missing now. Give the model it was written with.")
                if name not in then:
                    raise InputError(f"{path} holds no {where}. Give the model it was written with.")
                if then[name] != here[name] and kind == "frozen":
                    raise InputError(f"{where} has other values than when {path} was written. Give the same model.")
                if then[name] != here[name]:
                    raise InputError(
                        f"{where} is {here[name]}, but it was {then[name]} when {path} was written. Give the same model."
                    )


def _looks(tensor: Tensor) -> str:
    """The dtype and the shape in words.

    >>> _looks(torch.zeros(2, 3))
    'float32 of shape (2, 3)'
    """
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def _of_variable(variable: Variable) -> dict[str, Any]:
    return {
        "leaves": dict(zip(variable.names, (leaf.detach() for leaf in variable.leaves), strict=True)),
        "buffers": variable.named_buffers(),
    }


@torch.no_grad()
def _into_variable(variable: Variable, saved: dict[str, Any]) -> None:
    for name, leaf in zip(variable.names, variable.leaves, strict=True):
        leaf.copy_(saved["leaves"][name])
    for name, buffer in variable.named_buffers().items():
        buffer.copy_(saved["buffers"][name])


def optimisers(loop: Loop) -> dict[str, Any]:
    """The kinds and the settings of the two optimisers, as they are before the first step, without tensors."""
    return {
        level: {"kind": type(mover.optimizer).__name__, "groups": [_plain(g) for g in _groups(mover.optimizer)]}
        for level, mover in (("inner", loop.theta), ("outer", loop.v))
    }


def check_optimisers(path: Path, was: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse other optimisers than those the run began with."""
    for level in ("inner", "outer"):
        then, here = was[level], now[level]
        if then["kind"] != here["kind"]:
            raise InputError(
                f"The {level} optimiser was {then['kind']} when {path} was written, and is {here['kind']} now. Give the same"
                f" {level}_optimizer again."
            )
        if len(then["groups"]) != len(here["groups"]):
            raise InputError(
                f"The {level} optimiser had {len(then['groups'])} groups of parameters when {path} was written, and has"
                f" {len(here['groups'])} now. Give the same {level}_optimizer again."
            )
        for a, b in zip(then["groups"], here["groups"], strict=True):
            for name in {**a, **b}:
                if a.get(name) != b.get(name):
                    raise InputError(
                        f"The {level} optimiser had {name} = {a.get(name)} when {path} was written, and has {b.get(name)} now."
                        f" Give the same {level}_optimizer again."
                    )


def _groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{k: value for k, value in group.items() if k != "params"} for group in optimizer.param_groups]


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _of_optimiser(optimizer: Optimizer) -> dict[str, Any]:
    return {"groups": _groups(optimizer), "state": optimizer.state_dict()["state"]}


def _into_optimiser(mover: Mover, saved: dict[str, Any]) -> None:
    """Go on with the moments and the settings that were saved."""
    numbered = mover.optimizer.state_dict()["param_groups"]
    groups = [group | {"params": here["params"]} for group, here in zip(saved["groups"], numbered, strict=True)]
    mover.optimizer.load_state_dict({"state": saved["state"], "param_groups": groups})
