"""Where a result comes from: the command, the machine, the versions, the day and the commit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nhgd.report.html import Html, joined
from nhgd.report.page import command, listing, paragraph
from nhgd.report.shape import MAYBE_TEXT

ORIGIN = {
    "command?": MAYBE_TEXT,
    "date?": MAYBE_TEXT,
    "versions?": {str: object},
    "machine?": {str: object},
    "git?": (dict, type(None)),
}
PROVENANCE = (dict, type(None))


def provenance(origin: Mapping[str, Any]) -> Html:
    """The command, to be copied, and the rest as a list."""
    words = origin.get("command")
    asked = (
        command(words)
        if isinstance(words, str)
        else paragraph("Called from Python, not from the command line.", "quiet")
    )
    return joined([asked, listing(dict(_known(origin)))])


def _known(origin: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """One list of all; what is said twice is shown once."""
    if origin.get("date"):
        yield "date", origin["date"]
    if origin.get("git"):
        changed = " with changes" if origin["git"].get("changed") else ""
        yield "commit", f"{origin['git'].get('commit')}{changed}"
    for part in ("versions", "machine", "environment"):
        yield from (origin.get(part) or {}).items()
