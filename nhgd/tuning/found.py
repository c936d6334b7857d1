"""What a sweep has found: the best settings, every trial, and how much each setting matters."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nhgd._results import jsonable
from nhgd.comparison.formats import aligned, csv_of, said
from nhgd.errors import InputError
from nhgd.plot import sweep as pictures
from nhgd.tuning.storage import WORKER, optuna

ASKED, ERROR, METRICS, SURPLUS = (f"nhgd:{name}" for name in ("asked", "error", "metrics", "surplus"))
SHOWN = 10  # trials in the text
EDGE = 0.03  # of a range, at its ends


def counted(trials: Iterable[Any]) -> list[Any]:
    """The trials that are part of the sweep: ended, or at work; not those cut off by a kill, nor one too many."""
    found = []
    for trial in trials:
        ended = trial.state.name in ("COMPLETE", "PRUNED") or (trial.state.name == "FAIL" and ERROR in trial.user_attrs)
        if (ended or trial.state.name == "RUNNING") and SURPLUS not in trial.user_attrs:
            found.append(trial)
    return found


@dataclass(frozen=True)
class Found:
    """The result of a sweep.

    Attributes:
        about: what was searched, and how.
        trials: number, state (complete, pruned, failed or running), parameters, value, seconds, metrics and error of
            each.
        best: number, value, metrics, and the parameters of the best trial together with what was set for all; None
            before any has ended well.
        importance: the share of each parameter in the variation of the values; empty where nothing can be said.
    """

    about: Mapping[str, Any]
    trials: Sequence[Mapping[str, Any]]
    best: Mapping[str, Any] | None
    importance: Mapping[str, float]

    @classmethod
    def of(cls, study: Any, about: Mapping[str, Any]) -> Found:
        """From a study of Optuna."""
        rows = [_row(trial) for trial in counted(study.get_trials(deepcopy=False))]
        good = [row for row in rows if row["state"] == "complete"]
        best = None
        if good:
            row = min(good, key=lambda row: row["value"])
            parameters = {**about["settings"], **row["parameters"]}
            best = {"parameters": parameters, **{key: row[key] for key in ("value", "number", "metrics")}}
        return cls(about, rows, best, _importance(study, good))

    def to_dict(self) -> dict[str, Any]:
        """Everything, in the words of JSON."""
        plain = jsonable(
            {**self.about, "best": self.best, "trials": self.trials, "importance": self.importance, "notes": self.notes}
        )
        assert isinstance(plain, dict)
        return plain

    def to_json(self) -> str:
        """The same as text."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    @property
    def notes(self) -> list[str]:
        """What a reader should know: where the best value of a setting lies at an end of what was searched."""
        found = []
        for key, (low, high) in self.about["ranges"].items():
            value = None if self.best is None else self.best["parameters"].get(key)
            if isinstance(value, (int, float)):
                share = _share(value, low, high, str(self.about["space"][key]).endswith(":log"))
                if not EDGE <= share <= 1 - EDGE:
                    found.append(
                        f"The best {key}, {value:.4g}, lies at the {'lower' if share < EDGE else 'upper'} end of"
                        f" {low:g}..{high:g}. The optimum may lie beyond; search a wider range."
                    )
        return found

    def to_csv(self) -> str:
        """The trials, their parameters and metrics as columns."""
        rows = []
        for trial in self.trials:
            row = {key: trial[key] for key in ("number", "state", "value", "seconds")}
            rows.append(row | {**trial["parameters"]} | {**trial["metrics"]} | {"error": trial["error"]})
        return csv_of(rows)

    def to_text(self) -> str:
        """For people: the best trials, and what they say."""
        about = self.about
        selection = about["selection"].replace("_", " ")
        counts = {state: sum(row["state"] == state for row in self.trials) for state in ("pruned", "failed", "running")}
        more = "".join(f", {count} {state}" for state, count in counts.items() if count)
        keys = list(about["space"])
        ranked = sorted((row for row in self.trials if row["value"] is not None), key=lambda row: row["value"])
        lines = [["trial", selection, *keys]]
        for row in ranked[:SHOWN]:
            lines.append(
                [str(row["number"]), f"{row['value']:.5g}", *(_short(row["parameters"].get(key)) for key in keys)]
            )
        parts = [
            f"{about['task']} by {about['method']}: {len(self.trials)} trials of {about['budget_words']} each{more};"
            f" {about['sampler']}, {'no' if about['pruner'] == 'none' else about['pruner']} pruning",
            "",
            *aligned(lines),
        ]
        if self.importance:
            shares = ", ".join(f"{key} {100 * share:.0f} %" for key, share in self.importance.items())
            parts += ["", f"Share of each in what the trials differ by: {shares}"]
        if self.best is not None:
            headline = self.best["metrics"].get(about["headline"]) if about["headline"] != about["selection"] else None
            words = f", {about['headline'].replace('_', ' ')} {headline:.4g}" if headline is not None else ""
            parts += ["", f"Best: {said(self.best['parameters'])}   ({selection} {self.best['value']:.5g}{words})"]
        parts += ["", *(f"Note: {note}" for note in self.notes)] if self.notes else []
        return "\n".join(parts)

    def __str__(self) -> str:
        return self.to_text()

    def plot(self, path: str | Path) -> Path:
        """Draw the value of every trial and the best so far, in the format that the name of the file says."""
        return pictures.draw_trials([Path(path)], self._drawn())[0]

    def plot_importance(self, path: str | Path) -> Path:
        """Draw the share of each parameter, and the values over each."""
        return pictures.draw_parameters([Path(path)], self._drawn())[0]

    def parameters_file(self) -> str:
        """What `nhgd run --params` takes."""
        assert self.best is not None
        known = {key: self.about[key] for key in ("task", "preset", "method")}
        found = known | {
            "parameters": self.best["parameters"],
            "value": self.best["value"],
            "metrics": self.best["metrics"],
        }
        return json.dumps(jsonable(found), indent=2, allow_nan=False) + "\n"

    def write(self, write_all: Any, suffixes: Sequence[str]) -> list[str]:
        """Write tables and figures by a function that takes what they are and a function of a folder; their names."""
        texts = {"sweep.json": self.to_json(), "best.json": self.parameters_file(), "trials.csv": self.to_csv()}

        def written(folder: Path) -> list[Path]:
            for name, text in texts.items():
                (folder / name).write_text(text, encoding="utf-8")
            made = [folder / name for name in texts]
            if suffixes:
                made += pictures.draw_trials([folder / f"trials.{end}" for end in suffixes], self._drawn())
                made += pictures.draw_parameters([folder / f"parameters.{end}" for end in suffixes], self._drawn())
            return made

        return [path.name for path in write_all("The tables and figures", written)]

    def _drawn(self) -> dict[str, Any]:
        if not any(row["value"] is not None for row in self.trials):
            raise InputError("No trial has ended well, so there is nothing to draw.")
        logarithmic = [key for key, part in self.about["space"].items() if str(part).endswith(":log")]
        return {
            "about": self.about, "trials": self.trials, "importance": self.importance, "logarithmic": logarithmic,
        }  # fmt: skip


def _share(value: float, low: float, high: float, log: bool) -> float:
    """Where a value lies between two ends, from 0 to 1.

    >>> _share(1.0, 0.25, 4.0, log=True), _share(1.0, 0.0, 4.0, log=False)
    (0.5, 0.25)
    """
    if log:
        value, low, high = math.log(value), math.log(low), math.log(high)
    return (value - low) / (high - low)


def _row(trial: Any) -> dict[str, Any]:
    states = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "running"}
    took = None if trial.duration is None else trial.duration.total_seconds()
    last = trial.last_step
    return {
        "number": trial.number,
        "state": states[trial.state.name],
        "parameters": dict(trial.params),
        "value": trial.value if trial.state.name == "COMPLETE" else None,
        "last_value": None if last is None else trial.intermediate_values[last],
        "seconds": took,
        "metrics": dict(trial.user_attrs.get(METRICS, {})),
        "error": trial.user_attrs.get(ERROR),
        "worker": trial.user_attrs.get(WORKER),
    }


def _importance(study: Any, good: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """By functional analysis of variance (Hutter, Hoos and Leyton-Brown, 2014), which takes scikit-learn."""
    if len({row["value"] for row in good}) < 3:
        return {}
    try:
        import sklearn  # noqa: F401
    except ImportError:
        return {}
    package = optuna()
    keys = list(good[0]["parameters"])
    varied = [key for key in keys if len({repr(row["parameters"].get(key)) for row in good}) > 1]
    if not varied:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        evaluator = package.importance.FanovaImportanceEvaluator(seed=0)
        try:
            found = package.importance.get_param_importances(study, evaluator=evaluator, params=varied)
        except (ValueError, RuntimeError):  # too few trials, or all alike
            return {}
    return {key: float(share) for key, share in found.items()}


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
