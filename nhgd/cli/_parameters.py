"""Settings in a file: what `nhgd sweep` found, and `nhgd run --params` takes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nhgd.checkpoint.disk import read_all
from nhgd.errors import InputError


@dataclass(frozen=True)
class Parameters:
    """Settings by their keys, as text, and the method they were found for.

    Attributes:
        path: the file; None where none was given.
        values: as --set takes them.
        method: None where the file names none.
    """

    path: Path | None = None
    values: dict[str, str] = field(default_factory=dict)
    method: str | None = None

    @classmethod
    def read(cls, path: Path | None, task: str, preset: str = "default") -> Parameters:
        """Of a file, for a task with a preset: either {"outer_lr": 0.1, ...}, or that under "parameters", as best.json
        has it.
        """
        if path is None:
            return cls()
        try:
            found: Any = json.loads(read_all(path))
        except OSError as error:
            raise InputError(f"--params {path} cannot be read: {error.strerror or error}.") from error
        except (ValueError, RecursionError) as error:
            raise InputError(f"--params {path} is no JSON: {error}.") from error
        values = found.get("parameters", found) if isinstance(found, dict) else None
        if not isinstance(values, dict) or not all(isinstance(v, (str, bool, int, float)) for v in values.values()):
            raise InputError(
                f'--params {path} must be a JSON object of settings, such as {{"outer_lr": 0.1}}, or one that has'
                ' it under "parameters".'
            )
        if values is found:
            return cls(path, _texts(values))
        for_task, method = found.get("task"), found.get("method")
        if for_task is not None and for_task != task:
            raise InputError(f"--params {path} was found for the task {for_task}, not for {task}.")
        for_preset = found.get("preset")
        if for_preset is not None and for_preset != preset:
            raise InputError(f"--params {path} was found for the preset {for_preset}. Add --preset {for_preset}.")
        return cls(path, _texts(values), method if isinstance(method, str) else None)

    def method_beside(self, given: str | None) -> str | None:
        """The method of the run: the given one, which must be that of the file if that has one."""
        if given is not None and self.method is not None and given != self.method:
            raise InputError(
                f"--params {self.path} was found for the method {self.method}, not for {given}. Omit --method, or give"
                " single settings by --set."
            )
        return self.method if given is None else given


def _texts(values: dict[str, Any]) -> dict[str, str]:
    """As a user writes them after --set."""
    return {key: value if isinstance(value, str) else repr(value) for key, value in values.items()}
