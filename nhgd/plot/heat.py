"""Pictures of a control and of the temperature it makes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from nhgd.plot.figure import figure
from nhgd.plot.style import PALETTE, headed, save, styled


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
    with styled():
        drawn = figure(7.2, 3.9)
        axes = drawn.subplots()
        said = f"learnt: {on_grid.value(f):.4f} on the grid, {continuous.value(f):.4f} in all"
        axes.plot(on_grid.times.numpy(), f.numpy(), color=PALETTE[0], label=said)
        for form, name, colour in ((on_grid, "grid", PALETTE[1]), (continuous, "whole domain", PALETTE[2])):
            best = f"best for the {name}: {form.bound():.4f}"
            axes.plot(form.times.numpy(), form.best().numpy(), "--", linewidth=1.2, color=colour, label=best)
        low, high = float(f.min()), float(f.max())
        # The best controls spike where t is 0 or 2, which hardly matters to the temperature.
        axes.set(xlabel="time t", ylabel="source f(t)", ylim=(min(low, -2) - 0.5, max(high, 2) + 0.5))
        drawn.legend(loc="outside lower center", ncols=1, fontsize=8.5, title="objective", alignment="left")
        drawn.suptitle(
            "The learnt source beside the best possible ones", x=0.01, ha="left", fontsize=11, fontweight="bold"
        )
        save(drawn, [path])
    return path


def draw_state(path: Path, learnt: Tensor, true: Tensor, wanted: Tensor, times: Sequence[float]) -> Path:
    """The temperature by the network, truly, and as wanted, at some times: (side, side, len(times)) each."""
    shown = (("network", learnt), ("true", true), ("wanted", wanted))
    low, high = (float(edge) for edge in (min(part.min() for _, part in shown), max(part.max() for _, part in shown)))
    beyond = {(True, True): "both", (True, False): "min", (False, True): "max"}.get((low < -1, high > 1), "neither")
    with styled():
        drawn = figure(7.6, 2.35 * len(times) + 0.9)
        rows = drawn.subplots(len(times), 3, sharex=True, sharey=True, squeeze=False)
        for k, (row, time) in enumerate(zip(rows, times, strict=True)):
            for axes, (name, values) in zip(row, shown, strict=True):
                image = axes.imshow(
                    values[:, :, k].T.numpy(), origin="lower", extent=(0, 1, 0, 1), vmin=-1, vmax=1, cmap="RdBu_r"
                )
                axes.grid(visible=False)
                axes.set(xticks=(0, 0.5, 1), yticks=(0, 0.5, 1))
                if k == 0:
                    axes.set_title(name)
                if k == len(times) - 1:
                    axes.set_xlabel("x")
            row[0].set_ylabel(f"t = {time:g}\ny")
        said = f"temperature, from {low:.2g} to {high:.2g}" + (", clipped at the ends" if beyond != "neither" else "")
        drawn.colorbar(image, ax=rows, shrink=0.7, extend=beyond, label=said)
        headed(drawn, "The temperature under the learnt source")
        save(drawn, [path])
    return path
