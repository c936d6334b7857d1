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

from nhgd._results import folder, jsonable
from nhgd.errors import InputError, NhgdError, unknown
from nhgd.plot.style import FORMATS

Say: TypeAlias = Callable[[str], None]
Result: TypeAlias = dict[str, Any]

EXPERIMENTS: Mapping[str, str] = {
    "theory": "Slopes, quantiles and floors of the theorems on models whose data are their own.",
}


@dataclass(frozen=True)
class Request:
    """What to reproduce, and how much of it.

    Attributes:
        experiment: a name in `EXPERIMENTS`.
        quick: a small part of it, in under three minutes on two cores.
        data: the folder of the task's files.
        out: a folder for results; without it nothing is written.
        seconds: how long it may take; None: as long as the whole takes.
        device: "auto", "cpu", "cuda" or "cuda:1".
        seed: the first of those used.
    """

    experiment: str
    quick: bool = False
    data: Path | None = None
    out: Path | None = None
    seconds: float | None = None
    device: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.experiment not in EXPERIMENTS:
            raise unknown("experiment", self.experiment, EXPERIMENTS)
        if self.seconds is not None and not self.seconds > 0:
            raise InputError(f"The time of an experiment must be above 0 seconds, got {self.seconds}.")


def reproduce(request: Request, say: Say = lambda words: None) -> Result:
    """Run an experiment; its result as plain values. A folder gets it as JSON, with tables and figures.

    >>> reproduce(Request("theories"))
    Traceback (most recent call last):
    nhgd.errors.InputError: There is no experiment 'theories'. Did you mean theory? Known: theory.
    """
    return _theory(request, say)


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
        if place is not None:
            place.write_texts({"theory.json": as_json(found), "theory.txt": text(found) + "\n"})
            if importlib.util.find_spec("matplotlib") is not None:
                place.write_all("The figures", lambda beside: draw(beside, found, FORMATS[:1]))
    return found


def as_json(found: Mapping[str, Any]) -> str:
    """A result as the text of a file."""
    return json.dumps(jsonable(found), indent=1, allow_nan=False) + "\n"


def summary(found: Mapping[str, Any]) -> str:
    """A result for people."""
    from nhgd.reproduce.theory.tables import text

    return text(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line that needs nothing but torch and NumPy; `nhgd reproduce` is the same."""
    parser = argparse.ArgumentParser(prog="python -m nhgd.reproduce", description=reproduce.__doc__)
    parser.add_argument("experiment", choices=list(EXPERIMENTS), help="; ".join(EXPERIMENTS.values()))
    parser.add_argument("--quick", action="store_true", help="a small part, in under three minutes on two cores")
    parser.add_argument("--data", type=Path, help="the folder of the task's files")
    parser.add_argument("--out", type=Path, help="a folder for results; what is there is gone on with")
    parser.add_argument("--seconds", type=float, help="how long it may take, the most valuable rows first")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--seed", type=int, default=0, help="the first of the seeds")
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
