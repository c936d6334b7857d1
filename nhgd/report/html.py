"""HTML whose text is escaped by construction: whatever is not `Html` already becomes text."""

from __future__ import annotations

import html as escaping
from collections.abc import Iterable
from typing import TypeAlias

VOID = ("img", "meta", "input", "path", "line", "rect", "circle", "polyline", "polygon", "col")


class Html(str):
    """Text that is HTML, and stays as it is."""

    __slots__ = ()


Child: TypeAlias = str | int | Iterable["Child"] | None


def element(tag: str, /, *children: Child, **attributes: str | float | bool | None) -> Html:
    """An element; a final underscore of an attribute falls away, others become hyphens, and None or False omits it.

    >>> element("p", "a < b", element("b", "c"), class_="note", data_value=0.5)
    '<p class="note" data-value="0.5">a &lt; b<b>c</b></p>'
    """
    said = "".join(
        f" {_attribute(key)}" + ("" if value is True else f'="{escaping.escape(str(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if tag in VOID:
        return Html(f"<{tag}{said}/>")
    return Html(f"<{tag}{said}>{joined(children)}</{tag}>")


def joined(children: Iterable[Child]) -> Html:
    """Children one after another, those that are text escaped."""
    return Html("".join(_written(child) for child in children))


def _written(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Html):
        return child
    if isinstance(child, (str, int, float)):
        return escaping.escape(str(child))
    return joined(child)


def _attribute(key: str) -> str:
    return key.rstrip("_").replace("_", "-") if key not in ("viewBox", "preserveAspectRatio") else key
