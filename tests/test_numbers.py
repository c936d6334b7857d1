"""Each number of the documentation that could have been measured has a source: a table or a sentence that is made from the
committed JSON, code that a test runs, or a line below that says why it needs none."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from benchmarks import scaling, sentences, tables
from nhgd.paper import TABLE
from tests.test_docs import PAGES, ROOT, settings_table

PAGES = [*PAGES, ROOT / "CHANGELOG.md"]
UNITS = "%|ms|us|s|seconds?|minutes?|times|[kMGT]i?B"
WORDS = "two|three|four|five|six|seven|eight|nine|ten|twelve|twenty|thirty|forty|fifty|a hundred|a thousand"
# A decimal fraction, a number with a unit, or so many times something.
MEASURABLE = re.compile(
    rf"(?<![\w.^-])\d[\d,.]*(?: to \d[\d,.]*)? ?(?:{UNITS})(?!\w)|(?<![\w.^-])\d[\d,]*\.\d+(?![\w.])|\b(?:{WORDS}) times\b"
)

# Numbers that are chosen, given or known rather than measured, by page.
STATED = {
    "README.md": {
        "need Python 3.10": "pyproject.toml",
        "(Apache 2.0)": "LICENSE",
    },
    "CHANGELOG.md": {
        "in place of a weight below 0.5": "a definition",
        "relative residual above 0.1 warns": "a threshold",
    },
    "benchmarks/parallel.md": {
        "NVLink 450 GB/s each way and 5 microseconds, InfiniBand 50 GB/s": "assumptions, called so",
        "Weak efficiency exceeds 100 %": "a limit",
        "and 10 seconds more. A cut is counted": "a time limit",
        "ten times as large as its factors": "the table of counts",
    },
    "docs/architecture.md": {"Every 30 seconds": "a default", "more than 2 % of the time": "a default"},
    "docs/callbacks.md": {"up to 0.2 seconds late": "the limit of the replay"},
    "docs/choosing.md": {
        "(0.8 of the old value, 0.2 of the new one)": "a constant",
        "(rho above 0.998)": "a constant",
        "its old value, 0.8 at most": "a constant",
        "weights at 0.5": "a setting of the table",
        "weights are 0.5": "a setting of the table",
        "(0.95 for right labels, 0.05 for wrong ones)": "a setting of the table",
        "ends above 0.1": "a threshold",
        "more than ten times as long as theta": "a threshold",
        "rose to three times its lowest mean": "a threshold",
    },
    "docs/cleaning.md": {
        "4.6 is 99 to 1": "a definition, log 99",
        "weight is below 0.5": "a definition",
        "is above 0.1 or": "a threshold",
        "above 0.5": "a threshold",
        "(45 % are wrong)": "a setting of the table: 50 % get one of ten classes",
        "60 seconds of outer steps": "a setting of the table",
        "(C = 0.1)": "a setting of the table",
        "With a ridge ten times stronger": "a setting of the table",
        "20 % wrong labels": "a setting of the table",
    },
    "docs/comparing.md": {"from the 20 % to the 80 % quantile": "a definition"},
    "docs/distillation.md": {
        "unpack to more than 4 GiB": "a limit",
        "120 seconds each": "a setting of the table",
        "60 seconds each": "a setting of the table",
        "NHGD reaches 0.8256 with n = 5 and 0.8281 with n = 100": "the paper, its table of distillation",
        "0.8359": "the paper, its table of distillation",
    },
    "docs/first-steps.md": {"of which 40 % are labelled wrong": "the setting of the demonstration"},
    "docs/imbalance.md": {"than 20 times the share of another": "a limit"},
    "docs/influence.md": {"(2 GiB)": "a default"},
    "docs/methods.md": {
        "(0.01, 0.03, 0.1)": "a setting of the table",
        "edge of the grid, 0.01 or 0.1": "a setting of the table",
        "nu = 0.001": "a setting",
        "50 Adam steps of 0.001": "a setting",
        "Adam with 0.01": "a setting",
        "Not given: 0.1": "a setting",
        "are not given: 0.5": "a setting",
    },
    "docs/parallel.md": {"(30 seconds by default)": "a default", "and 10 seconds more": "a limit", "30 seconds more": "a limit"},
    "docs/reproduction.md": {
        "with 95 % intervals": "a definition",
        "three times at most": "a setting of the search",
        "Fair, 3 seconds a run": "a setting of the table",
        "Fair, 12 seconds a run": "a setting of the table",
        "untuned, 10 seconds": "a setting of the table",
        "untuned, 40 seconds": "a setting of the table",
    },
    "docs/pde.md": {"nu = 0.001": "a setting", "torch 2.11": "a version", "or 50 seconds": "a setting of the table"},
}  # fmt: skip


def flat(text: str) -> str:
    """Without line breaks, and without the marks of a list or a quotation at their beginnings."""
    return " ".join(re.sub(r"^\s*(?:[-*>]|\d\.) ", "", text, flags=re.MULTILINE).split())


def prose(page: Path) -> str:
    """A page without code, links' targets and tables that tests compare with their source."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^<!-- table: \S+ -->\n\n(?:\|.*\n)+", "", text, flags=re.MULTILINE)
    for task in TABLE:
        text = text.replace("\n".join(settings_table(task)), "")
    text = re.sub(r"(?<=\n\n)(?: {4}.*\n+)+", "", text)
    return re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "`", text))


@cache
def measured() -> dict[str, list[str]]:
    return sentences.measured()


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_measurable_number_has_a_source(page):
    left = flat(prose(page))
    known = [re.sub(r"`[^`]*`", "`", piece) for piece in measured().get(name_of(page), [])]
    for piece in sorted([*known, *STATED.get(name_of(page), {})], key=len, reverse=True):
        left = left.replace(flat(piece), "...")
    found = [left[max(0, m.start() - 60) : m.end() + 30] for m in MEASURABLE.finditer(left)]
    assert not found, "give these a table, a line in benchmarks/sentences.py, or one in STATED above"


@pytest.mark.parametrize("page", sorted({*STATED, *sentences.measured()}))
def test_what_is_said_of_a_page_stands_there(page):
    text = flat((ROOT / page).read_text(encoding="utf-8"))
    for piece in measured().get(page, []):
        assert flat(piece) in text, f"{page} and benchmarks/results disagree"
    plain = flat(prose(ROOT / page))
    unused = [piece for piece in STATED.get(page, {}) if flat(piece) not in plain]
    assert not unused


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_marked_table_is_one_that_is_made(page):
    marked = set(re.findall(r"^<!-- table: (\S+) -->$", page.read_text(encoding="utf-8"), flags=re.MULTILINE))
    made = set(tables.pages().get(name_of(page), {}))
    if page.name == "parallel.md" and page.parent.name == "benchmarks":
        made |= set(scaling.all_tables(ROOT / "benchmarks/results"))
    assert marked == made


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("it took 0.81 of", ["0.81"]),
        ("within 9 % of it, in 12 ms", ["9 %", "12 ms"]),
        ("1.0 to 1.6 times as long", ["1.0 to 1.6 times"]),
        ("six times nearer", ["six times"]),
        ("eps^-1.5 and H^0.5, 11 x 11, version 1.2.3, in three steps", []),
    ],
)
def test_what_counts_as_measurable(text, found):
    assert MEASURABLE.findall(text) == found
