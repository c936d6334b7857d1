"""The results of `nhgd reproduce theory` as text and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import fill
from typing import Any


def text(found: Mapping[str, Any]) -> str:
    """Every claim with what was found."""
    parts = []
    for claim in found["claims"]:
        head = f"{'held    ' if claim['held'] else 'NOT HELD'}  {claim['claim']}"
        rest = fill(
            f"{claim['expected']}; found: {claim['found']}", 110, initial_indent=10 * " ", subsequent_indent=10 * " "
        )
        parts += [head, rest]
    return "\n".join(parts)


def claims(found: Mapping[str, Any]) -> str:
    """The same as a table."""
    lines = ["| claim | expected | found | held |", "| --- | --- | --- | --- |"]
    for claim in found["claims"]:
        cells = [_plain(claim[key]) for key in ("claim", "expected", "found")]
        lines.append(f"| {' | '.join(cells)} | {'yes' if claim['held'] else 'no'} |")
    return "\n".join(lines)


def slopes(found: Mapping[str, Any]) -> str:
    """The slope of every error on every model, with its interval."""
    names = list(found["rates"])
    first = found["rates"][names[0]]["curves"]
    lines = [f"| error | theory | {' | '.join(names)} |", "| --- " * (len(names) + 2) + "|"]
    for curve, one in first.items():
        cells = [_slope(found["rates"][name]["curves"][curve]) for name in names]
        lines.append(f"| {curve} | {'' if one['aim'] is None else one['aim']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def quantiles(found: Mapping[str, Any]) -> str:
    """The power of sqrt(log(1 / delta)) with which each quantile grows."""
    names = list(found["tails"])
    errors = list(found["tails"][names[0]]["errors"])
    lines = [f"| error | {' | '.join(names)} |", "| --- " * (len(names) + 1) + "|"]
    for error in errors:
        of = [found["tails"][name]["errors"][error] for name in names]
        cells = [f"{one['power']:.2f} ({one['power_low']:.2f} to {one['power_high']:.2f})" for one in of]
        lines.append(f"| {error} | {' | '.join(cells)} |")
    return "\n".join(lines)


def outer(found: Mapping[str, Any]) -> str:
    """The slopes of theorem 2."""
    names = list(found["outer"])
    titles = {
        "in T": "mean squared hypergradient in T, from a stationary point",
        "hypergradient error in T": "squared error of the hypergradient in T",
        "in K": "mean squared hypergradient in K",
        "in K above the noise": "the same above its noise",
    }
    lines = [f"| slope of | theory | {' | '.join(names)} |", "| --- " * (len(names) + 2) + "|"]
    for part, title in titles.items():
        of = [found["outer"][name][part] for name in names]
        aim = "" if of[0]["aim"] is None else f"{of[0]['aim']:.2f}"
        lines.append(f"| {title} | {aim} | {' | '.join(_slope(one) for one in of)} |")
    return "\n".join(lines)


def floor(found: Mapping[str, Any]) -> str:
    """What a wrong model leaves."""
    lines = ["| epsilon_D | norm of H - I, exact | measured | its bound | norm of 1/I - 1/H, exact | measured |", "| --- " * 6 + "|"]  # fmt: skip
    for row in found["misspecification"]["rows"]:
        names = ("epsilon_D", "H - I", "measured H - I", "bound", "inverse", "measured inverse")
        lines.append("| " + " | ".join(f"{row[name]:.3g}" for name in names) + " |")
    return "\n".join(lines)


def _slope(one: Mapping[str, Any]) -> str:
    return f"{one['slope']:.2f} ({one['low']:.2f} to {one['high']:.2f})"


def _plain(words: str) -> str:
    return words.replace("|", "&#124;")
