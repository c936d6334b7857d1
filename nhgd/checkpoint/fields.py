"""The fields of a checkpoint: a table with a row for each, which says how it is read, checked and restored.

A new thing to keep is a new row of `LOOP`, for what moves in the loop, or of `PROGRESS`, for what else does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from nhgd._randomness import Randomness
from nhgd.checkpoint import schema
from nhgd.checkpoint.compatibility import groups_of
from nhgd.loop.loop import Loop
from nhgd.loop.mover import Mover
from nhgd.stop import Interrupted, Run
from nhgd.variable import Variable

T = TypeVar("T")


@dataclass
class Progress:
    """How far a run has come.

    Attributes:
        loop: the variables, their optimisers, the curvature, the streams.
        state: of the algorithm.
        randomness: the run's own generators.
        seconds: that its outer steps took.
        history: one row for each of them.
        whole: whether the run stands between two outer steps.
        run: the call of `Solver.run` that it is in, if it is in one.
        interrupted: the call that a checkpoint was written in, from reading it until the run continues.
        resumed: the folder of the checkpoint that was read, until the first step from it.
    """

    loop: Loop
    state: Any
    randomness: Randomness
    seconds: float = 0.0
    history: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    whole: bool = True
    run: Run | None = None
    interrupted: Interrupted | None = None
    resumed: Path | None = None


@dataclass(frozen=True)
class Field(Generic[T]):
    """One thing that is kept of an owner.

    Attributes:
        name: in the checkpoint.
        get: its value now, as a tree. Tensors are those of the run itself, not copies.
        check: what a saved value must be, by the fresh owner.
        put: brings the owner to the saved value, which has been checked.
    """

    name: str
    get: Callable[[T], Any]
    check: Callable[[T], schema.Check]
    put: Callable[[T, Any], None]


def kept(table: Iterable[Field[T]], owner: T) -> dict[str, Any]:
    """All that is kept of an owner."""
    return {field.name: field.get(owner) for field in table}


def _all(table: Iterable[Field[T]], owner: T) -> schema.Check:
    return schema.record(**{field.name: field.check(owner) for field in table})


def _put(table: Iterable[Field[T]], owner: T, saved: Mapping[str, Any]) -> None:
    for field in table:
        field.put(owner, saved[field.name])


def _variable(name: str, of: Callable[[Loop], Variable]) -> Field[Loop]:
    """The leaves and the buffers of a variable."""

    def tensors(variable: Variable) -> dict[str, dict[str, Tensor]]:
        leaves = [leaf.detach() for leaf in variable.leaves]
        return {"leaves": dict(zip(variable.names, leaves, strict=True)), "buffers": variable.named_buffers()}

    def check(loop: Loop) -> schema.Check:
        parts = tensors(of(loop)).items()
        return schema.record(
            **{part: schema.record(**{n: schema.tensor_like(t) for n, t in named.items()}) for part, named in parts}
        )

    return Field(name, lambda loop: tensors(of(loop)), check, lambda loop, saved: _into_variable(of(loop), saved))


@torch.no_grad()
def _into_variable(variable: Variable, saved: dict[str, Any]) -> None:
    for name, leaf in zip(variable.names, variable.leaves, strict=True):
        leaf.copy_(saved["leaves"][name])
    for name, buffer in variable.named_buffers().items():
        buffer.copy_(saved["buffers"][name])


def _optimiser(name: str, of: Callable[[Loop], Mover]) -> Field[Loop]:
    """The settings and the moments of an optimiser."""

    def get(loop: Loop) -> dict[str, Any]:
        optimizer = of(loop).optimizer
        return {"groups": groups_of(optimizer), "state": optimizer.state_dict()["state"]}

    return Field(
        name, get, lambda loop: _like_optimiser(of(loop)), lambda loop, saved: _into_optimiser(of(loop), saved)
    )


def _like_optimiser(mover: Mover) -> schema.Check:
    groups = [
        schema.record(**{name: _like_setting(value) for name, value in group.items()})
        for group in groups_of(mover.optimizer)
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
    """A setting of an optimiser, of the same kind if that is known; a step size may be a number or a tensor."""

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


def _into_optimiser(mover: Mover, saved: dict[str, Any]) -> None:
    """Go on with the moments and the settings that were saved."""
    numbered = mover.optimizer.state_dict()["param_groups"]
    groups = [group | {"params": here["params"]} for group, here in zip(saved["groups"], numbered, strict=True)]
    mover.optimizer.load_state_dict({"state": saved["state"], "param_groups": groups})


def _numbers(name: str, of: Callable[[Loop], Any]) -> Field[Loop]:
    """An object whose attributes are numbers."""

    def put(loop: Loop, saved: dict[str, Any]) -> None:
        for attribute, value in saved.items():
            setattr(of(loop), attribute, value)

    return Field(name, lambda loop: dict(vars(of(loop))), lambda loop: schema.like(vars(of(loop))), put)


def curvature(loop: Loop) -> Any:
    """The state of the inverse with every record in it; None without an online inverse."""
    return None if loop.inverse is None else loop.executor.keep()


def _put_curvature(loop: Loop, saved: Any) -> None:
    if loop.inverse is not None:
        loop.executor.restore(saved)


def _put_recorder(loop: Loop, saved: Any) -> None:
    if loop.inverse is not None:
        loop.recall(saved)


_RECORDER = schema.record(
    unaccounted=schema.listing(schema.text),
    foreign=schema.listing(schema.text),
    suffices=schema.flag,
    layers=schema.mapping(schema.optional(schema.text)),
    slow=schema.flag,
    empirical=schema.flag,
    drawn=schema.count,
    noisy=schema.flag,
    batch_objective=schema.flag,
)

_SCALER = schema.record(
    overflows=schema.count,
    scale=schema.number,
    growth_factor=schema.number,
    backoff_factor=schema.number,
    growth_interval=schema.count,
    _growth_tracker=schema.count,
)


def _no_scaler(value: Any, where: str) -> None:
    if value is not None:
        raise schema.Misfit(where, "nothing, because no scaler is given")


LOOP: tuple[Field[Loop], ...] = (
    _variable("theta", lambda loop: loop.problem.theta),
    _variable("v", lambda loop: loop.problem.v),
    _optimiser("inner_optimiser", lambda loop: loop.theta),
    _optimiser("outer_optimiser", lambda loop: loop.v),
    Field(
        "curvature",
        curvature,
        lambda loop: lambda value, where: schema.check_same_kind(value, curvature(loop), where),
        _put_curvature,
    ),
    Field("recorder", lambda loop: loop.recorder_memory(), lambda _: schema.optional(_RECORDER), _put_recorder),
    Field(
        "scaler",
        lambda loop: loop.problem.scaling.state(),
        lambda loop: _SCALER if loop.problem.scaling.active else _no_scaler,
        lambda loop, saved: loop.problem.scaling.restore(saved),
    ),
    _numbers("clock", lambda loop: loop.clock),
    _numbers("calls", lambda loop: loop.calls),
    # Streams come last: they restore their position by drawing batches again.
    Field(
        "inner_data",
        lambda loop: loop.inner.position(),
        lambda _: schema.position,
        lambda loop, saved: loop.inner.go_to(saved),
    ),
    Field(
        "outer_data",
        lambda loop: loop.outer.position(),
        lambda _: schema.position,
        lambda loop, saved: loop.outer.go_to(saved),
    ),
)


def _put_loop(progress: Progress, saved: Any) -> None:
    with progress.randomness.scope():  # what streams draw is the run's; where its generators end is put right after
        _put(LOOP, progress.loop, saved)


def _put_state(progress: Progress, saved: Any) -> None:
    progress.state = saved


def _put_seconds(progress: Progress, saved: float) -> None:
    progress.seconds = saved


def _put_run(progress: Progress, saved: Any) -> None:
    progress.interrupted = None if saved is None else Interrupted.read(saved)


_RULE = schema.record(name=schema.text, settings=schema.optional(schema.mapping(schema.number)))

PROGRESS: tuple[Field[Progress], ...] = (
    Field("loop", lambda p: kept(LOOP, p.loop), lambda p: _all(LOOP, p.loop), _put_loop),
    Field(
        "state",
        lambda p: p.state,
        lambda p: lambda value, where: schema.check_same_kind(value, p.state, where),
        _put_state,
    ),
    Field(
        "randomness",
        lambda p: p.randomness.state(),
        lambda _: schema.generators,
        lambda p, saved: p.randomness.restore(saved),
    ),
    Field("seconds", lambda p: p.seconds, lambda _: schema.seconds, _put_seconds),
    Field(
        "run",
        lambda p: None if p.run is None else p.run.kept(),
        lambda _: schema.optional(schema.record(first=schema.count, began=schema.seconds, rules=schema.listing(_RULE))),
        _put_run,
    ),
)
NAMES = tuple(field.name for field in PROGRESS)
