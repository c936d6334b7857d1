"""`nhgd data`: image sets on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nhgd._progress import bar
from nhgd._results import folder
from nhgd.cli._options import Json
from nhgd.cli._output import console, print_json
from nhgd.data.fetch import cache
from nhgd.data.fetch import fetch as fetch_files

data = typer.Typer(help="Download image sets.", rich_markup_mode=None)


@data.callback()
def image_sets() -> None:
    """Download image sets, checked by their sums, into the cache or a folder of your own."""


@data.command()
def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="mnist or fashion-mnist.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Target folder; default: the cache, where tasks look first.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Download MNIST or Fashion-MNIST. Existing files stay; an interrupted download continues."""
    with folder(out), bar(f"fetch {name}") as tick:
        files = fetch_files(name, out, tick)
    if as_json:
        print_json({"name": name, "folder": str(out or cache() / name), "files": [str(file) for file in files]})
    else:
        console().print(f"{name} is in {out or cache() / name}, {len(files)} files, checksums correct.")
