"""Distilled images, a line for each class, with its name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nhgd.plot.figure import figure
from nhgd.plot.style import save, styled

Array = np.ndarray[Any, Any]
LINES, COLUMNS = 40, 10  # that are drawn


def draw_distilled(path: Path, images: Array, names: Sequence[str], title: str, where: str = "not shown") -> Path:
    """Write the picture.

    Args:
        path: the file.
        images: (C, n, H, W, channels), grey or in colour, on one scale.
        names: of the classes, (C,).
        title: a line above.
        where: the images that are too many are.
    """
    classes, each = min(len(images), LINES), min(images.shape[1], COLUMNS)
    low, high = np.quantile(images, (0.01, 0.99))
    shown = np.clip((images - low) / max(high - low, 1e-12), 0, 1)
    high_by_wide = images.shape[2] / images.shape[3]
    # Few images of a class leave the width for several classes in a line.
    across = max(1, min(classes, 6 // each))
    lines = -(-classes // across)
    across = -(-classes // lines)  # lines of equal length: ten are five and five
    width = 1.25 * each * across + 0.3
    with styled():
        drawn = figure(max(width, 4.5), 1.25 * lines * min(high_by_wide, 4) + 0.32 * lines + 0.6)
        cells: Any = drawn.subplots(lines, each * across, squeeze=False)
        for axes in cells.flat:
            axes.set_axis_off()
        for c in range(classes):
            line, first = c // across, c % across * each
            for n in range(each):
                axes = cells[line, first + n]
                axes.imshow(
                    shown[c, n].squeeze(-1) if images.shape[4] == 1 else shown[c, n], cmap="gray", vmin=0, vmax=1
                )
                if not n:
                    name = names[c] if len(names[c]) <= 24 else f"{names[c][:23]}…"
                    axes.set_title(name, fontsize=11, fontweight="normal")
        left = [f"{len(images) - classes} more classes"] if len(images) > classes else []
        left += [f"{images.shape[1] - each} more of each"] if images.shape[1] > each else []
        words = title + (f" ({' and '.join(left)} {where})" if left else "")
        drawn.suptitle(words, fontsize=11, fontweight="bold", x=0.01, ha="left")
        save(drawn, [path])
    return path
