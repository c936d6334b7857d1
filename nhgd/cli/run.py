"""`nhgd run`: one method on one task."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from nhgd import task as tasks
from nhgd._duration import seconds
from nhgd._path import check_name
from nhgd._solution import Solution
from nhgd.algorithm import AbstractAlgorithm
from nhgd.checkpoint import claimed, exists, last_kept
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
from nhgd.cli._output import Folder, check_folder, console, folder, jsonable, number, print_json, table
from nhgd.cli._settings import check_early, for_execution, for_run, for_task, parse
from nhgd.cli._started import LAUNCHER, started_by_someone
from nhgd.errors import InputError
from nhgd.execution import Distributed
from nhgd.execution import resolve as resolve_execution
from nhgd.reproduce.settings import EXPERIMENTS, TABLE, paper
from nhgd.task import Instance
from nhgd.task._setting import convert

Pictures: TypeAlias = Callable[[Path], list[Path]]
FILES = ("result.json", "history.jsonl", "curve.png")


def run(
    context: typer.Context,
    task: Task,
    method: Annotated[
        str | None, typer.Option(help="`nhgd list` names them; default: what suits the task.", show_default=False)
    ] = None,
    seed: Seed = 0,
    steps: Annotated[int | None, typer.Option(help="Outer steps; default: the task's own.", show_default=False)] = None,
    budget: Annotated[str | None, typer.Option(help="Time to solve in: 60s, 5m, 1h.", show_default=False)] = None,
    device: Device = "auto",
    execution: Annotated[str, typer.Option(help="Where curvature is kept up to date.")] = "inline",
    data: DataFolder = None,
    out: Out = None,
    preset: Preset = "default",
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="A folder to keep the run in, so that it can be resumed.", show_default=False),
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
            "--resume", help="Go on from --checkpoint, or from OUT/checkpoint, if there is one; else begin anew."
        ),
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", help="Let --checkpoint hold an earlier run, which is replaced when this one first writes."
        ),
    ] = False,
    max_restarts: Annotated[
        int, typer.Option(help="How often a distributed run that lost a process is started again, from --resume.")
    ] = 0,
    changes: Changes = None,
    as_json: Json = False,
) -> None:
    """Solve a task by a method. --out writes result.json, history.jsonl, curve.png and the task's own pictures.

    Ctrl-C, SIGTERM and SIGHUP end it after the current outer step; what was reached is written, with "partial": true.
    """
    if steps is not None and steps < 1:
        raise InputError(f"--steps must be a whole number of at least 1, got {steps}.")
    if budget is not None:
        seconds(budget)
    if out is not None:
        check_folder(out, *FILES)
    kept = _kept(checkpoint, checkpoint_every, resume, overwrite, out)
    where = device_called(device)
    _check_restarts(max_restarts, execution, resume)
    chosen, rest = for_task(tasks.resolve(task, preset), parse(changes))
    how, rest = for_execution(execution, rest)
    check_early(chosen, method, rest)
    printed_settings(task, preset, method, parse(changes))
    executor = resolve_execution(execution, **how)
    launching = isinstance(executor, Distributed) and not started_by_someone()
    leading = not started_by_someone() or os.environ["RANK"] == "0"
    with ExitStack() as stack:
        if kept and leading:
            # Before anything that takes long. The solver, in this process or another, takes it over.
            lock = claimed(kept["checkpoint"], overwrite, resume)
            stack.callback(lock.release)
            if launching:
                stack.close()
        if launching:
            given: Any = context.find_root().command
            assert isinstance(executor, Distributed)
            raise typer.Exit(_launched(given.given, executor, max_restarts, kept.get("checkpoint")))
        place = stack.enter_context(folder(out if leading else None))
        if isinstance(executor, Distributed):
            where = device_of_rank(where)
            tie_to_launcher()
            executor.arrive()  # before anything that takes long, so that the others know that we are coming
        try:
            keep_to_threads(chosen.threads, where)
            began = time.perf_counter()
            instance = chosen.build(checked_seed(seed), where, data)
            preparation = time.perf_counter() - began
            if method is None and not as_json and _cannot_be_run(task, preset):
                print(
                    "Note: the paper prints beta = 0 here, which cannot be run; the task's own method is.",
                    file=sys.stderr,
                )
            method, algorithm, printed = named_method(task, preset, method, instance, parse(changes))
            refuse_idle(parse(changes), instance.method_settings, algorithm)
            settings, algorithm = for_run(chosen, algorithm, rest)
            settings = {key: value for key, value in printed.items() if key not in parse(changes)} | settings
            going_on = resume and exists(kept["checkpoint"])
            if resume and not going_on:
                print(f"There is no checkpoint in {kept['checkpoint']} yet: the run begins anew.", file=sys.stderr)
            solver = instance.start(algorithm, seed, executor, resume=going_on, **settings, **kept)
            if not as_json:
                note_crowding([execution], where, solver.loop.threads)
            if going_on:
                print(f"Going on from {kept['checkpoint']}, outer step {solver.loop.clock.k}.", file=sys.stderr)
        except BaseException as error:
            executor.fail(error)  # nobody is to wait for us
            raise
        stack.callback(solver.close)
        if steps is None and budget is None:
            steps = instance.steps
        asked = stack.enter_context(signals.asking(solver.stop, patient=started_by_someone()))
        try:
            solution = solver.run(steps=steps, budget=budget)
            if not executor.leads:
                return
            answer = {
                "task": task,
                "method": method,
                "preset": preset,
                "seed": seed,
                "device": str(where),
                "execution": solution.stats["execution"],
                "threads": solution.stats["threads"],
                "steps": solution.stats["steps"],
                "seconds": solution.stats["seconds"],
                "preparation_seconds": preparation,
                "result": solution.result,
                "partial": solution.result == "stopped",
                "initial": {"outer_loss": solution.history[0]["outer_loss"]},
                "metrics": {name: solution.history[-1][name] for name in ("outer_loss", "inner_loss")},
                "oracle_calls": solution.stats["oracle_calls"],
                "stagnation": solution.stats["stagnation"],
                "settings": {
                    "task": {f.name: getattr(chosen, f.name) for f in fields(chosen)},
                    "solver": instance.settings_for(algorithm) | settings,
                    "method": solver.algorithm,
                },
                "out": None if out is None else str(out),
            }
            if answer["partial"] and place is not None:
                # At once: the metrics of some tasks take longer than one may be given.
                _write_numbers(place, answer, solution)
            answer["metrics"] = instance.summary(solution)
            written = [] if place is None else _write(place, answer, solution, instance.pictures)
            if as_json:
                print_json(answer)
            else:
                _tell(answer, written)
        except KeyboardInterrupt as stop:
            # It says what lies on disk then.
            stop.args = ("" if solver.checkpoint is None else solver.checkpoint.last().strip(),)
            raise
    if answer["partial"] and asked.number is not None:
        known = "" if solver.checkpoint is None else solver.checkpoint.last()
        print(
            f"Error: Stopped by {signals.name_of(asked.number)} after outer step {answer['steps']}.{known}"
            f"{f' What was reached is in {out}.' if written else ''}",
            file=sys.stderr,
        )
        raise typer.Exit(128 + asked.number)


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
        raise InputError("Under torchrun it is torchrun that starts again: torchrun --max-restarts N.")
    if restarts and not resume:
        raise InputError("--max-restarts needs --resume, so that what is started again goes on from its checkpoint.")


def _kept(
    checkpoint: Path | None, every: str | None, resume: bool, overwrite: bool, out: Path | None
) -> dict[str, Any]:
    """The settings of the solver that say where and how often the run is kept; none where it is not."""
    if resume and overwrite:
        raise InputError("--resume goes on with a run and --overwrite begins one in its place. Leave one of them away.")
    if checkpoint is None and resume:
        if out is None:
            raise InputError("--resume needs to know where the run was kept. Add --checkpoint DIR, or --out DIR.")
        checkpoint = out / "checkpoint"
    if checkpoint is not None:
        check_name("--checkpoint", checkpoint)
    if checkpoint is None:
        if every is not None:
            raise InputError("--checkpoint-every needs a place to write to. Add --checkpoint DIR.")
        if overwrite:
            raise InputError("--overwrite is about an earlier run in --checkpoint DIR. Add that, or leave it away.")
        return {}
    return (
        {"checkpoint": checkpoint}
        | ({} if every is None else {"checkpoint_every": every})
        | ({"overwrite": True} if overwrite else {})
    )


def named_method(
    task: str, preset: str, method: str | None, instance: Instance, changes: Mapping[str, str]
) -> tuple[str, AbstractAlgorithm, dict[str, Any]]:
    """The method's name, itself, and the solver's settings that the paper prints for it where its experiment is run."""
    printed = printed_settings(task, preset, method, changes)
    if printed is not None:
        return printed
    return method or instance.method, instance.algorithm(method), {}


def printed_settings(
    task: str, preset: str, method: str | None, changes: Mapping[str, str]
) -> tuple[str, AbstractAlgorithm, dict[str, Any]] | None:
    """The same where the paper has this method in this experiment, else None. It needs no data."""
    experiment = EXPERIMENTS.get((task, preset))
    if experiment is None or (method is None and _cannot_be_run(task, preset)):
        return None
    name = method or "nhgd-paper"
    if name not in TABLE[experiment] and name != "stocbio":
        return None
    # What the paper prints may be impossible; then the change is what makes it possible.
    given = [text for key, text in changes.items() if key in ("beta", "inverse.beta")] if name == "nhgd-paper" else []
    return name, *paper(experiment, name, convert("beta", given[-1], float) if given else None)


def _cannot_be_run(task: str, preset: str) -> bool:
    """Whether the paper's own method cannot be run as printed for this experiment, with beta = 0; then the task's is."""
    experiment = EXPERIMENTS.get((task, preset))
    return experiment is not None and not TABLE[experiment]["nhgd-paper"].beta


def refuse_idle(changes: dict[str, str], suited: Mapping[str, Any], algorithm: Any) -> None:
    """A setting that the task hands on to the method is an error when this method has none of that name."""
    for key in suited:
        if key in changes and not hasattr(algorithm, key):
            raise InputError(f"The method {algorithm.name} has no setting {key}, so --set {key} would be ignored.")


def _write(place: Folder, answer: dict[str, Any], solution: Solution, pictures: Pictures) -> list[str]:
    """The names of the files."""
    _write_numbers(place, answer, solution)
    # The pictures come last: none of them is worth losing the numbers.
    place.write("curve.png", solution.plot)
    drawn = place.draw(pictures)
    return [*FILES, *(path.name for path in drawn)]


def _write_numbers(place: Folder, answer: dict[str, Any], solution: Solution) -> None:
    lines = [json.dumps(jsonable(row), allow_nan=False) + "\n" for row in solution.history]
    result = json.dumps(jsonable(answer), indent=2, allow_nan=False) + "\n"
    place.write_texts({"history.jsonl": "".join(lines), "result.json": result})


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
