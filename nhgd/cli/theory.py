"""`nhgd theory`: what the paper's theorems prescribe for a task, and what that would cost."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated, Any

import torch
import typer

from nhgd import task as tasks
from nhgd import theory as bounds
from nhgd._experiment.changes import for_task, parse
from nhgd._progress import bar
from nhgd._validation import positive
from nhgd.cli._options import Changes, DataFolder, Device, Json, Preset, Seed, Task, checked_seed, device_called
from nhgd.cli._output import console, number, print_json, table
from nhgd.errors import InputError
from nhgd.objective import Objective
from nhgd.task import Instance
from nhgd.theory import Constants, Estimate
from nhgd.theory.inner import check_delta

YEAR = 365.25 * 24 * 3600
MEASURED_STEPS = 20


def theory(
    task: Task,
    epsilon: Annotated[float, typer.Option(help="The mean squared hypergradient to aim at.")] = 0.1,
    delta: Annotated[float, typer.Option(help="The probability of missing it.")] = 0.1,
    radius: Annotated[
        float | None,
        typer.Option(help="Radius of the ball of theta; default: twice the norm of the solution.", show_default=False),
    ] = None,
    seed: Seed = 0,
    device: Device = "auto",
    data: DataFolder = None,
    preset: Preset = "default",
    changes: Changes = None,
    as_json: Json = False,
) -> None:
    """Constants of a task, the step sizes and loop lengths of the theorems, and their cost. --set takes task settings.

    Constants are estimated from samples at the solved inner problem and around it. The gap to the best outer loss is
    taken as the loss itself, which bounds it where losses are never negative. The bounds are worst cases, and real
    runs need far less.
    """
    check_delta(delta)
    positive("theory", epsilon=epsilon)
    chosen, rest = for_task(tasks.resolve(task, preset), parse(changes))
    if rest:
        raise InputError(f"theory runs no method, so --set {next(iter(rest))} would be ignored. Omit it.")
    where = device_called(device)
    with bar("theory") as tick:
        tick(0.0, "building the task")
        instance = chosen.build(checked_seed(seed), where, data)
        tick(0.3, "solving the inner problem")
        instance.solve_inner()
        tick(0.5, "constants")
        found = bounds.estimated(instance.problem, instance.full_inner, instance.full_outer, R=radius, seed=seed)
        tick(0.95, "time of a step")
        seconds = _seconds_of_a_step(instance)
    with torch.no_grad():
        gap = float(instance.problem.outer_value(instance.full_outer))
    answer = {"task": task, "preset": preset, "seed": seed, "epsilon": epsilon, "delta": delta, "gap": gap}
    answer |= _constants(found) | {"prescribed": _prescribed(found.constants, epsilon, delta, gap, seconds)}
    if as_json:
        print_json(answer)
    else:
        _tell(answer)


def _constants(found: Estimate) -> dict[str, Any]:
    values = asdict(found.constants)
    return {
        "constants": {name: {"value": value, "how": found.how.get(name, "given")} for name, value in values.items()}
    }


def _prescribed(c: Constants, epsilon: float, delta: float, gap: float, seconds: float) -> dict[str, Any]:
    """Both theorems: their conditions, step sizes, loop lengths and cost."""
    inner = {
        "q": c.q,
        "eta_0": bounds.eta(c, 0),
        "c_prime": bounds.c_prime(c),
        "T_0": bounds.T_0(c, delta),
        "inverse_error_at_T_0": bounds.inverse_error(c, bounds.T_0(c, delta), delta),
    }
    smoothness = bounds.L_v(c)
    if smoothness == 0:
        return inner
    target = bounds.prescribed(c, epsilon, delta, gap)
    return inner | {
        "L_v": smoothness,
        "alpha": target.alpha,
        "T_1": bounds.T_1(c, delta, target.K),
        "K": target.K,
        "T": target.T,
        "samples": target.samples,
        "seconds_of_a_step": seconds,
        "years": target.samples * seconds / YEAR,
    }


def _seconds_of_a_step(instance: Instance) -> float:
    """The median time of an inner gradient on the smallest batch that the task draws."""
    batch = next(iter(instance.inner_data))
    taken = []
    for _ in range(MEASURED_STEPS):
        began = time.perf_counter()
        Objective(instance.problem, batch, 0).gradient()
        taken.append(time.perf_counter() - began)
    return sorted(taken)[len(taken) // 2]


def _tell(answer: dict[str, Any]) -> None:
    out = console()
    listed = table(f"{answer['task']}, seed {answer['seed']}: constants of the theory", "", "value", "from")
    for name, row in answer["constants"].items():
        if row["value"] is not None:
            listed.add_row(name, number(row["value"]), row["how"])
    out.print(listed)
    found = answer["prescribed"]
    target = f"a mean squared hypergradient of {answer['epsilon']:g} with probability {1 - answer['delta']:g}"
    listed = table(f"\nWhat the theorems prescribe for {target}", "", "value")
    for name, value in found.items():
        listed.add_row(name.replace("_", " ") if name == "seconds_of_a_step" else name, number(value))
    out.print(listed)
    out.print(
        "\nEstimates come from sampled points, so the true constants may be worse. The bounds hold for every problem with these"
        " constants; a run needs far less, as `nhgd run` shows."
    )
