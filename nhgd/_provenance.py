"""Where a result comes from: the command, the versions, the machine, the day and the commit."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import nhgd


def provenance(arguments: Sequence[str], device: torch.device) -> dict[str, Any]:
    """What to keep with a result, as plain values.

    Args:
        arguments: of the command `nhgd`.
        device: that it computes on.
    """
    return {
        "command": shlex.join(["nhgd", *arguments]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": _versions(),
        "machine": _machine(device),
        "git": commit(Path.cwd()),
    }


def _versions() -> dict[str, str]:
    found = {"nhgd": nhgd.__version__, "python": platform.python_version(), "torch": torch.__version__}
    for name in ("numpy", "scikit-learn"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _machine(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {
        "host": platform.node(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "device": str(device),
    }
    if device.type == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return found


def commit(folder: Path) -> dict[str, Any] | None:
    """The commit that a folder has checked out, and whether files differ from it; None if it is no git repository."""
    head = _git(folder, "rev-parse", "HEAD")
    if head is None:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": head, "changed": None if changed is None else bool(changed)}


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(  # noqa: S603  the words are this file's own
            ["git", "-C", str(folder), *words],  # noqa: S607  the user's own git
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return done.stdout.strip()
