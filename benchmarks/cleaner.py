"""LabelCleaner and cleanlab, both with their defaults, on six tables with two kinds of noise at three rates.

    python -m benchmarks.cleaner benchmarks/results/cleaner-cpu.json --cleanlab-python PYTHON --jobs 16
    python -m benchmarks.cleaner benchmarks/results/cleaner-cpu.json --part cleanlab --cleanlab-python PYTHON
    python -m benchmarks.cleaner benchmarks/results/cleaner-cpu.json --part ours --again --jobs 16
    python -m benchmarks.cleaner benchmarks/results/cleaner-cpu.json --figure docs/cleaner.png      draws what was measured

A tenth of each class, two samples at least, is set aside with right labels: the trusted set. Some labels of the others are made
wrong: "uniform" gives a fraction of them a random class, possibly the right one, "pair" the next class. Three candidates look
for them: LabelCleaner without a trusted set, LabelCleaner with it, and cleanlab's `find_label_issues` from 5-fold logistic
regression (benchmarks/cleanlab_reference.py, run by the Python you name, or by this one). The measure is the F1 of finding the
wrong labels. A cell is a table with a kind and a rate of noise. On the small tables cleanlab is also given a logistic
regression with a ten times stronger ridge (C = 0.1), which suits tables with many features and few rows.

`steps` holds the F1 after 40, 80, 150 and 300 outer steps on breast cancer with 20 % wrong labels. What the file has already is
not measured again, so an interrupted run can be continued, and cleanlab's part can be measured on a machine that has it and
ours on another; `--again` measures ours anew.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, load_wine, make_classification

from benchmarks.environment import environment
from nhgd.plot.figure import figure
from nhgd.sklearn.cleaner import LabelCleaner, NoTrustedSetWarning
from nhgd.task._overfitting import OverfittingWarning

Array = np.ndarray[Any, Any]
KINDS, RATES = ("uniform", "pair"), (0.1, 0.2, 0.4)
SMALL = ("breast cancer", "wine", "iris")
STEPS = (40, 80, 150, 300)
RIDGED = 0.1  # C of the second logistic regression for cleanlab
OURS = ("f1", "cpu_seconds", "f1_trusted", "cpu_seconds_trusted")
KEY = ("table", "noise", "rate", "seed")
Key = tuple[str, str, float, int]
WAYS = {"f1": "LabelCleaner, none", "f1_trusted": "LabelCleaner, trusted set", "f1_cleanlab": "cleanlab"}


def covertype_like(rows: int = 2000, seed: int = 7) -> tuple[Array, Array]:
    """Ten numbers and two one-hot columns that tell seven unequal classes about as badly as those of the forest covers."""
    rng = np.random.default_rng(seed)
    share = np.array([0.365, 0.488, 0.062, 0.01, 0.02, 0.025, 0.03])
    y = rng.choice(7, size=rows, p=share / share.sum())

    def by_class(*values: float) -> Array:
        found: Array = np.array(values)[y]
        return found

    elevation = by_class(3128, 2920, 2394, 2223, 2787, 2419, 3361)
    elevation = elevation + by_class(157, 186, 196, 102, 96, 189, 108) * rng.normal(size=rows)
    aspect = rng.uniform(0, 360, rows)
    slope = np.clip(rng.gamma(3, 5, rows) + by_class(0, 0, 6, 4, 2, 5, 0), 0, 60)
    water = rng.gamma(1.5, 180, rows) * by_class(1, 1, 0.8, 0.4, 0.8, 0.6, 1.3)
    above_water = 0.2 * water + 30 * rng.normal(size=rows)
    road = rng.gamma(2.2, 1000, rows) * by_class(1.2, 1.1, 0.45, 0.4, 0.6, 0.5, 1.2)
    fire = rng.gamma(2, 1000, rows) * by_class(1, 1.1, 0.45, 0.4, 0.8, 0.5, 1)
    shade = [
        220 + 1.25 * np.sin(np.deg2rad(aspect + turn)) * slope + 8 * rng.normal(size=rows) for turn in (0, 90, 180)
    ]
    areas = np.array(
        [
            [0.5, 0.1, 0.4, 0],
            [0.52, 0.03, 0.44, 0.01],
            [0, 0, 0.4, 0.6],
            [0, 0, 0, 1],
            [0.4, 0, 0.6, 0],
            [0, 0, 0.44, 0.56],
            [0.25, 0.11, 0.64, 0],
        ]
    )
    soils = 0.5 * rng.dirichlet(np.full(40, 0.25), size=7) + 0.5 * rng.dirichlet(np.full(40, 0.6))
    area = np.eye(4)[[rng.choice(4, p=areas[c]) for c in y]]
    soil = np.eye(40)[[rng.choice(40, p=soils[c]) for c in y]]
    return np.column_stack([elevation, aspect, slope, water, above_water, road, fire, *shade, area, soil]), y


@cache
def tables() -> dict[str, tuple[Array, Array]]:
    """Features and right labels."""
    imbalanced = make_classification(
        1500, 20, n_informative=8, n_redundant=4, n_classes=3, weights=[0.8, 0.15, 0.05], class_sep=1.5, flip_y=0,
        random_state=3,
    )  # fmt: skip
    return {
        "breast cancer": load_breast_cancer(return_X_y=True),
        "wine": load_wine(return_X_y=True),
        "iris": load_iris(return_X_y=True),
        "digits": load_digits(return_X_y=True),
        "covertype-like": covertype_like(),
        "imbalanced": imbalanced,
    }


def spoilt(X: Array, y: Array, kind: str, rate: float, seed: int) -> tuple[Array, Array, Array, Array, Array]:
    """Samples, noisy labels, which are wrong, and the trusted set."""
    classes = int(y.max()) + 1
    rng = np.random.default_rng([seed, round(100 * rate), KINDS.index(kind)])
    members = [rng.permutation(np.flatnonzero(y == c)) for c in range(classes)]
    trusted = np.concatenate([mine[: max(2, round(0.1 * len(mine)))] for mine in members])
    rest = rng.permutation(np.setdiff1d(np.arange(len(y)), trusted))
    noisy = y[rest].copy()
    touched = rng.permutation(len(rest))[: round(rate * len(rest))]
    noisy[touched] = rng.integers(0, classes, len(touched)) if kind == "uniform" else (noisy[touched] + 1) % classes
    return X[rest], noisy, noisy != y[rest], X[trusted], y[trusted]


def f1(found: Array, wrong: Array) -> float:
    return float(2 * (found & wrong).sum() / max(found.sum() + wrong.sum(), 1))


def suspects(X: Array, y: Array, *trusted: Array, **settings: Any) -> Array:
    """Whom LabelCleaner suspects."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoTrustedSetWarning)
        warnings.simplefilter("ignore", OverfittingWarning)
        found: Array = LabelCleaner(**settings).fit(X, y, *trusted).weights_ < 0.5
    return found


def keys(seeds: int, large_seeds: int) -> Iterator[Key]:
    """Cells and seeds, all cells of a seed before the next, so that what was broken off is even."""
    for seed in range(max(seeds, large_seeds)):
        for name in tables():
            if seed < (seeds if name in SMALL else large_seeds):
                yield from ((name, kind, rate, seed) for kind in KINDS for rate in RATES)


def measure_cleanlab(wanted: list[Key], python: str, strength: float = 1.0) -> dict[Key, float]:
    """Its F1 of each cell and seed, in one process of its own."""
    data, wrongs, found = tables(), {}, {}
    with tempfile.TemporaryDirectory() as place:
        for i, (name, kind, rate, seed) in enumerate(wanted):
            X, y, wrongs[i], _, _ = spoilt(*data[name], kind, rate, seed)
            np.savez(Path(place) / f"{i}.npz", X=X, y=y, seed=seed)
        script = Path(__file__).with_name("cleanlab_reference.py")
        subprocess.run([python, str(script), place, str(strength)], check=True, env={**os.environ, "PYTHONPATH": ""})
        for i, key in enumerate(wanted):
            found[key] = f1(np.load(Path(place) / f"{i}.npy"), wrongs[i])
    return found


def measure(key: Key) -> dict[str, float]:
    """LabelCleaner's F1 and seconds, without a trusted set and with it."""
    name, kind, rate, seed = key
    x, noisy, wrong, *trusted = spoilt(*tables()[name], kind, rate, seed)
    found = {}
    for ending, given in (("", ()), ("_trusted", trusted)):
        started = time.process_time()
        found[f"f1{ending}"] = f1(suspects(x, noisy, *given, random_state=seed), wrong)
        found[f"cpu_seconds{ending}"] = time.process_time() - started
    return found


def measure_steps(key: tuple[int, int]) -> dict[str, Any]:
    """F1 of a seed and a number of outer steps."""
    seed, steps = key
    x, noisy, wrong, *trusted = spoilt(*tables()["breast cancer"], "pair", 0.2, seed)
    row: dict[str, Any] = {"steps": steps, "seed": seed}
    for ending, given in (("", ()), ("_trusted", trusted)):
        row[f"f1{ending}"] = f1(suspects(x, noisy, *given, steps=steps, random_state=seed), wrong)
    return row


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means of all cells; where a cell is worse than cleanlab, or with a trusted set than without, by more than is allowed."""
    rows = [row for row in rows if {*OURS, "f1_cleanlab"} <= set(row)]
    cells = {}
    for key in dict.fromkeys((row["table"], row["noise"], row["rate"]) for row in rows):
        mine = [row for row in rows if (row["table"], row["noise"], row["rate"]) == key]
        values = {way: np.array([row[way] for row in mine]) for way in WAYS}
        cells[key] = {way: float(v.mean()) for way, v in values.items()} | {"seeds": len(mine)}
        for name, a, b in (("over_cleanlab", "f1", "f1_cleanlab"), ("trusted_over_none", "f1_trusted", "f1")):
            gain = values[a] - values[b]
            error = float(gain.std(ddof=1) / len(gain) ** 0.5) if len(gain) > 1 else None
            cells[key] |= {name: float(gain.mean()), f"{name}_error": error}
    below = [key for key, c in cells.items() if c["over_cleanlab"] < -max(0.02, 2 * _known(c["over_cleanlab_error"]))]
    worse = [key for key, c in cells.items() if c["trusted_over_none"] < -2 * _known(c["trusted_over_none_error"])]
    return {
        "mean": {way: float(np.mean([c[way] for c in cells.values()])) for way in WAYS},
        "below_cleanlab": [list(key) for key in below],
        "worse_with_trusted_set": [list(key) for key in worse],
        "cells": [{"table": key[0], "noise": key[1], "rate": key[2]} | c for key, c in cells.items()],
    }


def _known(error: float | None) -> float:
    return 0.0 if error is None else error


def table(result: dict[str, Any]) -> list[str]:
    """A line for each cell."""
    lines = [
        "| table | noise | LabelCleaner, none | LabelCleaner, trusted set | cleanlab | seeds |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for c in result["summary"]["cells"]:
        means = " | ".join(f"{c[way]:.3f}" for way in WAYS)
        lines.append(f"| {c['table']} | {c['noise']} {c['rate']:.0%} | {means} | {c['seeds']} |")
    means = " | ".join(f"{result['summary']['mean'][way]:.3f}" for way in WAYS)
    return [*lines, f"| all cells | | {means} | |"]


def small_table(result: dict[str, Any]) -> list[str]:
    """The cells of small tables, with the stronger ridge for cleanlab, and in how many seeds that is no worse."""
    lines = [
        f"| table | noise | LabelCleaner, none | cleanlab | cleanlab, C = {RIDGED} | seeds where cleanlab, C = {RIDGED}, is as"
        " good or better |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for c in result["summary"]["cells"]:
        key = ("table", "noise", "rate")
        rows = [row for row in result["rows"] if all(row[name] == c[name] for name in key)]
        if c["table"] in SMALL:
            ridged = float(np.mean([row["f1_cleanlab_ridged"] for row in rows]))
            wins = sum(row["f1_cleanlab_ridged"] >= row["f1"] for row in rows)
            means = " | ".join(f"{value:.3f}" for value in (c["f1"], c["f1_cleanlab"], ridged))
            lines.append(f"| {c['table']} | {c['noise']} {c['rate']:.0%} | {means} | {wins} of {len(rows)} |")
    return lines


def steps_table(result: dict[str, Any]) -> list[str]:
    """A column for each number of outer steps."""
    lines = [f"| outer steps | {' | '.join(map(str, STEPS))} |", "| --- |" + " --- |" * len(STEPS)]
    for way in ("f1", "f1_trusted"):
        means = [np.mean([row[way] for row in result["steps"] if row["steps"] == steps]) for steps in STEPS]
        lines.append(f"| {WAYS[way]} | {' | '.join(f'{mean:.3f}' for mean in means)} |")
    return lines


def draw(result: dict[str, Any], path: Path) -> None:
    """The three ways in every cell, and what the number of outer steps does."""
    cells = result["summary"]["cells"]
    names = list(dict.fromkeys(c["table"] for c in cells))
    drawing = figure(3.2 * 3, 2.6 * 2 + 2.4)
    panels = drawing.subplots(3, 3)
    for panel, name in zip(panels.flat[: len(names)], names, strict=True):
        for way, colour in zip(WAYS, ("tab:blue", "tab:green", "tab:red"), strict=True):
            for kind, line in (("uniform", "-"), ("pair", "--")):
                mine = [c for c in cells if c["table"] == name and c["noise"] == kind]
                values = [c[way] for c in mine]
                panel.plot(
                    [c["rate"] for c in mine],
                    values,
                    line,
                    marker="o",
                    ms=3,
                    color=colour,
                    label=f"{WAYS[way]}, {kind}",
                )
        panel.set(title=name, ylim=(0, 1.02), xticks=RATES)
    panels[0, 0].set_ylabel("F1")
    panels[1, 0].set_ylabel("F1")
    steps = panels[2, 0]
    for way, colour in (("f1", "tab:blue"), ("f1_trusted", "tab:green")):
        means = [np.mean([row[way] for row in result["steps"] if row["steps"] == s]) for s in STEPS]
        steps.plot(STEPS, means, "-o", ms=3, color=colour)
    steps.set(
        title="breast cancer, 20 %", xlabel="outer steps", ylabel="F1", ylim=(0, 1.02), xscale="log", xticks=STEPS
    )
    steps.set_xticklabels(STEPS)
    steps.minorticks_off()
    for panel in panels.flat[len(names) + 1 :]:
        panel.axis("off")
    panels[1, 1].set_xlabel("noise")
    drawing.legend(*panels[0, 0].get_legend_handles_labels(), loc="lower right", fontsize=9, ncols=2)
    drawing.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=20, help="of breast cancer, wine and iris")
    parser.add_argument("--large-seeds", type=int, default=5, help="of the other tables")
    parser.add_argument("--step-seeds", type=int, default=3, help="of the numbers of outer steps")
    parser.add_argument("--cleanlab-python", default=sys.executable, help="a Python that has cleanlab and scikit-learn")
    parser.add_argument("--part", choices=("all", "cleanlab", "ours"), default="all", help="what to measure")
    parser.add_argument("--again", action="store_true", help="measure ours anew")
    parser.add_argument("--jobs", type=int, default=1, help="processes for ours, of one thread each")
    parser.add_argument("--figure", type=Path, help="draw what the file holds, and measure nothing")
    options = parser.parse_args()
    result: dict[str, Any] = {"rows": [], "steps": []}
    if options.out.exists():
        result = json.loads(options.out.read_text(encoding="utf-8"))
    if options.figure is not None:
        draw(result, options.figure)
        return
    if options.again:
        result["steps"] = []
        for row in result["rows"]:
            for name in OURS:
                row.pop(name, None)
    rows = {tuple(row[name] for name in KEY): row for row in result["rows"]}
    for key in keys(options.seeds, options.large_seeds):
        rows.setdefault(key, dict(zip(KEY, key, strict=True)))
    result["rows"] = list(rows.values())
    if options.part != "ours":
        for column, strength in (("f1_cleanlab", 1.0), ("f1_cleanlab_ridged", RIDGED)):
            some = SMALL if strength == RIDGED else tables()
            lacking = [key for key, row in rows.items() if column not in row and row["table"] in some]
            for key, found in measure_cleanlab(lacking, options.cleanlab_python, strength).items():
                rows[key][column] = found
            _write(options.out, result)
    if options.part != "cleanlab":
        result["environment"] = environment(torch.device("cpu"))
        context = get_context("spawn")
        with ProcessPoolExecutor(options.jobs, context, torch.set_num_threads, (1,)) as pool:
            lacking = [key for key, row in rows.items() if not set(OURS) <= set(row)]
            for key, ours in zip(lacking, pool.map(measure, lacking), strict=True):
                rows[key] |= ours
                _write(options.out, result)
                shown = {name: round(v, 3) if isinstance(v, float) else v for name, v in rows[key].items()}
                print(shown, flush=True)
            if not result["steps"]:
                wanted = [(seed, steps) for seed in range(options.step_seeds) for steps in STEPS]
                result["steps"] = list(pool.map(measure_steps, wanted))
    _write(options.out, result)
    print("\n".join(table(result)))
    print({name: result["summary"][name] for name in ("mean", "below_cleanlab", "worse_with_trusted_set")})


def _write(path: Path, result: dict[str, Any]) -> None:
    result["summary"] = summary(result["rows"])
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
