"""Several methods, seeds and settings on one task, with the same budget for each run."""

from __future__ import annotations

import importlib.util
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import torch

from nhgd import task as tasks
from nhgd._progress import bar
from nhgd._results import folder, jsonable
from nhgd._validation import shown
from nhgd.algorithm import AbstractAlgorithm
from nhgd.comparison import choice, grid
from nhgd.comparison import seeds as seed_lists
from nhgd.comparison.budget import Allowance
from nhgd.comparison.grid import Grid
from nhgd.comparison.store import Store, check, kept
from nhgd.comparison.table import Table, check_metric
from nhgd.comparison.trial import Run, Trial, environment
from nhgd.comparison.workers import Workers
from nhgd.data.device import usable_device
from nhgd.errors import InputError
from nhgd.plot.style import FORMATS
from nhgd.task import AbstractTask, OwnProblem

Methods: TypeAlias = str | Sequence[str | AbstractAlgorithm] | Mapping[str, str | AbstractAlgorithm]
METHODS = ("nhgd", "aid-cg", "stocbio", "soba")
MOST_WIDER = 8  # rounds


@dataclass(frozen=True)
class Comparison:
    """What was asked for, checked.

    Attributes:
        first: a run of it; the others differ in label, method, seed and settings.
        methods: names and objects by label.
        seeds, grid: as parsed.
        jobs, widen: as of `bench`.
        origin: where it comes from, as `provenance` gives it, for the page.
    """

    first: Trial
    methods: Mapping[str, str | AbstractAlgorithm]
    seeds: Sequence[int]
    grid: Grid
    jobs: int = 1
    widen: int = 0
    origin: Mapping[str, Any] | None = None

    @classmethod
    def of(
        cls,
        task: str | AbstractTask,
        methods: Methods,
        chosen_seeds: int | Iterable[int],
        budget: str | float,
        settings: Grid,
        preset: str,
        device: str,
        data: str | Path | None,
        jobs: int,
        warmup: int,
        patience: int | None,
        widen: int,
        origin: Mapping[str, Any] | None = None,
    ) -> Comparison:
        """From arguments; everything that can be refused without data is refused here."""
        named = _by_label(methods)
        grid.check_prefixes(settings, named)
        for name, value, least in (("warmup", warmup, 2), ("patience", patience, 1), ("widen", widen, 0)):
            if value is not None and (not isinstance(value, int) or value < least):
                raise InputError(f"{name} must be a whole number of at least {least}, got {shown(value)}.")
        if widen > MOST_WIDER:
            raise InputError(f"widen is at most {MOST_WIDER}, got {widen}. Give a grid that covers more.")
        if not isinstance(jobs, int) or jobs == 0:
            raise InputError(f"jobs is a number of processes, or -1 for one on each core; got {shown(jobs)}.")
        if jobs != 1 and importlib.util.find_spec("joblib") is None:
            raise InputError("Several processes need joblib: pip install joblib. With jobs=1 nothing is needed.")
        here = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        used = str(usable_device("bench", here))
        label, method = next(iter(named.items()))
        first = Trial(
            task, preset, label, method, 0, {}, Allowance.read(budget), used, None if data is None else Path(data), warmup,
            patience,
        )  # fmt: skip
        found = cls(first, named, seed_lists.checked(chosen_seeds), settings, jobs, widen, origin)
        checked = set()
        for trial in found.trials():
            if (key := (trial.label, str(trial.settings))) not in checked:
                trial.experiment()
                checked.add(key)
        return found

    @cached_property
    def task(self) -> AbstractTask:
        """The task without its changes."""
        return tasks.resolve(self.first.task, self.first.preset)

    def trials(self) -> list[Trial]:
        """All runs: a whole comparison of one seed before the next, so that a part of it is a comparison too."""
        combined = {label: grid.combinations(self.grid, label) for label in self.methods}
        longest = max(len(some) for some in combined.values())
        return [
            replace(self.first, label=label, method=method, seed=seed, settings=combined[label][nth])
            for seed in self.seeds
            for nth in range(longest)
            for label, method in self.methods.items()
            if nth < len(combined[label])
        ]

    def asked(self) -> dict[str, Any]:
        """What all runs of a folder have in common."""
        first, task = self.first, self.task
        settings = {f.name: _plain(getattr(task, f.name)) for f in fields(task)}
        return {
            "version": environment(torch.device("cpu"))["nhgd"],
            "task": task.name if isinstance(first.task, AbstractTask) else first.task,
            "preset": first.preset,
            "settings of the task": settings,
            "budget": str(first.allowance),
            "device": first.device,
            "data": None if first.data is None else os.path.abspath(first.data),
            "patience": first.patience,
            "longest": first.longest,
        }

    def about(self) -> dict[str, Any]:
        """For the reader of a result."""
        asked, task, allowance = self.asked(), self.task, self.first.allowance
        return {
            "kind": "bench",
            **{key: asked[key] for key in ("task", "preset", "device", "budget", "patience")},
            "budget_words": allowance.words,
            "unit": allowance.unit,
            "methods": list(self.methods),
            "seeds": list(self.seeds),
            "settings": jsonable(self.grid),
            "warmup": self.first.warmup,
            "jobs": self.jobs,
            "headline": task.headline,
            "curve": task.curve,
            "selection": task.selection,
            "command": None if self.origin is None else self.origin.get("command"),
            "provenance": self.origin,
        }

    def table(
        self,
        out: Path | None,
        target: tuple[str, float] | None = None,
        progress: bool | None = None,
        say: Callable[[str], None] = lambda words: None,
        suffixes: Sequence[str] = FORMATS,
        until: float | None = None,
        workers: Workers | None = None,
    ) -> Table:
        """Run what is not in the folder yet, write everything there, and give the table.

        Args:
            workers: processes that take the runs, in place of `jobs`; they draw no pictures.
            until: a reading of `time.monotonic` after which no further run begins; the table is then of those there
                are.
        """
        with ExitStack() as stack:
            place = stack.enter_context(folder(out))
            store = None if place is None else Store(place.path, self.asked())
            if store is not None:
                check(store.path, store.asked)
            trials = self.trials()
            if not late(until) and (store is None or any(store.load(trial) is None for trial in trials)):
                self._rehearse_building(None if target is None else target[0], workers is not None)
            if store is not None:
                store.begin()
            try:
                runs = self._runs(trials, store, progress, say, until, workers)
                for _ in range(self.widen):
                    wider = self._wider(runs)
                    more = self._runs(wider, store, progress, say, until, workers) if wider else []
                    if not more:
                        break
                    trials += wider
                    runs += more
            except KeyboardInterrupt as stop:
                if store is not None:
                    stop.args = (f"The finished runs are in {out}; the same command goes on from there.",)
                raise
            order = {label: nth for nth, label in enumerate(self.methods)}
            runs.sort(key=lambda run: order[run["method"]])  # stable: seeds and settings stay in order
            found = Table(self.about(), runs, target)
            if place is not None:
                drawn = suffixes if importlib.util.find_spec("matplotlib") is not None else ()
                found.write(place.write_all, drawn)
            return found

    def _rehearse_building(self, metric: str | None, elsewhere: bool) -> None:
        """Make the data once, so that what is wrong with them, or with the target's metric, is one error before any
        run.

        Where runs are taken `elsewhere`, this process keeps off the device, and makes only what is read from files.
        """
        first = self.trials()[0]
        if elsewhere and first.data is None:
            return
        device = "cpu" if elsewhere else first.device
        made = first.experiment().task.build(first.seed, torch.device(device), first.data)
        if metric is not None:
            with torch.no_grad():
                known = made.metrics(made.problem.theta.given, made.problem.v.given)
            check_metric(metric, [*known, *made.losses()], self.task.name)

    def _runs(
        self,
        trials: Sequence[Trial],
        store: Store | None,
        progress: bool | None,
        say: Callable[[str], None],
        until: float | None = None,
        workers: Workers | None = None,
    ) -> list[Run]:
        found: dict[str, Run] = {}
        if store is not None:
            found = {trial.key: run for trial in trials if (run := store.load(trial)) is not None}
            if found:
                say(f"{len(found)} of {len(trials)} runs were done before.")
        left = [trial for trial in trials if trial.key not in found]
        with bar("bench", progress) as tick:
            tick(len(found) / len(trials), "the first run" if left else "")
            measured = self._measured if workers is None else workers.measured
            for trial, run in measured(before(left, until, self.jobs if workers is None else workers.jobs), store):
                found[trial.key] = run
                words = f"{trial.label}, seed {trial.seed}{_in_brackets(trial.settings)}"
                tick(len(found) / len(trials), words)
                say(f"{len(found)} of {len(trials)}: {words}: {_ended(run, self.task.headline)}")
        for trial in left:  # what failed before, and was not tried again in the time
            if store is not None and trial.key not in found and (run := store.load(trial, failed=True)) is not None:
                found[trial.key] = run
        return [found[trial.key] for trial in trials if trial.key in found]

    def _measured(self, trials: Iterable[Trial], store: Store | None) -> Iterator[tuple[Trial, Run]]:
        drawing = {self.seeds[0]} if store is not None else set()
        if self.jobs == 1:
            for trial in trials:
                yield kept(trial, store, trial.seed in drawing)
            return
        from joblib import Parallel, delayed
        from joblib.parallel import get_active_backend

        backend = get_active_backend()[0]
        way = "generator_unordered" if getattr(backend, "supports_return_generator", False) else "list"
        calls = (delayed(kept)(trial, store, trial.seed in drawing) for trial in trials)
        yield from Parallel(n_jobs=self.jobs, return_as=way, batch_size=1)(calls)

    def _wider(self, runs: Sequence[Run]) -> list[Trial]:
        """The runs one step beyond each end at which an optimum lies."""
        known = {trial.key for trial in self.trials()} | {_key(run) for run in runs}
        found = []
        for at in choice.edges(runs, self.task.selection):
            own = [run for run in runs if run["method"] == at["method"]]
            best = choice.chosen(own, self.task.selection)[0]["settings"]
            value = grid.beyond(at["key"], best, [run["settings"] for run in own])
            if value is None:
                continue
            method = self.methods[at["method"]]
            for seed in self.seeds:
                trial = replace(
                    self.first, label=at["method"], method=method, seed=seed, settings=best | {at["key"]: value}
                )
                if trial.key not in known:
                    found.append(trial)
        return found


def before(trials: Sequence[Trial], until: float | None, jobs: int = 1) -> Iterator[Trial]:
    """The trials, until a reading of `time.monotonic`.

    One that may end early, because it has a longest time, has its share of what is left until then: as long as all that
    are still to come, `jobs` at a time, would have if they took as long. What it does not need, they have.
    """
    for nth, trial in enumerate(trials):
        if late(until):
            return
        if until is None or trial.longest is None:
            yield trial
            continue
        now, rounds = time.monotonic(), math.ceil((len(trials) - nth) / (jobs if jobs > 0 else os.cpu_count() or 1))
        yield replace(trial, until=now + (until - now) / rounds)


def late(until: float | None) -> bool:
    """Whether a reading of `time.monotonic` is past."""
    return until is not None and time.monotonic() > until


def _key(run: Run) -> str:
    return Trial("", "", run["method"], "", run["seed"], run["settings"], Allowance(1.0, "s")).key


def as_task(task: Any) -> str | AbstractTask:
    """A function as a task; anything else as it is."""
    return OwnProblem(task) if callable(task) and not isinstance(task, (str, AbstractTask)) else task


def _by_label(methods: Methods) -> dict[str, str | AbstractAlgorithm]:
    if isinstance(methods, str):
        methods = [name.strip() for name in methods.split(",") if name.strip()]
    if isinstance(methods, Mapping):
        found = {str(label): method for label, method in methods.items()}
    else:
        found = {}
        for method in methods:
            label = method.name if isinstance(method, AbstractAlgorithm) else str(method)
            if label in found and isinstance(method, AbstractAlgorithm):
                raise InputError(f"Two methods are called {label}. Give names: methods={{'a': ..., 'b': ...}}.")
            found[label] = method
    if not found:
        raise InputError("There are no methods to compare. Name some, for example nhgd,aid-cg.")
    return found


def _plain(value: Any) -> Any:
    """The same in another process: functions by their name, not by their address."""
    return f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else jsonable(value)


def _in_brackets(settings: Mapping[str, Any]) -> str:
    return f" ({', '.join(f'{key}={value}' for key, value in settings.items())})" if settings else ""


def _ended(run: Run, headline: str) -> str:
    if run["error"] is not None:
        return f"failed: {run['error']}"
    value = run["metrics"].get(headline)
    steps = "1 step" if run["steps"] == 1 else f"{run['steps']} steps"
    return f"{steps}, {headline.replace('_', ' ')} {'-' if value is None else format(value, '.4g')}"
