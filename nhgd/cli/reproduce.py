"""`nhgd reproduce`: the paper's theorems and tables, measured again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nhgd._progress import bar
from nhgd.cli._options import DataFolder, Device, Json, Out, Seed, checked_seed, device_called
from nhgd.cli._output import console, print_json
from nhgd.reproduce import EXPERIMENTS, Request
from nhgd.reproduce import reproduce as run
from nhgd.reproduce.command import summary


def reproduce(
    experiment: Annotated[str, typer.Argument(metavar="EXPERIMENT", help=f"{', '.join(EXPERIMENTS)}.")],
    quick: Annotated[bool, typer.Option("--quick", help="A small part, in under three minutes on two cores.")] = False,
    data: DataFolder = None,
    out: Out = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="After how many seconds no further run begins.", show_default=False),
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="A part of a table: printed, fair or own.", show_default=False)
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(help="Of each run but those with the paper's settings, such as 30s.", show_default=False),
    ] = None,
    search: Annotated[
        str | None,
        typer.Option(help="Of each run of the grid of step sizes, if not --budget.", show_default=False),
    ] = None,
    own: Annotated[
        str | None,
        typer.Option(help="Of each run of the library's own form, if not --budget.", show_default=False),
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Seeds of each final run.", show_default=False)] = None,
    steps: Annotated[
        int | None, typer.Option(help="Outer steps with the paper's settings.", show_default=False)
    ] = None,
    longest: Annotated[
        str | None,
        typer.Option(help="After which a run with the paper's settings ends, such as 60s.", show_default=False),
    ] = None,
    jobs: Annotated[int, typer.Option(help="Runs at the same time, each in a process of its own.")] = 1,
    tuned: Annotated[
        Path | None,
        typer.Option(help="The JSON of an earlier result, whose step sizes are taken.", show_default=False),
    ] = None,
    again: Annotated[
        str | None, typer.Option(help="Methods of it that are searched for again, by commas.", show_default=False)
    ] = None,
    seed: Seed = 0,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """The paper's theorems and tables, measured again. --out keeps the results, and goes on with what is there.

    Where torch and NumPy are all there is, `python -m nhgd.reproduce EXPERIMENT` does the same.
    """
    request = Request(
        experiment, quick, data, out, seconds, str(device_called(device)), checked_seed(seed), only, budget,
        search, own, seeds, steps, longest, jobs, tuned=tuned, again=again,
    )  # fmt: skip
    with bar("reproduce", lines=not as_json) as tick:
        found = run(request, lambda words: tick(None, words))
    if as_json:
        print_json(found)
    else:
        console().print(summary(found))
