"""A search for settings of one method on one task, whose trials several processes may share."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from nhgd import task as tasks
from nhgd._experiment import Built
from nhgd._progress import bar
from nhgd._results import folder, jsonable
from nhgd._validation import check_seed, shown
from nhgd.comparison import seeds as seed_lists
from nhgd.comparison.budget import Allowance
from nhgd.comparison.choice import value_of
from nhgd.comparison.store import differences
from nhgd.comparison.trial import Run, Trial, measured
from nhgd.data.device import usable_device
from nhgd.errors import InputError, RunError, unknown
from nhgd.plot.style import FORMATS
from nhgd.stop import Spent
from nhgd.task import AbstractTask
from nhgd.tuning import space as spaces
from nhgd.tuning import storage as storages
from nhgd.tuning.fitting import fitted
from nhgd.tuning.found import ASKED, ERROR, METRICS, SURPLUS, Found, counted
from nhgd.tuning.sampler import SAMPLERS, sampler_of
from nhgd.tuning.space import Space

PRUNERS = ("median", "none")
PARTS = 10  # of a run's budget, at whose ends trials are compared
UNPRUNED = 2  # parts that every trial is given
MOST = 100_000  # trials


@dataclass(frozen=True)
class Sweep:
    """What was asked for, checked.

    Attributes:
        first: a run of it; the others differ in seed and settings.
        trials: how many in all.
        address: of the storage.
        given: what is searched; empty: the default of the task and the method.
        sampler, pruner, seeds, seed, study: as of `sweep`.
        origin: where it comes from, for the page.
    """

    first: Trial
    trials: int
    address: str | None
    given: Space
    sampler: str
    pruner: str
    seeds: Sequence[int]
    seed: int
    study: str
    origin: Mapping[str, Any] | None = field(default=None, compare=False)

    @classmethod
    def of(
        cls,
        task: str | AbstractTask,
        method: str | None,
        trials: int,
        storage: str | None,
        budget: str | float,
        space: Space,
        settings: Mapping[str, Any],
        preset: str,
        sampler: str,
        pruner: str,
        seeds: int | Iterable[int],
        seed: int,
        study: str | None,
        device: str,
        data: str | Path | None,
        out: Path | None,
        origin: Mapping[str, Any] | None = None,
    ) -> Sweep:
        """From arguments; everything that can be refused without data is refused here."""
        if not isinstance(trials, int) or isinstance(trials, bool) or not 1 <= trials <= MOST:
            raise InputError(f"trials must be a whole number from 1 to {MOST:,}, got {shown(trials)}.")
        for kind, name, known in (("sampler", sampler, SAMPLERS), ("pruner", pruner, PRUNERS)):
            if name not in known:
                raise unknown(kind, str(name), known)
        if method is not None and not isinstance(method, str):
            raise InputError(f"A sweep keeps its method by name, so that it can be repeated; got {shown(method)}.")
        both = [key for key in space if key in settings]
        if both:
            raise InputError(f"{both[0]} is both searched and set. Omit it from one of the two.")
        check_seed(seed)
        here = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        found_task = tasks.resolve(task, preset)
        name = f"{found_task.name} by {method or 'its own method'}" if study is None else study
        first = Trial(
            task, preset, name, method, 0, settings, Allowance.read(budget), str(usable_device("sweep", here)),
            None if data is None else Path(data),
        )  # fmt: skip
        storages.optuna()
        found = cls(
            first, trials, storage if storage is not None else _in_folder(out), fitted(first, space), sampler, pruner,
            seed_lists.checked(seeds), int(seed), name, origin,
        )  # fmt: skip
        first.experiment()
        return found

    @cached_property
    def task(self) -> AbstractTask:
        """The task without its changes."""
        return tasks.resolve(self.first.task, self.first.preset)

    def asked(self, built: Built, space: Space) -> dict[str, Any]:
        """What all workers of a study must agree on."""
        first, task = self.first, self.task
        found: dict[str, Any] = jsonable(
            {
                "task": task.name,
                "preset": first.preset,
                "settings of the task": {f.name: getattr(task, f.name) for f in fields(task)},
                "method": built.method,
                "budget": str(first.allowance),
                "settings": first.settings,
                "space": {key: str(part) for key, part in space.items()},
                "seeds": list(self.seeds),
                "device": torch.device(first.device).type,
            }
        )
        return found

    def run(
        self, out: Path | None, progress: bool | None = None, say: Callable[[str], None] = lambda words: None
    ) -> Found:
        """Take what trials are left, write everything, and give what was found."""
        with folder(out) as place:
            with bar("sweep", progress) as tick:
                tick(None, "preparing the data")
                built = self.first.experiment().build(self.seeds[0], torch.device(self.first.device), self.first.data)
                space = self.given or _default(built, self.first.settings)
                tick(None, "opening the storage")
                storage = storages.opened(self.address)
                try:
                    study = self._study(storage, built, space)
                    most = min(self.trials, spaces.sizes(space)) if self.sampler == "grid" else self.trials
                    self._take(study, space, most, tick, say)
                    found = Found.of(study, self._about(built, space, most))
                except storages.errors() as error:
                    raise storages.in_words(error, self.address) from error
                finally:
                    storages.closed(storage)
            if found.best is None:
                errors = [row["error"] for row in found.trials if row["error"]]
                raise RunError(
                    f"None of {len(found.trials)} trials ended well. The first error: {errors[0]}"
                    if errors
                    else "No trial has ended yet; others are still at work. Run the same command again."
                )
            if place is not None:
                found.write(place.write_all, FORMATS if _can_draw() else ())
            return found

    def _about(self, built: Built, space: Space, most: int) -> dict[str, Any]:
        task = self.task
        asked = self.asked(built, space)
        return {
            "kind": "sweep",
            **{key: asked[key] for key in ("task", "preset", "method", "budget", "settings", "space", "seeds")},
            "ranges": {key: [part.low, part.high] for key, part in space.items() if isinstance(part, spaces.Range)},
            "device": self.first.device,
            "budget_words": self.first.allowance.words,
            "selection": task.selection,
            "headline": task.headline,
            "study": self.study,
            "storage": storages.hidden(self.address),
            "sampler": self.sampler,
            "pruner": self.pruner,
            "asked_trials": most,
            "command": None if self.origin is None else self.origin.get("command"),
            "provenance": self.origin,
        }

    def _study(self, storage: Any, built: Built, space: Space) -> Any:
        """The study, with its first trial planned if it is new; refused if it was made with other settings."""
        optuna = storages.optuna()
        study = optuna.create_study(
            storage=storage,
            study_name=self.study,
            load_if_exists=True,
            sampler=sampler_of(self.sampler, self.seed, {key: part.grid() for key, part in space.items()}),
            pruner=optuna.pruners.MedianPruner(5, UNPRUNED) if self.pruner == "median" else optuna.pruners.NopPruner(),
        )
        asked, before = self.asked(built, space), study.user_attrs.get(ASKED)
        if before is None:
            study.set_user_attr(ASKED, asked)
            own = spaces.starts(built)
            start = {key: own[key] for key, part in space.items() if key in own and part.holds(own[key])}
            if self.sampler != "grid" and start.keys() == space.keys():
                study.enqueue_trial(start, skip_if_exists=True)
        elif said := differences(before, asked):
            raise InputError(
                f"The study {self.study} in {storages.hidden(self.address)} was made with other settings: {said}. Give this"
                " sweep another name with --study, or repeat the settings."
            )
        return study

    def _take(
        self, study: Any, space: Space, most: int, tick: Callable[[float | None, str], None], say: Callable[[str], None]
    ) -> None:
        """Trials, one after another, until there are as many as were asked for, whoever took them."""
        optuna = storages.optuna()
        while True:
            storages.give_up_lost(study)
            running = counted(study.get_trials(deepcopy=False))
            done = sum(trial.state.is_finished() for trial in running)
            tick(done / most, _so_far(study))
            if len(running) >= most:
                return

            at: list[Any] = []

            def objective(trial: Any, at: list[Any] = at) -> float:
                at.append(trial)
                return self._value(trial, space, most)

            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                warnings.simplefilter("ignore", UserWarning)  # about failed trials, which have an error here
                try:
                    study.optimize(objective, n_trials=1, catch=(_Failed,))
                except KeyboardInterrupt as stop:
                    if at and at[0].params:
                        study.enqueue_trial(at[0].params)  # it is taken first when the sweep goes on
                    if self.address is not None:
                        kept = storages.hidden(self.address)
                        stop.args = (f"The finished trials are in {kept}; the same command goes on from there.",)
                    raise
            (frozen,) = (one for one in study.get_trials(deepcopy=False) if one.number == at[0].number)
            if SURPLUS not in frozen.user_attrs:
                say(f"{done + 1} of {most}: {_ended(frozen)}; {_so_far(study)}")

    def _value(self, trial: Any, space: Space, most: int) -> float:
        """The mean of the selection metric over the seeds, for values that the trial suggests."""
        trial.set_user_attr(storages.WORKER, storages.here())
        earlier = [one for one in counted(trial.study.get_trials(deepcopy=False)) if one.number < trial.number]
        if len(earlier) >= most:  # another worker took the last one at the same moment
            trial.set_user_attr(SURPLUS, True)
            raise _Failed
        values = {key: part.suggested(key, trial) for key, part in space.items()}
        found: list[float] = []
        runs: list[Run] = []
        for nth, seed in enumerate(self.seeds):
            own = Trial(
                self.first.task, self.first.preset, self.first.label, self.first.method, seed,
                {**self.first.settings, **values}, self.first.allowance, self.first.device, self.first.data,
                watch=self._watching(trial, nth, found),
            )  # fmt: skip
            run = measured(own)
            runs.append(run)
            value = value_of(run, self.task.selection)
            if run["error"] is not None or value is None or not math.isfinite(value):
                trial.set_user_attr(ERROR, run["error"] or f"{self.task.selection} is no finite number.")
                raise _Failed
            if run.get("result") == "pruned":
                raise storages.optuna().TrialPruned
            found.append(value)
        names = dict.fromkeys(name for run in runs for name in run["metrics"])
        means = {name: _mean([run["metrics"].get(name) for run in runs]) for name in names}
        trial.set_user_attr(METRICS, {name: value for name, value in means.items() if value is not None})
        return sum(found) / len(found)

    def _watching(self, trial: Any, nth: int, before: list[float]) -> Callable[[Spent, float], bool]:
        """Reports the mean so far at each part of the budget, and says whether the trial is worth going on with."""
        rule, reported = self.first.allowance.rule(), 0

        def watch(spent: Spent, value: float) -> bool:
            nonlocal reported
            part = min(int(PARTS * rule.fraction(spent)), PARTS)
            if part <= reported or not math.isfinite(value):
                return False
            reported = part
            trial.report((sum(before) + value) / (len(before) + 1), nth * PARTS + part)
            return bool(trial.should_prune())

        return watch


class _Failed(Exception):
    """A trial without a value; its error is kept with it."""


def _default(built: Built, settings: Mapping[str, Any]) -> Space:
    found = {key: part for key, part in spaces.default(built).items() if key not in settings}
    if not found:
        raise InputError("Nothing is left to search. Name what is with --space, for example --space inner_steps=5..40.")
    return found


def _in_folder(out: Path | None) -> str | None:
    return None if out is None else f"sqlite:///{(out / 'sweep.db').absolute()}"


def _so_far(study: Any) -> str:
    values = [trial.value for trial in study.get_trials(deepcopy=False) if trial.state.name == "COMPLETE"]
    return f"best {min(values):.4g}" if values else "no result yet"


def _ended(trial: Any) -> str:
    said = ", ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in trial.params.items()
    )
    if trial.state.name == "COMPLETE":
        return f"{said}: {trial.value:.4g}"
    return f"{said}: {'pruned' if trial.state.name == 'PRUNED' else 'failed'}"


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


def _can_draw() -> bool:
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None
