"""What all experiments have in common: how they are asked for, and where their results go."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from nhgd._results import Folder, folder, jsonable
from nhgd._validation import shown
from nhgd.comparison.budget import Allowance
from nhgd.errors import InputError, NhgdError, unknown
from nhgd.plot.style import FORMATS

Say: TypeAlias = Callable[[str], None]
Result: TypeAlias = dict[str, Any]

EXPERIMENTS: Mapping[str, str] = {
    "cleaning": "Wrong labels of MNIST: the paper's table by its settings, and tuned with equal seconds.",
    "distillation-5": "Five images a class of Fashion-MNIST, likewise.",
    "distillation-100": "A hundred images a class of Fashion-MNIST, likewise.",
    "pde": "Control of the heat equation, likewise.",
    "parallel": "Algorithm 2: the same run serially, beside another thread, stream, device or process.",
    "theory": "Slopes, quantiles and floors of the theorems on models whose data are their own.",
}

PARTS = ("printed", "fair", "own")  # of a table


@dataclass(frozen=True)
class Request:
    """What to reproduce, and how much of it.

    Attributes:
        experiment: a name in `EXPERIMENTS`.
        quick: a small part of it, in under three minutes on two cores.
        data: the folder of the task's files.
        out: a folder for results; without it nothing is written.
        seconds: after how long no further run begins; None: the whole, or what fits the time of a quick one.
        device: "auto", "cpu", "cuda" or "cuda:1".
        seed: the first of those used.
        only: a part of a table, "printed", "fair" or "own"; the others are shown as far as the folder holds them.
        budget: of each run but the printed ones, such as "30s"; None: what suits the experiment.
        search: of each run of the grid of step sizes, where that is to differ from the budget.
        own: of each run of the library's own form, likewise.
        seeds: how many each final run has; None: what suits the experiment.
        steps: outer steps of the runs with the paper's settings; None: what suits the experiment.
        longest: a time such as "60s" after which such a run ends with the steps it has; None: none.
        beside: runs of other experiments at the same time, for the reader of the result.
        tuned: an earlier result of the same experiment, whose step sizes are taken in place of a search.
        again: methods of it that are searched for again, by commas.
        jobs: runs at the same time, each in a process of its own; they disturb each other's clocks, all methods alike.
    """

    experiment: str
    quick: bool = False
    data: Path | None = None
    out: Path | None = None
    seconds: float | None = None
    device: str = "auto"
    seed: int = 0
    only: str | None = None
    budget: str | None = None
    search: str | None = None
    own: str | None = None
    seeds: int | None = None
    steps: int | None = None
    longest: str | None = None
    jobs: int = 1
    beside: int = 0
    tuned: Path | None = None
    again: str | None = None

    def __post_init__(self) -> None:
        if self.experiment not in EXPERIMENTS:
            raise unknown("experiment", self.experiment, EXPERIMENTS)
        if self.seconds is not None and not self.seconds > 0:
            raise InputError(f"The time of an experiment must be above 0 seconds, got {self.seconds}.")
        if self.only is not None and self.only not in PARTS:
            raise unknown("part of a table", self.only, PARTS)
        if self.again is not None and self.tuned is None:
            raise InputError("again names methods of an earlier result, which tuned gives. Omit it, or give both.")
        for name in ("only", "budget", "search", "own", "seeds", "steps", "longest", "jobs", "tuned"):
            given = getattr(self, name)
            if given not in (None, 1 if name == "jobs" else None) and self.experiment in ("theory", "parallel"):
                raise InputError(f"{self.experiment} is no table, so {name} would be ignored. Omit it.")
        for name in ("seeds", "steps", "jobs"):
            given = getattr(self, name)
            if given is not None and (not isinstance(given, int) or given < 1):
                raise InputError(f"{name} must be a whole number of at least 1, got {shown(given)}.")
        for budget in (self.budget, self.search, self.own):
            if budget is not None:
                Allowance.read(budget)
        if self.longest is not None and Allowance.read(self.longest).unit != "s":
            raise InputError(f"longest is a time such as '60s', got {shown(self.longest)}.")


def reproduce(request: Request, say: Say = lambda words: None) -> Result:
    """Run an experiment; its result as plain values. A folder gets it as JSON, with tables and figures.

    >>> reproduce(Request("theories"))
    Traceback (most recent call last):
    nhgd.errors.InputError: There is no experiment 'theories'. Did you mean theory? Known: cleaning, ...
    """
    if request.experiment == "theory":
        return _theory(request, say)
    return _parallel(request, say) if request.experiment == "parallel" else _table(request, say)


def _table(request: Request, say: Say) -> Result:
    from nhgd.reproduce.tables import Asked, table
    from nhgd.reproduce.tables.figures import draw
    from nhgd.reproduce.tables.text import text

    if request.experiment == "pde" and request.data is not None:
        raise InputError("pde reads no files, so data would be ignored. Omit it.")
    asked = Asked(
        request.experiment,
        request.quick,
        request.data,
        request.seconds,
        request.device,
        request.seed,
        request.only,
        request.budget,
        request.search,
        request.own,
        request.seeds,
        request.steps,
        request.longest,
        request.jobs,
        request.beside,
        tuned=known_sizes(request),
    )
    with folder(request.out) as place:
        found = table(asked, None if place is None else place.path, say)
        _write(place, found, text(found), lambda beside: draw(beside, found, FORMATS[:1]))
    return found


def known_sizes(request: Request) -> dict[str, dict[str, Any]]:
    """The step sizes that an earlier result found, by method, but for those that are to be searched for again."""
    if request.tuned is None:
        return {}
    again = [name.strip() for name in (request.again or "").split(",") if name.strip()]
    try:
        found = json.loads(request.tuned.read_text(encoding="utf-8"))
        if found["experiment"] != request.experiment or found["quick"] != request.quick:
            kind = "quick " if found["quick"] else ""
            raise InputError(f"{request.tuned} is a {kind}result of {found['experiment']}. Give one of the same kind.")
        sizes = {row["method"]: dict(row["fair"]["settings"]) for row in found["rows"] if row["fair"]}
    except (OSError, UnicodeDecodeError, ValueError, LookupError, TypeError) as error:
        raise InputError(
            f"{request.tuned} is no result of nhgd reproduce: {type(error).__name__}: {error}. Give the JSON of one."
        ) from error
    for name in again:
        if name not in sizes:
            raise unknown("method of that result", name, list(sizes))
    return {name: settings for name, settings in sizes.items() if name not in again}


def _parallel(request: Request, say: Say) -> Result:
    from nhgd.reproduce.parallel import parallel, text

    if request.seconds is not None:
        raise InputError("parallel takes a fixed number of outer steps, so seconds would be ignored. Omit it.")
    with folder(request.out) as place:
        found = parallel(request.quick, request.data, request.device, request.seed, say)
        _write(place, found, text(found), None)
    return found


def _write(place: Folder | None, found: Result, words: str, draw: Callable[[Path], list[Path]] | None) -> None:
    """A result as JSON and as text, with figures where Matplotlib is installed."""
    if place is None:
        return
    name = found["experiment"]
    place.write_texts({f"{name}.json": as_json(found), f"{name}.txt": words + "\n"})
    if draw is not None and importlib.util.find_spec("matplotlib") is not None:
        place.write_all("The figures", draw)


def _theory(request: Request, say: Say) -> Result:
    from nhgd.reproduce.theory import Effort, theory
    from nhgd.reproduce.theory.figures import draw
    from nhgd.reproduce.theory.tables import text

    for name, given in (("data", request.data), ("seconds", request.seconds)):
        if given is not None:
            raise InputError(f"theory draws its own data and takes a fixed time, so {name} would be ignored. Omit it.")
    with folder(request.out) as place:
        found = theory(Effort.quick() if request.quick else Effort(), request.seed, say)
        found["quick"] = request.quick
        _write(place, found, text(found), lambda beside: draw(beside, found, FORMATS[:1]))
    return found


def as_json(found: Mapping[str, Any]) -> str:
    """A result as the text of a file."""
    return json.dumps(jsonable(found), indent=1, allow_nan=False) + "\n"


def summary(found: Mapping[str, Any]) -> str:
    """A result for people."""
    if found["experiment"] == "theory":
        from nhgd.reproduce.theory.tables import text
    elif found["experiment"] == "parallel":
        from nhgd.reproduce.parallel import text
    else:
        from nhgd.reproduce.tables.text import text
    return text(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line that needs nothing but torch and NumPy; `nhgd reproduce` is the same."""
    parser = argparse.ArgumentParser(prog="python -m nhgd.reproduce", description=reproduce.__doc__)
    parser.add_argument("experiment", choices=list(EXPERIMENTS), help="; ".join(EXPERIMENTS.values()))
    parser.add_argument("--quick", action="store_true", help="a small part, in under three minutes on two cores")
    parser.add_argument("--data", type=Path, help="the folder of the task's files")
    parser.add_argument("--out", type=Path, help="a folder for results; what is there is gone on with")
    parser.add_argument("--seconds", type=float, help="after how many seconds no further run begins")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--seed", type=int, default=0, help="the first of the seeds")
    parser.add_argument("--only", choices=PARTS, help="a part of a table")
    parser.add_argument("--budget", help="of each run but those with the paper's settings, such as 30s")
    parser.add_argument("--search", help="of each run of the grid, if that differs from --budget")
    parser.add_argument("--own", help="of each run of the library's own form, if that differs from --budget")
    parser.add_argument("--seeds", type=int, help="of each final run")
    parser.add_argument("--steps", type=int, help="outer steps with the paper's settings")
    parser.add_argument("--longest", help="a time after which a run with the paper's settings ends, such as 60s")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time, each in a process of its own")
    parser.add_argument("--beside", type=int, default=0, help="such runs of other experiments, for the reader")
    parser.add_argument("--tuned", type=Path, help="an earlier result, whose step sizes are taken")
    parser.add_argument("--again", help="methods of it that are searched for again, by commas")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    given = vars(parser.parse_args(arguments))
    as_object = given.pop("json")
    try:
        found = reproduce(Request(**given), lambda words: print(words, file=sys.stderr, flush=True))
    except NhgdError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    print(as_json(found) if as_object else summary(found))
    return 0
