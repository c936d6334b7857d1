"""What may follow a run step by step: functions for `Solver(on_step=...)`.

Any function of a row will do; these two are at hand. Others, such as those of W&B and MLflow, are in docs/callbacks.md.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, TextIO

from nhgd._results import jsonable
from nhgd.errors import InputError, RunError


class JSONLines:
    """Writes each row to a file as one line of JSON, at once, so that another program may read along.

    Args:
        path: the file, which is replaced; its folder is made.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, JSONLines(f"{folder}/a.jsonl") as log:
    ...     log({"step": 1, "outer_loss": float("nan")})
    ...     print(Path(folder, "a.jsonl").read_text())
    {"step": 1, "outer_loss": null}
    <BLANKLINE>
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file: TextIO = self.path.open("w", encoding="utf-8", buffering=1)
        except OSError as error:
            raise InputError(f"{self.path} cannot be written: {error.strerror or error}.") from error

    def __call__(self, row: dict[str, Any]) -> None:
        """Write a row."""
        try:
            self._file.write(line(row))
            self._file.flush()
        except OSError as error:
            raise RunError(f"{self.path} could not be written: {error.strerror or error}.") from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> JSONLines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def line(row: dict[str, Any]) -> str:
    """A row as a line of JSON."""
    return json.dumps(jsonable(row), allow_nan=False) + "\n"


class TensorBoard:
    """Writes every number of each row as a scalar that TensorBoard shows, by outer step.

    Args:
        folder: of the run, as `tensorboard --logdir` takes it, or the folder above.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise InputError("TensorBoard needs its package: pip install 'nhgd[tensorboard]'.") from None
        try:
            self._writer: Any = SummaryWriter(log_dir=str(folder))
        except OSError as error:
            raise InputError(f"{folder} cannot be written: {error.strerror or error}.") from error

    def __call__(self, row: dict[str, Any]) -> None:
        """Write a row."""
        for name, value in row.items():
            if name != "step" and isinstance(value, (bool, int, float)) and math.isfinite(value):
                self._writer.add_scalar(name, float(value), row["step"])
        self._writer.flush()

    def close(self) -> None:
        """Close the files."""
        self._writer.close()

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
