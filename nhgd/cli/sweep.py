"""`nhgd sweep`: a search for settings of a method on a task."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from nhgd._experiment.changes import parse
from nhgd._provenance import provenance
from nhgd.cli import _completion
from nhgd.cli._options import Changes, DataFolder, Device, Json, Out, Preset, Task, checked_seed, device_called
from nhgd.cli._output import lines_unless, print_json
from nhgd.comparison import seeds as seed_lists
from nhgd.report import report
from nhgd.tuning import PRUNERS, SAMPLERS, Sweep, space
from nhgd.tuning.storage import hidden


def sweep(
    context: typer.Context,
    task: Task,
    method: Annotated[
        str | None,
        typer.Option(
            help="See `nhgd list`; default: the one that suits the task.",
            show_default=False,
            autocompletion=_completion.methods,
        ),
    ] = None,
    trials: Annotated[int, typer.Option(help="How many in all, those that are in the storage included.")] = 50,
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="sqlite:///FILE, postgresql://USER@HOST/DATABASE, journal:FILE, redis://HOST; default: a file in --out.",
            show_default=False,
        ),
    ] = None,
    searched: Annotated[
        list[str] | None,
        typer.Option(
            "--space",
            metavar="KEY=RANGE",
            help="outer_lr=0.01..1:log, inner_steps=5..40 or inverse=cg,neumann; may be given several times.",
            show_default="step sizes, and the damping of a learnt inverse",
        ),
    ] = None,
    budget: Annotated[str, typer.Option(help="Of each run: a time 60s, or gradient-equivalents 500g.")] = "10s",
    sampler: Annotated[str, typer.Option(help=f"{', '.join(SAMPLERS)}.")] = "tpe",
    pruner: Annotated[str, typer.Option(help=f"When a trial ends early: {', '.join(PRUNERS)}.")] = "median",
    seeds: Annotated[
        str, typer.Option(metavar="SEEDS", help="Of data and runs, whose mean counts: a count, a range, a list.")
    ] = "1",
    seed: Annotated[int, typer.Option(help="Of the search itself.")] = 0,
    study: Annotated[str | None, typer.Option(help="Its name in the storage.", show_default="task and method")] = None,
    device: Device = "auto",
    data: DataFolder = None,
    out: Out = None,
    preset: Preset = "default",
    changes: Changes = None,
    as_json: Json = False,
) -> None:
    """Search for settings of a method on a task, by Optuna. Several processes may share a storage; resumable.

    The best are in OUT/best.json, which `nhgd run TASK --params OUT/best.json` takes.
    """
    given: Any = context.find_root().command
    where = device_called(device)
    words = [hidden(word) or word for word in given.given]
    asked = Sweep.of(
        task, method, trials, storage, budget, space.parsed(searched), parse(changes), preset, sampler, pruner,
        seed_lists.parsed(seeds), checked_seed(seed), study, str(where), data, out, provenance(words, where),
    )  # fmt: skip
    found = asked.run(out, say=lines_unless(as_json))
    page = None if out is None else report(out)
    if as_json:
        print_json(found.to_dict() | {"out": None if out is None else str(out)})
        return
    print(found.to_text())
    if page is not None:
        print(f"\nWritten: best.json, sweep.json, trials.csv, figures and {page.name} in {out}. The page: {page}")
        print(
            f"Use the best: nhgd run {task}{'' if preset == 'default' else f' --preset {preset}'} --params {out}/best.json"
        )
