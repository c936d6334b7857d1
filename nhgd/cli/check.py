"""`nhgd check`: every inverse against the exact hypergradient of a task."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Annotated, Any

import torch
import typer

import nhgd
from nhgd import task as tasks
from nhgd._check import EXACT_BELOW
from nhgd._progress import bar
from nhgd.cli._changes import for_inverses, for_task, parse
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
from nhgd.inverse import INVERSES, resolve


def check(
    task: Task,
    inverses: Annotated[
        str | None,
        typer.Option(
            help="Names with commas between, such as kfac,cg-40; default: all, exact on small problems alone.",
            show_default=False,
        ),
    ] = None,
    seed: Seed = 0,
    device: Device = "auto",
    data: DataFolder = None,
    preset: Preset = "default",
    changes: Changes = None,
    as_json: Json = False,
) -> None:
    """Error, time and memory of inverses at the solved inner problem of a task. --set also takes cg.steps=100.

    Inverses that learn see ten batches, or one pass where there are fewer; products run over all inner data. Numbers are
    float64 unless --set dtype=float32 says otherwise.
    """
    names = list(INVERSES) if inverses is None else [name.strip() for name in inverses.split(",") if name.strip()]
    if not names:
        raise InputError("--inverses names none. Give some, for example --inverses kfac,cg,identity, or omit it.")
    asked = parse(changes)
    named = tasks.resolve(task, preset)
    if hasattr(named, "dtype"):
        asked = {"dtype": "float64"} | asked  # an exact reference needs the digits
    chosen, rest = for_task(named, asked)
    compared = for_inverses(chosen, {name: resolve(name) for name in names}, rest)
    where = device_called(device)
    keep_to_threads(chosen.threads, where)
    with bar("check") as tick:
        tick(0.0, "building the task")
        instance = chosen.build(checked_seed(seed), where, data)
        tick(0.5, "solving the inner problem")
        instance.solve_inner()
        tick(1.0, "")
    if inverses is None and instance.problem.theta.numel > EXACT_BELOW:
        compared.pop("exact")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        training_batches = list(islice(instance.inner_data, 10))
    report = nhgd.check(
        instance.problem,
        instance.full_inner,
        instance.full_outer,
        inverses=list(compared.values()),
        learn_from=training_batches,
        seed=seed,
    )
    rows = [row | {"inverse": name} for row, name in zip(report.rows, compared, strict=True)]
    answer = {"task": task, "preset": preset, "seed": seed} | report.as_dict() | {"rows": rows}
    if as_json:
        print_json(answer)
    else:
        _tell(answer, replace(report, rows=rows).warnings)


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
