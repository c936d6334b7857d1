"""docs/architecture.md against the house: its listing, the rooms of its table, and the walk of a batch."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import torch

import nhgd
from nhgd.task import Cleaning

ROOT = Path(nhgd.__file__).parent
PAGE = (ROOT.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
ROWS = 10  # of the table that says where something new belongs


def section(title: str) -> str:
    return PAGE.split(f"## {title}", 1)[1].split("\n## ", 1)[0]


def test_the_listing_is_of_all_files_and_folders_of_the_package() -> None:
    listing = PAGE.split("    nhgd/\n", 1)[1].split("    tests/ ", 1)[0]
    named = set(re.findall(r"(?<![\w/])_?\w+(?:\.py|/)", listing)) - {
        "distributed/",
        "pde/",
    }  # which are in their rooms
    places = {f"{p.name}/" if p.is_dir() else p.name for p in ROOT.iterdir() if p.suffix == ".py" or p.is_dir()}
    assert named == places - {"__init__.py", "__main__.py", "__pycache__/"}


def test_the_table_names_a_room_for_ten_kinds_of_newcomers() -> None:
    rows = [line.split("|")[1:4] for line in section("Where does my new X go?").splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + ROWS  # the first two are its head
    for kind, room, _ in rows[2:]:
        place = re.sub(r"(NAME|FORMAT)\.py", "", room.strip(" `"))
        assert (ROOT / place).exists(), (kind, room)


def test_a_batch_crosses_the_files_that_the_walk_names(tmp_path: Path) -> None:
    """An outer step is watched call by call, after two others, which see the model for the first time."""
    walk = section("One outer step of `nhgd run cleaning`")
    named = [f"checkpoint/{name}" if name == "writer.py" else name for name in re.findall(r"`([\w/]+\.py)`", walk)]
    assert len(set(named)) > 20
    crossed: set[str] = set()

    def watch(frame: Any, event: str, given: Any) -> None:
        if event == "call":
            crossed.add(frame.f_code.co_filename)

    made = Cleaning.preset("quick").build(0, torch.device("cpu"))
    with made.start("nhgd", checkpoint=tmp_path / "a", checkpoint_every=1) as solver:
        solver.step()
        solver.step()
        before = sys.getprofile()
        sys.setprofile(watch)
        try:
            solver.step()
        finally:
            sys.setprofile(before)
    assert [name for name in named if str(ROOT / name) not in crossed] == []
