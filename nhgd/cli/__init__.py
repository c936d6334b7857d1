"""A thin command line over the library: one file for each command."""

from __future__ import annotations

import sys

from nhgd.cli._streams import prepare


def main() -> None:
    """The console script. Without the command-line extra it says what is missing."""
    prepare()
    try:
        from nhgd.cli._program import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "click", "rich"):
            raise
        print("The command line needs: pip install 'nhgd[cli]'", file=sys.stderr)
        sys.exit(2)
    app()
