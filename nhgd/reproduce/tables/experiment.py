"""`nhgd reproduce cleaning` and its like: a table of the paper by two protocols, beside its own numbers.

printed    the paper's settings; metrics at every outer step, averages of the last 50; A reset and A carried
fair       one optimiser outside for all methods; both step sizes from a grid on one seed, widened where the best lies
           at an end; then equal seconds for each of several seeds
own        the library's own form of the problem, without tuning
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nhgd._results import jsonable
from nhgd.comparison import grid as grids
from nhgd.comparison.budget import Allowance
from nhgd.comparison.choice import edge_sentence
from nhgd.comparison.comparison import Comparison, late
from nhgd.comparison.table import Table
from nhgd.comparison.workers import Workers
from nhgd.paper import OPEN
from nhgd.reproduce.tables import tuning
from nhgd.reproduce.tables.claimed import CLAIMED
from nhgd.reproduce.tables.plan import CARRIED, LAST, Plan, Stage, plan_of
from nhgd.reproduce.tables.rows import curves, fair_row, first_in_time, printed_row

LONG = 120.0  # seconds that no run is given up before, of a table whose time is limited
SEARCH_POINTS = 20  # evaluations of a run of the search
QUICK_SECONDS = 140.0  # after which a quick one begins no further run
STAGES = {"printed": ("printed",), "fair": ("grid", "seeds"), "own": ("own",)}  # by what --only says
SHARES = {"printed": 3.0, "grid": 4.0, "seeds": 3.0, "own": 1.0}  # of the time


@dataclass(frozen=True)
class Asked:
    """What is asked for: see `nhgd.reproduce.Request`, whose words these are."""

    experiment: str
    quick: bool
    data: Path | None
    seconds: float | None
    device: str
    seed: int
    only: str | None = None
    budget: str | None = None
    search: str | None = None
    own: str | None = None
    seeds: int | None = None
    steps: int | None = None
    longest: str | None = None
    jobs: int = 1
    beside: int = 0
    smallest: bool = False
    tuned: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def plan(self) -> Plan:
        """The plan of the experiment, with what was asked to differ."""
        plan = plan_of(self.experiment, self.quick, self.data, self.smallest)
        printed, grid, own, seeds = plan.printed, plan.grid, plan.own, plan.seeds
        if self.budget is not None:
            grid, own = replace(grid, budget=self.budget), replace(own, budget=self.budget)
        if self.own is not None:
            own = replace(own, budget=self.own)
        if self.seeds is not None:
            printed, own, seeds = replace(printed, seeds=self.seeds), replace(own, seeds=self.seeds), self.seeds
        if self.steps is not None:
            printed = replace(printed, budget=f"{self.steps} steps", points=self.steps)
        if self.longest is not None:
            printed = replace(printed, longest=Allowance.read(self.longest).amount)
        return replace(plan, printed=printed, grid=grid, own=own, seeds=seeds)


def table(asked: Asked, out: Path | None, say: Callable[[str], None] = lambda words: None) -> dict[str, Any]:
    """Run what a folder does not hold yet, and put the table together from what there is.

    Args:
        asked: what to reproduce, and how much of it.
        out: a folder for each stage's runs. The same call goes on where it was interrupted, or where its time was up.
        say: told what comes next.
    """
    with ExitStack() as stack:
        workers = None
        if asked.jobs > 1:
            longest = None
            if asked.seconds is not None and asked.longest is None:  # else runs end by themselves
                longest = max(asked.seconds / 3, min(asked.seconds, LONG))
            elif asked.seconds is not None:
                longest = asked.seconds
            workers = stack.enter_context(Workers(asked.jobs, longest))
        return _table(asked, out, say, workers)


def _table(asked: Asked, out: Path | None, say: Callable[[str], None], workers: Workers | None) -> dict[str, Any]:
    began = time.monotonic()
    plan = asked.plan()
    limit = asked.seconds if asked.seconds is not None else QUICK_SECONDS if asked.quick else None
    data = asked.data if asked.experiment != "pde" else None

    def staged(name: str, stage: Stage, seeds: list[int], brief: bool = False) -> Table | None:
        comparison = _comparison(stage, seeds, asked.device, data, brief)
        until = ends[name]
        place = None if out is None else out / name
        here = place is not None and (place / "runs").is_dir()
        if name not in stages or late(until):  # what is there is still shown
            if not here:
                return None
            until = -math.inf
        found = comparison.table(
            place, None, False, lambda words: say(f"{name}: {words}"), suffixes=(), until=until, workers=workers
        )
        return found if found.runs else None

    stages = [name for only, names in STAGES.items() if asked.only in (None, only) for name in names]
    ends = _ends(stages, began, limit)
    first = asked.seed
    printed = staged("printed", plan.printed, list(range(first, first + plan.printed.seeds)), brief=True)
    search = replace(plan.grid, budget=asked.search or plan.grid.budget, points=SEARCH_POINTS, memory=False)
    known = {label: asked.tuned[label] for label in search.methods if label in asked.tuned}
    search = _without(search, known)
    tuned = None
    if search.methods:
        tuned = tuning.tuned(search, lambda stage: staged("grid", stage, [first], brief=True))
    sizes = known | ({} if tuned is None else {label: runs[0]["settings"] for label, runs in tuned.chosen.items()})
    final = None
    if sizes:
        # Other seeds than the one that the step sizes were chosen on.
        seeds = list(range(first + 1, first + 1 + plan.seeds))
        final = staged("seeds", _with(plan.grid, sizes), seeds, brief=True)
    own = staged("own", plan.own, list(range(first, first + plan.own.seeds)))
    found = _put_together(asked, plan, printed, tuned, final, own)
    found["seconds"] = time.monotonic() - began
    found["load"] = os.getloadavg()[0] if hasattr(os, "getloadavg") else None  # other work that the clocks have seen
    plain = jsonable(found)
    assert isinstance(plain, dict)
    return plain


def _ends(stages: Sequence[str], began: float, limit: float | None) -> dict[str, float | None]:
    """When each stage is to end, by its share of the time."""
    whole, sofar = sum(SHARES[name] for name in stages), 0.0
    found: dict[str, float | None] = dict.fromkeys(SHARES)
    for name in stages:
        sofar += SHARES[name]
        found[name] = None if limit is None else began + limit * sofar / whole
    return found


def _comparison(stage: Stage, seeds: list[int], device: str, data: Path | None, brief: bool) -> Comparison:
    digits = "digits" in (stage.settings.get("dataset"), getattr(stage.task, "dataset", None))
    comparison = Comparison.of(
        stage.task, stage.methods, seeds, stage.budget, grids.of_python(stage.settings), stage.preset, device,
        None if digits else data, 1, 2, None, stage.widen,
    )  # fmt: skip
    first = replace(comparison.first, points=stage.points, brief=brief, memory=stage.memory, longest=stage.longest)
    return replace(comparison, first=first)


def _without(stage: Stage, known: Mapping[str, Any]) -> Stage:
    """The methods whose step sizes are not known."""
    methods = {label: method for label, method in stage.methods.items() if label not in known}
    settings = {key: value for key, value in stage.settings.items() if key.rpartition(":")[0] not in known}
    return replace(stage, methods=methods, settings=settings)


def _with(stage: Stage, sizes: Mapping[str, Mapping[str, Any]]) -> Stage:
    """The final runs: each method whose step sizes are known, with these."""
    settings = {f"{label}:{key}": value for label, own in sizes.items() for key, value in own.items()}
    methods = {label: method for label, method in stage.methods.items() if label in sizes}
    return replace(stage, methods=methods, settings=settings, widen=0)


def _put_together(
    asked: Asked, plan: Plan, printed: Table | None, tuned: Table | None, final: Table | None, own: Table | None
) -> dict[str, Any]:
    claimed = CLAIMED[asked.experiment]
    labels = dict.fromkeys([*plan.printed.methods, *plan.grid.methods])
    rows = []
    for label in labels:
        said = claimed.get("nhgd-paper" if label == CARRIED else label)
        rows.append(
            {
                "method": label,
                "paper": None if said is None else said._asdict(),
                "printed": None if printed is None else printed_row(printed, label, plan.accuracy),
                "fair": None if final is None else fair_row(final, label),
            }
        )
    tables = {"printed": printed, "grid": tuned, "seeds": final, "own": own}
    wanted = {
        "printed": plan.printed.seeds * len(plan.printed.methods),
        "seeds": plan.seeds * len(plan.grid.methods),
        "own": plan.own.seeds * len(plan.own.methods),
    }
    wanted = {name: count for name, count in wanted.items() if asked.only is None or name in STAGES[asked.only]}
    done = {name: 0 if (one := tables[name]) is None else len(one.runs) for name in wanted}
    metrics = ["outer_loss", *([] if plan.accuracy is None else [plan.accuracy])]
    return {
        "experiment": asked.experiment,
        "quick": asked.quick,
        "seed": asked.seed,
        "only": asked.only,
        "problem": plan.words,
        "last": LAST,
        "jobs": asked.jobs,
        "beside": asked.beside,
        "protocols": {
            "printed": _about(printed, plan.printed),
            "fair": _about(final, plan.grid)
            | {
                "grid": jsonable(plan.grid.settings),
                "widen": plan.grid.widen,
                "search": asked.search or plan.grid.budget,
                "known": sorted(asked.tuned),
            },
            "own": _about(own, plan.own),
        },
        "runs": {name: {"done": done[name], "wanted": count} for name, count in wanted.items()},
        "complete": done == wanted,
        "rows": rows,
        "own": [] if own is None else [{"method": label} | (fair_row(own, label) or {}) for label in plan.own.methods],
        "first_in_time": None if final is None else first_in_time(final),
        "tuning": [] if tuned is None else tuned.edges,
        "notes": {
            name: notes for name, one in tables.items() if one is not None and (notes := _notes(one, asked.quick))
        },
        "curves": {
            name: {} if one is None else {metric: curves(one, metric, average) for metric in metrics}
            for name, one, average in (("printed", printed, plan.average), ("fair", final, 1))
        },
        "open": dict(OPEN),
        "environment": next(
            (run["environment"] for run in (printed or own or tuned or Table({}, [])).runs if "environment" in run),
            None,
        ),
    }


def _notes(found: Table, quick: bool) -> list[str]:
    """What a reader should know; two values of a step size are both at an end, so of a quick grid that is not said."""
    ends = {edge_sentence(at) for at in found.edges} if quick else set()
    return [note for note in found.notes if note not in ends]


def _about(found: Table | None, stage: Stage) -> dict[str, Any]:
    seeds = [] if found is None else sorted({run["seed"] for run in found.runs})
    about = (
        {}
        if found is None
        else {"headline": found.about["headline"], "target": found.target and found.target["metric"]}
    )
    return {"budget": stage.budget, "longest": stage.longest, "seeds": seeds} | about
