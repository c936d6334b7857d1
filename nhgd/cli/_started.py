"""Whether a process stands alone. It is asked before anything else is imported."""

from __future__ import annotations

import os


def started_by_someone() -> bool:
    """Whether this process is one of several that torchrun, or `launch`, has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ
