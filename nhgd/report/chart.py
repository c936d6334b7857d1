"""Curves with bands as SVG, in the colours of the page around them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from nhgd.report.html import Html, element, joined

WIDE, HIGH = 540, 330
LEFT, RIGHT, TOP, BOTTOM = 90, 14, 12, 52
SPAN = 30  # a larger ratio of values above 0 takes a logarithmic axis
Numbers: TypeAlias = Sequence[float | None]


@dataclass(frozen=True)
class Line:
    """A curve.

    Attributes:
        index: of its colour and dashes, and of the switch that hides it.
        x, y: its points; a gap where a value is None.
        low, high: the edges of its band, if it has one.
    """

    name: str
    index: int
    x: Numbers
    y: Numbers
    low: Numbers = ()
    high: Numbers = ()


@dataclass(frozen=True)
class Scale:
    """From values to places of the picture."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        """The place of a value."""
        if self.logarithmic:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values inside."""
        return log_ticks(self.low, self.high) if self.logarithmic else ticks(self.low, self.high)


def chart(
    lines: Sequence[Line],
    x_label: str,
    y_label: str,
    level: tuple[float, str] | None = None,
    moment: tuple[float, str] | None = None,
    whole: bool = False,
) -> Html:
    """An SVG picture.

    Args:
        lines: to draw; those without points are left out.
        x_label, y_label: of the axes.
        level: a value that a horizontal line marks, and its words.
        moment: the same on the other axis.
        whole: only whole numbers stand below it.
    """
    drawn = [line for line in lines if any(True for _ in _points(line))]
    values = [value for line in drawn for value in _values(line)]
    ends = [x for line in drawn for x, _ in _points(line)]
    if not values:
        return element("p", f"There is no number of {y_label} to draw.", class_="quiet")
    if level is not None:
        values.append(level[0])
    logarithmic = min(values) > 0 and max(values) / min(values) > SPAN
    low, high = _room(min(values), max(values), logarithmic)
    across = Scale(min(0.0, min(ends)), max(ends) if max(ends) > min(0.0, min(ends)) else 1.0, LEFT, WIDE - RIGHT)
    upwards = Scale(low, high, HIGH - BOTTOM, TOP, logarithmic)
    kind = " (logarithmic)" if logarithmic else ""
    names = ", ".join(line.name for line in drawn)
    return element(
        "svg",
        element("title", f"{y_label}{kind} over {x_label}: {names}"),
        _grid(across, upwards, whole),
        _level(upwards, level),
        _moment(across, moment),
        (_band(line, across, upwards) for line in drawn if line.low),
        (_curve(line, across, upwards) for line in drawn),
        element("text", x_label, x=(LEFT + WIDE - RIGHT) / 2, y=HIGH - 8, class_="label", text_anchor="middle"),
        element(
            "text", y_label + kind, class_="label", text_anchor="middle",
            transform=f"translate(14 {(TOP + HIGH - BOTTOM) / 2:g}) rotate(-90)",
        ),
        viewBox=f"0 0 {WIDE} {HIGH}", role="img", class_="chart",
    )  # fmt: skip


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Multiples of 1, 2, 2.5 or 5 times a power of ten.

    >>> ticks(0.0, 0.9), ticks(0.61, 0.64)
    ([0.0, 0.2, 0.4, 0.6, 0.8], [0.61, 0.62, 0.63, 0.64])
    """
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9))
    return _multiples(low, high, step)


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, and 2 and 5 times them where there are few.

    >>> log_ticks(0.009, 1.5), log_ticks(0.5, 25)
    ([0.01, 0.1, 1.0], [0.5, 1.0, 2.0, 5.0, 10.0, 20.0])
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, (last - first) // 6)
    powers = [float(f"1e{k}") for k in range(first, last + 1) if not k % every]
    found = [power for power in powers if low <= power <= high]
    if len(found) < 3:
        found = [m * power for power in powers for m in (1, 2, 5) if low <= m * power <= high]
    return found


def said(value: float) -> str:
    """A number beside an axis.

    >>> said(0.0), said(0.25), said(12000.0), said(1e-07)
    ('0', '0.25', '12,000', '1e-7')
    """
    if value and not 1e-4 <= abs(value) < 1e6:
        base, power = f"{value:.3e}".split("e")
        return f"{float(base):g}e{int(power)}"
    return f"{value:,.10g}"


def _multiples(low: float, high: float, step: float) -> list[float]:
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [float(f"{k * step:.12g}") for k in range(first, last + 1)]


def _room(low: float, high: float, logarithmic: bool) -> tuple[float, float]:
    """A little more than the values take, so that no line lies on the frame."""
    if logarithmic:
        part = (high / low) ** 0.04
        return low / part, high * part
    part = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - part, high + part


def _points(line: Line) -> Iterator[tuple[float, float]]:
    return ((x, y) for x, y in zip(line.x, line.y, strict=False) if x is not None and y is not None)


def _values(line: Line) -> Iterator[float]:
    yield from (y for _, y in _points(line))
    yield from (value for edge in (line.low, line.high) for value in edge if value is not None)


def _grid(across: Scale, upwards: Scale, whole: bool) -> Html:
    made: list[Html] = []
    for value in upwards.ticks():
        y = f"{upwards(value):.1f}"
        made.append(element("line", x1=LEFT, x2=WIDE - RIGHT, y1=y, y2=y, class_="grid"))
        made.append(element("text", said(value), x=LEFT - 8, y=y, dy="0.35em", text_anchor="end"))
    for value in across.ticks():
        if whole and value % 1:
            continue
        x = f"{across(value):.1f}"
        made.append(element("line", x1=x, x2=x, y1=TOP, y2=HIGH - BOTTOM, class_="grid"))
        made.append(element("text", said(value), x=x, y=HIGH - BOTTOM + 18, text_anchor="middle"))
    base = f"{HIGH - BOTTOM}"
    made.append(element("line", x1=LEFT, x2=WIDE - RIGHT, y1=base, y2=base, class_="axis"))
    return joined(made)


def _level(upwards: Scale, level: tuple[float, str] | None) -> Html:
    if level is None:
        return Html("")
    y = upwards(level[0])
    return joined(
        [
            element("line", x1=LEFT, x2=WIDE - RIGHT, y1=f"{y:.1f}", y2=f"{y:.1f}", class_="mark"),
            element("text", level[1], x=WIDE - RIGHT - 4, y=f"{y - 5:.1f}", text_anchor="end"),
        ]
    )


def _moment(across: Scale, moment: tuple[float, str] | None) -> Html:
    if moment is None:
        return Html("")
    x = across(moment[0])
    late = x > (LEFT + WIDE - RIGHT) / 2
    return joined(
        [
            element("line", x1=f"{x:.1f}", x2=f"{x:.1f}", y1=TOP, y2=HIGH - BOTTOM, class_="mark"),
            element(
                "text", moment[1], x=f"{x - 5 if late else x + 5:.1f}", y=TOP + 12, text_anchor="end" if late else "start"
            ),
        ]
    )  # fmt: skip


def _curve(line: Line, across: Scale, upwards: Scale) -> Html:
    """Separate pieces where values are missing; a point where a piece is one value."""
    made = []
    for piece in _pieces(line.x, line.y):
        places = [f"{across(x):.1f} {upwards(y):.1f}" for x, y in piece]
        if len(places) == 1:
            x, y = places[0].split()
            made.append(element("circle", cx=x, cy=y, r=3, class_="dot"))
        else:
            made.append(element("path", d="M" + "L".join(places), class_="line"))
    return element("g", element("title", line.name), made, data_line=line.index, class_=f"line-{line.index}")


def _band(line: Line, across: Scale, upwards: Scale) -> Html:
    rows = [
        (x, low, high)
        for x, low, high in zip(line.x, line.low, line.high, strict=False)
        if x is not None and low is not None and high is not None
    ]
    if len(rows) < 2:
        return Html("")
    there = [f"{across(x):.1f} {upwards(high):.1f}" for x, _, high in rows]
    back = [f"{across(x):.1f} {upwards(low):.1f}" for x, low, _ in reversed(rows)]
    band = element("path", d="M" + "L".join([*there, *back]) + "Z", class_="band")
    return element("g", band, data_line=line.index, class_=f"line-{line.index}")


def _pieces(xs: Numbers, ys: Numbers) -> list[list[tuple[float, float]]]:
    found: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(xs, ys, strict=False):
        if x is None or y is None:
            found.append([])
        else:
            found[-1].append((x, y))
    return [piece for piece in found if piece]
