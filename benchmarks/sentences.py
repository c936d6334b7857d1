"""What sentences of the documentation say of measurements, made from the committed JSON; tests/test_numbers.py compares.

`measured` has, by page, pieces of text with their numbers filled in. A sentence with a new number gets a line here, or
the number stays out.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

from benchmarks import reproduction
from benchmarks.tables import read
from nhgd.loop.horizon import POWER
from nhgd.paper import TABLE

WORDS = ["none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def measured() -> dict[str, list[str]]:
    """Pieces of text by the page that has them."""
    return {
        "benchmarks/parallel.md": [*on_two_cores(), *on_one_gpu(), *by_arithmetic()],
        "docs/choosing.md": [*horizons(), *errors(), *digits()],
        "docs/methods.md": [
            lagged_cross(),
            ten_seeds("sinusoids", "zoo-sinusoids-cpu.jsonl"),
            ten_seeds("representation-conv", "zoo-representation-cpu.jsonl"),
        ],
        "docs/reproduction.md": reproduced(),
        "docs/scale.md": scaled(),
        "docs/pde.md": [bounds()],
        "CHANGELOG.md": [captured()],
        "README.md": [replayed_on_the_cpu()],
    }


def digits() -> list[str]:
    found = read("precision-cpu.json")["precision"]
    against = found["against_float64"]
    errors = [100 * against[name]["relative_error"] for name in ("autocast", "bfloat16")]
    assert against["float32"]["relative_error"] < 1e-5
    assert 0.9e6 < found["parameters"] < 1.1e6
    return [
        f"differs from that in float64 by {errors[0]:.1f} % of its length under autocast, and by {errors[1]:.1f} % with",
        f"its cosine with the whole one is {against['block']['cosine']:.3f}",
    ]


def scaled() -> list[str]:
    found = read("float16-cpu.json")["float16"]
    assert 0.9e6 < found["parameters"] < 1.1e6
    of, small = (
        {name: 100 * row["relative_error"] for name, row in found[kind].items()} for kind in ("losses", "small losses")
    )
    kept = max(row["relative_error"] for row in found["kept"].values())
    bound = next(f"{10.0**-power:.{power}f}" for power in range(6, 0, -1) if 100 * kept < 10.0**-power)
    return [
        f"differs by less than {bound} % of its length on that transformer",
        f"differs from that in float64 by {of['bfloat16']:.2f} % of its",
        f"under bfloat16, and by {of['float16 with a scaler']:.2f} % under float16 with a scaler",
        f"wrong by {small['float16']:.1f} %, and with a scaler by {small['float16 with a scaler']:.2f} %",
    ]


def reproduced() -> list[str]:
    """Of the paper's tables, measured again: what their rows have, what was not reached, and who was first."""
    found = {name: reproduction.read(name) for name in reproduction.TABLES}
    cleaning, hundred = found["cleaning"], found["distillation-100"]
    steps = [row["printed"]["steps"] for row in cleaning["rows"] if row["printed"] and not row["printed"]["failed"]]
    chosen = sum(row.alpha == 1 for row in TABLE["cleaning"].values())
    wider = sum(one["key"] == "outer_lr" and one["edge"] == "largest" for one in cleaning["tuning"])
    said = [
        f"{cleaning['jobs'] + cleaning['beside']} runs shared the card",
        f"{WORDS[chosen].capitalize()} rows of the cleaning table were chosen there",
        f"{WORDS[wider]} methods of the cleaning table wanted ever larger steps",
        f"take from {min(steps)} to {max(steps):,} outer steps of the cleaning problem",
        *(left_out(name, one) for name, one in found.items()),
    ]
    for one in (cleaning, hundred):
        first = one["first_in_time"]
        if first["held"]:
            continue
        rows = {row["method"]: row["fair"] for row in one["rows"] if row["fair"]}
        there, ours = (rows[first[key]]["to_target"] for key in ("first", "ours"))
        said.append(
            f"`{first['first']}` gets there by outer step {there['step']:g}, `{first['ours']}` by outer step {ours['step']:g}"
        )
        said.append(
            f"`{first['ours']}` took {rows[first['ours']]['steps']:,.0f} outer steps in its time, `{first['first']}`"
            f" {rows[first['first']]['steps']:,.0f}"
        )
    return said


def left_out(name: str, found: dict[str, Any]) -> str:
    """The rows of the paper's settings that have no run."""
    missing = [f"`{row['method']}`" for row in found["rows"] if row["paper"] and not row["printed"]]
    if not missing:
        return f"Of {name} every row of the paper was reached"
    several = f"{', '.join(missing[:-1])} and {missing[-1]}" if len(missing) > 1 else missing[0]
    return f"Of {name} there was no time for {several}"


def on_two_cores() -> list[str]:
    found = {run["method"]: {row["execution"]: row for row in run["rows"]} for run in read("bench-cleaning-cpu.json")}
    window, kfac = found["nhgd-window"], found["nhgd"]
    gains = [window[name]["speedup"] for name in ("thread", "distributed")]
    share = kfac["inline"]["curvature_milliseconds"] / kfac["inline"]["inner_milliseconds"]
    assert window["inline"]["curvature_milliseconds"] > 0.5 * window["inline"]["milliseconds"]
    assert 1 / 15 < share < 1 / 12
    return [f"`thread` gains {gains[0]:.2f} times and `distributed` {gains[1]:.2f} times with `nhgd-window`"]


def on_one_gpu() -> list[str]:
    runs = [read(f"streams-h200{run}.json")["rows"] for run in ("", "-run2", "-run3")]
    room = [row["ratio"] for run in runs for row in run if "beside" in row["case"] and row["floor"] == 1]
    small, middle, large = (row for row in runs[0] if "beside" in row["case"])
    alone = [busy(row, "curvature") for row in (small, middle, large)]
    inner = [busy(row, "inner") for row in (small, middle, large)]
    fast = next(row for row in runs[2] if row["case"] == middle["case"] and row["batch"] == middle["batch"])
    return [
        f"comes within {100 * min(room) - 100:.0f} to {100 * max(room) - 100:.0f} % of perfect overlap",
        f"for {alone[0]:.0f} ms of an outer step at batch 256, {alone[1]:.0f} at 1,024 and {alone[2]:.0f} at 8,192; the"
        f" kernels of the inner loop for {inner[0]:.0f}, {inner[1]:.0f} and {inner[2]:.0f}.",
        f"idle for {100 - 100 * middle['busy']['curvature']:.0f} % of its time, and hardly any on a fast one, where it is"
        f" {100 - 100 * fast['busy']['curvature']:.0f} %",
        f"nearly the sum of the two ({busy(middle, 'stream'):.0f} of {alone[1] + inner[1]:.0f} ms)",
        f"the sum is {large['floor']:.2f} times the curvature alone, and {large['ratio']:.2f} was measured",
    ]


def busy(row: dict[str, Any], part: str) -> float:
    """Milliseconds of kernels."""
    return float(row["busy"][part] * row["milliseconds"][part])


def by_arithmetic() -> list[str]:
    from benchmarks import scaling
    from benchmarks.tables import ROOT

    machine = scaling.read_machines(ROOT / "benchmarks/results")[1]
    shown = scaling.second_device_table(machine).split("x ")[1:]
    gains = [float(part.split()[0]) for part in shown]
    net = next(net for net in scaling.NETS if "transformer" in net.name)
    summed = 1e3 * scaling.all_reduce(scaling.NUMBER * net.factor_numbers(), 1024)
    return [
        f"a second GPU gains {min(gains):.1f} to {max(gains):.1f} times",
        f"into the sum of the factors, about {summed:.0f} ms",
    ]


def horizons() -> list[str]:
    """m for three values of rho, by its formula."""
    m = {rho: ((1 + rho) / (1 - rho)) ** POWER for rho in (0.4, 0.98, 0.998)}
    ends = ("x turns at every step", "it weighs samples: x persists", "it has nearly settled")
    return [f"{end} | {rho} | {m[rho]:{form}} |" for end, rho, form in zip(ends, m, (".1f", ".0f", ".0f"), strict=True)]


def errors() -> list[str]:
    rows = {row["inverse"]: row for row in read("cleaning-inverses-h200.json")["errors"][0]["rows"]}
    cosine, error = rows["kfac"]["cosine"], rows["kfac"]["relative_error"]
    length = cosine + sqrt(cosine**2 - 1 + error**2)  # of x, from |x - x*|^2 = |x|^2 - 2 |x| cosine + 1
    assert round(length) == 2
    nearer = round(rows["cg, 40"]["relative_error"] / rows["refined(kfac, 5)"]["relative_error"])
    products = [place["reference"]["hvps"] for place in read("cleaning-inverses-h200.json")["errors"]]
    return [
        f"to a residual of 1e-11, which took {products[0]} and {products[1]} products",
        "Plain K-FAC has the right direction and about twice the right length.",
        f"Five come {WORDS[nearer]} times nearer to the truth than forty of plain conjugate gradients",
    ]


def lagged_cross() -> str:
    models = read("overhead-cpu.json")["models"].values()
    loops = [
        model["methods"]["nhgd without curvature"]["seconds"] / model["methods"]["aid-identity"]["seconds"]
        for model in models
    ]
    return f"With ten of them the loop takes {min(loops):.1f} to {max(loops):.1f} times the CPU time"


def ten_seeds(problem: str, file: str) -> str:
    from benchmarks.tables import ROOT
    from benchmarks.zoo.runs import read as read_runs
    from benchmarks.zoo.table import OURS, RIVALS, cells

    found = cells(read_runs(ROOT / "benchmarks/results" / file))[problem]
    assert all(cell.seeds == 10 for cell in found.values())
    second = min((name for name in RIVALS if name in found), key=lambda name: found[name].loss)
    ours, other = found[OURS], found[second]
    return (
        f"with ten seeds `{OURS}` has {ours.loss:.3f} ± {ours.spread:.3f} and the best of the others, `{second}`,"
        f" {other.loss:.3f} ± {other.spread:.3f}"
    )


def bounds() -> str:
    from nhgd.task.pde.control import continuous, on_grid

    return (
        f"the least that either can be: {on_grid(1e-3).bound():.4f} and {continuous(1e-3).bound():.4f} for nu = 0.001"
    )


def captured() -> str:
    methods = read("captured-h200.json")["methods"]
    ms = {name: methods[name]["graph"]["milliseconds"] for name in ("nhgd", "aid-identity", "aid-cg-10")}
    return (
        f"takes {ms['nhgd']:.1f} ms with `nhgd`, {ms['aid-identity']:.2f} with `aid-identity` and {ms['aid-cg-10']:.1f} with"
        " `aid-cg-10`"
    )


def replayed_on_the_cpu() -> str:
    found = read("floor-cpu.json")["ways"]
    eager, replayed = (found[name]["ratio"] for name in ("nhgd", "nhgd, captured"))
    return (
        f"an outer step of `nhgd` takes {eager:.2f} times the CPU time of a loop written by hand in plain torch, and"
        f' {replayed:.2f} times with `compile="graph"`'
    )
