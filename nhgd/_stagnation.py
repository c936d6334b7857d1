"""Detects runs that make no progress although they could."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, pstdev
from typing import Any

import torch
from torch import Tensor

SHORTEST = 30  # outer steps; fewer are not informative
STRAIGHT = 0.6  # of the way of v that is left when its turns are taken off: noise about an optimum leaves less
SLIGHT = 1e-3  # of the outer loss: a fall that does not count, or a slope that promises none
NOISY = 0.05  # of the outer loss: with noisier means no statement is made


class StagnationWarning(UserWarning):
    """The outer loss of a run has not fallen, although there was somewhere to go."""


@dataclass
class Trajectory:
    """The path of v during a run, and the outer losses along it.

    At an optimum the outer loss does not fall either. But there the hypergradient vanishes or is noise, so that v
    changes direction; or a projection stops v. A warning therefore requires that v kept its direction and either hardly
    moved, although the slope promised more, or moved far without any gain and is still moving. Once v has settled, the
    outer loss may well be above that of the first steps, when theta was not yet trained; and if batches are so noisy
    that a fall could not be seen, there is no warning either.
    """

    first: Tensor  # v before the run, (P,)
    losses: list[float] = field(default_factory=list)
    slopes: list[float] = field(default_factory=list)
    strides: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.last = self.first

    def note(self, v: Tensor, row: dict[str, Any], stride: float | None = None) -> None:
        """Note an outer step to v with its row of the history, and the distance moved if it is known."""
        self.strides.append(_distance(v, self.last) if stride is None else stride)
        self.last = v
        self.losses.append(row["outer_loss"])
        self.slopes.append(row["hypergradient_norm"])

    def remark(self, held: bool = False) -> str | None:
        """A warning about the run, or None; `held`: a projection may keep v where it is."""
        steps = len(self.losses)
        if steps < SHORTEST:
            return None
        moved = _distance(self.last, self.first)
        own, unit = float(self.first.double().norm()), math.sqrt(self.first.numel())
        size = max(own, unit)
        level = abs(fmean(self.losses))
        promise = median(self.slopes) * size  # what the slope gains where v moves by its own size, to first order
        if not promise > SLIGHT * level or moved < STRAIGHT * sum(self.strides):
            return None
        quarter = steps // 4
        end = self.losses[-quarter:]
        middle = self.losses[steps // 2 - quarter : steps // 2]  # theta is trained by then, independently of v
        if moved < 0.01 * size and not held and _stood(middle, end, level):
            return (
                f"The outer loss has not fallen: {fmean(middle):.4g} before the middle of {steps} outer steps, {fmean(end):.4g} at"
                f" their end. v moved by {moved:.1e}, always in the same direction: raise outer_lr."
            )
        tenths = [self.losses[start : start + steps // 10] for start in range(0, steps - steps // 10 + 1, steps // 10)]
        begin, *others = tenths
        settled = fmean(self.strides[-quarter:]) < 0.5 * fmean(self.strides)
        if moved > 0.3 * (own or unit) and not settled and all(_stood(begin, tenth, level) for tenth in others):
            return (
                f"The outer loss has not fallen: {fmean(begin):.4g} in the first of {steps} outer steps,"
                f" {fmean(end):.4g} in the last, though v moved by {moved:.2g}. Try another method or inverse"
                " (nhgd.check shows which hypergradients are accurate), more inner steps, or a lower outer_lr."
            )
        return None


def held_by(rule: float | tuple[float, float] | Callable[[Any], Any] | None, leaves: Sequence[Tensor]) -> bool:
    """Whether a projection may hold v: a function of the user's own, or a box that v touches."""
    if rule is None or isinstance(rule, (int, float)):
        return False
    if callable(rule):
        return True
    low, high = rule
    return any(bool(((leaf <= low) | (leaf >= high)).any()) for leaf in leaves)


def _stood(before: Sequence[float], after: Sequence[float], level: float) -> bool:
    """Whether the mean did not fall: by no more than noise, twice its standard error, or by a slight part alone.

    Noise that could hide a fall worth having makes the answer no.
    """
    noise = 2 * math.sqrt((pstdev(before) ** 2 + pstdev(after) ** 2) / (len(before) - 1))
    return noise <= NOISY * level and fmean(before) - fmean(after) <= max(noise, SLIGHT * level)


def _distance(a: Tensor, b: Tensor) -> float:
    return float(torch.linalg.vector_norm((a - b).double()))
