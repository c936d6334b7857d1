"""Which page suits a folder, and its file."""

from __future__ import annotations

from pathlib import Path

from nhgd._results import Folder
from nhgd.errors import InputError
from nhgd.report import bench, executions, history, run, runs, sweep
from nhgd.report.page import Page

NAME = "report.html"


def report(folder: str | Path) -> Path:
    """Write report.html into a folder that `nhgd bench`, `nhgd run` or `nhgd sweep` has written; its path.

    Args:
        folder: of a comparison, a run or a sweep, or one that holds folders of runs.
    """
    place = Path(folder)
    found = _page(place)
    return Folder(place).write_texts({NAME: found.to_html()})[0]


def _page(place: Path) -> Page:
    if not place.is_dir():
        raise InputError(f"{place} is no folder. Name the folder that --out of a command was.")
    if (place / bench.FILE).exists():
        return executions.page(place) if executions.suits(place) else bench.page(place)
    if (place / sweep.FILE).exists():
        return sweep.page(place)
    if (place / history.FILE).exists():
        return run.page(place)
    if runs.folders(place):
        return runs.page(place)
    raise InputError(
        f"{place} holds no results: neither {bench.FILE} of `nhgd bench`, nor {history.FILE} of `nhgd run`, nor {sweep.FILE}"
        " of `nhgd sweep`, nor folders of runs. Name the folder that --out of such a command was."
    )
