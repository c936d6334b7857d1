"""Whether this process was started alone; determined before anything else is imported."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress

LAUNCHER = "NHGD_LAUNCHER"  # in the environment of a process that `launch` has started: the number of that process
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # where the agent of torchrun, or of `launch`, reads why a process failed


def started_by_someone() -> bool:
    """Whether this process is one of several that torchrun, or `launch`, has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def will_be_restarted() -> bool:
    """Whether torchrun has a restart left, so that what this process answers if it fails is not the last word."""
    if LAUNCHER in os.environ:  # `launch` itself keeps the answer until it is known to be the last
        return False
    counts = [os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS")]
    return all(count.isdigit() for count in counts) and int(counts[0]) < int(counts[1])


def leave_error(sentence: str, code: int, kind: str, lost: int | None = None, checkpoint: bool = False) -> bool:
    """Leave an error to the agent that started this process; whether that will print it.

    Args:
        sentence: what to print.
        code: the exit code.
        kind: the class of the error.
        lost: the rank of another process that was lost, -1 if unknown; None: the error is this process's own.
        checkpoint: whether the sentence names the last checkpoint.
    """
    if not os.environ.get(ERROR_FILE):
        return False
    told = {"message": sentence, "timestamp": str(int(time.time())), "code": code}
    with suppress(OSError), open(os.environ[ERROR_FILE], "w", encoding="utf-8") as file:
        json.dump(told | {"kind": kind, "lost": lost, "checkpoint": checkpoint}, file)
    return LAUNCHER in os.environ
