"""What a resumed run must have in common with the saved one: its variables and its optimisers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from nhgd.data.batch import fingerprint
from nhgd.errors import InputError
from nhgd.loop.loop import Loop
from nhgd.problem import Bilevel


def signature(problem: Bilevel) -> dict[str, Any]:
    """What a problem must have in common with the one of a checkpoint."""
    return {"device": problem.theta.device.type} | {
        variable.role: {
            "leaves": {name: _looks(leaf) for name, leaf in zip(variable.names, variable.leaves, strict=True)},
            "buffers": {name: _looks(buffer) for name, buffer in variable.named_buffers().items()},
            "frozen": {name: fingerprint(tensor) for name, tensor in variable.frozen().items()},
        }
        for variable in (problem.theta, problem.v)
    }


def check_signature(path: Path, was: dict[str, Any], problem: Bilevel) -> None:
    """Refuse a problem with other variables, before anything changes."""
    now = signature(problem)
    if was["device"] != now["device"]:
        raise InputError(
            f"{path} was written on {was['device']}, but theta is now on {now['device']}. A run must continue on the"
            " same device, because devices round differently."
        )
    for role in ("theta", "v"):
        for kind, word in (("leaves", ""), ("buffers", "the buffer "), ("frozen", "the frozen ")):
            then, here = was[role][kind], now[role][kind]
            for name in {**then, **here}:
                where = f"{word}{role}" if name == role else f"{word}{role}[{name!r}]"
                if name not in here:
                    raise InputError(f"{path} holds {where}, which is now missing. Use the model it was written with.")
                if name not in then:
                    raise InputError(f"{path} has no {where}. Use the model it was written with.")
                if then[name] != here[name] and kind == "frozen":
                    raise InputError(f"{where} has different values than when {path} was written. Use the same model.")
                if then[name] != here[name]:
                    raise InputError(
                        f"{where} is {here[name]}, but it was {then[name]} when {path} was written. Give the same model."
                    )


def _looks(tensor: Tensor) -> str:
    """The dtype and the shape in words.

    >>> import torch
    >>> _looks(torch.zeros(2, 3))
    'float32 of shape (2, 3)'
    """
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def optimisers(loop: Loop) -> dict[str, Any]:
    """The kinds and the settings of the two optimisers, as they are before the first step, without tensors."""
    return {
        level: {"kind": type(mover.optimizer).__name__, "groups": [_plain(g) for g in groups_of(mover.optimizer)]}
        for level, mover in (("inner", loop.theta), ("outer", loop.v))
    }


def check_optimisers(path: Path, was: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse optimisers other than those of the saved run."""
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


def groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The settings of each group of parameters, without the parameters."""
    return [{k: value for k, value in group.items() if k != "params"} for group in optimizer.param_groups]


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
