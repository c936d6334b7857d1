"""`nhgd bench --execution`: ways to execute one method on one task, side by side."""

from __future__ import annotations

import io
import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, TypeAlias

import torch

from nhgd._experiment import Built, Experiment
from nhgd._experiment.changes import for_execution, parse
from nhgd._memory import synchronise
from nhgd._path import check_folder
from nhgd._plan import readable
from nhgd._progress import bar
from nhgd._provenance import provenance
from nhgd._results import folder, jsonable
from nhgd._solver import Solver
from nhgd.cli._launch import launch, tie_to_launcher
from nhgd.cli._options import checked_seed, device_called, device_of_rank, keep_to_threads, note_crowding
from nhgd.cli._output import console, number, print_json, table
from nhgd.cli._started import LAUNCHER, started_by_someone
from nhgd.comparison.store import ASKED
from nhgd.errors import InputError
from nhgd.execution import EXECUTIONS, AbstractExecutor, Distributed, resolve
from nhgd.plot import executions
from nhgd.report import report as page

Trial: TypeAlias = dict[str, Any]  # what `measured` gives: one run of one execution
REFERENCE = "inline"


METHOD, STEPS, WARMUP, ROUNDS, SEED = "nhgd", 20, 3, 3, 0


def compare(
    task: str,
    execution: str,
    method: str,
    steps: int,
    warmup: int,
    rounds: int,
    seed: int,
    device: str,
    data: Path | None,
    out: Path | None,
    preset: str,
    changes: Sequence[str] | None,
    as_json: bool,
    given: Sequence[str],
) -> None:
    """Time an outer step of a method under several executions, and compare what they find with the inline run.

    Every run starts afresh with the same seed. The executions alternate, so that noise affects all equally. --out
    writes bench.json, with every single time, and bench.png.
    """
    for option, value, least in (("steps", steps, 1), ("warmup", warmup, 0), ("rounds", rounds, 1)):
        if value < least:
            raise InputError(f"--{option} must be a whole number of at least {least}, got {value}.")
    if out is not None:
        check_folder("--out", out)
        if (out / ASKED).exists():
            raise InputError(f"{out} holds a comparison of methods, which would be replaced. Choose another folder.")
    names = _names(execution)
    experiment, how = Experiment.chosen(task, preset, method, parse(changes), lambda rest: _settings(names, rest))
    where = device_called(device)
    if started_by_someone():
        where = device_of_rank(where)
    keep_to_threads(experiment.task.threads, where)
    case = Case(experiment, how, where, checked_seed(seed), data)
    if started_by_someone():
        _take_part(case, warmup, steps)
        return
    if REFERENCE not in names:
        names = [REFERENCE, *names]
        case.how[REFERENCE] = {}
    if not as_json:
        note_crowding(names, case.device)
    settings = case.rehearsed()
    words = _words(task, method, steps, warmup, seed, device, data, preset, changes or ())
    with folder(out) as place:
        trials = _in_turns(case, names, rounds, warmup, steps, words, as_json)
        answer = {
            "task": task,
            "method": method,
            "preset": preset,
            "seed": seed,
            "device": str(case.device),
            "steps": steps,
            "warmup": warmup,
            "rounds": rounds,
            "rows": _rows(trials),
            "environment": _environment(case.device),
            "provenance": provenance(given, case.device),
            "settings": settings,
            "out": None if out is None else str(out),
        }
        if place is not None:
            kept = answer | {"trials": [_kept(name, trial) for name, some in trials.items() for trial in some]}
            place.write("bench.png", lambda path: executions.draw(path, answer))
            place.write_texts({"bench.json": json.dumps(jsonable(kept), indent=2, allow_nan=False) + "\n"})
            page(place.path)
    if as_json:
        print_json(answer)
    else:
        _tell(answer)


@dataclass(frozen=True)
class Case:
    """One method on one task, with the settings of each execution by name."""

    experiment: Experiment
    how: dict[str, dict[str, Any]]
    device: torch.device
    seed: int
    data: Path | None

    def executor(self, name: str) -> AbstractExecutor:
        """A new executor."""
        return resolve(name, **self.how[name])

    def build(self) -> Built:
        """The experiment with its data, at its start."""
        return self.experiment.build(self.seed, self.device, self.data)

    def begin(self, executor: AbstractExecutor) -> Solver:
        """A solver at the very beginning. Metrics are not computed, because they are not part of a method."""
        solver = self.build().start(self.seed, executor)
        solver.metrics = None
        return solver

    def rehearsed(self) -> dict[str, Any]:
        """Every executor of this process started once, so that one that cannot run here is refused before anything
        runs.

        All that was chosen, for the reader of bench.json.
        """
        built = self.build()
        inverse, problem = built.algorithm.online, built.instance.problem
        if inverse is None or inverse.learner is None:
            raise InputError(
                f"The method {self.experiment.method} learns nothing from the inner steps, so every execution is the"
                " same. Use --method nhgd."
            )
        for name in self.how:
            executor = self.executor(name)
            if isinstance(executor, Distributed):
                continue
            try:
                executor.start(inverse, problem.theta, problem.v)
            finally:
                executor.close()
        return built.described() | {"executions": self.how}


def _in_turns(
    case: Case, names: Sequence[str], rounds: int, warmup: int, steps: int, words: Sequence[str], as_json: bool
) -> dict[str, list[Trial]]:
    """Run every execution `rounds` times, in turns."""
    trials: dict[str, list[Trial]] = {name: [] for name in names}
    with bar("bench") as tick:
        for turn in range(rounds):
            first = turn % len(names)  # so that none is always first, when the machine may be cooler
            for nth, name in enumerate((*names[first:], *names[:first])):
                tick((turn + nth / len(names)) / rounds, f"round {turn + 1} of {rounds}: {name}")
                made = case.executor(name)
                if isinstance(made, Distributed):
                    trials[name].append(_launched(words, made, as_json))
                else:
                    trials[name].append(measured(case.begin(made), warmup, steps))
    return trials


def _names(text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise InputError("--execution is empty. Give names, for example --execution inline,thread.")
    for name in names:
        EXECUTIONS[name.partition(":")[0]]
    return names


def _settings(names: Sequence[str], changes: Mapping[str, str]) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The settings of each execution that has them, and the changes that are no execution's."""
    found: dict[str, dict[str, Any]] = {}
    taken: set[str] = set()
    kinds: dict[str, Any] = {name: EXECUTIONS[name.partition(":")[0]] for name in names}
    some_lag = any(kind.background for kind in kinds.values())
    for name, kind in kinds.items():
        known = set(signature(kind).parameters) - {"device", "team"}
        own = {key: text for key, text in changes.items() if key.removeprefix("execution.") in known}
        if some_lag and not kind.background:
            own = {}  # a lag is for those that can have one
        found[name] = for_execution(name, own)[0]
        taken |= own.keys()
    return found, {key: text for key, text in changes.items() if key not in taken}


def measured(solver: Solver, warmup: int, steps: int) -> Trial:
    """Take outer steps: their milliseconds, how they were divided, and the end point. Closes the solver."""
    device = solver.problem.theta.device
    executor = solver.executor
    found: Trial = {key: [] for key in ("milliseconds", "inner", "waited", "curvature")}
    try:
        if executor.group.serves:
            solver.run(steps=1)  # until those of the inner loop have finished
            return found
        row = {}
        for _ in range(warmup):
            row = solver.step()
        synchronise(device)
        begun = before = executor.measured()
        for _ in range(steps):
            started = time.perf_counter()
            row = solver.step()
            synchronise(device)
            taken = time.perf_counter() - started
            now = executor.measured()
            work, before = now.since(before), now
            found["milliseconds"].append(1e3 * taken)
            found["inner"].append(1e3 * max(0.0, taken - work.waited_seconds))
            found["waited"].append(1e3 * work.waited_seconds)
            found["curvature"].append(1e3 * work.curvature_seconds)
        whole = before.since(begun)
        return found | {
            "overlap": whole.overlap,
            "largest_lag": max(row["largest_lag"] for row in solver.history[warmup:]),
            "bytes_sent": whole.bytes_sent / steps,
            "processes": whole.processes,
            "outer_loss": row["outer_loss"],
            "v": solver.problem.v.flat().double().cpu().tolist(),
        }
    finally:
        solver.close()


def _take_part(case: Case, warmup: int, steps: int) -> None:
    """In a process that `bench` started: measure its one execution and report to the parent."""
    if LAUNCHER not in os.environ:
        raise InputError("bench starts the processes of a distributed execution itself. Run it without torchrun.")
    tie_to_launcher()
    (name,) = case.how
    executor = case.executor(name)
    assert isinstance(executor, Distributed)
    trial = measured(case.begin(executor), warmup, steps)
    if executor.group.leads:
        print(json.dumps(trial))


def _launched(words: Sequence[str], executor: Distributed, as_json: bool) -> Trial:
    """The measurements of the first of several processes, which are started and ended here."""
    heard = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with redirect_stdout(heard):
        launch(words, executor.roles, 0, executor.timeout)
    heard.seek(0)
    said = heard.read()
    found: Trial = json.loads(said)
    return found


def _words(
    task: str,
    method: str,
    steps: int,
    warmup: int,
    seed: int,
    device: str,
    data: Path | None,
    preset: str,
    changes: Sequence[str],
) -> list[str]:
    """The command of a process that takes part in a distributed execution."""
    given = {"execution": "distributed", "method": method, "steps": steps, "warmup": warmup, "seed": seed}
    given |= {"device": device, "preset": preset} | ({} if data is None else {"data": str(data)})
    words = ["bench", task, *(word for key, value in given.items() for word in (f"--{key}", str(value)))]
    return [*words, *(word for pair in changes for word in ("--set", pair)), "--json"]


def _rows(trials: Mapping[str, Sequence[Trial]]) -> list[dict[str, Any]]:
    """One row for each execution, over all its rounds."""
    true = torch.tensor(trials[REFERENCE][0]["v"], dtype=torch.float64)
    inline = statistics.median(_all(trials[REFERENCE], "milliseconds"))
    rows = []
    for name, some in trials.items():
        times = _all(some, "milliseconds")
        low, middle, high = _quartiles(times)
        differences = [torch.tensor(trial["v"], dtype=torch.float64) - true for trial in some]
        difference = max(float(d.abs().max()) if d.numel() else 0.0 for d in differences)
        rows.append(
            {
                "execution": name,
                "milliseconds": middle,
                "quartiles": [low, high],
                "speedup": inline / middle,
                "inner_milliseconds": statistics.median(_all(some, "inner")),
                "waited_milliseconds": statistics.median(_all(some, "waited")),
                "curvature_milliseconds": statistics.median(_all(some, "curvature")),
                "overlap": statistics.median(trial["overlap"] for trial in some),
                "largest_lag": max(trial["largest_lag"] for trial in some),
                "bytes_sent": statistics.median(trial["bytes_sent"] for trial in some),
                "processes": some[-1]["processes"],
                "outer_loss": some[-1]["outer_loss"],
                "difference": difference,
                "equal": difference == 0.0,
            }
        )
    return rows


def _all(trials: Sequence[Trial], key: str) -> list[float]:
    return [value for trial in trials for value in trial[key]]


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The quarter, the half and the three quarters of sorted values.

    >>> _quartiles([4.0, 1.0, 3.0, 2.0, 5.0])
    (2.0, 3.0, 4.0)
    """
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def _kept(name: str, trial: Trial) -> Trial:
    return {"execution": name} | {key: value for key, value in trial.items() if key != "v"}


def _environment(device: torch.device) -> dict[str, Any]:
    found = {"torch": torch.__version__, "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    return found | ({"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {})


def _tell(answer: dict[str, Any]) -> None:
    out = console()
    title = (
        f"{answer['task']} by {answer['method']}, seed {answer['seed']}, on {answer['device']}: one outer step, median of"
        f" {answer['rounds']} x {answer['steps']}"
    )
    columns = ("execution", "ms", "quartiles", "speedup", "inner ms", "waiting ms", "curvature ms", "overlap", "lag")
    listed = table(title, *columns, "sent", "outer loss", "v differs by")
    for row in answer["rows"]:
        low, high = row["quartiles"]
        parts = [row[f"{part}_milliseconds"] for part in ("inner", "waited", "curvature")]
        listed.add_row(
            row["execution"],
            number(row["milliseconds"], ".3g"),
            f"{low:.3g}-{high:.3g}",
            number(row["speedup"], ".2f"),
            *(number(part, ".3g") for part in parts),
            f"{100 * row['overlap']:.0f} %",
            str(row["largest_lag"]),
            readable(round(row["bytes_sent"])),
            number(row["outer_loss"]),
            "0" if row["equal"] else number(row["difference"], ".1e"),
        )
    out.print(listed)
    if answer["out"] is not None:
        out.print(f"\nWritten: bench.json, bench.png and report.html in {answer['out']}")
