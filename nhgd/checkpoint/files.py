"""A checkpoint on disk: a folder that appears whole or not at all, and is read without running any code.

    runs/a/checkpoint-000007/tensors.safetensors     every tensor by name
    runs/a/checkpoint-000007/history.jsonl           one row for each outer step
    runs/a/checkpoint-000007/run.json                all the rest, with the hashes of the other two and of itself

A new one is written under a temporary name and renamed; only then is the last but one removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from nhgd.checkpoint import rows, schema
from nhgd.checkpoint.disk import LARGEST, Damaged, draft_folder, hash_file, read_all, remove, to_disk, write_file
from nhgd.checkpoint.rows import Written
from nhgd.errors import InputError, RunError

FORMAT = "nhgd checkpoint"
VERSION = 3
TENSORS, REST = "tensors.safetensors", "run.json"
_NAME = re.compile(r"checkpoint-(\d{6,})")
_DRAFT = ".draft-"


def safetensors() -> ModuleType:
    """The library that reads and writes tensors without running code."""
    try:
        import safetensors.torch as library
    except ImportError:
        raise InputError("Checkpoints need safetensors: pip install 'nhgd[checkpoint]'.") from None
    return library


def _failures() -> tuple[type[Exception], ...]:
    """Turn the errors of writing or reading a file into the library's own, if the library causes them."""
    from safetensors import SafetensorError

    return OSError, SafetensorError


def _why(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    found = re.search(r"([^:{}\"]*?) \(os error \d+\)", str(error))
    return found[1].strip() if found else str(error).strip().rstrip(".")


def called(path: Path, number: int) -> Path:
    """The folder of a checkpoint."""
    return path / f"checkpoint-{number:06d}"


def gone(path: Path, number: int) -> bool:
    """Whether a checkpoint no longer exists, as far as the system can tell."""
    try:
        os.stat(called(path, number))
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def numbered(path: Path) -> list[tuple[int, Path]]:
    """The numbers and the places of all checkpoints under `path`, whole or damaged, the newest first."""
    try:
        names = os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise InputError(f"{path} cannot be read: {_why(error)}.") from error
    found = [(int(match[1]), path / name) for name in names if (match := _NAME.fullmatch(name))]
    return sorted(found, reverse=True)


def newest(path: Path) -> tuple[int, Path] | None:
    """The number and the folder of the newest checkpoint under `path`, if there is one."""
    return next(iter(numbered(path)), None)


@dataclass(frozen=True)
class Kept:
    """One that this run has written or was read from: its number, and how far its rows reach."""

    number: int
    written: Written


def write(
    path: Path,
    number: int,
    contents: dict[str, Any],
    tensors: Mapping[str, Tensor],
    history: Sequence[Any],
    pack: Callable[[int], Any],
    before: Sequence[Kept],
) -> Kept:
    """Write a checkpoint under `path`, which must be there.

    Args:
        path: where the checkpoints of a run lie.
        number: of the new one.
        contents: everything but tensors, as JSON.
        tensors: by name; copied unchanged.
        history: of the run, of which `pack` gives the JSON of row i.
        before: what this run wrote before, the newest last. The last one stays.
    """
    library = safetensors()
    old = [(called(path, kept.number), kept.written, kept is not before[-1]) for kept in before]
    try:
        with draft_folder(path / f"{_DRAFT}{os.getpid()}") as draft:
            # Each in memory of its own: the library refuses tensors that share some, and permuted ones.
            copies = {n: t.to("cpu", copy=True, memory_format=torch.contiguous_format) for n, t in tensors.items()}
            library.save_file(copies, draft / TENSORS)
            to_disk(draft / TENSORS)
            written = rows.write(draft, history, pack, old)
            data = _document(contents | {"history": written.to_dict()}, hash_file(draft / TENSORS))
            if len(data) > LARGEST:
                raise RunError(
                    f"The checkpoint in {path} could not be written: what it holds beside tensors takes {len(data):,} bytes,"
                    f" and {LARGEST:,} is the most. Keep large states as tensors."
                )
            write_file(draft / REST, data)
            to_disk(draft)
            os.rename(draft, called(path, number))
            to_disk(path)
    except _failures() as error:
        raise RunError(f"The checkpoint in {path} could not be written: {_why(error)}.") from error
    return Kept(number, written)


def _document(contents: dict[str, Any], tensors_sha256: str) -> bytes:
    """Everything but tensors as JSON, with the hashes of the tensors and of itself first."""
    text = json.dumps(contents, allow_nan=False)
    head = {
        "format": FORMAT,
        "version": VERSION,
        "tensors_sha256": tensors_sha256,
        "contents_sha256": hashlib.sha256(text.encode()).hexdigest(),
    }
    return f'{json.dumps(head)[:-1]}, "contents": {text}}}\n'.encode()


def tidy(path: Path, keep: set[int], drafts: bool) -> None:
    """Take away all checkpoints but some, each at once and not in parts; and what processes that are gone left
    half-written.
    """
    with contextlib.suppress(OSError):
        for number, place in numbered(path):
            if number not in keep:
                gone = path / f"{_DRAFT}{os.getpid()}-{number}"
                try:
                    os.rename(place, gone)
                finally:
                    remove(gone)
    if drafts:
        remove_drafts(path)


def remove_drafts(path: Path) -> None:
    """Take away what processes that are gone left half-written; the caller holds the lock."""
    with contextlib.suppress(OSError, InputError):
        for name in os.listdir(path):
            if name.startswith(_DRAFT):
                shutil.rmtree(path / name, ignore_errors=True)


@dataclass(frozen=True)
class Found:
    """A checkpoint that was read: its contents, its tensors, its rows as JSON, and which one it is."""

    contents: dict[str, Any]
    tensors: dict[str, Tensor]
    rows: list[Any]
    kept: Kept


def read(path: Path, trees: Sequence[str]) -> tuple[Found, list[Exception]]:
    """The newest intact checkpoint under `path`, and what is wrong with newer ones.

    Args:
        path: where the checkpoints of a run lie.
        trees: the names of what they hold.
    """
    library = safetensors()
    wrong: list[Exception] = []
    for found in _readable(path, trees, library, wrong):
        return found, wrong
    if not wrong:
        raise InputError(f"There is no checkpoint in {path}. Give the folder that was passed as checkpoint=.")
    raise InputError(f"{wrong[0]} Restore the folder from a copy, or start the run again.") from wrong[0]


def _readable(path: Path, trees: Sequence[str], library: ModuleType, wrong: list[Exception]) -> Iterator[Found]:
    for number, place in numbered(path):
        try:
            yield _read(place, number, trees, library)
        except Damaged as error:
            wrong.append(error)
        except _failures() as error:
            wrong.append(InputError(f"The checkpoint {place} cannot be read: {_why(error)}."))


def _read(place: Path, number: int, trees: Sequence[str], library: ModuleType) -> Found:
    file = place / REST
    try:
        document = json.loads(read_all(file).decode())
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise Damaged(file, "it is not an nhgd checkpoint")
        if document["version"] != VERSION:
            raise InputError(
                f"{place} has checkpoint format {document['version']}, but this nhgd reads format {VERSION}. Continue"
                " with the nhgd that wrote it."
            )
        contents = document["contents"]
        text = json.dumps(contents, allow_nan=False)
        if hashlib.sha256(text.encode()).hexdigest() != document["contents_sha256"]:
            raise Damaged(file)
        if hash_file(place / TENSORS) != document["tensors_sha256"]:
            raise Damaged(place / TENSORS)
        tensors = _loaded(place / TENSORS, library)
        schema.check_document(contents, tensors, trees)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise Damaged(file, str(error) if isinstance(error, schema.Misfit) else "it does not match its hash") from error
    found, written = rows.read(place, contents["history"])
    return Found(contents, tensors, found, Kept(number, written))


def _loaded(file: Path, library: ModuleType) -> dict[str, Tensor]:
    refused: tuple[type[Exception], ...] = (
        *_failures(),
        RuntimeError,
    )  # torch's own error if it cannot open or map the file
    try:
        found: dict[str, Tensor] = library.load_file(file)
    except refused as error:
        if isinstance(error, OSError):
            raise
        raise Damaged(file, _why(error).splitlines()[0]) from error
    return found
