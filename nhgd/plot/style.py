"""One look for all figures: colours that colour-blind readers can tell apart, one size of type, quiet axes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

from nhgd.errors import InputError


@dataclass(frozen=True)
class Theme:
    """The colours of a figure or a page.

    Attributes:
        paper, page, shade: behind figures, around them, and of headings.
        ink, quiet: of text, and of what matters less.
        grid, edge: of lines that help the eye, and of those that end something.
        palette: of what is compared.
    """

    paper: str
    page: str
    shade: str
    ink: str
    quiet: str
    grid: str
    edge: str
    palette: tuple[str, ...]


# M. Okabe and K. Ito, Color Universal Design, 2008; without their yellow, which is too light for a line on white. Those
# for dark paper are as far from each other to colour-blind eyes, and lighter.
LIGHT = Theme(
    *("#ffffff", "#f5f6f8", "#f1f3f5", "#222222", "#5f6772", "#e3e6ea", "#a9b0b9"),
    ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555"),
)
DARK = Theme(
    *("#191c21", "#101216", "#22262c", "#e8eaed", "#a3abb6", "#30353d", "#59616c"),
    ("#4A9FE0", "#F07F2E", "#1FB58A", "#E5A3C8", "#F5C242", "#8FD3FF", "#B4B9C1"),
)
PALETTE = LIGHT.palette
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))  # once the colours are used up
INK, QUIET, GRID = LIGHT.ink, LIGHT.quiet, LIGHT.grid
LETTERS = 10  # of a heading, to the inch
FORMATS = ("png", "svg", "pdf")

SETTINGS: Any = {  # any: matplotlib has a type of its own for the keys
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.edgecolor": QUIET,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "text.color": INK,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "figure.facecolor": "white",
    "savefig.dpi": 150,
    "pdf.fonttype": 42,  # text that can be searched and copied
    "svg.hashsalt": "nhgd",  # the same picture is the same file
}


@contextmanager
def styled() -> Iterator[None]:
    """Figures that are made and saved inside have this look; the caller's settings of Matplotlib stay as they are."""
    try:
        from matplotlib import rc_context
    except ImportError:
        raise InputError("Plots need matplotlib: pip install 'nhgd[cli]'.") from None
    with rc_context(SETTINGS):
        yield


def line_of(index: int) -> dict[str, Any]:
    """The colour and the dashes of the index-th line of a figure.

    >>> line_of(0)["color"], line_of(7)["color"], line_of(7)["linestyle"]
    ('#0072B2', '#0072B2', (0, (5, 2)))
    """
    return {
        "color": PALETTE[index % len(PALETTE)],
        "linestyle": DASHES[index // len(PALETTE) % len(DASHES)],
    }


def headed(figure: Any, text: str) -> None:
    """A heading at the left, in as many lines as the figure is wide for."""
    lines = wrap(text, max(int(LETTERS * figure.get_figwidth()), 20), break_on_hyphens=False)
    figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=11, fontweight="bold")


def save(figure: Any, paths: Sequence[Path]) -> None:
    """Write a figure in the formats that the names of the files say, without the date."""
    for path in paths:
        no_date = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix.lower())
        figure.savefig(path, **({} if no_date is None else {"metadata": no_date}))
