"""`nhgd.sweep`: a search for settings of one method, and the page of what it found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from nhgd._validation import validated_but
from nhgd.comparison.comparison import as_task
from nhgd.report import report
from nhgd.task import AbstractTask
from nhgd.tuning import Found, Sweep
from nhgd.tuning import space as spaces


@validated_but("seeds", "budget")
def sweep(
    task: str | AbstractTask | Callable[[int], Mapping[str, Any]],
    method: str | None = None,
    trials: int = 50,
    storage: str | None = None,
    budget: str | float = "10s",
    space: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    preset: str = "default",
    *,
    sampler: str = "tpe",
    pruner: str = "median",
    seeds: int | Iterable[int] = 1,
    seed: int = 0,
    study: str | None = None,
    device: str = "auto",
    data: str | Path | None = None,
    out: str | Path | None = None,
    progress: bool | None = None,
) -> Found:
    """Search for settings of a method on a task, by the selection metric of the task, which is never taken from test
    data.

    The same call goes on with the trials that are in the storage, up to the number of `trials` in all. Several
    processes, on one machine or many, may work on one storage at once. It needs Optuna: pip install 'nhgd[sweep]'.

    Args:
        task: a name, a task with its settings, or a function of a seed, as of `nhgd.bench`.
        method: a name; None: the one that suits the task.
        trials: how many in all; those that were cut off by a kill do not count, and are repeated.
        storage: any of Optuna's, such as "sqlite:///sweep.db", "postgresql://user@host/database" or
            "journal:sweep.log"; None: a file in `out`, or memory.
        budget: of each run, as of `nhgd.bench`.
        space: what is searched, by key: (0.01, 1.0, "log") is a range, ["cg", "neumann"] are choices. Default: the step
            sizes around the task's own, and the damping of a learnt inverse.
        settings: of all trials, as `nhgd run --set` takes them.
        preset: a named set of the task's settings.
        sampler: "tpe", "random" or "grid".
        pruner: "median": a trial ends early when it is worse than half of the earlier ones at the same part of its
            budget; or "none".
        seeds: of the data and the run, a list or how many; a trial's value is the mean over them.
        seed: of the search itself.
        study: its name in the storage; default: task and method.
        device, data: as of `nhgd.bench`.
        out: a folder for sweep.json, best.json (for `nhgd run --params`), trials.csv, figures, and a page, report.html.
        progress: a bar on standard error; by default on a terminal only.

    >>> found = sweep("quadratic", "soba", trials=3, budget="30g", space={"outer_lr": (0.01, 0.1, "log")})
    >>> sorted(found.best), len(found.trials), found.best["parameters"].keys()
    (['metrics', 'number', 'parameters', 'value'], 3, dict_keys(['outer_lr']))
    """
    place = None if out is None else Path(out)
    asked = Sweep.of(
        as_task(task), method, trials, storage, budget, spaces.of_python(space), dict(settings or {}), preset, sampler, pruner, seeds,
        seed, study, device, data, place,
    )  # fmt: skip
    found = asked.run(place, progress)
    if place is not None:
        report(place)
    return found
