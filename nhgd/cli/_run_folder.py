"""The folder of a run: what it is, its history while it grows, and its result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TextIO

from nhgd._results import Folder, jsonable
from nhgd._solution import Solution
from nhgd.errors import RunError
from nhgd.loggers import line
from nhgd.plot.history import draw_history
from nhgd.task import TASKS, Instance

FILES = ("run.json", "result.json", "history.jsonl", "curve.png")


class RunFolder:
    """Writes run.json and the first lines of history.jsonl with the first outer step, and the rest as it comes.

    A disk that fails meanwhile does not end the run: everything is written once more at its end, whole or not at all,
    and that says what is wrong.

    Args:
        place: where.
        about: what is known of the run before it starts, for run.json.
        earlier: rows of the history of a resumed run.
    """

    def __init__(self, place: Folder, about: Mapping[str, Any], earlier: list[dict[str, Any]]) -> None:
        self._place, self._about, self._earlier = place, about, earlier
        self._file: TextIO | None = None
        self._begun = False

    def note(self, row: dict[str, Any]) -> None:
        """Write a row of the history."""
        with suppress(OSError, RunError):
            if not self._begun:
                self._begin()
            if self._file is not None:
                self._file.write(line(row))
                self._file.flush()
                self._place.holds_some = True

    def _begin(self) -> None:
        self._begun = True  # whether or not it can be written
        earlier = "".join(map(line, self._earlier))
        self._place.write_texts({"run.json": _text(self._about), "history.jsonl": earlier})
        (self._place.path / "result.json").unlink(missing_ok=True)  # of an earlier run
        self._file = (self._place.path / "history.jsonl").open("a", encoding="utf-8")

    def close(self) -> None:
        """No more rows."""
        with suppress(OSError):
            if self._file is not None:
                self._file.close()
        self._file = None

    def finish(self, answer: dict[str, Any], solution: Solution, instance: Instance) -> list[str]:
        """Write everything, and add the task's metrics to the answer first; the names of the files."""
        self.close()
        if answer["partial"]:  # at once: the metrics of some tasks take longer than one may be given
            self._write_numbers(answer, solution)
        answer["metrics"] = instance.summary(solution)
        self._write_numbers(answer, solution)
        # The pictures come last: none of them is worth losing the numbers.
        about, metrics = self._about, answer["metrics"]
        title = f"{about['task']} by {about['method']}, seed {about['seed']}"
        curve = TASKS[about["task"]].curve if about["task"] in TASKS else None
        self._place.write(
            "curve.png",
            lambda path: draw_history(path, solution.history, title, curve, metrics.get("selected_step")),
        )
        drawn = self._place.write_all(f"The pictures in {self._place.path}", instance.pictures)
        return [*FILES, *(path.name for path in drawn)]

    def _write_numbers(self, answer: dict[str, Any], solution: Solution) -> None:
        rows = "".join(map(line, solution.history))
        texts = {"run.json": _text(self._about), "history.jsonl": rows, "result.json": _text(answer)}
        self._place.write_texts(texts)


def _text(found: Mapping[str, Any]) -> str:
    return json.dumps(jsonable(found), indent=2, allow_nan=False) + "\n"


def numbers(solution: Solution) -> dict[str, Any]:
    """The numbers of the solution, without metrics."""
    stats, history = solution.stats, solution.history
    return {
        **{name: stats[name] for name in ("execution", "threads", "steps", "seconds", "oracle_calls", "stagnation")},
        "result": solution.result,
        "partial": solution.result == "stopped",
        "initial": {"outer_loss": history[0]["outer_loss"]},
        "metrics": {name: history[-1][name] for name in ("outer_loss", "inner_loss")},
    }
