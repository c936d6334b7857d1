"""Options that several commands share, and what their text means."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, TypeAlias

import torch
import typer

from nhgd.cli import _completion
from nhgd.errors import InputError, unknown

Task: TypeAlias = Annotated[
    str,
    typer.Argument(metavar="TASK", help="The problem; `nhgd list` names them.", autocompletion=_completion.tasks),
]
Seed: TypeAlias = Annotated[int, typer.Option(help="Seed of the data and of every random number of the run.")]
Device: TypeAlias = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Preset: TypeAlias = Annotated[
    str,
    typer.Option(
        help="A named set of the task's settings, such as quick or paper.", autocompletion=_completion.presets
    ),
]
Changes: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change one setting; may be given several times.", show_default=False
    ),
]
DataFolder: TypeAlias = Annotated[
    Path | None, typer.Option("--data", help="Folder of the task's files (or NHGD_DATA).", show_default=False)
]
Out: TypeAlias = Annotated[
    Path | None,
    typer.Option("--out", help="A folder for the results; without it nothing is written.", show_default=False),
]
Json: TypeAlias = Annotated[
    bool, typer.Option("--json", help="One JSON object on standard output, nothing else there.")
]


def device_called(name: str) -> torch.device:
    """The device a user named, made sure of."""
    kind, _, number = name.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (number and not number.isdecimal()) or (number and kind != "cuda"):
        raise unknown("device", name, ("auto", "cpu", "cuda"))
    if kind == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise InputError("PyTorch cannot use a CUDA device here. Use --device cpu.")
        if number and int(number) >= count:
            raise InputError(f"There is no {name}: this machine has {count} CUDA device(s), counted from 0.")
    return torch.device(name)


def device_of_rank(device: torch.device) -> torch.device:
    """One GPU for each process of a machine, as long as there are enough."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def keep_to_threads(threads: int | None, device: torch.device) -> None:
    """Let torch take no more CPU threads than suit the work; how many is no matter of the machine's load, so runs
    repeat.
    """
    if threads is not None and device.type == "cpu":
        torch.set_num_threads(min(threads, torch.get_num_threads()))


def note_crowding(executions: Iterable[str], device: torch.device, threads: int | None = None) -> None:
    """Warn if two parts of one process have more CPU threads than there are cores, because waiting threads spin."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads() if threads is None else threads
    beside = [name for name in executions if name in ("thread", "device:cpu")]
    if device.type == "cpu" and beside and 2 * threads > cores > 1:
        print(
            f"Note: under {' and '.join(beside)} the inner loop and the curvature have {threads} threads each, on {cores} cores,"
            f" and wait for each other. With OMP_NUM_THREADS={cores // 2} they do not.",
            file=sys.stderr,
        )


def checked_seed(seed: int) -> int:
    """A seed that every generator takes."""
    if not 0 <= seed < 2**63:
        raise InputError(f"--seed must be a whole number from 0 to 2^63 - 1, got {seed}.")
    return seed
