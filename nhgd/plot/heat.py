"""Pictures of a control and of the temperature it makes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from nhgd.plot.figure import figure


class ControlObjective(Protocol):
    """The value of a control, and the best possible one."""

    @property
    def times(self) -> Tensor:
        """Where controls are given."""

    def value(self, f: Tensor) -> float:
        """Of a control."""

    def best(self) -> Tensor:
        """The best control."""

    def bound(self) -> float:
        """Its value."""


def draw_control(path: Path, on_grid: ControlObjective, continuous: ControlObjective, f: Tensor) -> Path:
    """Plot the learnt source over time with the best possible ones, for both readings of the objective."""
    drawn = figure(6.4, 3.6)
    axes = drawn.subplots()
    axes.plot(
        on_grid.times.numpy(),
        f.numpy(),
        label=f"learnt: {on_grid.value(f):.4f} on the grid, {continuous.value(f):.4f} in all",
    )
    for form, name in ((on_grid, "grid"), (continuous, "whole domain")):
        axes.plot(
            form.times.numpy(), form.best().numpy(), "--", linewidth=1, label=f"best for the {name}: {form.bound():.4f}"
        )
    low, high = float(f.min()), float(f.max())
    # The best controls spike where t is 0 or 2, which hardly matters to the temperature.
    axes.set(xlabel="t", ylabel="f(t)", ylim=(min(low, -2) - 0.5, max(high, 2) + 0.5))
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    drawn.savefig(path, dpi=120)
    return path


def draw_state(path: Path, learnt: Tensor, true: Tensor, wanted: Tensor, times: Sequence[float]) -> Path:
    """The temperature by the network, truly, and as wanted, at some times: (side, side, len(times)) each."""
    drawn = figure(8.0, 7.2)
    rows = drawn.subplots(len(times), 3, sharex=True, sharey=True)
    for k, (row, time) in enumerate(zip(rows, times, strict=True)):
        for axes, (name, values) in zip(row, (("network", learnt), ("true", true), ("wanted", wanted)), strict=True):
            image = axes.imshow(
                values[:, :, k].T.numpy(), origin="lower", extent=(0, 1, 0, 1), vmin=-1, vmax=1, cmap="RdBu_r"
            )
            axes.set_title(f"{name}, t = {time:g}", fontsize=9)
    drawn.colorbar(image, ax=rows, shrink=0.6)
    drawn.savefig(path, dpi=120)
    return path
