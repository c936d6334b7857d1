"""`nhgd report`: a folder of results as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nhgd.cli._options import Json
from nhgd.cli._output import print_json
from nhgd.report import report


def write_report(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder that --out of a command was, or of several such.")
    ],
    as_json: Json = False,
) -> None:
    """One page, report.html, of a folder that bench, run, sweep or another command has written. It needs no network."""
    written = report(folder)
    if as_json:
        print_json({"report": str(written), "folder": str(folder)})
    else:
        print(written)
