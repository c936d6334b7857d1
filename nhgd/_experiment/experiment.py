"""What TASK, --preset, --method and --set choose together: one method on one task, before and after it is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch

from nhgd import task as tasks
from nhgd._experiment.changes import check_early, for_run, for_task
from nhgd._solver import Solver
from nhgd.algorithm import AbstractAlgorithm, prepared
from nhgd.errors import InputError
from nhgd.execution import AbstractExecutor
from nhgd.paper import Printed, printed
from nhgd.task import AbstractTask, Instance
from nhgd.task._parser import convert

H = TypeVar("H")
Splitter: TypeAlias = Callable[[Mapping[str, str]], tuple[H, dict[str, str]]]


@dataclass(frozen=True)
class Experiment:
    """One method on one task, as it was asked for.

    Attributes:
        name, preset, method: as they were given; in Python a method may be an object.
        task: the task with its own changes.
        changes: everything that --set says.
        rest: what of it belongs neither to the task nor to an executor.
    """

    name: str
    preset: str
    method: str | AbstractAlgorithm | None
    task: AbstractTask
    changes: Mapping[str, str]
    rest: Mapping[str, str]

    @classmethod
    def chosen(
        cls,
        name: str | AbstractTask,
        preset: str,
        method: str | AbstractAlgorithm | None,
        changes: Mapping[str, str],
        for_executors: Splitter[H],
    ) -> tuple[Experiment, H]:
        """The experiment, and the settings of executors. What can be refused without data is refused here.

        Args:
            for_executors: takes changes apart into settings of executors and the rest.
        """
        task, rest = for_task(tasks.resolve(name, preset), changes)
        of_executors, rest = for_executors(rest)
        check_early(task, method, rest)
        found = cls(
            name if isinstance(name, str) else task.name,
            preset if isinstance(name, str) else "",
            method,
            task,
            changes,
            rest,
        )
        found.printed()
        return found, of_executors

    def printed(self) -> Printed | None:
        """The paper's settings for this method, if this is one of its experiments; else None."""
        if isinstance(self.method, AbstractAlgorithm):
            return None
        given = [text for key, text in self.changes.items() if key in ("beta", "inverse.beta")]
        return printed(self.name, self.preset, self.method, convert("beta", given[-1], float) if given else None)

    def build(self, seed: int, device: torch.device, data: Path | None) -> Built:
        """Make the data and the problem, and choose the method and the settings of the solver."""
        instance = self.task.build(seed, device, data)
        from_paper = self.printed()
        settings: dict[str, Any]
        if isinstance(self.method, AbstractAlgorithm):
            method, algorithm, settings = self.method.name, prepared(self.method, instance.problem), {}
        elif from_paper is None:
            method, algorithm, settings = self.method or instance.method, instance.algorithm(self.method), {}
        else:
            method, algorithm = from_paper.method, from_paper.algorithm
            settings = {key: value for key, value in from_paper.settings.items() if key not in self.changes}
        self._refuse_ignored(instance, algorithm)
        changed, algorithm = for_run(self.task, algorithm, self.rest)
        return Built(self.task, instance, method, algorithm, settings | changed)

    def _refuse_ignored(self, instance: Instance, algorithm: AbstractAlgorithm) -> None:
        """A setting that the task hands on to the method is an error when this method has none of that name."""
        known = {f.name for f in fields(algorithm)}
        for key in instance.method_settings:
            if key in self.changes and key not in known:
                raise InputError(f"The method {algorithm.name} has no setting {key}, so --set {key} would be ignored.")


@dataclass(frozen=True)
class Built:
    """The same with data.

    Attributes:
        task, instance: the task, and what was built from it.
        method, algorithm: the method's name, and itself.
        settings: of the solver, if they differ from the task's own.
    """

    task: AbstractTask
    instance: Instance
    method: str
    algorithm: AbstractAlgorithm
    settings: dict[str, Any]

    def start(self, seed: int, executor: AbstractExecutor, resume: bool = False, **kept: Any) -> Solver:
        """A solver of it; `kept`: where and how often checkpoints are written."""
        return self.instance.start(self.algorithm, seed, executor, resume=resume, **self.settings, **kept)

    def described(self) -> dict[str, Any]:
        """Every setting, for the reader of a result."""
        return {
            "task": {f.name: getattr(self.task, f.name) for f in fields(self.task)},
            "solver": self.instance.settings_for(self.algorithm) | self.settings,
            "method": self.algorithm,
        }
