"""The folder of a comparison: one file for each run, so that one which was killed goes on where it ended."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from nhgd._results import Folder, jsonable
from nhgd.comparison.trial import Run, Trial, measured
from nhgd.errors import InputError

ASKED, RUNS, PICTURES, RESULT = "comparison.json", "runs", "pictures", "bench.json"


class Store:
    """Runs in a folder.

    Args:
        path: the folder, which is there.
        asked: what all of its runs have in common, by name.
    """

    def __init__(self, path: Path, asked: dict[str, Any]) -> None:
        self.path = path
        self.asked = jsonable(asked)

    def begin(self) -> None:
        """Refuse a folder that holds a comparison with other settings; remember those of this one."""
        check(self.path, self.asked)
        for place in (self.path, self.path / RUNS):
            for draft in place.glob(".draft-*"):  # of a process that was killed
                shutil.rmtree(draft, ignore_errors=True)
        if not (self.path / ASKED).exists():
            text = json.dumps(self.asked, indent=2, allow_nan=False) + "\n"
            Folder(self.path).write_texts({ASKED: text})

    def name(self, trial: Trial) -> str:
        """The name of a run's file, without its ending."""
        words = re.sub(r"[^A-Za-z0-9._-]+", "_", f"{trial.label}-seed{trial.seed}")[:80]
        return f"{words}-{hashlib.sha256(trial.key.encode()).hexdigest()[:8]}"

    def pictures(self, trial: Trial) -> Path:
        """Where the pictures of a run are."""
        return self.path / PICTURES / self.name(trial)

    def load(self, trial: Trial, failed: bool = False) -> Run | None:
        """The run, if it was finished without an error; or also with one, where a `failed` run is wanted."""
        try:
            run = json.loads((self.path / RUNS / f"{self.name(trial)}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return run if isinstance(run, dict) and "error" in run and (failed or run["error"] is None) else None

    def keep(self, trial: Trial, run: Run) -> None:
        """Write a run; its file appears whole or not at all."""
        (self.path / RUNS).mkdir(exist_ok=True)
        text = json.dumps(jsonable(run), allow_nan=False) + "\n"
        Folder(self.path / RUNS).write_texts({f"{self.name(trial)}.json": text})


def kept(trial: Trial, store: Store | None, drawing: bool) -> tuple[Trial, Run]:
    """Measure, and write the result at once, in whichever process this is."""
    if store is None:
        return trial, measured(trial)
    run = measured(replace(trial, pictures=store.pictures(trial)) if drawing else trial)
    run["file"] = store.name(trial)
    if run.get("pictures"):
        run["folder"] = f"{PICTURES}/{run['file']}"
    store.keep(trial, run)
    return trial, run


def check(path: Path, asked: dict[str, Any]) -> None:
    """Refuse a folder that holds a comparison with other settings, or something else of that name."""
    file = path / ASKED
    if not file.exists():
        if (path / RESULT).exists():
            raise InputError(
                f"{path} holds results that are not of a comparison of methods, and {RESULT} would be replaced."
                " Choose another folder."
            )
        return
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
        assert isinstance(before, dict)
    except (OSError, ValueError, AssertionError):
        raise InputError(f"{file} cannot be read as what a comparison wrote. Choose another folder.") from None
    if said := differences(before, jsonable(asked)):
        raise InputError(
            f"{path} holds a comparison with other settings: {said}. Choose another folder, or delete that one. Methods,"
            " seeds and values of settings may be added; the rest stays."
        )


def differences(before: dict[str, Any], now: dict[str, Any]) -> str:
    """What differs, in words; empty where nothing does.

    >>> differences({"budget": "5s", "task": "l2"}, {"budget": "9s", "task": "l2"})
    'its budget is 5s, not 9s'
    """
    different = [key for key in {**now, **before} if now.get(key) != before.get(key)]
    return " and ".join(_difference(key, before.get(key), now.get(key)) for key in different)


def _difference(key: str, before: Any, now: Any) -> str:
    return f"its {key} is {_short(before)}, not {_short(now)}"


def _short(value: Any) -> str:
    if value is None:
        return "not given"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
