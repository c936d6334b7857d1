"""Tasks: settings with named presets and, once built, a problem with its data and metrics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from nhgd._randomness import Randomness
from nhgd._registry import summary
from nhgd._solution import Solution
from nhgd._solver import Solver
from nhgd._validation import Validated, check_seed, validated
from nhgd.algorithm import AbstractAlgorithm, prepared
from nhgd.data.batch import Batch
from nhgd.errors import InputError, unknown
from nhgd.execution import AbstractExecutor
from nhgd.problem import Bilevel
from nhgd.task._parser import convert, kinds

T = TypeVar("T", bound="AbstractTask")


@dataclass(frozen=True, kw_only=True, eq=False)
class Instance(ABC):
    """A task with data, ready to be solved or checked. Each task has a subclass of its own.

    Attributes:
        problem, inner_data, outer_data: what a `Solver` takes.
        full_inner, full_outer: all inner and all outer data as one batch each.
        method, steps: what to run when the user does not say.
        method_settings: settings for those methods that have them, such as how many batches to average over.
    """

    problem: Bilevel
    inner_data: Iterable[Batch]
    outer_data: Iterable[Batch]
    full_inner: Batch
    full_outer: Batch
    method: str = "nhgd"
    steps: int = 100
    method_settings: Mapping[str, Any] = field(default_factory=dict)

    @abstractmethod
    def solver_settings(self) -> dict[str, Any]:
        """The settings of the `Solver` that suit this task: inner_steps, step sizes, projections."""

    def plain_sgd_settings(self) -> dict[str, Any]:
        """What replaces some of them for methods that can take plain gradient steps only."""
        return {}

    def settings_for(self, algorithm: AbstractAlgorithm) -> dict[str, Any]:
        """The settings of the solver that suit this task and a method."""
        return self.solver_settings() | (self.plain_sgd_settings() if algorithm.plain else {})

    def methods(self) -> Mapping[str, AbstractAlgorithm]:
        """Methods tuned for this task, by the name they replace; other names have their usual meaning."""
        return {}

    def metrics(self, theta: Any, v: Any) -> dict[str, float]:
        """Numbers for the history."""
        return {}

    def summary(self, solution: Solution) -> dict[str, float]:
        """The numbers a run is judged by; outer_loss and inner_loss among them."""
        with torch.no_grad():
            return self.losses() | self.metrics(self.problem.theta.given, self.problem.v.given)

    def brief(self, solution: Solution) -> dict[str, float]:
        """The summary, or where that takes long the part that takes no longer than an evaluation; for many runs."""
        return self.summary(solution)

    def losses(self) -> dict[str, float]:
        """Both losses at the current theta and v, on all data."""
        with torch.no_grad():
            return {
                "outer_loss": float(self.problem.outer_value(self.full_outer)),
                "inner_loss": float(self.problem.objective(self.full_inner)),
            }

    @abstractmethod
    def solve_inner(self) -> float:
        """Bring theta to the inner optimum at the current v, in place; returns the norm of the last inner gradient."""

    def influence_metrics(self, total: Tensor) -> dict[str, float]:
        """Numbers that the influence of each training sample on the mean outer loss, (N,), is judged by."""
        return {}

    def pictures(self, folder: Path) -> list[Path]:
        """Draw what v has become into files of a folder; their paths."""
        return []

    def algorithm(self, method: str | None = None) -> AbstractAlgorithm:
        """A method by name, ready for this problem and with the settings that suit the task."""
        name = self.method if method is None else method
        own = self.methods()
        found = prepared(own.get(name, name), self.problem)
        known = {f.name for f in fields(found)}
        return replace(found, **{key: value for key, value in self.method_settings.items() if key in known})

    def start(
        self,
        method: str | AbstractAlgorithm | None = None,
        seed: int = 0,
        execution: str | AbstractExecutor = "inline",
        resume: bool = False,
        **settings: Any,
    ) -> Solver:
        """A solver of this instance, afresh or from its checkpoint. Further settings replace those that suit the
        task.
        """
        begin = partial(Solver.resume, settings.pop("checkpoint", "")) if resume else Solver
        algorithm = method if isinstance(method, AbstractAlgorithm) else self.algorithm(method)
        return begin(
            self.problem,
            self.inner_data,
            self.outer_data,
            method=algorithm,
            seed=seed,
            execution=execution,
            metrics=self.metrics,
            **(self.settings_for(algorithm) | settings),
        )


def _seeded(build: Callable[..., Instance]) -> Callable[..., Instance]:
    """Seed the global generators too, for tasks that draw from them; the caller's are restored."""

    @wraps(build)
    def within(self: Any, seed: int, device: torch.device, data: str | Path | None = None) -> Instance:
        check_seed(seed)
        with Randomness(int(seed), device).scope():
            return build(self, int(seed), device, data)

    return within


@dataclass(frozen=True)
class AbstractTask(Validated, ABC):
    """A bilevel problem people know, with its settings as fields and named presets of them.

    Attributes:
        name: as `nhgd list` shows it.
        presets: settings by name.
        headline: the number of a summary that methods are compared by.
        curve: the number of the history that shows it over time.
        selection: the number that chooses settings of a method, never taken from test data; lower is better.
    """

    name: ClassVar[str]
    headline: ClassVar[str] = "outer_loss"
    curve: ClassVar[str] = "outer_loss"
    selection: ClassVar[str] = "outer_loss"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"default": {}}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "build" in vars(cls):
            cls.build = _seeded(vars(cls)["build"])  # type: ignore[method-assign]  # from its seed

    @property
    def threads(self) -> int | None:
        """How many CPU threads suit it, which the command line keeps to; None: as many as torch takes."""
        return None

    @abstractmethod
    def build(self, seed: int, device: torch.device, data: str | Path | None = None) -> Instance:
        """Make the data and the problem. `data` is the folder the user named, if any.

        It may draw from torch's, NumPy's and Python's global generators: they are seeded for it, and put back after.
        """

    @classmethod
    @validated
    def preset(cls: type[T], name: str = "default") -> T:
        """The task with the settings of a preset."""
        if name not in cls.presets:
            raise unknown(f"preset of {cls.name}", name, cls.presets)
        return cls(**cls.presets[name])

    def with_settings(self: T, settings: Mapping[str, Any]) -> T:
        """A copy with some settings changed; those given as text are read as their field's type."""
        known = kinds(type(self))
        for key in settings:
            if key not in known:
                raise unknown(f"setting of {self.name}", key, known)
        return replace(self, **{key: convert(key, value, known[key]) for key, value in settings.items()})

    def check_choices(self, **choices: Iterable[str]) -> None:
        """Refuse a setting, by name, whose value is none of its choices."""
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise unknown(f"{name} of {self.name}", getattr(self, name), known)

    def refuse_data(self, data: str | Path | None) -> None:
        """For tasks that read no files: a folder that would be ignored is an error."""
        if data is not None:
            raise InputError(f"{self.name} reads no files, so --data would be ignored. Omit it.")

    @classmethod
    def summary(cls) -> str:
        """The first line of the docstring."""
        return summary(cls)
