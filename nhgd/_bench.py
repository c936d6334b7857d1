"""`nhgd.bench`: several methods with equal budgets, and the page of their results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from nhgd._validation import validated_but
from nhgd.comparison import METHODS, Comparison, Table, grid
from nhgd.comparison.comparison import Methods, as_task
from nhgd.report import report
from nhgd.task import AbstractTask


@validated_but("seeds", "budget")
def bench(
    task: str | AbstractTask | Callable[[int], Mapping[str, Any]],
    methods: Methods = METHODS,
    seeds: int | Iterable[int] = 3,
    budget: str | float = "10s",
    settings: Mapping[str, Any] | None = None,
    preset: str = "default",
    *,
    device: str = "auto",
    data: str | Path | None = None,
    out: str | Path | None = None,
    jobs: int = 1,
    warmup: int = 2,
    patience: int | None = None,
    target: tuple[str, float] | None = None,
    widen: int = 0,
    progress: bool | None = None,
) -> Table:
    """Run several methods on a task with several seeds, each run with the same budget, and compare them.

    The clock runs during outer steps alone, and is read when the device has finished them. Evaluation, the making of
    the data and a few outer steps of a separate run before it are not part of the time.

    Args:
        task: a name; a task with its settings, such as `nhgd.task.Cleaning(noise=0.2)`; or, for a problem of your own,
            a function of a seed that returns the arguments of a `Solver`, see `nhgd.task.OwnProblem`.
        methods: names, algorithm objects, or either by a name of your own.
        seeds: a list, or how many: 3 means 0, 1 and 2. A seed decides the data and every random number of a run.
        budget: "10s", "5m" or seconds as a number; or "500g": that many gradient-equivalents, see
            `nhgd.stop.gradient_equivalents`.
        settings: as `nhgd run --set` takes them. A list is a grid: {"outer_lr": [0.1, 0.3]} runs both, for every method
            alike, and each method is then shown with the one that its evaluation split chose. "soba:outer_lr" is for
            soba alone.
        preset: a named set of the task's settings.
        device: "auto", "cpu", "cuda" or "cuda:1".
        data: a folder with the task's files.
        out: a folder for results: one file for each run, tables, figures, and a page of all of it, report.html.
            The same call goes on where it was interrupted, and more methods, seeds and values may be added later.
        jobs: processes, by joblib; its backends such as Dask and Ray are used inside `joblib.parallel_config(...)`.
            Runs at the same time disturb each other's clocks unless each has a core of its own.
        warmup: outer steps of the separate run, at least 2.
        patience: end a run after so many evaluations without a lower selection loss; about 50 are made in a run.
        target: a metric and the value that counts as reached, such as ("test_accuracy", 0.9).
        widen: how often a grid is continued beyond its end for a method whose best value lies there.
        progress: a bar on standard error; by default on a terminal only.

    >>> table = bench("quadratic", methods=["aid-cg", "soba"], seeds=2, budget="60g")
    >>> [(row["method"], row["seed"], row["oracle_calls"]["hvps"] > 0) for row in table.rows]
    [('aid-cg', 0, True), ('aid-cg', 1, True), ('soba', 0, True), ('soba', 1, True)]
    """
    asked = Comparison.of(
        as_task(task),
        methods,
        seeds,
        budget,
        grid.of_python(settings),
        preset,
        device,
        data,
        jobs,
        warmup,
        patience,
        widen,
    )
    found = asked.table(None if out is None else Path(out), target, progress)
    if out is not None:
        report(out)
    return found
