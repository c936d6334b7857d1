"""A run as its folder tells it: what it was, its history, and its result if it has ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nhgd.report.chart import Line
from nhgd.report.folder import read_json, read_lines
from nhgd.report.provenance import ORIGIN
from nhgd.report.shape import MAYBE_NUMBER, MAYBE_TEXT
from nhgd.stop import gradient_equivalents
from nhgd.task import TASKS

FILE, RESULT, ROWS = "run.json", "result.json", "history.jsonl"
POINTS = 400  # of a curve
COUNTS = (
    *(
        "step",
        "seconds",
        "lag",
        "largest_lag",
        "inner_seconds",
        "curvature_seconds",
        "waited_seconds",
        "overlap",
        "bytes_sent",
    ),
    *("gradients", "inner_gradients", "outer_gradients", "hvps", "cross", "samples", "poor_solve"),
)

SHAPE = {
    "task": str,
    "method": str,
    "seed": int,
    "device?": MAYBE_TEXT,
    "preset?": MAYBE_TEXT,
    "settings?": (dict, type(None)),
    **ORIGIN,
}
ROW = {"step": int, **dict.fromkeys(("seconds", "gradients?", "hvps?", "cross?"), MAYBE_NUMBER)}
DONE = {
    "metrics": {str: MAYBE_NUMBER}, "seconds": MAYBE_NUMBER, "steps?": MAYBE_NUMBER, "oracle_calls": {str: MAYBE_NUMBER},
    "result?": MAYBE_TEXT, "partial?": bool, "error?": MAYBE_TEXT, "warnings?": [str], "pictures?": [str],
    "stagnation?": MAYBE_TEXT,
}  # fmt: skip


@dataclass(frozen=True)
class History:
    """A run.

    Attributes:
        folder: where it is.
        about, rows, result: its three files; the result is None where a run goes on, or has failed.
    """

    folder: Path
    about: Mapping[str, Any]
    rows: list[dict[str, Any]]
    result: Mapping[str, Any] | None

    @classmethod
    def read(cls, folder: Path) -> History:
        """From the folder of a run."""
        rows = read_lines(folder / ROWS, ROW)
        result = read_json(folder / RESULT, DONE) if (folder / RESULT).exists() else None
        return cls(folder, read_json(folder / FILE, SHAPE), rows, result)

    @property
    def metrics(self) -> list[str]:
        """The numbers of its rows, the task's own first, then the losses."""
        known = dict.fromkeys(
            name
            for row in self.rows
            for name, value in row.items()
            if name not in COUNTS and isinstance(value, (int, float)) and not isinstance(value, bool)
        )
        first = [name for name in (self.curve, "outer_loss", "inner_loss") if name in known]
        return list(dict.fromkeys([*first, *known]))

    @property
    def curve(self) -> str:
        """The metric that its task is followed by."""
        task = self.about["task"]
        return TASKS[task].curve if task in TASKS else "outer_loss"

    @property
    def headline(self) -> str:
        """The metric that its task is compared by."""
        task = self.about["task"]
        return TASKS[task].headline if task in TASKS else "outer_loss"

    @property
    def pictures(self) -> list[str]:
        """The pictures of its task."""
        if self.result is not None and "pictures" in self.result:
            return list(self.result["pictures"])
        return sorted(file.name for file in self.folder.glob("*.png") if file.name != "curve.png")

    def line(self, metric: str, axis: str, name: str, index: int = 0) -> Line:
        """The curve of a metric, with fewer points where they are many."""
        rows = [row for row in self.rows if metric in row]
        every = max(1, -(-len(rows) // POINTS))
        rows = [row for nth, row in enumerate(rows) if not nth % every or nth == len(rows) - 1]
        return Line(name, index, [self._at(row, axis) for row in rows], [_number(row[metric]) for row in rows])

    def selected(self, axis: str) -> tuple[float, str] | None:
        """Where the step was whose numbers are reported."""
        step = None if self.result is None else self.result["metrics"].get("selected_step")
        row = next((row for row in self.rows if row["step"] == step), None)
        place = None if row is None else self._at(row, axis)
        return None if place is None else (place, f"selected: step {step:g}")

    def _at(self, row: Mapping[str, Any], axis: str) -> float | None:
        if axis != "gradients":
            return _number(row.get(axis))
        counts = {name: row.get(name) for name in ("gradients", "hvps", "cross")}
        return None if None in counts.values() else gradient_equivalents({k: v or 0.0 for k, v in counts.items()})


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
