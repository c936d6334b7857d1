"""An empty figure, or an error that says how to get Matplotlib."""

from __future__ import annotations

import io
from functools import cache
from typing import Any

from nhgd.errors import InputError


def figure(width: float, height: float, **settings: Any) -> Any:
    """A Matplotlib figure of this size in inches, which a notebook shows without pyplot."""
    return _class()(figsize=(width, height), layout="constrained", **settings)


@cache
def _class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("Plots need matplotlib: pip install 'nhgd[cli]'.") from None

    class NotebookFigure(Figure):
        """pyplot tells notebooks how to show figures, but takes over the program's windows; so this one says it
        itself.
        """

        def _repr_png_(self) -> bytes:
            written = io.BytesIO()
            self.savefig(written, format="png")
            return written.getvalue()

    return NotebookFigure
