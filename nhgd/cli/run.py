"""`nhgd run`: one method on one task."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from nhgd._duration import seconds
from nhgd._experiment import Built, Experiment
from nhgd._experiment.changes import for_execution, parse
from nhgd._path import check_folder, check_name
from nhgd._progress import bar
from nhgd._provenance import provenance
from nhgd._results import check_files, folder
from nhgd._solver import Solver
from nhgd.checkpoint import claimed, exists, last_kept
from nhgd.cli import _completion
from nhgd.cli import _signals as signals
from nhgd.cli._launch import launch, tie_to_launcher
from nhgd.cli._options import (
    Changes,
    DataFolder,
    Device,
    Json,
    Out,
    Preset,
    Seed,
    Task,
    checked_seed,
    device_called,
    device_of_rank,
    keep_to_threads,
    note_crowding,
)
from nhgd.cli._output import console, number, print_json, table
from nhgd.cli._parameters import Parameters
from nhgd.cli._run_folder import FILES, RunFolder, numbers
from nhgd.cli._started import LAUNCHER, started_by_someone, will_be_restarted
from nhgd.errors import InputError
from nhgd.execution import AbstractExecutor, Distributed
from nhgd.execution import resolve as resolve_execution
from nhgd.loggers import TensorBoard
from nhgd.paper import prints_no_nhgd


def run(
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
    seed: Seed = 0,
    steps: Annotated[int | None, typer.Option(help="Outer steps; default: the task's own.", show_default=False)] = None,
    budget: Annotated[str | None, typer.Option(help="Time limit: 60s, 5m, 1h.", show_default=False)] = None,
    device: Device = "auto",
    execution: Annotated[
        str, typer.Option(help="Where curvature is updated.", autocompletion=_completion.executions)
    ] = "inline",
    data: DataFolder = None,
    out: Out = None,
    preset: Preset = "default",
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Folder for checkpoints, so that the run can be resumed.", show_default=False),
    ] = None,
    checkpoint_every: Annotated[
        str | None,
        typer.Option(
            metavar="N", help="Outer steps between two checkpoints, or a time such as 60s.", show_default="30s"
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue from --checkpoint, or from OUT/checkpoint, if there is one; else start a new run.",
        ),
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace an earlier run in --checkpoint once this one first writes there."),
    ] = False,
    max_restarts: Annotated[
        int, typer.Option(help="How often a distributed run is restarted with --resume after losing a process.")
    ] = 0,
    params: Annotated[
        Path | None,
        typer.Option(help="Settings from a file, such as best.json of `nhgd sweep`.", show_default=False),
    ] = None,
    changes: Changes = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write the history to OUT/tensorboard, for TensorBoard.")
    ] = False,
    progress: Annotated[
        bool | None,
        typer.Option(
            "--progress/--no-progress",
            help="A bar on a terminal, lines elsewhere; with --json on a terminal only, unless --progress is given.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Solve a task by a method. --out keeps the result, the history, the command and pictures.

    Ctrl-C, SIGTERM and SIGHUP end it after the current outer step; the results so far are written, with "partial":
    true.
    """
    _check_stop_rules(steps, budget)
    if out is not None:
        check_folder("--out", out)
        check_files(out, *FILES)
    elif tensorboard:
        raise InputError("--tensorboard writes into the folder of the run. Add --out DIR.")
    kept = _kept(checkpoint, checkpoint_every, resume, overwrite, out)
    where = device_called(device)
    _check_restarts(max_restarts, execution, resume)
    found = Parameters.read(params, task, preset)
    experiment, how = Experiment.chosen(
        task,
        preset,
        found.method_beside(method),
        found.values | parse(changes),
        lambda rest: for_execution(execution, rest),
    )
    executor = resolve_execution(execution, **how)
    given: Any = context.find_root().command
    if isinstance(executor, Distributed) and not started_by_someone():
        if kept:  # refused here, before processes are started; the solver of one of them takes it over
            claimed(kept["checkpoint"], overwrite, resume).release()
        raise typer.Exit(_launched(given.given, executor, max_restarts, kept.get("checkpoint")))
    leading = not started_by_someone() or os.environ["RANK"] == "0"
    with ExitStack() as stack:
        if kept and leading:  # before anything that takes long; the solver takes it over
            stack.callback(claimed(kept["checkpoint"], overwrite, resume).release)
        place = stack.enter_context(folder(out if leading else None))
        board = stack.enter_context(TensorBoard(place.path / "tensorboard")) if place and tensorboard else None
        display = ExitStack()  # ends before the answer is printed
        stack.enter_context(display)
        shown = leading and progress is not False
        lines = shown and (progress is True or not as_json)
        tick = display.enter_context(bar(task, None if shown else False, lines, shared=True))
        tick(None, "preparing the data")
        if isinstance(executor, Distributed):
            where = device_of_rank(where)
            tie_to_launcher()
        try:
            began = time.perf_counter()
            built = _built(experiment, checked_seed(seed), where, data)
            preparation = time.perf_counter() - began
            tick(None, f"starting {built.method}")
            solver = _started(built, seed, executor, resume, kept)
        except BaseException as error:
            executor.group.fail(error)  # so that no other process waits for this one
            raise
        stack.callback(solver.close)
        if not as_json:
            note_crowding([execution], where, solver.loop.threads)
        about = {"task": task, "method": built.method, "preset": preset, "seed": seed, "device": str(where)}
        if steps is None and budget is None:
            steps = built.instance.steps
        settings = built.described() | {"method": solver.algorithm}
        record = None
        if place is not None:
            known = about | {"execution": execution, "steps": steps, "budget": budget, "settings": settings}
            record = RunFolder(place, known | provenance(given.given, where), list(solver.history))
            stack.callback(record.close)
            solver.on_step.append(record.note)
        if board is not None:
            solver.on_step.append(board)
        asked = stack.enter_context(signals.asking(solver.stop, patient=started_by_someone()))
        try:
            solution = solver.run(steps=steps, budget=budget)
            if not executor.group.leads:
                return
            answer = {
                **about,
                **numbers(solution),
                "preparation_seconds": preparation,
                "settings": settings,
                "out": None if out is None else str(out),
            }
            tick(1.0, "measuring the result")
            if record is None:
                answer["metrics"] = built.instance.summary(solution)
                written = []
            else:
                written = record.finish(answer, solution, built.instance)
            display.close()
            if as_json and answer["partial"] and will_be_restarted():
                pass  # the attempt that follows answers
            elif as_json:
                print_json(answer)
            else:
                _tell(answer, written)
        except KeyboardInterrupt as stop:
            stop.args = (_last_checkpoint(solver).strip(),)  # it reports what is on disk then
            raise
    if answer["partial"] and asked.number is not None:
        print(
            f"Error: Stopped by {signals.name_of(asked.number)} after outer step"
            f" {answer['steps']}.{_last_checkpoint(solver)}{f' The results so far are in {out}.' if written else ''}",
            file=sys.stderr,
        )
        raise typer.Exit(128 + asked.number)


def _last_checkpoint(solver: Solver) -> str:
    """A sentence about it, with a space before it; nothing if there is none."""
    return "" if solver.checkpoint is None else solver.checkpoint.last()


def _check_stop_rules(steps: int | None, budget: str | None) -> None:
    if steps is not None and steps < 1:
        raise InputError(f"--steps must be a whole number of at least 1, got {steps}.")
    if budget is not None:
        seconds(budget)


def _built(experiment: Experiment, seed: int, device: torch.device, data: Path | None) -> Built:
    """The experiment with its data, on as many threads as suit it."""
    keep_to_threads(experiment.task.threads, device)
    built = experiment.build(seed, device, data)
    if experiment.method is None and prints_no_nhgd(experiment.name, experiment.preset):
        print(
            "Note: the paper prints beta = 0 here, which cannot be run; the task's own method is used.", file=sys.stderr
        )
    return built


def _started(built: Built, seed: int, executor: AbstractExecutor, resume: bool, kept: Mapping[str, Any]) -> Solver:
    """The solver, resumed from its checkpoint if there is one to resume."""
    resuming = resume and exists(kept["checkpoint"])
    if resume and not resuming:
        print(f"There is no checkpoint in {kept['checkpoint']} yet: a new run begins.", file=sys.stderr)
    solver = built.start(seed, executor, resuming, **kept)
    if resuming:
        print(f"Resuming from {kept['checkpoint']}, outer step {solver.loop.clock.k}.", file=sys.stderr)
    return solver


def _launched(arguments: list[str], executor: Distributed, restarts: int, checkpoint: Path | None) -> int:
    """The exit code of a run in several processes."""

    def known() -> str:
        return "" if checkpoint is None else last_kept(checkpoint)

    try:
        return launch(arguments, executor.roles, restarts, executor.timeout, known)
    except KeyboardInterrupt as stop:
        stop.args = (known().strip(),)
        raise


def _check_restarts(restarts: int, execution: str, resume: bool) -> None:
    if restarts < 0:
        raise InputError(f"--max-restarts must be a whole number of at least 0, got {restarts}.")
    if restarts and execution != "distributed":
        raise InputError(f"--max-restarts is for --execution distributed; {execution} runs in one process.")
    if restarts and started_by_someone() and LAUNCHER not in os.environ:
        raise InputError("Under torchrun, restarts are torchrun's: torchrun --max-restarts N.")
    if restarts and not resume:
        raise InputError("--max-restarts needs --resume, so that the restarted run continues from its checkpoint.")


def _kept(
    checkpoint: Path | None, every: str | None, resume: bool, overwrite: bool, out: Path | None
) -> dict[str, Any]:
    """The checkpoint settings of the solver; none without a folder."""
    if resume and overwrite:
        raise InputError("--resume continues a run and --overwrite replaces it. Omit one of them.")
    if checkpoint is None and resume:
        if out is None:
            raise InputError("--resume needs the folder of the run. Add --checkpoint DIR, or --out DIR.")
        checkpoint = out / "checkpoint"
    if checkpoint is not None:
        check_name("--checkpoint", checkpoint)
    if checkpoint is None:
        if every is not None:
            raise InputError("--checkpoint-every needs a folder. Add --checkpoint DIR.")
        if overwrite:
            raise InputError("--overwrite needs --checkpoint DIR. Add it, or omit --overwrite.")
        return {}
    return (
        {"checkpoint": checkpoint}
        | ({} if every is None else {"checkpoint_every": every})
        | ({"overwrite": True} if overwrite else {})
    )


def _tell(answer: dict[str, Any], written: list[str]) -> None:
    calls, execution = answer["oracle_calls"], answer["execution"]
    out = console()
    listed = table(f"{answer['task']} by {answer['method']}, seed {answer['seed']}, on {answer['device']}", "", "value")
    listed.add_row("outer steps", f"{answer['steps']} (stopped by {answer['result']})")
    listed.add_row("seconds", number(answer["seconds"], ".3g"))
    listed.add_row("seconds before the first step", number(answer["preparation_seconds"], ".3g"))
    listed.add_row("outer loss, first", number(answer["initial"]["outer_loss"]))
    for name, value in answer["metrics"].items():
        listed.add_row(name.replace("_", " "), number(value))
    listed.add_row("gradients / Hessian / cross products", f"{calls['gradients']} / {calls['hvps']} / {calls['cross']}")
    listed.add_row("execution", f"{execution['name']}, {execution['processes']} process(es)")
    out.print(listed)
    if answer["out"] is not None:
        out.print(f"\nWritten: {', '.join(written)} in {answer['out']}")
