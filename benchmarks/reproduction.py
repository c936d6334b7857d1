"""Tables of docs/reproduction.md from what `nhgd reproduce` wrote: python -m benchmarks.tables

    nhgd reproduce theory --out OUT
    python -m benchmarks.card fair,own,printed OUT --data DATA --seconds 290        the four tables, on one GPU
    nhgd reproduce parallel --quick --data MNIST --out OUT

The JSON of each is kept in benchmarks/results/reproduction. `python -m benchmarks.reproduction` draws the page's figures;
with OUT it first takes over from there the parts of each table that were measured, and leaves the others as they are.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from nhgd.reproduce.command import as_json
from nhgd.reproduce.tables import text
from nhgd.reproduce.tables.figures import draw
from nhgd.reproduce.theory import tables as theory

FOLDER = Path(__file__).parent / "results" / "reproduction"
DOCS = Path(__file__).parent.parent / "docs"
TABLES = ("cleaning", "distillation-5", "distillation-100", "pde")
NEARLY = 0.9  # of the time of curvature, which then counts as hidden
SAME = 1e-5  # by which v may differ in float32, where sums are taken in another order


def overlaps() -> list[str]:
    """The machines that algorithm 2 was measured on."""
    return [name for name in ("parallel", "parallel-h200") if (FOLDER / f"{name}.json").exists()]


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
        **{name: parallel(read(name)) for name in overlaps()},
        "claims": claims(),
        "targets": targets(),
    }
    for experiment in TABLES:
        result = read(experiment)
        for part, cells in (("printed", text.printed), ("fair", text.fair), ("own", text.own)):
            heads, lines = cells(result)
            if lines:
                found[f"{experiment}-{part}"] = text.markdown(heads, lines)
    return found


def claims() -> str:
    """The experiments' claims beside what was measured."""
    cleaning, five, hundred, pde = (read(name) for name in TABLES)
    ms = {row["method"]: row["fair"]["milliseconds_per_step"] for row in pde["rows"] if row["fair"]}
    carried = "; ".join(carried_over(result) for result in (cleaning, five, hundred))
    beside = {name: read(name) for name in overlaps()}
    furthest = max(row["largest_difference_of_v"] for one in beside.values() for row in one["rows"])
    speeds, hidden = [], []
    for name, one in beside.items():
        others = [row for row in one["rows"] if row["execution"] != "inline"]
        each = ", ".join(f"{row['execution']} {row['speedup']:.2f}" for row in others)
        place = "on one GPU" if name.endswith("h200") else "on two cores"
        speeds.append(f"{place}: {each} times the serial speed, at most {one['best_speedup']:.2f} possible")
        serial = one["rows"][0]
        saved = serial["milliseconds"] - min(row["milliseconds"] for row in others)
        hidden.append(max(0.0, saved / serial["curvature_milliseconds"]))
    lines = ["| claim of the paper | its figure | ours | verdict |", "| --- | --- | --- | --- |"]
    for result, words, best in (
        (cleaning, "cleaning: NHGD has the highest test accuracy", True),
        (five, "distillation, n = 5: NHGD has the highest test accuracy", True),
        (hundred, "distillation, n = 100: NHGD comes close to the best", False),
    ):
        printed, fair = ranking(result, printed_accuracy), ranking(result, fair_accuracy)
        theirs = ranking(result, paper_accuracy)
        good = [one.place == 1 if best else one.behind <= theirs.behind for one in (printed, fair)]
        verdict = {(1, 1): "held", (1, 0): "in part: by the printed settings", (0, 1): "in part: tuned"}
        lines.append(
            f"| {words} | {said(theirs)} | printed settings: {said(printed)}; tuned, equal seconds: {said(fair)}"
            f" | {verdict.get((good[0], good[1]), 'not held')} |"
        )
    lines += [
        f"| PDE: NHGD is three to four times faster than Broyden | 3 to 4 | {ms['aid-broyden'] / ms['nhgd-paper']:.1f} an outer step"
        f" by the paper's own recursion, {ms['aid-broyden'] / ms['nhgd, adam inside']:.1f} by the exact Fisher matrix of the"
        " residuals | in part: faster, by less |",
        f"| PDE: NHGD comes close to Broyden's objective | 0.0266 against 0.0237 | {objective(pde, 'nhgd-paper')} against"
        f" {objective(pde, 'aid-broyden')}, by the network | held, far from converged |",
        f"| A carried over from one outer step to the next (algorithm 1) | - | {carried} | not held: it grows, and overflows |",
        "| NHGD with beta = 0 (n = 5) | 0.8256 | divides by zero; 0.7 was taken | cannot be run |",
        f"| parallel: the result is that of the serial run | - | largest difference of v {furthest:.1g}"
        f" | {'held' if furthest < SAME else 'not held'} |",
        f"| parallel: no extra run time | - | {'; '.join(speeds)}"
        f" | {'held' if max(hidden) >= NEARLY else 'not shown'}: at most {100 * max(hidden):.0f} % of the time of curvature"
        " is hidden |",
    ]
    return "\n".join(lines)


def targets() -> str:
    """What the library set itself, by its own forms of the problems, untuned."""
    lines = ["| target | measured | met |", "| --- | --- | --- |"]
    for experiment, metric, words, goal in (
        ("cleaning", "test_accuracy", "cleaning, selected test accuracy at least 0.920", 0.92),
        ("cleaning", "f1", "cleaning, F1 at least 0.96", 0.96),
        ("distillation-5", "test_accuracy", "distillation, n = 5, at least 0.85", 0.85),
        ("distillation-100", "test_accuracy", "distillation, n = 100, at least 0.85", 0.85),
        ("pde", "true_objective_grid", "PDE, true objective on the grid at most 0.0225", -0.0225),
    ):
        row = next(row for row in read(experiment)["own"] if row["method"] == "nhgd")
        one = row["metrics"][metric]
        met = one["mean"] >= goal if goal > 0 else one["mean"] <= -goal
        lines.append(
            f"| {words} | {one['mean']:.4f} ± {one['deviation']:.4f}, {row['seeds']} seeds | {'yes' if met else 'no'} |"
        )
    for experiment in TABLES:
        first = read(experiment)["first_in_time"]
        if first is None or first["first"] is None:
            found, met = "none reached it with every seed", "open"
        else:
            times = first["seconds"]
            found = " and ".join(
                f"{name} after {times[name]['mean']:.2g} ± {times[name]['standard_error']:.1g} s"
                for name in dict.fromkeys((first["first"], first["ours"]))
                if name is not None
            )
            met = "yes" if first["held"] else "no"
        lines.append(f"| {experiment}: one of ours first in time to target | {found} | {met} |")
    return "\n".join(lines)


def paper_accuracy(row: dict[str, Any]) -> float | None:
    return None if row["paper"] is None or "carried" in row["method"] else row["paper"]["test_accuracy"]


def printed_accuracy(row: dict[str, Any]) -> float | None:
    return None if row["paper"] is None or "carried" in row["method"] else (row["printed"] or {}).get("test_accuracy")


def fair_accuracy(row: dict[str, Any]) -> float | None:
    """Of the paper's own methods: that of the run's theta in the distillation, as in the paper."""
    metrics = (row["fair"] or {}).get("metrics", {})
    found = metrics.get("test_accuracy", metrics.get("loop_test_accuracy"))
    return None if found is None or row["paper"] is None else found["mean"]


class Ranking(NamedTuple):
    """The place of the paper's method, of how many, its accuracy, and how far that is behind the best."""

    place: int
    methods: int
    accuracy: float
    behind: float


def ranking(result: dict[str, Any], value: Callable[[dict[str, Any]], float | None]) -> Ranking:
    """By an accuracy of each row."""
    known = {row["method"]: found for row in result["rows"] if (found := value(row)) is not None}
    own = known["nhgd-paper"]
    return Ranking(1 + sum(other > own for other in known.values()), len(known), own, max(known.values()) - own)


def said(one: Ranking) -> str:
    return f"{one.accuracy:.4f}, place {one.place} of {one.methods}"


def carried_over(result: dict[str, Any]) -> str:
    """What became of the carried inverse: where it ended a run, or its outer loss beside that of the one begun afresh."""
    rows = {row["method"]: row["printed"] for row in result["rows"]}
    carried, reset = next(row for name, row in rows.items() if "carried" in name), rows["nhgd-paper"]
    if carried["failed"]:
        return f"{result['experiment']}: non-finite at outer step {carried['steps'] + 1}"
    return (
        f"{result['experiment']}: outer loss {carried['outer_loss']:.2g} against {reset['outer_loss']:.2g} begun afresh"
    )


def objective(result: dict[str, Any], method: str) -> str:
    row = next(row["fair"] for row in result["rows"] if row["method"] == method)
    return f"{row['metrics']['objective_net']['mean']:.4f}"


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


def adopted(before: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """A result with the parts that a later one has measured in their place.

    Methods of the fair protocol are compared with each other, so that part is taken as a whole. Of the printed settings a
    row stays that the later result has not reached, or reached in fewer outer steps.
    """
    found = json.loads(json.dumps(before))
    rows = {row["method"]: row for row in found["rows"]}
    for row in new["rows"]:
        own = rows.setdefault(row["method"], {**row, "printed": None, "fair": None})
        if row["printed"] and (not own["printed"] or row["printed"].get("steps", 0) >= own["printed"].get("steps", 0)):
            own["printed"] = row["printed"]
    found["rows"] = list(rows.values())
    parts = {name for name in ("printed", "fair") if any(row[name] for row in new["rows"])}
    if "fair" in parts:
        later = {row["method"]: row["fair"] for row in new["rows"]}
        for row in found["rows"]:
            row["fair"] = later.get(row["method"])
        known = set(new["protocols"]["fair"].get("known", ()))
        found["tuning"] = [one for one in before["tuning"] if one["method"] in known] + new["tuning"]
        found["first_in_time"] = new["first_in_time"]
    if any(len(row) > 1 for row in new["own"]):
        parts.add("own")
        found["own"] = new["own"]
    stages = {"printed": ("printed",), "fair": ("grid", "seeds"), "own": ("own",)}
    for part in parts:
        found["protocols"][part] = new["protocols"][part]
        for stage in stages[part]:
            for place in ("runs", "notes"):
                if stage in new[place]:
                    found[place][stage] = new[place][stage]
        if part in new["curves"]:
            found["curves"][part] = found["curves"].get(part, {}) | new["curves"][part]
    found["complete"] = all(one["done"] == one["wanted"] for one in found["runs"].values())
    return found | {name: new[name] for name in ("seconds", "load", "environment", "open", "jobs", "beside") if parts}


def adopt(out: Path) -> list[str]:
    """Take over what a folder of `benchmarks.card` holds; the experiments of which there was something."""
    names = []
    for experiment in TABLES:
        path = out / experiment / f"{experiment}.json"
        if path.exists():
            found = adopted(read(experiment), json.loads(path.read_text(encoding="utf-8")))
            (FOLDER / f"{experiment}.json").write_text(as_json(found), encoding="utf-8")
            names.append(experiment)
    path = out / "parallel" / "parallel.json"
    if path.exists():
        on_gpu = json.loads(path.read_text(encoding="utf-8"))["device"].startswith("cuda")
        names.append("parallel-h200" if on_gpu else "parallel")
        shutil.copy(path, FOLDER / f"{names[-1]}.json")
    return names


def main() -> None:
    """The figures of the fair protocol, for the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", help="a folder of benchmarks.card, to be taken over first")
    out = parser.parse_args().out
    if out is not None:
        print("taken over:", ", ".join(adopt(out)))
    with tempfile.TemporaryDirectory() as folder:
        for experiment in TABLES:
            for path in draw(Path(folder), read(experiment), ["png"]):
                if path.stem == "fair":
                    shutil.copy(path, DOCS / f"reproduction-{experiment}.png")


if __name__ == "__main__":
    main()
