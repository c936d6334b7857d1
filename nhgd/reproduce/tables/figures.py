"""The figures of a table: accuracy and outer loss against seconds, one for each protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nhgd.plot import progress

TITLES = {"printed": "the paper's settings", "fair": "tuned step sizes, equal seconds"}


def draw(folder: Path, found: Mapping[str, Any], suffixes: Sequence[str]) -> list[Path]:
    """Every figure in every format, into a folder."""
    made: list[Path] = []
    for protocol, metrics in found["curves"].items():
        panels = [
            {"x": "seconds, evaluation excluded", "y": metric.replace("_", " "), "bands": bands}
            for metric, bands in metrics.items()
            if bands
        ]
        if panels:
            title = f"{found['experiment']}{' (quick)' if found['quick'] else ''}: {TITLES[protocol]}"
            made += progress.draw([folder / f"{protocol}.{end}" for end in suffixes], title, panels)
    return made
