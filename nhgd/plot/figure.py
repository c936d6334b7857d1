"""An empty figure, or an error that says how to get Matplotlib."""

from __future__ import annotations

from typing import Any

from nhgd.errors import InputError


def figure(width: float, height: float, **settings: Any) -> Any:
    """A Matplotlib figure of this size in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("Plots need matplotlib: pip install 'nhgd[cli]'.") from None
    return Figure(figsize=(width, height), layout="constrained", **settings)
