"""The result of a comparison: rows, their summary, and what can be made of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from nhgd._results import jsonable
from nhgd.comparison import choice, formats
from nhgd.comparison.bands import AXES, HIGH, LOW, PART, Band, band, quantile, rises, targets_of, to_target
from nhgd.comparison.store import RESULT
from nhgd.comparison.trial import Run
from nhgd.errors import InputError
from nhgd.plot import comparison as pictures

_KEPT_APART = ("points", "described", "environment", "compile", "evaluated_every")


class Table:
    """What `nhgd.bench` found.

    Attributes:
        about: what was compared: task, preset, budget, device, metrics and more.
        runs: everything that is known of each run.

    Args:
        about, runs: as above.
        target: a metric of the curves and the value that counts as reached; None: nine tenths of the way from each
            seed's start to its best.
    """

    def __init__(self, about: Mapping[str, Any], runs: Sequence[Run], target: tuple[str, float] | None = None) -> None:
        self.about = dict(about)
        self.runs = list(runs)
        self._target = target

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """One for each run: method, seed, settings, metrics, seconds, oracle_calls, steps, step_cost, error and
        more.
        """
        return [{key: value for key, value in run.items() if key not in _KEPT_APART} for run in self.runs]

    @cached_property
    def chosen(self) -> dict[str, list[Run]]:
        """The runs of each method with the settings that its selection metric chose."""
        return {name: choice.chosen(own, self.about["selection"]) for name, own in choice.by_method(self.runs).items()}

    @cached_property
    def summary(self) -> list[dict[str, Any]]:
        """For each method and metric the mean over the seeds, the sample deviation, the median and the 20-80 % band."""
        rows = []
        for method, runs in self.chosen.items():
            names = dict.fromkeys(name for run in runs for name in run["metrics"])
            for name in names:
                values = [value for run in runs if (value := run["metrics"].get(name)) is not None]
                if values:
                    rows.append({"method": method, "metric": name} | _statistics(values) | {"runs": len(runs)})
        return rows

    @cached_property
    def costs(self) -> list[dict[str, Any]]:
        """For each method the settings chosen, the runs that failed, and medians of steps and of what one of them
        costs.
        """
        rows = []
        for method, runs in self.chosen.items():
            good = [run for run in runs if run["error"] is None]
            row = {
                "method": method,
                "settings": runs[0]["settings"],
                "runs": len(runs),
                "failed": len(runs) - len(good),
            }
            for name in ("steps", "seconds", "gradients"):
                row[name] = quantile([run[name] for run in good], 0.5) if good else None
            for name in ("seconds", "gradients"):
                row[f"step_{name}"] = quantile([run["step_cost"][name] for run in good], 0.5) if good else None
            rows.append(row | {"error": next((run["error"] for run in runs if run["error"] is not None), None)})
        return rows

    @cached_property
    def target(self) -> dict[str, Any] | None:
        """What counts as reached, and when each method reached it. Without a value each seed has its own, see
        `targets_of`.
        """
        good = {name: [run for run in runs if run["error"] is None] for name, runs in self.chosen.items()}
        metric, value = (self.about["curve"], None) if self._target is None else self._target
        known = dict.fromkeys(name for run in self.runs for point in run["points"] for name in point)
        if known:
            check_metric(metric, [name for name in known if name not in AXES], self.about["task"])
        targets = targets_of(chain(*good.values()), metric)
        if value is not None:
            targets = dict.fromkeys(targets, value)
        if not targets:
            return None
        methods = [{"method": name} | to_target(runs, metric, targets) for name, runs in good.items()]
        return {"metric": metric, "value": value, "part": PART, "rises": rises(metric), "methods": methods}

    @cached_property
    def tried(self) -> list[dict[str, Any]]:
        """Every setting of every method with its mean of the selection metric, and which was chosen."""
        return choice.tried(self.runs, self.about["selection"])

    @cached_property
    def edges(self) -> list[dict[str, Any]]:
        """Where a chosen value lies at the end of what was tried."""
        return choice.edges(self.runs, self.about["selection"])

    @cached_property
    def notes(self) -> list[str]:
        """What a reader should know: optima at the edge of a grid, failures, warnings."""
        found = [choice.edge_sentence(at) for at in self.edges]
        for method, runs in choice.by_method(self.runs).items():
            failed = [run for run in runs if run["error"] is not None]
            if failed:
                found.append(
                    f"{method}: {len(failed)} of {len(runs)} runs failed, the first with: {failed[0]['error']}"
                )
            heard = [run["warnings"][0] for run in runs if run["warnings"]]
            if heard:
                found.append(f"{method}: {len(heard)} of {len(runs)} runs had a warning, the first: {heard[0]}")
        return found

    def bands(self, metric: str | None = None, axis: str = "seconds") -> dict[str, Band]:
        """For each method the median of a metric of the history over an axis, with its 20-80 % band.

        Args:
            metric: default: the one that the task is followed by.
            axis: "seconds", "gradients" (gradient-equivalents) or "step".
        """
        found = {name: band(runs, metric or self.about["curve"], axis) for name, runs in self.chosen.items()}
        return {name: one for name, one in found.items() if one is not None}

    @property
    def complete(self) -> bool:
        """Whether every method has a run that ended well."""
        return all(row["failed"] < row["runs"] for row in self.costs)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the points of each run, in the words of JSON."""
        metrics = dict.fromkeys(name for run in self.runs for point in run["points"] for name in point)
        curves = {name: {axis: self.bands(name, axis) for axis in AXES} for name in metrics if name not in AXES}
        found = {
            **self.about,
            "rows": self.rows,
            "summary": self.summary,
            "costs": self.costs,
            "target": self.target,
            "tried": self.tried,
            "edges": self.edges,
            "notes": self.notes,
            "curves": curves,
            "environment": self.runs[0].get("environment") if self.runs else None,
        }
        plain = jsonable(found)
        assert isinstance(plain, dict)
        return plain

    def to_json(self) -> str:
        """The same as text."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    def to_dataframe(self) -> Any:
        """A pandas DataFrame with one line for each run; settings, metrics and calls are columns."""
        try:
            from pandas import DataFrame
        except ImportError:
            raise InputError("to_dataframe() needs pandas: pip install pandas. table.rows needs nothing.") from None
        return DataFrame([formats.flat(row) for row in self.rows])

    def to_text(self) -> str:
        """Tables for people, in plain text."""
        return formats.text(self)

    def to_csv(self) -> str:
        """The summary as CSV."""
        return formats.csv_of(self.summary)

    def to_latex(self) -> str:
        """The main metrics as a LaTeX table, mean and deviation."""
        return formats.latex(self)

    def plot(self, path: str | Path, metric: str | None = None) -> Path:
        """Draw the curves over seconds and over gradient-equivalents, in the format that the name of the file says."""
        return pictures.draw_curves([Path(path)], self._drawn(metric))[0]

    def plot_bars(self, path: str | Path) -> Path:
        """Draw the task's headline metric of each method."""
        return pictures.draw_bars([Path(path)], self._bars())[0]

    def write(self, write_all: Any, suffixes: Sequence[str]) -> list[str]:
        """Write tables and figures by a function that takes what they are and a function of a folder; their names."""
        texts = {
            RESULT: self.to_json(),
            "summary.csv": self.to_csv(),
            "rows.csv": formats.csv_of([formats.flat(row) for row in self.rows]),
            "table.txt": self.to_text() + "\n",
            "table.tex": self.to_latex(),
        }

        def written(folder: Path) -> list[Path]:
            for name, text in texts.items():
                (folder / name).write_text(text, encoding="utf-8")
            made = [folder / name for name in texts]
            if suffixes and any(self.bands().values()):
                made += pictures.draw_curves([folder / f"curves.{end}" for end in suffixes], self._drawn())
                made += pictures.draw_bars([folder / f"bars.{end}" for end in suffixes], self._bars())
            return made

        return [path.name for path in write_all("The tables and figures", written)]

    def __str__(self) -> str:
        return self.to_text()

    def _repr_html_(self) -> str:
        return formats.html(self)

    def _drawn(self, metric: str | None = None) -> dict[str, Any]:
        name = metric or self.about["curve"]
        panels = {axis: self.bands(name, axis) for axis in ("seconds", "gradients")}
        if not any(panels["seconds"].values()):
            raise InputError(f"No run has a metric {name}. {self.about['task']} is followed by {self.about['curve']}.")
        target = self.target if self.target is not None and self.target["metric"] == name else None
        return {"about": self.about, "metric": name, "panels": panels, "target": target, "costs": self.costs}

    def _bars(self) -> dict[str, Any]:
        name = self.about["headline"]
        rows = [
            row | {"words": formats.mean_and_deviation(row).replace("+-", "±")}
            for row in self.summary
            if row["metric"] == name
        ]
        return {"about": self.about, "metric": name, "rows": rows, "share": rises(name)}


def check_metric(metric: str, known: Sequence[str], task: str) -> None:
    """Refuse a target that no run is followed by."""
    if metric not in known:
        raise InputError(f"The target {metric} is no metric of {task}. It has {', '.join(known)}.")


def _statistics(values: Sequence[float]) -> dict[str, Any]:
    return {
        "mean": fmean(values),
        "deviation": stdev(values) if len(values) > 1 else None,
        "median": quantile(values, 0.5),
        "low": quantile(values, LOW),
        "high": quantile(values, HIGH),
        "seeds": len(values),
    }
