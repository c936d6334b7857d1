"""Tables of docs/reproduction.md from what `nhgd reproduce` wrote: python -m benchmarks.tables

    nhgd reproduce theory --out OUT
    nhgd reproduce cleaning --quick --data MNIST --budget 3s --seconds 1100 --out OUT
    nhgd reproduce distillation-5 --quick --data FASHION --budget 3s --seconds 700 --out OUT
    nhgd reproduce distillation-100 --quick --data FASHION --budget 3s --seconds 700 --out OUT
    nhgd reproduce pde --quick --budget 5s --seconds 700 --out OUT
    nhgd reproduce parallel --quick --data MNIST --out OUT

The JSON of each is kept in benchmarks/results/reproduction.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nhgd.reproduce.tables import text
from nhgd.reproduce.theory import tables as theory

FOLDER = Path(__file__).parent / "results" / "reproduction"
TABLES = ("cleaning", "distillation-5", "distillation-100", "pde")


def read(experiment: str) -> dict[str, Any]:
    """A result by the name of its experiment."""
    found: dict[str, Any] = json.loads((FOLDER / f"{experiment}.json").read_text(encoding="utf-8"))
    return found


def pages() -> dict[str, str]:
    """The tables of the page by their marks."""
    slopes = read("theory")
    found = {
        "theory-claims": theory.claims(slopes),
        "theory-slopes": theory.slopes(slopes),
        "theory-quantiles": theory.quantiles(slopes),
        "theory-outer": theory.outer(slopes),
        "parallel": parallel(read("parallel")),
    }
    for experiment in TABLES:
        result = read(experiment)
        found[f"{experiment}-printed"] = text.markdown(*text.printed(result))
        found[f"{experiment}-fair"] = text.markdown(*text.fair(result))
        if result["own"]:
            found[f"{experiment}-own"] = text.markdown(*text.own(result))
    return found


def parallel(result: dict[str, Any]) -> str:
    lines = [
        "| execution | ms an outer step | speedup | ms of curvature | ms waited for it | largest difference of v |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in result["rows"]:
        lines.append(
            f"| {row['execution']} | {row['milliseconds']:.0f} | {row['speedup']:.2f} | {row['curvature_milliseconds']:.0f}"
            f" | {row['waited_milliseconds']:.0f} | {row['largest_difference_of_v']:g} |"
        )
    return "\n".join(lines)
