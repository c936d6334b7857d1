"""The figures of `nhgd reproduce theory`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import log, sqrt
from pathlib import Path
from typing import Any

from nhgd.plot import rates


def draw(folder: Path, found: Mapping[str, Any], suffixes: Sequence[str]) -> list[Path]:
    """Every figure in every format, into a folder."""
    made: list[Path] = []
    for name, title, panels in _figures(found):
        made += rates.draw([folder / f"theory-{name}.{end}" for end in suffixes], title, panels)
    return made


def _figures(found: Mapping[str, Any]) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    yield (
        "rates",
        "Errors of one inner loop of T steps: mean and 10-90 % of the runs, slopes in brackets",
        [_panel(name, "T (theta: T + q)", "error", _curves(one["curves"])) for name, one in found["rates"].items()],
    )
    yield (
        "tails",
        "Quantiles of the errors over the runs, with bootstrap intervals",
        [
            _panel(name, "sqrt(log(1 / delta))", "(1 - delta) quantile", _quantiles(one["errors"]))
            for name, one in found["tails"].items()
        ],
    )
    parts = ("in T", "hypergradient error in T", "in K above the noise")
    yield (
        "outer",
        "Algorithm 1: mean squared hypergradient over outer steps",
        [
            _panel(
                part,
                "K" if "in K" in part else "T",
                "squared norm",
                [_fitted(name, one[part]) for name, one in found["outer"].items()],
            )
            for part in parts
        ],
    )
    rows = found["misspecification"]["rows"]
    x = [row["epsilon_D"] for row in rows]
    yield (
        "misspecification",
        "A wrong model: the floor of the error",
        [
            _panel(
                title,
                "epsilon_D",
                "norm",
                [{"label": label, "x": x, "y": [row[key] for row in rows]} for key, label in lines],
            )
            for title, lines in (
                ("|H - I|", (("H - I", "exact"), ("measured H - I", "measured"), ("bound", "bound"))),
                ("|A - 1 / H|", (("inverse", "exact"), ("measured inverse", "measured, mean of the runs"))),
            )
        ],
    )


def _panel(title: str, x: str, y: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
    return {"title": title, "x": x, "y": y, "lines": lines}


def _curves(curves: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [_fitted(name, curve) for name, curve in curves.items()]


def _fitted(name: str, curve: Mapping[str, Any]) -> dict[str, Any]:
    line = {"label": f"{name} ({curve['slope']:.2f})", "x": curve["x"], "y": curve["mean"], "guide": curve["aim"]}
    return line | ({"low": curve["tenth"], "high": curve["nine tenths"]} if "tenth" in curve else {})


def _quantiles(errors: Mapping[str, Any]) -> list[dict[str, Any]]:
    lines = []
    for name, one in errors.items():
        x = [sqrt(log(1 / delta)) for delta in one["delta"]]
        label = f"{name} (power {one['power']:.2f})"
        lines.append({"label": label, "x": x, "y": one["quantile"], "low": one["low"], "high": one["high"], "guide": 1})
    return lines
