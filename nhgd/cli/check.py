"""`nhgd check`: every inverse against the exact hypergradient of a task, at its solution or along a run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import nhgd
from nhgd import task as tasks
from nhgd._along import AlongReport
from nhgd._check import EXACT_BELOW, Report
from nhgd._experiment import Built, Experiment
from nhgd._experiment.changes import for_inverses, for_task, of_inverses, parse
from nhgd._progress import bar
from nhgd.cli._options import (
    Changes,
    DataFolder,
    Device,
    Json,
    Preset,
    Seed,
    Task,
    checked_seed,
    device_called,
    keep_to_threads,
)
from nhgd.cli._output import console, number, print_json, table
from nhgd.errors import InputError
from nhgd.execution import resolve as resolve_execution
from nhgd.inverse import INVERSES, AbstractInverse, resolve
from nhgd.task import AbstractTask, Instance


def check(
    task: Task,
    inverses: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated names such as kfac,cg-40; default: all, with exact on small problems only.",
            show_default=False,
        ),
    ] = None,
    along: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help=(
                "Run the task and examine N of its outer steps: the first, the last, and others in geometric"
                " progression."
            ),
            show_default=False,
        ),
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="Method of the run with --along; default: nhgd.", show_default=False)
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Outer steps of the run with --along; default: the task's own.", show_default=False),
    ] = None,
    seed: Seed = 0,
    device: Device = "auto",
    data: DataFolder = None,
    preset: Preset = "default",
    changes: Changes = None,
    as_json: Json = False,
) -> None:
    """Error, time and memory of inverses at the solved inner problem of a task. --set also takes cg.steps=100.

    Inverses that learn see ten batches, or one pass if there are fewer; products use all inner data. Numbers are
    float64 unless --set dtype=float32 is given. With --along a run of the task is examined instead of its solution,
    and --set takes the run's settings, too.
    """
    if along is None:
        if method is not None or steps is not None:
            raise InputError("--method and --steps need --along N. Add it, or omit them.")
    elif along < 1:
        raise InputError(f"--along must be a whole number of at least 1, got {along}.")
    elif steps is not None and steps < along:
        raise InputError(f"--steps {steps} are fewer outer steps than the {along} points of --along. Ask for more.")
    names = list(INVERSES) if inverses is None else [name.strip() for name in inverses.split(",") if name.strip()]
    if not names:
        raise InputError("--inverses is empty. Give names, for example --inverses kfac,cg,identity, or omit it.")
    asked = parse(changes)
    if hasattr(tasks.resolve(task, preset), "dtype"):
        asked = {"dtype": "float64"} | asked  # an exact reference needs the digits
    known = {name: resolve(name) for name in names}
    origin = {"task": task, "preset": preset, "seed": checked_seed(seed)}
    where = device_called(device)
    if along is None:
        chosen, rest = for_task(tasks.resolve(task, preset), asked)
        compared = for_inverses(chosen, known, rest)
        keep_to_threads(chosen.threads, where)
        report = _at_the_solution(chosen, compared, inverses is None, seed, where, data)
        rows = [row | {"inverse": name} for row, name in zip(report.rows, compared, strict=True)]
        answer = origin | report.as_dict() | {"rows": rows}
        tell = partial(_tell, answer, replace(report, rows=rows).warnings)
    else:
        experiment, own = Experiment.chosen(task, preset, method or "nhgd", asked, partial(of_inverses, known))
        compared = for_inverses(experiment.task, known, own)
        keep_to_threads(experiment.task.threads, where)
        built = experiment.build(seed, where, data)
        found = _along_the_run(built, compared, inverses is None, seed, steps, along)
        found = replace(found, rows=_renamed(found.rows, list(compared)))
        answer = origin | {"method": built.method, "steps": found.solution.stats["steps"]} | found.as_dict()
        tell = partial(_tell_along, answer, found.refusals)
    if as_json:
        print_json(answer)
    else:
        tell()


def _at_the_solution(
    task: AbstractTask,
    compared: dict[str, AbstractInverse],
    every: bool,
    seed: int,
    device: torch.device,
    data: Path | None,
) -> Report:
    with bar("check") as tick:
        tick(0.0, "building the task")
        instance = task.build(seed, device, data)
        tick(0.5, "solving the inner problem")
        instance.solve_inner()
        tick(1.0, "")
    _leave_out_exact(compared, every, instance)
    return nhgd.check(
        instance.problem,
        instance.full_inner,
        instance.full_outer,
        inverses=list(compared.values()),
        learn_from=_training_batches(instance, seed),
        seed=seed,
    )


def _along_the_run(
    built: Built, compared: dict[str, AbstractInverse], every: bool, seed: int, steps: int | None, points: int
) -> AlongReport:
    instance = built.instance
    _leave_out_exact(compared, every, instance)
    training_batches = _training_batches(instance, seed)
    with built.start(seed, resolve_execution("inline")) as solver:
        return nhgd.check_along(
            solver,
            instance.full_inner,
            instance.full_outer,
            steps=instance.steps if steps is None else steps,
            points=points,
            inverses=list(compared.values()),
            learn_from=training_batches,
            seed=seed,
        )


def _renamed(rows: list[dict[str, Any]], names: list[str]) -> list[dict[str, Any]]:
    """The rows of several points with the names that were given; a point may have one more row, the run's own,
    before them.
    """
    each = len(rows) // len({row["step"] for row in rows}) if rows else 1
    own = each - len(names)
    return [row if i % each < own else row | {"inverse": names[i % each - own]} for i, row in enumerate(rows)]


def _leave_out_exact(compared: dict[str, AbstractInverse], every: bool, instance: Instance) -> None:
    """Drop the exact inverse if theta is too large for it."""
    if every and instance.problem.theta.numel > EXACT_BELOW:
        compared.pop("exact")


def _training_batches(instance: Instance, seed: int) -> list[Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return list(islice(instance.inner_data, 10))


def _tell(answer: dict[str, Any], warnings: list[str]) -> None:
    reference = answer["reference"]
    out = console()
    title = f"{answer['task']}, seed {answer['seed']}: D = {reference['dimension']}, reference: {reference['method']}"
    listed = table(title, "inverse", "cosine", "relative error", "ms", "MB", "Hessian products", "residual")
    refused = []
    for row in answer["rows"]:
        if row["error"]:
            refused.append(f"{row['inverse']}: {row['error']}")
            continue
        cells = [(row["cosine"], ".4f"), (row["relative_error"], ".2g"), (row["milliseconds"], ".3g")]
        cells += [(row["megabytes"], ".3g"), (row["hvps"], "d"), (row["residual"], ".2g")]
        listed.add_row(row["inverse"], *(number(value, form) for value, form in cells))
    out.print(listed)
    for line in (*refused, *warnings, *answer["advice"]):
        out.print(f"\n{line}")


def _tell_along(answer: dict[str, Any], refusals: list[str]) -> None:
    out = console()
    title = f"{answer['task']} by {answer['method']}, seed {answer['seed']}, reference: {answer['reference']}"
    columns = ("cosine", "relative error", "damped cosine", "residual", "inner distance", "damping")
    listed = table(title, "step", "inverse", *columns, left=2)
    before = None
    for row in answer["rows"]:
        if row["error"]:
            continue
        new = row["step"] != before
        cells = [(row["cosine"], ".4f"), (row["relative_error"], ".2g"), (row["cosine_damped"], ".4f")]
        cells += [(row["residual"], ".2g")]
        place = [number(row[key], ".2g") if new else "" for key in ("inner_distance", "damping")]
        listed.add_row(str(row["step"]) if new else "", row["inverse"], *(number(*cell) for cell in cells), *place)
        before = row["step"]
    out.print(listed)
    said = (
        "cosine and relative error are to the exact hypergradient where the run stands, the damped cosine is to that of the"
        ' Hessian with the run\'s damping, which its horizon asks for. What is "of the run" has the statistics that the run has'
        " learnt; the others learn where it stands."
    )
    for line in (said, *refusals):
        out.print(f"\n{line}")
