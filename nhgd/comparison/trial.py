"""One run of a comparison: built, warmed up, timed, evaluated outside the clock, and described by plain values."""

from __future__ import annotations

import json
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, TypeAlias

import torch
from typing_extensions import override

from nhgd._experiment import Built, Experiment
from nhgd._memory import PeakMemory, out_of_memory
from nhgd._results import jsonable
from nhgd._solution import Row
from nhgd._solver import Solver
from nhgd._threads import limited
from nhgd.algorithm import AbstractAlgorithm
from nhgd.comparison.budget import Allowance
from nhgd.errors import InputError, NhgdError
from nhgd.execution import Inline
from nhgd.stop import AbstractStop, Budget, Spent, gradient_equivalents
from nhgd.task import AbstractTask

Run: TypeAlias = dict[str, Any]  # what `measured` gives; it is kept as JSON
FULL = "full_"  # before the losses on all data, beside those of a step's batches


@dataclass(frozen=True)
class Trial:
    """What one run is made from.

    Attributes:
        task, preset: a task by name with a preset, or an object.
        label, method: the method's name in the comparison, and its name or object; None: the task's own.
        seed: of the data and of the run.
        settings: of this run, by key.
        allowance: what it may spend.
        device, data: where it runs, and the folder of the task's files.
        warmup: outer steps of a separate run before it.
        patience: evaluations without a better selection loss after which it ends.
        points: about how often it is evaluated.
        watch: sees what was spent and the selection loss after each evaluation, and says whether the run ends there.
        longest: seconds of outer steps after which a run ends that may take a number of them.
        until: a reading of `time.monotonic` after which it ends with the outer steps that it has; None: none.
        brief: whether the metrics at the end are those of an evaluation, where the task's summary would take longer.
        memory: whether the memory of its outer steps is measured: on the CPU in the separate run, on a GPU in the run
            itself.
    """

    task: str | AbstractTask
    preset: str
    label: str
    method: str | AbstractAlgorithm | None
    seed: int
    settings: Mapping[str, Any]
    allowance: Allowance
    device: str = "cpu"
    data: Path | None = None
    warmup: int = 2
    patience: int | None = None
    points: int = 50
    longest: float | None = None
    brief: bool = False
    memory: bool = False
    until: float | None = field(default=None, compare=False)
    pictures: Path | None = field(default=None, compare=False)
    watch: Callable[[Spent, float], bool] | None = field(default=None, compare=False)

    def experiment(self) -> Experiment:
        """The experiment; what can be refused without data is refused here."""
        changes: dict[str, Any] = dict(self.settings)
        return Experiment.chosen(self.task, self.preset, self.method, changes, lambda rest: (None, dict(rest)))[0]

    @property
    def key(self) -> str:
        """What tells it from the other runs of its comparison."""
        return json.dumps([self.label, self.seed, jsonable(self.settings)], sort_keys=True)


@dataclass(frozen=True)
class Patience(AbstractStop[tuple[float, int]]):
    """The evaluation loss has not fallen for `patience` evaluations."""

    name: ClassVar[str] = "patience"
    patience: int
    loss: str

    @override
    def init(self) -> tuple[float, int]:
        return float("inf"), 0

    @override
    def update(self, state: tuple[float, int], row: Mapping[str, Any]) -> tuple[float, int]:
        """Rows without the loss were not evaluated."""
        if self.loss not in row:
            return state
        best, since = state
        return (row[self.loss], 0) if row[self.loss] < best else (best, since + 1)

    @override
    def holds(self, spent: Spent, state: tuple[float, int]) -> bool:
        return state[1] >= self.patience


@dataclass(frozen=True)
class Watched(AbstractStop[tuple[float, int] | None]):
    """Somebody who sees the evaluation loss has said that the run is not worth going on with."""

    name: ClassVar[str] = "pruned"
    watch: Callable[[Spent, float], bool]
    loss: str

    @override
    def update(self, state: tuple[float, int] | None, row: Mapping[str, Any]) -> tuple[float, int] | None:
        """The loss of the last evaluation, and its step."""
        return (row[self.loss], row["step"]) if self.loss in row else state

    @override
    def holds(self, spent: Spent, state: tuple[float, int] | None) -> bool:
        return state is not None and state[1] == spent.steps and self.watch(spent, state[0])


@dataclass(frozen=True)
class Late(AbstractStop[None]):
    """The comparison's time, evaluations included, has no more for this run, which has one outer step in any case."""

    name: ClassVar[str] = "late"
    clocked: ClassVar[bool] = True
    until: float

    @override
    def holds(self, spent: Spent, state: None) -> bool:
        return spent.steps > 0 and time.monotonic() > self.until


def blank(trial: Trial) -> Run:
    """What is known of a run before it begins."""
    run: Run = {"method": trial.label, "seed": trial.seed, "settings": jsonable(trial.settings)}
    return run | {"metrics": {}, "seconds": None, "oracle_calls": {}, "points": [], "warnings": [], "error": None}


def measured(trial: Trial) -> Run:
    """Run it; an error that is the method's or the settings' own becomes part of the result."""
    run = blank(trial)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            _measure(trial, run)
        except NhgdError as error:
            run["error"] = str(error)
        except Exception as error:  # of a method, an inverse or a task from another package, or of torch
            run["error"] = out_of_memory(error) or f"{type(error).__name__}: {' '.join(str(error).split())}"
    run["warnings"] = list(dict.fromkeys(str(warning.message) for warning in heard))
    return run


def _measure(trial: Trial, run: Run) -> None:
    experiment, device = trial.experiment(), torch.device(trial.device)
    threads = experiment.task.threads
    with limited(None if threads is None or device.type != "cpu" else min(threads, torch.get_num_threads())):
        pace = _warmed_up(trial, experiment, device)
        if "megabytes" in pace:
            run["peak_megabytes"] = pace["megabytes"]
        began = time.perf_counter()
        built = experiment.build(trial.seed, device, trial.data)
        run["preparation_seconds"] = time.perf_counter() - began
        run["evaluated_every"] = every = max(1, round(trial.allowance.steps(pace) / trial.points))
        before = _on_gpu(device) if trial.memory else None
        with _begun(built, trial.seed, every) as solver:
            solver.on_step.append(_Pace(solver, trial, every).note)
            start = solver.evaluate()
            run["points"] = [_point({"step": 0, "seconds": 0.0} | start, start, 0.0)]
            try:
                solution = solver.run(stop=_rules(trial, experiment.task, start), progress=False)
            finally:
                _note(run, solver, trial, start)
            if run["points"][-1]["step"] < run["steps"]:
                last = {"step": run["steps"], "seconds": run["seconds"]} | solver.evaluate()
                run["points"].append(_point(last, start, run["gradients"]))
            run["result"] = solution.result
            if before is not None:
                run["peak_megabytes"] = (torch.cuda.max_memory_allocated(device) - before) / 1e6
            summary = built.instance.brief if trial.brief else built.instance.summary
            run["metrics"] = {name: _finite(value) for name, value in summary(solution).items()}
            run["described"] = jsonable(built.described() | {"method": solver.algorithm})
            run["compile"] = jsonable(solution.stats["compile"])
            run["pictures"] = _drawn(trial, built)


def _rules(trial: Trial, task: AbstractTask, start: Row) -> list[AbstractStop[Any]]:
    rules = [trial.allowance.rule(), *([] if trial.longest is None else [Budget(trial.longest)])]
    if trial.until is not None:
        rules.append(Late(trial.until))
    name = task.selection if task.selection in start else f"{FULL}{task.selection}"
    if trial.patience is not None:
        rules.append(Patience(trial.patience, name))
    if trial.watch is not None:
        rules.append(Watched(trial.watch, name))
    return rules


def _begun(built: Built, seed: int, every: int) -> Solver:
    """A solver whose metrics are those of the task and both losses on all data."""
    solver = built.start(seed, Inline())
    instance = built.instance

    def metrics(theta: Any, v: Any) -> dict[str, float]:
        return instance.metrics(theta, v) | {f"{FULL}{name}": value for name, value in instance.losses().items()}

    solver.metrics, solver.metrics_every = metrics, every
    return solver


class _Pace:
    """Evaluates more often than planned where steps have become slower than they were in the warm-up.

    Args:
        solver: of the run.
        trial: what it may spend.
        every: the steps between two evaluations that were planned.
    """

    def __init__(self, solver: Solver, trial: Trial, every: int) -> None:
        self._solver, self._every = solver, every
        self._unit = {"s": "seconds", "g": "gradients"}.get(trial.allowance.unit, "step")
        self._share = trial.allowance.amount / trial.points
        self._last = 0.0

    def note(self, row: Row) -> None:
        """After each step: the next one is evaluated if one and a half intervals have gone since the last
        evaluation.
        """
        spent = gradient_equivalents(row) if self._unit == "gradients" else row[self._unit]
        if f"{FULL}outer_loss" in row:
            self._last = spent
        late = spent - self._last > 1.5 * self._share
        self._solver.metrics_every = 1 if late else self._every


_PACES: dict[str, dict[str, float]] = {}  # of this process: what one outer step costs, by what was warmed up


def _warmed_up(trial: Trial, experiment: Experiment, device: torch.device) -> dict[str, float]:
    """Take a few outer steps of another run and forget it: loading kernels is no part of a method's time.

    What one outer step then costs. Every process does this once for each method with its settings.
    """
    same = {name: value for name, value in trial.settings.items() if not name.endswith("_lr")}  # which change no cost
    key = json.dumps([str(trial.task), trial.preset, trial.label, jsonable(same), trial.device, trial.memory])
    if key not in _PACES:
        built = experiment.build(trial.seed, device, trial.data)
        with _begun(built, trial.seed, every=2**30) as solver:
            rows = solver.run(steps=max(2, trial.warmup), progress=False).history
            solver.evaluate()
        _PACES[key] = _cost(rows)
        if trial.memory and device.type != "cuda":
            with PeakMemory() as peak, _begun(built, trial.seed, every=2**30) as solver:
                solver.run(steps=1, progress=False)
            _PACES[key]["megabytes"] = peak.bytes / 1e6
    return _PACES[key]


def _on_gpu(device: torch.device) -> int | None:
    """The memory that tensors have on a GPU before a run, whose peak is counted from here; None elsewhere."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _cost(rows: Sequence[Row]) -> dict[str, float]:
    """Seconds and gradient-equivalents of an outer step: the median after the first."""
    pairs = list(pairwise(rows)) or [({"seconds": 0.0}, rows[0])]
    return {
        "seconds": median(after["seconds"] - before["seconds"] for before, after in pairs),
        "gradients": median(
            gradient_equivalents(after) - (gradient_equivalents(before) if "gradients" in before else 0.0)
            for before, after in pairs
        ),
    }


def _note(run: Run, solver: Solver, trial: Trial, start: Row) -> None:
    """What the solver has reached, also where it then failed."""
    history = solver.history
    evaluated = [row for row in history if f"{FULL}outer_loss" in row]
    run["points"] += [_point(row, start, gradient_equivalents(row)) for row in evaluated]
    run["steps"] = len(history)
    run["seconds"] = solver.seconds
    run["oracle_calls"] = solver.loop.calls.as_dict()
    run["gradients"] = solver.loop.calls.equivalents
    run["step_cost"] = _cost(history) if history else None
    run["environment"] = environment(torch.device(trial.device), solver.loop.threads)


def _point(row: Row, names: Iterable[str], gradients: float) -> Row:
    """The metrics of a row, on the axes of step, seconds and gradient-equivalents; its losses are those on all data."""
    return {
        "step": row["step"],
        "seconds": row["seconds"],
        "gradients": gradients,
        **{name.removeprefix(FULL): _finite(row[name]) for name in names},
    }


def _finite(value: float) -> float | None:
    found = jsonable(float(value))
    return None if found is None else float(found)


def _drawn(trial: Trial, built: Built) -> list[str]:
    """The task's own pictures of the last point, if they are wanted and can be drawn; their names."""
    if trial.pictures is None:
        return []
    try:
        trial.pictures.mkdir(parents=True, exist_ok=True)
        return [path.name for path in built.instance.pictures(trial.pictures)]
    except InputError:  # without Matplotlib
        return []


def environment(device: torch.device, threads: int | None = None) -> dict[str, Any]:
    """The versions and the machine of a run."""
    import nhgd

    found: dict[str, Any] = {
        "nhgd": nhgd.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads() if threads is None else threads,
        "device": str(device),
    }
    return found | ({"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {})
