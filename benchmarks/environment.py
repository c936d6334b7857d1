"""The machine and the versions a measurement was made with, for the JSON of its results."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

import nhgd


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, processor and, for CUDA, the card."""
    found: dict[str, Any] = {
        "nhgd": nhgd.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(device),
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found
