"""Results: as JSON, and as files in a folder that appear whole or not at all."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch

from nhgd._path import check_folder, unwritable
from nhgd.checkpoint.disk import draft_folder, to_disk
from nhgd.errors import InputError, RunError


def jsonable(value: Any) -> Any:
    """The same in the words of JSON: nan and inf become null, objects their name and settings.

    >>> jsonable({"a": float("nan"), "b": (1, 2.5), "c": torch.float64})
    {'a': None, 'b': [1, 2.5], 'c': 'float64'}
    """
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")  # a path need not be text
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, torch.Tensor):
        return jsonable(value.tolist())
    if isinstance(value, type):
        return value.__name__
    if is_dataclass(value):
        name = getattr(value, "name", type(value).__name__)
        return {"name": name} | {f.name: jsonable(getattr(value, f.name)) for f in fields(value)}
    return str(value).removeprefix("torch.")


def check_files(path: Path, *files: str) -> None:
    """Refuse a folder for results in which the name of a result file is taken by something else; writes nothing."""
    for name in files:
        try:
            kind = os.stat(path / name).st_mode
        except OSError:
            continue  # nothing is there
        if not stat.S_ISREG(kind):
            what = "folder" if stat.S_ISDIR(kind) else "device or a pipe"
            raise InputError(f"--out {path} has a {what} {name}, where a file must be written. Choose another folder.")


class Folder:
    """A folder for results. Every file appears whole or not at all.

    Attributes:
        holds_some: whether one has appeared.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.holds_some = False

    def write(self, name: str, make: Callable[[Path], Any]) -> Path:
        """Let `make` write a file."""

        def made(beside: Path) -> list[Path]:
            make(beside / name)
            return [beside / name]

        return self.write_all(str(self.path / name), made)[0]

    def write_texts(self, texts: Mapping[str, str]) -> list[Path]:
        """Files of text."""

        def made(beside: Path) -> list[Path]:
            for name, text in texts.items():
                (beside / name).write_text(text, encoding="utf-8")
            return [beside / name for name in texts]

        return self.write_all(" and ".join(str(self.path / name) for name in texts), made)

    def write_all(self, what: str, make: Callable[[Path], list[Path]]) -> list[Path]:
        """Let `make` write files into a temporary folder; they replace older ones once all are written.

        Args:
            what: the files, in the words of an error.
            make: from the folder to the files that it wrote.
        """
        try:
            with draft_folder(self.path / f".draft-{os.getpid()}") as beside:
                made = make(beside)
                for path in made:
                    to_disk(path)
                for path in made:
                    os.replace(path, self.path / path.name)
                    self.holds_some = True
        except OSError as error:
            raise RunError(f"{what} could not be written: {error.strerror or error}.") from error
        return [self.path / path.name for path in made]


@contextmanager
def folder(path: Path | None) -> Iterator[Folder | None]:
    """The folder, made and tried out; it is taken away again when the block fails before anything was written.

    If the block is interrupted after that, the message names the folder.
    """
    if path is None:
        yield None
        return
    check_folder("--out", path)
    missing: list[Path] = []
    try:
        trial = path / f".trial-{os.getpid()}"
        try:
            missing = [p for p in (path, *path.parents) if not p.exists()]
            path.mkdir(parents=True, exist_ok=True)
            trial.touch()
            trial.unlink()
        except OSError as error:
            with suppress(OSError):
                trial.unlink(missing_ok=True)
            raise unwritable("--out", path, error) from error
        made_ready = Folder(path)
        try:
            yield made_ready
        except KeyboardInterrupt as stop:
            if made_ready.holds_some:
                stop.args = (f"{stop} The results so far are in {path}.".strip(),)
            raise
    except BaseException:
        for made in missing:
            try:
                made.rmdir()
            except OSError:
                break
        raise
