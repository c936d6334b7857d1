"""What a run has drawn: its pictures, and its images one by one where it has kept them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nhgd.report.folder import inside, picture
from nhgd.report.html import Html, joined
from nhgd.report.page import picture as figure

WORDS = {
    "images": "Distilled images",
    "state": "The temperature at three times",
    "control": "The learnt source",
    "shares": "The share of each class in the training loss",
    "episode": "An episode of held-out classes",
    "parameters": "The value of every trial over each setting",
    "suspects": "The labels most suspected",
}


def learnt(folder: Path, place: str, names: Sequence[str]) -> Html:
    """The pictures of a run.

    Args:
        folder: of the page.
        place: of the run, in the folder.
        names: of its files.
    """
    made = []
    for name in names:
        file = inside(folder, str(Path(place) / name))
        if file.suffix.lower() == ".png":
            made.append(figure(picture(file), WORDS.get(file.stem, file.stem.replace("_", " "))))
    return joined(made)
