"""What each table is made from: tasks, methods, grids and budgets, in full and in a small part."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from nhgd import task as tasks
from nhgd.algorithm import AID, ITD, NHGD, AbstractAlgorithm, NHGDSingle
from nhgd.inverse import CG, KFAC, Broyden, FisherDense, FisherWindow
from nhgd.paper import EXPERIMENTS as PRESETS
from nhgd.paper import TABLE, paper
from nhgd.task import PDE, AbstractTask, Cleaning, Distillation
from nhgd.task.distillation import nhgd_for

CARRIED = "nhgd-paper, A carried"
LAST = 50  # outer steps that the paper's averages are over
SMALLEST_BETA = 0.7  # of the paper's grid: where 0 is printed, which would divide by zero
DIGITS: Mapping[str, Any] = {"dataset": "digits"}


@dataclass(frozen=True)
class Stage:
    """One comparison of several methods on one problem, with one budget.

    Attributes:
        task: a name, to be run with `preset`, or an object.
        methods: names or objects by label.
        settings: as of `nhgd.bench`; a list is a grid.
        budget: of each run.
        seeds: how many.
        points: about how many evaluations a run has.
        widen: how often a grid is continued where its best value is its first or last.
        longest: seconds after which a run ends whose budget is a number of outer steps.
        memory: whether the memory of outer steps is measured.
        alternating: whether step sizes are searched one after the other, see `tuning`; else every combination is run.
    """

    task: str | AbstractTask
    methods: Mapping[str, str | AbstractAlgorithm]
    budget: str
    preset: str = "default"
    settings: Mapping[str, Any] = field(default_factory=dict)
    seeds: int = 1
    points: int = 50
    widen: int = 0
    longest: float | None = None
    memory: bool = True
    alternating: bool = False


@dataclass(frozen=True)
class Plan:
    """The stages of one table.

    Attributes:
        printed: the paper's settings, evaluated at every outer step.
        grid: the tuning of the fair protocol, on one seed.
        seeds: of its final runs.
        own: the library's own form of the problem, without tuning.
        accuracy: what the paper's accuracy is called in the history; None where it has none.
        average: outer steps that its figures average over.
        words: what the data and the sizes are, for a reader.
    """

    printed: Stage
    grid: Stage
    seeds: int
    own: Stage
    accuracy: str | None
    average: int
    words: str


def plan_of(experiment: str, quick: bool, data: Path | None, smallest: bool = False) -> Plan:
    """The plan of an experiment.

    Args:
        experiment: "cleaning", "distillation-5", "distillation-100" or "pde".
        quick: fewer methods, samples, steps and values, for a few minutes of two cores.
        data: the folder of the task's files; a quick one does without, and takes digits.
        smallest: for tests of the machinery: nothing can be concluded from it.
    """
    files = data is not None or bool(os.environ.get("NHGD_DATA"))
    make = _pde if experiment == "pde" else _cleaning if experiment == "cleaning" else _distillation
    found = make(experiment, quick or smallest, files)
    return _smallest(found) if smallest else found


def _smallest(plan: Plan) -> Plan:
    """A few methods, two steps."""
    return replace(plan, printed=_few(plan.printed), grid=_few(plan.grid), own=_few(plan.own), seeds=2)


def _few(stage: Stage) -> Stage:
    kept = ("nhgd-paper", CARRIED, "nhgd", "aid-cg-10", "aid-broyden", "nhgd, adam inside")
    methods = {label: method for label, method in stage.methods.items() if label in kept}
    settings = {
        key: value[0] if key.endswith("inner_lr") and isinstance(value, list) else value
        for key, value in stage.settings.items()
        if ":" not in key or key.rpartition(":")[0] in methods
    }
    return replace(stage, methods=methods, settings=settings, budget="2 steps", seeds=1, widen=0, alternating=False)


def _printed(experiment: str, settings: Mapping[str, Any], steps: int, seeds: int) -> Stage:
    task, preset = next(pair for pair, name in PRESETS.items() if name == experiment)
    labels = {name: name for name in TABLE[experiment]}
    methods = {"nhgd-paper": "nhgd-paper", CARRIED: "nhgd-paper"} | labels
    own: dict[str, Any] = {f"{CARRIED}:inverse.warm": "prior"}
    if not TABLE[experiment]["nhgd-paper"].beta:
        own |= {f"{label}:inverse.beta": SMALLEST_BETA for label in ("nhgd-paper", CARRIED)}
    return Stage(task, methods, f"{steps} steps", preset, dict(settings) | own, seeds=seeds, points=steps)


def _of_the_paper(experiment: str) -> dict[str, AbstractAlgorithm]:
    """Its methods as objects, so that a task's own optimisers are taken."""
    found = {}
    for name, row in TABLE[experiment].items():
        beta = SMALLEST_BETA if name == "nhgd-paper" and not row.beta else None
        found[name] = paper(experiment, name, beta)[0]
    return found


def _grid(inner: list[float], outer: list[float], quick: bool, natural: tuple[str, ...]) -> dict[str, Any]:
    """Five values of each step size, or two; natural steps have no inner one."""
    both = {"inner_lr": inner, "outer_lr": outer}
    chosen = {key: [values[1], values[3]] if quick else values for key, values in both.items()}
    return chosen | {f"{label}:inner_lr": inner[2] for label in natural}


IN_A_QUICK_ONE = ("nhgd-paper", "stocbio", "amigo", "ttsa", "soba", "aid-neumann-10", "aid-cg-10")


def _fair_methods(experiment: str, quick: bool, own: Mapping[str, str | AbstractAlgorithm]) -> dict[str, Any]:
    rows = _of_the_paper(experiment)
    return {**own, **{name: one for name, one in rows.items() if not quick or name in IN_A_QUICK_ONE}}


def _cleaning(experiment: str, quick: bool, files: bool) -> Plan:
    small: dict[str, Any] = {}
    words = "MNIST, 50,000 training samples, half of them relabelled"
    if quick and files:
        small = {"dataset": "mnist", "train": 2000, "trusted": 500, "evaluation": 500}
        words = "2,000 training samples of MNIST, half of them relabelled"
    elif quick:
        small = dict(DIGITS)
        words = "the digits that come with scikit-learn, 1,000 training samples, half of them relabelled"
    paper_task = Cleaning.preset("paper").with_settings(small | {"outer": "adam"})
    natural = "nhgd, natural inner"
    own: dict[str, str | AbstractAlgorithm] = {
        "nhgd": "nhgd",
        "nhgd-refined": "nhgd-refined",
        natural: NHGD(KFAC(), inner="natural", natural_steps=1),
        "nhgd_single": "nhgd_single",
    }
    grid = _grid([0.01, 0.03, 0.1, 0.3, 1.0], [0.003, 0.01, 0.03, 0.1, 0.3], quick, (natural,))
    library = Cleaning(noise=0.5, noise_kind="uniform").with_settings(small or {"dataset": "mnist"})
    return Plan(
        _printed(experiment, small, 30 if quick else 1000, 1 if quick else 5),
        Stage(
            paper_task, _fair_methods(experiment, quick, own), "0.5s" if quick else "10s", settings=grid,
            widen=0 if quick else 3, alternating=not quick,
        ),
        2 if quick else 5,
        Stage(library, {"nhgd": "nhgd", "aid-cg-10": AID(CG(steps=10))}, "2s" if quick else "10s", seeds=2 if quick else 5),
        "test_accuracy",
        1,
        words,
    )  # fmt: skip


def _distillation(experiment: str, quick: bool, files: bool) -> Plan:
    few = experiment == "distillation-5"
    preset = "paper-5" if few else "paper-100"
    small: dict[str, Any] = {}
    words = "Fashion-MNIST, all 60,000 training images"
    if quick and files:
        small = {"train": 3000} | ({} if few else {"per_class": 20, "batch": 64, "outer_batch": 1000})
        words = "3,000 training images of Fashion-MNIST"
    elif quick:
        small = dict(DIGITS) | ({} if few else {"per_class": 20, "batch": 64, "outer_batch": 500})
        words = "the digits that come with scikit-learn"
    if quick and not few:
        words += ", with 20 distilled images a class in place of 100"
    inner_steps = {"inner_steps": 30}
    paper_task = Distillation.preset(preset).with_settings(small | inner_steps)
    natural = "nhgd, natural inner"
    images = paper_task.per_class * 10
    own: dict[str, str | AbstractAlgorithm] = {
        "nhgd": NHGD(FisherWindow(window=images, fisher="exact"))
        if few
        else nhgd_for(images, 10, paper_task.batch, 30),
        natural: nhgd_for(images, 10, None, None),
        "nhgd-refined": NHGD(KFAC(fisher="exact"), refine=5),
        "nhgd_single": NHGDSingle(KFAC(fisher="exact")),
    }
    grid = _grid([0.01, 0.1, 1.0, 3.0, 10.0], [0.003, 0.01, 0.03, 0.1, 0.3], quick, (natural,))
    library = Distillation(per_class=paper_task.per_class).with_settings(
        {key: value for key, value in small.items() if key in ("dataset", "train", "outer_batch")}
        if small
        else {"dataset": "fashion-mnist"}
    )
    if quick and files:
        library = library.with_settings({"dataset": "fashion-mnist"})
    return Plan(
        _printed(experiment, small, 30 if quick else 1000, 1 if quick else 5),
        Stage(
            paper_task, _fair_methods(experiment, quick, own), "0.5s" if quick else "10s", settings=grid,
            widen=0 if quick else 3, alternating=not quick,
        ),
        2 if quick else 5,
        Stage(library, {"nhgd": "nhgd", "aid-cg-10": AID(CG(steps=10))}, "2s" if quick else "10s", seeds=2 if quick else 5),
        "loop_test_accuracy",
        10,
        words,
    )  # fmt: skip


def _pde(experiment: str, quick: bool, files: bool) -> Plan:
    preset, steps = ("quick", 12) if quick else ("paper", 500)
    task = PDE.preset(preset).with_settings({"inner": "adam"} | ({"inner_steps": 20} if quick else {}))
    points = task.interior + 4 * task.side + task.initial
    window = FisherWindow(window=points, fisher="exact", records="sample", damping=task.damping, allow_large=True)
    natural = NHGD(window, observe="end", inner="natural", natural_steps=1, natural_floor=task.floor)
    literal = FisherDense(form="inverse", update="ema", beta=0.8, records="raw", warm="reset")
    theirs: dict[str, str | AbstractAlgorithm] = {
        "nhgd-paper": NHGD(literal, cross="final"),
        "nhgd-paper, trajectory": NHGD(
            FisherDense(form="inverse", update="average", records="raw"), cross="trajectory"
        ),
        "aid-broyden": AID(Broyden()),
        "itd": ITD(),
        "truncated": ITD(truncate=5),
    }
    ours: dict[str, str | AbstractAlgorithm] = {
        "nhgd": natural,
        "nhgd, adam inside": NHGD(window, observe="end"),
        "aid-cg-10": AID(CG(steps=10)),
    }
    left_out = ("nhgd-paper, trajectory", "itd") if quick else ()
    fair = {label: method for label, method in (ours | theirs).items() if label not in left_out}
    grid = {
        "solver.inner_lr": [3e-4, 3e-3] if quick else [1e-4, 3e-4, 1e-3, 3e-3, 1e-2],
        "outer_lr": [0.01, 0.03] if quick else [0.001, 0.003, 0.01, 0.03, 0.1],
        "nhgd:solver.inner_lr": 1e-3,  # which natural steps do without
    }
    return Plan(
        Stage(task, theirs | ours, f"{steps} steps", seeds=1 if quick else 5, points=steps),
        Stage(task, fair, "1.5s" if quick else "60s", settings=grid, widen=0 if quick else 3, alternating=not quick),
        2 if quick else 5,
        Stage(PDE.preset("quick" if quick else "default"), {"nhgd": "nhgd"}, "5s" if quick else "60s", seeds=2 if quick else 5),
        None,
        1,
        f"preset {preset}: {points} points, a network of width {task.width} and depth {task.depth}",
    )  # fmt: skip


def names_of(task: str | AbstractTask, preset: str) -> AbstractTask:
    """The task of a stage, for its metrics."""
    return tasks.resolve(task, preset)


def device_of(device: str) -> str:
    """ "auto" as the device it means."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
