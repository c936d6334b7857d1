"""The picture of `nhgd demo`: accuracies, learnt weights, and the labels most suspected."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from nhgd.plot.figure import figure
from nhgd.plot.style import LIGHT, PALETTE, save, styled

RIGHT, WRONG, QUIET = PALETTE[0], PALETTE[1], LIGHT.edge


class ShownSamples(NamedTuple):
    """Training images, (N, side, side), with the labels they were given, the true ones, and which are wrong, (N,)."""

    images: Tensor
    given: Tensor
    true: Tensor
    wrong: Tensor


def draw(path: Path, answer: dict[str, Any], weights: Tensor, samples: ShownSamples) -> None:
    """Write the picture."""
    with styled():
        drawn = figure(13, 4.2)
        parts: Any = drawn.subfigures(1, 3, width_ratios=(1, 1, 1.25), wspace=0.04)
        bars, histogram, images = parts
        _accuracies(bars.subplots(), answer)
        _weights(histogram.subplots(), weights, samples)
        _suspects(images, weights, samples)
        save(drawn, [path])


def draw_suspects(path: Path, weights: Tensor, samples: ShownSamples, title: str) -> Path:
    """Write a picture of the samples with the lowest weights alone, as far as they are suspects."""
    count = min(20, max(1, int((weights < 0.5).sum())))
    columns = min(10, count)
    rows = -(-count // columns)
    with styled():
        drawn = figure(max(1.05 * columns, 5.5), 1.28 * rows + 0.6)
        _suspects(drawn, weights, samples, rows, columns, count, title)
        save(drawn, [path])
    return path


def _accuracies(axes: Any, answer: dict[str, Any]) -> None:
    accuracy = answer["accuracy"]
    bars = (
        ("labels\nas given", accuracy["as_given"], WRONG),
        ("trusted\nalone", accuracy["trusted_alone"], QUIET),
        ("cleaned", accuracy["cleaned"], RIGHT),
        ("all wrong\nones known", accuracy["perfect"], QUIET),
    )
    low = max(0.0, min(value for _, value, _ in bars) - 0.05)
    low = int(low * 20) / 20
    for place, (_, value, colour) in enumerate(bars):
        axes.bar(place, value - low, 0.68, bottom=low, color=colour)
        axes.text(place, value + 0.002, f"{value:.3f}", ha="center", va="bottom", fontsize=10)
    axes.set_xticks(range(len(bars)), [name for name, _, _ in bars], fontsize=9)
    axes.set_ylim(low, min(1.0, max(value for _, value, _ in bars) + 0.02))
    axes.set_title(f"Test accuracy (the axis starts at {low:.2f})", loc="left", fontsize=11)
    _plain(axes)


def _weights(axes: Any, weights: Tensor, samples: ShownSamples) -> None:
    wrong, right = weights[samples.wrong].tolist(), weights[~samples.wrong].tolist()
    edges = [i / 25 for i in range(26)]
    axes.hist([wrong, right], edges, stacked=True, color=[WRONG, RIGHT], label=["wrong label", "right label"])
    axes.axvline(0.5, color="#333333", linewidth=1, linestyle="--")
    suspect = weights < 0.5
    for x, side, words, wrong_there, right_there in (
        (0.13, "left", "suspect", suspect & samples.wrong, suspect & ~samples.wrong),
        (0.56, "left", "believed", ~suspect & samples.wrong, ~suspect & ~samples.wrong),
    ):
        counts = f"{int(wrong_there.sum())} wrong\n{int(right_there.sum())} right"
        axes.text(x, 0.62, f"{words}:\n{counts}", ha=side, va="top", fontsize=10, transform=axes.transAxes)
    axes.set(xlabel="learnt weight of a training image", ylabel="training images")
    axes.legend(frameon=True, framealpha=1, edgecolor="white", fontsize=9, loc="upper center")
    axes.set_title("Whom the model believes", loc="left", fontsize=11)
    _plain(axes)


def _suspects(
    images: Any,
    weights: Tensor,
    samples: ShownSamples,
    rows: int = 3,
    columns: int = 6,
    count: int | None = None,
    title: str = "Most suspected:  given label (true label)",
) -> None:
    images.suptitle(title, x=0.02, ha="left", fontsize=11)
    most = weights.argsort()[: rows * columns if count is None else count].tolist()
    given, true = samples.given.tolist(), samples.true.tolist()
    for nth, axes in enumerate(images.subplots(rows, columns, squeeze=False).flat):
        if nth >= len(most):
            axes.set_axis_off()
            continue
        i = most[nth]
        axes.imshow(samples.images[i].numpy(), cmap="gray_r", interpolation="nearest")
        colour = WRONG if given[i] != true[i] else RIGHT
        axes.set_title(f"{given[i]} ({true[i]})", fontsize=10, color=colour, pad=3, loc="center", fontweight="normal")
        axes.set(xticks=[], yticks=[])
        axes.grid(visible=False)
        for side in axes.spines.values():
            side.set(color=LIGHT.grid, visible=True)


def _plain(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=3, labelsize=9)
