"""`nhgd bench`: several methods with equal budgets, or one method under several executions."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from nhgd._provenance import provenance
from nhgd.cli import _completion, _executions
from nhgd.cli._options import Changes, DataFolder, Device, Json, Out, Preset, Task, checked_seed, device_called
from nhgd.cli._output import lines_unless, print_json
from nhgd.comparison import METHODS, Comparison, Table, grid, seeds
from nhgd.errors import InputError
from nhgd.report import report

SEEDS, BUDGET, WARMUP = "3", "10s", 2


def bench(
    context: typer.Context,
    task: Task,
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Comma-separated names, see `nhgd list`.",
            show_default=",".join(METHODS),
            autocompletion=_completion.method_list,
        ),
    ] = None,
    chosen_seeds: Annotated[
        str | None,
        typer.Option("--seeds", metavar="SEEDS", help="A count 5, a range 0-4, a list 3,7.", show_default=SEEDS),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(help="Of each run: a time 60s, or gradient-equivalents 500g.", show_default=BUDGET),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="METRIC=VALUE", help="What counts as reached.", show_default="90 % of the best"),
    ] = None,
    patience: Annotated[
        int | None,
        typer.Option(help="End a run after so many evaluations without a lower selection loss.", show_default=False),
    ] = None,
    widen: Annotated[
        int | None, typer.Option(help="How often a grid is continued where a best value lies at its edge.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Processes, by joblib; -1: one for each core.", show_default="1")
    ] = None,
    warmup: Annotated[
        int | None, typer.Option(help="Outer steps before those that are timed.", show_default=f"{WARMUP}")
    ] = None,
    execution: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Compare executions of one method instead, such as thread,device:cpu; inline is always included.",
            show_default=False,
        ),
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="With --execution: the method.", show_default=_executions.METHOD)
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="With --execution: outer steps in a round.", show_default=str(_executions.STEPS))
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="With --execution: rounds.", show_default=str(_executions.ROUNDS))
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="With --execution: the seed.", show_default=str(_executions.SEED))
    ] = None,
    device: Device = "auto",
    data: DataFolder = None,
    out: Out = None,
    preset: Preset = "default",
    changes: Changes = None,
    as_json: Json = False,
) -> None:
    """Several methods, seeds and settings with the same budget each: tables, figures and a page, report.html.

    --set outer_lr=0.1,0.3 is a grid for every method alike, from which each one's evaluation split chooses;
    --set soba:outer_lr=0.1 is for one method. The same command goes on with what is in --out.
    """
    for_methods = {
        "methods": methods, "seeds": chosen_seeds, "budget": budget, "target": target, "patience": patience,
        "widen": widen, "jobs": jobs,
    }  # fmt: skip
    for_executions = {"method": method, "steps": steps, "rounds": rounds, "seed": seed}
    given: Any = context.find_root().command
    if execution is not None:
        _refuse_given(for_methods, "compares methods; with --execution one method is compared with itself. Omit it.")
        _executions.compare(
            task, execution, _or(method, _executions.METHOD), _or(steps, _executions.STEPS),
            _or(warmup, _executions.WARMUP), _or(rounds, _executions.ROUNDS), _or(seed, _executions.SEED), device, data,
            out, preset, changes, as_json, given.given,
        )  # fmt: skip
        return
    remedies = {"method": "Use --methods.", "seed": "Use --seeds.", "steps": "Use --budget, such as 60s or 500g."}
    _refuse_given(for_executions, "is for the comparison of executions: --execution inline,thread.", remedies)
    where = device_called(device)
    asked = Comparison.of(
        task, _or(methods, ",".join(METHODS)), _seeds(_or(chosen_seeds, SEEDS)), _or(budget, BUDGET),
        grid.parsed(changes), preset, str(where), data, _or(jobs, 1), _or(warmup, WARMUP), patience, _or(widen, 0),
        provenance(given.given, where),
    )  # fmt: skip
    found = asked.table(out, _target(target), say=lines_unless(as_json))
    page = None if out is None else report(out)
    if as_json:
        print_json(found.to_dict() | {"out": None if out is None else str(out)})
    else:
        print(found.to_text())
        if page is not None:
            print(f"\nWritten: tables, figures and {page.name} in {out}. The page: {page}")
    if not found.complete:
        raise typer.Exit(_none_ended_well(found))


def _or(given: Any, default: Any) -> Any:
    return default if given is None else given


def _refuse_given(options: Mapping[str, Any], why: str, remedies: Mapping[str, str] | None = None) -> None:
    """An option that would be ignored is an error."""
    for name, value in options.items():
        if value is not None:
            more = (remedies or {}).get(name)
            raise InputError(f"--{name} {why}{f' {more}' if more else ''}")


def _seeds(text: str) -> list[int]:
    found = seeds.parsed(text)
    for seed in found:
        checked_seed(seed)
    return found


def _target(text: str | None) -> tuple[str, float] | None:
    if text is None:
        return None
    metric, sign, value = text.partition("=")
    try:
        if sign and metric.strip() and math.isfinite(float(value)):
            return metric.strip(), float(value)
    except ValueError:
        pass
    raise InputError(f"--target takes a metric and a value, such as test_accuracy=0.9; got {text!r}.")


def _none_ended_well(found: Table) -> int:
    for row in found.costs:
        if row["failed"] == row["runs"]:
            print(f"Error: No run of {row['method']} ended well. The first error: {row['error']}", file=sys.stderr)
    return 1
