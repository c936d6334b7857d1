"""Which method does best on which problem: the runs of the zoo as a Markdown table and as a figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from benchmarks.zoo.run import START, Record
from nhgd.plot.figure import figure

OURS = "nhgd"
RIVALS = ("aid-identity", "aid-cg-10", "itd", "soba")
MARGIN = 0.1  # of the best loss


@dataclass(frozen=True)
class Cell:
    """A method on a problem, at the outer step size that its selection loss chose.

    Attributes:
        loss, spread: mean and standard deviation of the held-out loss over the seeds; infinite where a run failed.
        score: mean held-out accuracy, where there is one.
        outer_lr: the one that was chosen.
        equivalents: gradient-equivalents of one outer step.
        seconds: of the processor, for one run.
        warned: the part of the runs that warned of something.
        failed: what the first failed run said.
        seeds: how many.
    """

    loss: float
    spread: float
    score: float | None
    outer_lr: float
    equivalents: float
    seconds: float
    warned: float
    failed: str | None
    seeds: int


def loss_of(record: Record, name: str) -> float:
    """A loss of a run; infinite where it failed."""
    value = record.get(f"{name}_loss")
    return value if value is not None and math.isfinite(value) else math.inf


def average(values: Sequence[float]) -> float:
    """The mean, also of infinite values."""
    return mean(values) if all(map(math.isfinite, values)) else math.inf


def cell(records: Sequence[Record]) -> Cell:
    """Choose the outer step size, and tell what it gives."""
    by_rate: dict[float, list[Record]] = {}
    for record in records:
        by_rate.setdefault(record["outer_lr"], []).append(record)
    rate, chosen = min(by_rate.items(), key=lambda pair: average([loss_of(r, "selection") for r in pair[1]]))
    losses = [loss_of(record, "held_out") for record in chosen]
    scores = [record["held_out_score"] for record in chosen if "held_out_score" in record]
    loss = average(losses)
    return Cell(
        loss,
        stdev(losses) if len(losses) > 1 and math.isfinite(loss) else 0.0,
        mean(scores) if len(scores) == len(chosen) else None,
        rate,
        mean(record.get("equivalents_a_step", 0.0) for record in chosen),
        mean(record["cpu_seconds"] for record in chosen),
        mean(float(bool(record["warnings"])) for record in chosen),
        next((record["failed"] for record in chosen if record["failed"]), None),
        len(chosen),
    )


def cells(records: Sequence[Record]) -> dict[str, dict[str, Cell]]:
    """Of every method on every problem, in the order of the runs."""
    found: dict[str, dict[str, list[Record]]] = {}
    for record in records:
        found.setdefault(record["problem"], {}).setdefault(record["method"], []).append(record)
    return {
        problem: {method: cell(runs) for method, runs in methods.items()} for problem, methods in sorted(found.items())
    }


def close(ours: Cell, best: Cell) -> bool:
    """Whether a loss is within a tenth of the best, or within the best one's spread over the seeds."""
    return ours.loss <= best.loss + max(MARGIN * abs(best.loss), best.spread)


def table(records: Sequence[Record], ours: str = OURS) -> str:
    """Held-out losses, the best in bold, and what the zoo is to show of one method."""
    found = cells(records)
    methods = list(dict.fromkeys(method for row in found.values() for method in row))
    methods.sort(key=lambda method: (method != START, method != ours, method not in RIVALS))
    lines = [f"| problem | {' | '.join(methods)} |", "| --- " * (len(methods) + 1) + "|"]
    near, first, silent, dear = [], [], [], []
    for problem, row in found.items():
        best = min((row[method].loss for method in methods if method in row and method != START), default=math.inf)
        lines.append(f"| {problem} | {' | '.join(shown(row.get(method), best) for method in methods)} |")
        rivals = [row[method] for method in RIVALS if method in row]
        if ours not in row or not rivals:
            continue
        mine, rival = row[ours], min(rivals, key=lambda c: c.loss)
        first += [problem] if mine.loss <= rival.loss else []
        if math.isfinite(mine.loss) and close(mine, rival):
            near.append(problem)
        elif mine.warned < 1 and mine.failed is None:
            silent.append(problem)
        if "aid-cg-10" in row and mine.equivalents >= row["aid-cg-10"].equivalents:
            dear.append(problem)
    compared = [problem for problem, row in found.items() if ours in row and any(m in row for m in RIVALS)]
    behind = [problem for problem in compared if problem not in near]
    lines += [
        "",
        f"{ours} beside {', '.join(RIVALS)}, on {len(compared)} problems: within 10 % or the spread of the best on {len(near)},"
        f" the best on {len(first)} ({', '.join(first) or 'none'}); behind on {', '.join(behind) or 'none'};"
        f" behind without a warning on {', '.join(silent) or 'none'}; not cheaper than aid-cg-10 on {', '.join(dear) or 'none'}.",
    ]
    return "\n".join(lines)


def shown(found: Cell | None, best: float) -> str:
    """The loss with its spread, the accuracy, the outer step size, and W where runs warned."""
    if found is None:
        return ""
    if not math.isfinite(found.loss):
        return "failed"
    text = f"{found.loss:.4g}"
    text = f"**{text}**" if found.loss <= best else text
    text += f" ± {found.spread:.2g}" if found.seeds > 1 else ""
    text += f", {100 * found.score:.1f} %" if found.score is not None else ""
    text += f" ({found.outer_lr:g})" if found.outer_lr else ""
    return text + (" W" if found.warned else "")


def draw(records: Sequence[Record], path: Path) -> None:
    """Held-out losses over the best one of each problem."""
    found = cells(records)
    methods = list(dict.fromkeys(method for row in found.values() for method in row if method != START))
    picture = figure(9, 0.45 * len(found) + 1.4)
    axes = picture.subplots()
    for i, row in enumerate(found.values()):
        known = {method: c.loss for method, c in row.items() if method != START and math.isfinite(c.loss)}
        for j, method in enumerate(methods):
            if method in known and min(known.values()) > 0:
                axes.plot(known[method] / min(known.values()), i, "osD^v<>pPX*h"[j % 12], color=f"C{j % 10}", alpha=0.8)
    for j, method in enumerate(methods):
        axes.plot([], [], "osD^v<>pPX*h"[j % 12], color=f"C{j % 10}", label=method)
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.axvline(1 + MARGIN, color="0.7", linewidth=0.8)
    axes.set_xlabel("held-out outer loss, inner problem run on, over the best method's")
    picture.legend(loc="outside upper center", ncols=min(6, len(methods)), fontsize="small")
    picture.savefig(path, dpi=150)
