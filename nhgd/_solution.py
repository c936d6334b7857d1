"""The result of a run: `Solution`, and the rows of its history."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from nhgd._html import table
from nhgd._validation import number
from nhgd.algorithm import AbstractAlgorithm, Loop, StepInfo
from nhgd.errors import InputError
from nhgd.execution.base import Traffic
from nhgd.plot.history import draw_history
from nhgd.record import BATCH_OBJECTIVE
from nhgd.variable import Given

Row: TypeAlias = dict[str, Any]
Metrics: TypeAlias = Callable[[Any, Any], dict[str, float]]


@dataclass(frozen=True, repr=False)
class Solution:
    """The result of a run.

    Attributes:
        v, theta: the objects that were given, trained in place.
        history: one dict for each outer step: step, seconds, outer_loss, inner_loss, hypergradient_norm, the oracle
            calls so far, and the metrics; and of the executor: lag (records that the curvature of the solve lacked),
            largest_lag (the most that were outstanding during the inner loop), inner_seconds, curvature_seconds,
            waited_seconds, overlap (the part of the curvature's time that the inner loop did not wait for) and
            bytes_sent.
        stats: method, steps, seconds, threads (CPU threads that the steps were computed on: one where the largest
            operation is small, unless OMP_NUM_THREADS, MKL_NUM_THREADS or torch.set_num_threads says how many), oracle
            calls, poor_solves (outer steps whose linear solve was in trouble), execution; statistics: "of the batch
            objective" where curvature was learnt from samples that BatchNorm in training mode couples, else None; of
            `nhgd`, cross: the way in which the cross derivative is taken, how v was seen to enter the inner problem
                (role, source), the relative difference from the derivative of
            the gradient's graph on the batch where that was verified, and a note where that graph is needed; compile:
            whether outer steps were repeated as captured work (taken: "graph" or "eager"), and why in a sentence;
            scaler: the scale of the losses, and how many passes overflowed and were taken again, or None; and
                stagnation: a sentence where `run` has got nowhere.
        result: the name of the stop rule that ended the run: "steps", "budget", "plateau", that of a rule of the
            caller's, or "stopped" when the caller's own loop or `stop` ended it.
        metrics: the names of the metrics in the history.
    """

    v: Given
    theta: Given
    history: list[Row]
    stats: dict[str, Any]
    result: str
    metrics: tuple[str, ...] = ()

    def __repr__(self) -> str:
        method, steps, seconds = (self.stats[name] for name in ("method", "steps", "seconds"))
        return f"<Solution by {method}: {steps} outer steps in {seconds:.3g} s, ended by {self.result!r}>"

    def plot(self, path: str | Path | None = None) -> Any:
        """Draw the outer and the inner loss over time.

        Args:
            path: where to write the picture too; its ending says how: .png, .svg or .pdf.

        Returns:
            A Matplotlib figure, which notebooks show.
        """
        return draw_history(None if path is None else Path(path), self.history, self.stats["method"])

    def _repr_html_(self) -> str:
        numbers = self._numbers()
        seconds, calls = self.stats["seconds"], self.stats["oracle_calls"]
        title = f"{self.stats['method']}, {self.stats['steps']} outer steps in {seconds:.3g} s, ended by {self.result}"
        used = ", ".join(f"{name.replace('_', ' ')} {count:,.0f}" for name, count in calls.items() if count)
        notes = [used, self.stats.get("stagnation")]
        return table(("", "first step", "last step"), numbers, title, [note for note in notes if note])

    def _numbers(self) -> list[list[str]]:
        """Losses and metrics in the first and the last row that have them."""
        rows = []
        for name in ("outer_loss", "inner_loss", "hypergradient_norm", *self.metrics):
            known = [row[name] for row in self.history if isinstance(row.get(name), (int, float))]
            if known:
                rows.append([name.replace("_", " "), f"{known[0]:.4g}", f"{known[-1]:.4g}"])
        return rows


def history_row(loop: Loop, info: StepInfo, work: Traffic, total: float, taken: float) -> Row:
    """The row of the outer step that was just taken.

    Args:
        loop: what the step was taken on.
        info: the algorithm's report.
        work: what the executor measured during it.
        total, taken: seconds of all steps, and of this one.
    """
    return {
        "step": loop.clock.k,
        "seconds": total,
        "outer_loss": info.outer_loss,
        "inner_loss": info.inner_loss,
        "hypergradient_norm": info.hypergradient_norm,
        "lag": info.lag,
        "largest_lag": work.largest_lag,
        "inner_seconds": max(0.0, taken - work.waited_seconds),
        "curvature_seconds": work.curvature_seconds,
        "waited_seconds": work.waited_seconds,
        "overlap": work.overlap,
        "bytes_sent": work.bytes_sent,
        **loop.calls.as_dict(),
        **info.notes,
    }


def statistics(algorithm: AbstractAlgorithm, loop: Loop, history: list[Row], seconds: float) -> dict[str, Any]:
    """The `stats` of a solution."""
    executor, traffic = loop.executor, loop.executor.measured()
    return {
        "method": algorithm.name,
        "algorithm": repr(algorithm),
        "inverse": None if loop.inverse is None else repr(loop.inverse),
        "steps": loop.clock.k,
        "seconds": seconds,
        "threads": loop.threads,
        "oracle_calls": loop.calls.as_dict(),
        "poor_solves": sum(bool(row.get("poor_solve")) for row in history),
        "statistics": BATCH_OBJECTIVE if loop.batch_objective else None,
        "stagnation": None,
        "scaler": loop.problem.scaling.summary(),
        **loop.remarks,
        "execution": {
            "name": executor.name,
            "processes": traffic.processes,
            "bytes_sent": traffic.bytes_sent,
            "waited_seconds": traffic.waited_seconds,
            "curvature_seconds": traffic.curvature_seconds,
            "overlap": traffic.overlap,
            "records": traffic.records,
            "max_lag": executor.max_lag if executor.background else 0,
            "largest_lag": max((row.get("largest_lag", 0) for row in history), default=0),
            "workers": loop.division.workers,
            "division": dict(loop.division.found),
        },
    }


def evaluated(metrics: Metrics, loop: Loop) -> dict[str, Any]:
    """The metrics at the current point; buffers, training flags and random numbers do not change."""
    problem = loop.problem
    with (
        loop.computing(),
        problem.guarded(seed=0),
        torch.no_grad(),
        problem.theta.view() as theta,
        problem.v.view() as v,
    ):
        return metric_values(metrics(theta, v))


def metric_values(found: Any) -> dict[str, Any]:
    """The result of metrics(), checked, as Python numbers for the history."""
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        odd = "a dict whose keys are not all text" if isinstance(found, dict) else f"a {type(found).__name__}"
        raise InputError(
            f"metrics() returned {odd}. Return a dict of numbers by name, for example {{'accuracy': 0.9}}."
        )
    return {name: number(value) for name, value in found.items()}
