"""A checkpoint on disk: a folder that appears whole or not at all, and is read without running any code.

    runs/a/checkpoint-000007/tensors.safetensors     every tensor by name
    runs/a/checkpoint-000007/run.json                all the rest, with the hash of the other file and of itself

A new one is written beside, under another name, and renamed; the one before it is taken away only then.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from nhgd.errors import InputError, RunError

FORMAT = "nhgd checkpoint"
VERSION = 1
_NAME = re.compile(r"checkpoint-(\d{6,})")
_DRAFT = ".draft-"


def safetensors() -> ModuleType:
    """The library that reads and writes tensors without running code."""
    try:
        import safetensors.torch as library
    except ImportError:
        raise InputError("Checkpoints need safetensors: pip install 'nhgd[checkpoint]'.") from None
    return library


def check_writable(path: Path) -> None:
    """Refuse, without writing anything, a place where no folder can be made."""
    place = path.absolute()
    while not os.path.lexists(place):
        place = place.parent
    if not place.is_dir():
        raise InputError(f"checkpoint {path} cannot be a folder: {place} is a file. Name another place.")
    if not os.access(place, os.W_OK | os.X_OK):
        raise InputError(f"checkpoint {path} cannot be written: {place} does not allow it. Name another place.")


def newest(path: Path) -> tuple[int, Path] | None:
    """The number and the folder of the newest checkpoint under `path`, if there is one."""
    if not path.is_dir():
        return None
    found = [(int(match[1]), place) for place in path.iterdir() if (match := _NAME.fullmatch(place.name))]
    return max(found, default=None)


def write(path: Path, contents: Any, tensors: Mapping[str, Tensor], last: int | None) -> int:
    """Write a checkpoint under `path` and take the older ones away; its number.

    Args:
        path: where the checkpoints of a run lie.
        contents: what is not a tensor, as JSON.
        tensors: by name; copied as they are.
        last: the number this run wrote last, None if it wrote none yet. Where another stands there now, another run has
            written it.
    """
    library = safetensors()
    before = newest(path)
    if last is not None and (before is None or before[0] != last):
        raise RunError(
            f"{path} has changed under this run: does another run write its checkpoints there? Name another."
        )
    number = 1 if before is None else before[0] + 1
    draft = path / f"{_DRAFT}{os.getpid()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        # Each in memory of its own: the library refuses tensors that share some, and permuted ones.
        copies = {name: t.to("cpu", copy=True, memory_format=torch.contiguous_format) for name, t in tensors.items()}
        library.save_file(copies, draft / "tensors.safetensors")
        text = json.dumps(contents, allow_nan=False)
        document = {
            "format": FORMAT,
            "version": VERSION,
            "tensors_sha256": _hash_file(draft / "tensors.safetensors"),
            "contents_sha256": hashlib.sha256(text.encode()).hexdigest(),
        }
        head = json.dumps(document)[:-1]
        (draft / "run.json").write_text(f'{head}, "contents": {text}}}\n', encoding="utf-8")
        for file in (draft / "tensors.safetensors", draft / "run.json", draft):
            _to_disk(file)
        os.rename(draft, path / f"checkpoint-{number:06d}")
        _to_disk(path)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise RunError(f"The checkpoint in {path} could not be written: {error.strerror or error}.") from error
    for place in path.iterdir():
        match = _NAME.fullmatch(place.name)
        if (match and int(match[1]) < number) or place.name.startswith(_DRAFT):
            shutil.rmtree(place, ignore_errors=True)
    return number


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor], int]:
    """The contents, the tensors and the number of the newest checkpoint under `path`, made sure to be as written."""
    library = safetensors()
    found = newest(path)
    if found is None:
        raise InputError(f"There is no checkpoint in {path}. Name the folder that was given as checkpoint=.")
    number, place = found
    try:
        document = json.loads((place / "run.json").read_text(encoding="utf-8"))
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise InputError(f"{place / 'run.json'} is no checkpoint of nhgd.")
        if document["version"] != VERSION:
            raise InputError(
                f"{place} has version {document['version']} of the checkpoint's format, and this nhgd reads version {VERSION}."
                " Continue with the nhgd that wrote it."
            )
        contents = document["contents"]
        text = json.dumps(contents, allow_nan=False)
        if hashlib.sha256(text.encode()).hexdigest() != document["contents_sha256"]:
            raise _damaged(place / "run.json")
        if _hash_file(place / "tensors.safetensors") != document["tensors_sha256"]:
            raise _damaged(place / "tensors.safetensors")
        try:
            return contents, library.load_file(place / "tensors.safetensors"), number
        except library.SafetensorError as error:
            raise _damaged(place / "tensors.safetensors") from error
    except OSError as error:
        raise InputError(f"The checkpoint {place} cannot be read: {error.strerror or error}.") from error
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        raise _damaged(place / "run.json") from error


def _damaged(file: Path) -> InputError:
    return InputError(
        f"{file} is damaged: it is not what was written. Restore the folder from a copy, or begin the run anew."
    )


def _hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(2**20):
            digest.update(part)
    return digest.hexdigest()


def _to_disk(path: Path) -> None:
    """Make sure that what was written survives a loss of power."""
    if os.name != "posix" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
