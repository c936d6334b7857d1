"""Pictures of a control and of the temperature it makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nhgd.errors import InputError
from nhgd.task.heat import END, QuadraticForm, target


def draw_control(path: Path, on_grid: QuadraticForm, continuous: QuadraticForm, f: Tensor) -> Path:
    """The learnt source over time beside the best there is, for either reading of the objective."""
    figure = _figure(6.4, 3.6)
    axes = figure.subplots()
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
    figure.savefig(path, dpi=120)
    return path


def draw_state(path: Path, learnt: Tensor, true: Tensor) -> Path:
    """The temperature by the network, truly, and as wanted, at three times, from (side, side, 9) over time."""
    figure = _figure(8.0, 7.2)
    line = torch.linspace(0, 1, len(learnt), dtype=torch.float64)
    x, y = torch.meshgrid(line, line, indexing="ij")
    times = torch.linspace(0, END, learnt.shape[2], dtype=torch.float64)
    rows = figure.subplots(3, 3, sharex=True, sharey=True)
    for row, k in zip(rows, (2, 4, 6), strict=True):
        wanted = target(x, y, times[k])
        for axes, (name, values) in zip(
            row, (("network", learnt[:, :, k]), ("true", true[:, :, k]), ("wanted", wanted)), strict=True
        ):
            image = axes.imshow(values.T.numpy(), origin="lower", extent=(0, 1, 0, 1), vmin=-1, vmax=1, cmap="RdBu_r")
            axes.set_title(f"{name}, t = {float(times[k]):g}", fontsize=9)
    figure.colorbar(image, ax=rows, shrink=0.6)
    figure.savefig(path, dpi=120)
    return path


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("Pictures need matplotlib: pip install 'nhgd[cli]'.") from None
    return Figure(figsize=(width, height), layout="constrained")
