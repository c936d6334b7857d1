"""What a task is: a problem with its data, its metrics and its settings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from nhgd.data.batch import Batch
from nhgd.errors import InputError, unknown
from nhgd.problem import Bilevel
from nhgd.solve import Metrics, Solution

T = TypeVar("T", bound="AbstractTask")


@dataclass(frozen=True)
class Instance:
    """A task with data, ready to be solved or checked.

    Attributes:
        problem, inner_data, outer_data: what a `Solver` takes.
        solver: settings of the `Solver` that suit this task (inner_steps, step sizes, projections).
        method, steps: what to run when the user does not say.
        metrics: (theta, v) -> numbers for the history.
        summary: the numbers a run is judged by, from its solution; outer_loss and inner_loss among them.
        full_inner, full_outer: all inner and all outer data as one batch each.
        solve_inner: brings theta to the inner optimum at the current v, in place.
        extra: what else a task knows about itself, such as closed-form answers.
    """

    problem: Bilevel
    inner_data: Iterable[Batch]
    outer_data: Iterable[Batch]
    solver: dict[str, Any]
    method: str
    steps: int
    metrics: Metrics | None
    summary: Callable[[Solution], dict[str, float]]
    full_inner: Batch
    full_outer: Batch
    solve_inner: Callable[[], float]
    extra: Any = None
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class AbstractTask(ABC):
    """A bilevel problem people know, with its settings as fields and named presets of them."""

    name: ClassVar[str]
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"default": {}}

    @abstractmethod
    def build(self, seed: int, device: torch.device, data: str | Path | None = None) -> Instance:
        """Make the data and the problem. `data` is the folder the user named, if any."""

    @classmethod
    def preset(cls: type[T], name: str = "default") -> T:
        """The task with the settings of a preset."""
        if name not in cls.presets:
            raise unknown(f"preset of {cls.name}", name, cls.presets)
        return cls(**cls.presets[name])

    def with_settings(self: T, settings: Mapping[str, Any]) -> T:
        """A copy with some settings changed, each converted to the type its field has now."""
        known = {f.name for f in fields(self)}
        for key in settings:
            if key not in known:
                raise unknown(f"setting of {self.name}", key, known)
        return replace(self, **{key: convert(key, value, getattr(self, key)) for key, value in settings.items()})

    @classmethod
    def summary(cls) -> str:
        """The first line of the docstring."""
        return (cls.__doc__ or "").strip().splitlines()[0]


def convert(name: str, value: Any, like: Any) -> Any:
    """A setting given as text, in the type of the value it replaces.

    >>> convert("batch", "32", 1024), convert("flag", "false", True), convert("radius", "none", None)
    (32, False, None)
    """
    if not isinstance(value, str) or isinstance(like, str):
        return value
    text = value.strip().lower()
    if text in ("none", "null"):
        return None
    try:
        if isinstance(like, bool):
            return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[text]
        if isinstance(like, int):
            return int(text)
        if isinstance(like, float):
            return float(text)
    except (ValueError, KeyError):
        raise InputError(f"{name} must be a {type(like).__name__}, got {value!r}.") from None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text, value)
