"""A page: its frame, look and small program, and the blocks that all pages share. Nothing in it asks the network."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import nhgd
from nhgd.plot.style import DARK, LIGHT, Theme
from nhgd.report.html import Child, Html, element, joined


@dataclass(frozen=True)
class Section:
    """A part of a page with a heading of its own."""

    title: str
    content: Child

    @property
    def anchor(self) -> str:
        """Its name in addresses."""
        return "".join(letter if letter.isalnum() else "-" for letter in self.title.lower())


@dataclass(frozen=True)
class Page:
    """What a page says.

    Attributes:
        title, lead: the heading, and a line below it.
        finding: the one sentence to take away, if there is one.
        sections: the rest.
    """

    title: str
    lead: str
    finding: str | None
    sections: Sequence[Section]

    def to_html(self) -> str:
        """The whole page."""
        style, script = _look(), _file("page.js")
        allowed = f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'"
        head = element(
            "head",
            element("meta", charset="utf-8"),
            element("meta", name="viewport", content="width=device-width, initial-scale=1"),
            element("meta", name="color-scheme", content="light dark"),
            element("meta", http_equiv="Content-Security-Policy", content=allowed),
            element("title", f"{self.title} - nhgd"),
            element("style", Html(style)),
        )
        shown = [section for section in self.sections if section.content]
        body = element(
            "body",
            element("a", "Skip to the results", href="#results", class_="skip"),
            element("header", self._heading(), self._links(shown)),
            element("main", (_section(section) for section in shown), id="results"),
            element(
                "footer",
                element("p", f"Written by nhgd {nhgd.__version__}. This page is one file and needs no network."),
            ),
            element("script", Html(script)),
        )
        return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"

    def _heading(self) -> Html:
        words = element("div", element("h1", self.title), element("p", self.lead, class_="lead"))
        button = element("button", "Dark", type="button", class_="theme", hidden=True)
        finding = None if self.finding is None else element("p", self.finding, class_="finding")
        return joined([element("div", words, button, class_="top"), finding])

    def _links(self, shown: Sequence[Section]) -> Html | None:
        links = (element("a", section.title, href=f"#{section.anchor}") for section in shown)
        return element("nav", links, aria_label="Sections") if len(shown) > 1 else None


def paragraph(words: str, kind: str | None = None) -> Html:
    """A paragraph."""
    return element("p", words, class_=kind)


def note(words: str, bad: bool = False) -> Html:
    """A sentence that a reader must not miss."""
    return element("p", words, class_="note bad" if bad else "note")


def more(title: str, content: Child) -> Html:
    """What is shown when it is asked for."""
    return element("details", element("summary", title), content)


def listing(values: Mapping[str, Any]) -> Html:
    """Names with their values; those inside of others are named in full."""
    pairs = ((element("dt", key), element("dd", value)) for key, value in flat(values))
    return element("dl", pairs)


def command(words: str) -> Html:
    """A command, to be copied."""
    button = element("button", "Copy", type="button", hidden=True)
    return element("div", element("pre", element("code", words)), button, class_="command")


def picture(address: str, words: str, caption: Child = None) -> Html:
    """A picture with its words."""
    return element(
        "figure",
        element("div", element("img", src=address, alt=words)),
        element("figcaption", words if caption is None else caption),
        class_="picture",
    )


def flat(values: Mapping[str, Any], before: str = "") -> Iterable[tuple[str, str]]:
    """Names and values as text, one level.

    >>> list(flat({"method": {"name": "nhgd", "decay": None}, "steps": [1, 2]}))
    [('method.name', 'nhgd'), ('method.decay', '-'), ('steps', '1, 2')]
    """
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", plain(value)


def plain(value: Any) -> str:
    """A value of JSON as text.

    >>> plain(None), plain(True), plain(0.1), plain(["a", 2])
    ('-', 'yes', '0.1', 'a, 2')
    """
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return ", ".join(plain(item) for item in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={plain(item)}" for key, item in value.items())
    return str(value)


def titled(name: str) -> str:
    """The name of a metric as words."""
    return name.replace("_", " ")


def _section(section: Section) -> Html:
    return element("section", element("h2", section.title), section.content, id=section.anchor)


def _look() -> str:
    light, dark = _variables(LIGHT), _variables(DARK)
    lines = [
        *(
            f".line-{index} {{ --own: var(--line-{index % len(LIGHT.palette)}); --dash: {dash}; }}"
            for index, dash in _dashes()
        ),
    ]
    return "\n".join(
        [
            f":root {{ color-scheme: light; {light} }}",
            f"@media (prefers-color-scheme: dark) {{ :root:not([data-theme]) {{ color-scheme: dark; {dark} }} }}",
            f':root[data-theme="dark"] {{ color-scheme: dark; {dark} }}',
            f"@media print {{ :root, :root:not([data-theme]) {{ color-scheme: light; {light} }} }}",
            *lines,
            _file("page.css"),
        ]
    )


def _dashes() -> Iterable[tuple[int, str]]:
    """For each line its dashes in SVG's words: solid ones first, others once the colours are used up."""
    ways = ("none", "9 5", "3 4", "12 4 3 4")
    return ((index, ways[index // len(LIGHT.palette)]) for index in range(len(ways) * len(LIGHT.palette)))


def _variables(theme: Theme) -> str:
    named = {
        "page": theme.page, "card": theme.paper, "head": theme.shade, "hover": theme.shade, "edge": theme.grid,
        "edge-strong": theme.edge, "ink": theme.ink, "quiet": theme.quiet, "link": theme.palette[0], "focus": theme.palette[4],
        "warn": theme.palette[4], "bad": theme.palette[1], "note": theme.shade,
    }  # fmt: skip
    named |= {f"line-{index}": colour for index, colour in enumerate(theme.palette)}
    return " ".join(f"--{name}: {value};" for name, value in named.items())


def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
