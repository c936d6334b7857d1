"""Curves that are compared: a switch for each, a choice of the metric, and a chart for each axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nhgd.report.chart import Line, chart
from nhgd.report.html import Html, element, joined
from nhgd.report.page import titled

AXES = {"seconds": "seconds", "gradients": "oracle calls (gradient-equivalents)", "step": "outer steps"}


@dataclass(frozen=True)
class Panel:
    """A chart: the axis below, the curves, and what is marked."""

    axis: str
    lines: Sequence[Line]
    level: tuple[float, str] | None = None
    moment: tuple[float, str] | None = None


def compared(names: Sequence[str], panels: Mapping[str, Sequence[Panel]], words: str) -> Html:
    """Charts of several metrics with their controls.

    Args:
        names: of the curves, in the order of their index.
        panels: for each metric its charts, the one to see first at the front.
        words: what the curves and the bands are.
    """
    switches = [_switch(name, index) for index, name in enumerate(names)] if len(names) > 1 else []
    options = [element("option", titled(metric), value=metric) for metric in panels]
    chosen = element("label", "Metric ", element("select", options, class_="metric", autocomplete="off"), hidden=True)
    controls = element("div", switches, chosen if len(panels) > 1 else None, class_="controls")
    made = [
        element(
            "div",
            element("h3", titled(metric), class_="hidden"),
            [chart(p.lines, AXES[p.axis], titled(metric), p.level, p.moment) for p in some],
            class_="panels", data_metric=metric,
        )
        for metric, some in panels.items()
    ]  # fmt: skip
    return joined([controls, element("p", words, class_="quiet"), made])


def swatch(index: int) -> Html:
    """A piece of the line that a name has in the charts."""
    line = element("g", element("path", d="M1 5L25 5", class_="line"), class_=f"line-{index}")
    return element("svg", line, viewBox="0 0 26 10", aria_hidden="true", class_="swatch")


def _switch(name: str, index: int) -> Html:
    return element(
        "button",
        swatch(index),
        element("span", name),
        type="button",
        class_="switch",
        aria_pressed="true",
        data_of=index,
        title=name,
    )
