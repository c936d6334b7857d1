"""What pictures show: the numbers that were handed to them, at the places where a reader looks for them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nhgd.plot import comparison, distilled, executions, heat, sweep
from nhgd.plot.history import draw_history
from nhgd.plot.style import SETTINGS
from nhgd.task import Cleaning

pytest.importorskip("matplotlib")
PNG = b"\x89PNG"


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved, still open to be looked at."""
    found = []
    from matplotlib.figure import Figure

    real = Figure.savefig

    def kept(figure, *args, **more):
        found.append(figure)
        return real(figure, *args, **more)

    monkeypatch.setattr(Figure, "savefig", kept)
    return found


def row(step, **more):
    return {"step": step, "seconds": 0.5 * step, "outer_loss": 10.0 ** (3 - step), "inner_loss": 1.0} | more


def test_a_curve_has_the_metric_of_its_task_and_marks_the_selected_step():
    rows = [row(step, f1=0.1 * step) for step in range(1, 6)]
    figure = draw_history(None, rows, "cleaning by nhgd, seed 3", "f1", 4)
    assert [axes.get_ylabel() for axes in figure.axes] == ["outer loss", "inner loss", "f1"]
    assert [axes.get_yscale() for axes in figure.axes] == ["log", "linear", "linear"]
    for axes in figure.axes:
        curve, mark = axes.get_lines()
        assert list(curve.get_xdata()) == [0.5 * step for step in range(1, 6)]
        assert set(mark.get_xdata()) == {2.0}
    assert list(figure.axes[2].get_lines()[0].get_ydata()) == [r["f1"] for r in rows]
    assert "cleaning by nhgd, seed 3" in figure.get_suptitle()
    assert len(draw_history(None, rows, "by aid", "outer_loss").axes) == 2
    assert len(draw_history(None, rows, "by aid", "accuracy").axes) == 2


def test_the_bar_of_an_execution_is_as_high_as_its_number(drawn, tmp_path):
    parts = {"inner_milliseconds": 3.0, "waited_milliseconds": 1.5, "curvature_milliseconds": 2.0}
    rows = [{"execution": "thread", "milliseconds": 4.0, "quartiles": [3.5, 5.0], **parts}]
    executions.draw(tmp_path / "a.png", {"rows": rows, "task": "l2", "method": "nhgd", "device": "cpu"})
    inner, waited, curvature = drawn[0].axes[0].patches
    assert inner.get_height() + waited.get_height() == 4.0
    assert waited.get_y() == inner.get_height() == 2.5
    assert curvature.get_height() == 2.0
    assert [text.get_text().strip() for text in drawn[0].axes[0].texts] == ["4"]


def test_the_bar_of_a_method_is_as_long_as_its_mean(drawn, tmp_path):
    rows = [
        {"method": "a", "mean": 0.9, "deviation": 0.05, "words": "0.900 ± 0.050"},
        {"method": "b", "mean": 0.5, "deviation": None, "words": "0.5"},
    ]
    about = {"task": "t", "budget_words": "1 s", "seeds": [0]}
    comparison.draw_bars([tmp_path / "a.png"], {"rows": rows, "metric": "f1", "about": about, "share": True})
    axes = drawn[0].axes[0]
    assert [bar.get_width() for bar in axes.patches] == [0.9, 0.5]
    assert axes.get_xlim()[0] == 0
    assert max(axes.get_xticks()) == 1
    assert [text.get_text() for text in axes.texts] == ["0.900 ± 0.050", "0.5"]


def test_equal_values_of_a_sweep_are_equal_points_under_a_whole_heading(drawn, tmp_path):
    """Values that differ by rounding alone are none of them beyond the axis; a long heading is not cut off."""
    trials = [
        {"number": n, "state": "complete", "value": value, "last_value": value, "parameters": {"steps": 5 * 2**n}}
        for n, value in enumerate([0.576, 0.576, 0.57600006])
    ]
    about = {"task": "distillation", "method": "aid-fisher_diagonal", "selection": "evaluation_loss"}
    about |= {"budget_words": "500 gradient-equivalents", "space": {"steps": "5,10,20"}, "ranges": {}}
    sweep.draw_parameters([tmp_path / "a.png"], {"about": about, "trials": trials, "importance": {}, "logarithmic": []})
    (made,) = drawn
    points, best = made.axes[0].collections
    assert len(points.get_offsets()) == 3
    assert len(best.get_offsets()) == 1
    assert all(tick == int(tick) for tick in made.axes[0].get_xticks())
    extent = made._suptitle.get_window_extent()  # in dots of the file that was written
    assert 0 < extent.x0 < extent.x1 < made.get_figwidth() * SETTINGS["savefig.dpi"]
    assert made._suptitle.get_text().split() == (
        [
            "distillation",
            "by",
            "aid-fisher_diagonal:",
            "evaluation",
            "loss,",
            "500",
            "gradient-equivalents",
            "a",
            "trial",
        ]
    )


def test_the_suspects_of_a_run_are_those_with_the_lowest_weights(drawn, tmp_path):
    made = Cleaning.preset("quick").build(0, torch.device("cpu"))
    with torch.no_grad():
        weights = made.task.sample_weights(made.training.model, made.training.v, made.sets)
    (path,) = made.pictures(tmp_path)
    assert path.name == "suspects.png"
    assert path.read_bytes().startswith(PNG)
    first = next(axes for axes in drawn[0].axes if axes.images)
    least = int(weights.argmin())
    np.testing.assert_array_equal(first.images[0].get_array(), made.sets.pixels[least].reshape(8, 8).numpy())
    assert first.get_title() == f"{int(made.sets.train.y[least])} ({int(made.sets.true_labels[least])})"
    suspects = weights < 0.5
    counts = f"{int(suspects.sum())} labels suspected, {int((suspects & made.sets.wrong).sum())} of them wrong"
    assert counts in drawn[0].get_suptitle()


def test_distilled_images_have_their_names_and_are_large(drawn, tmp_path):
    images = np.random.default_rng(0).random((3, 2, 4, 4, 1))
    path = distilled.draw_distilled(tmp_path / "a.png", images, ["T-shirt", "coat", "bag"], "two of each")
    assert path.read_bytes().startswith(PNG)
    titles = [axes.get_title(loc="left") for axes in drawn[0].axes]
    assert [title for title in titles if title] == ["T-shirt", "coat", "bag"]
    box = drawn[0].axes[0].get_window_extent()
    assert min(box.width, box.height) > 60
    distilled.draw_distilled(tmp_path / "b.png", images[[0] * 10, :1], list("0123456789"), "one of each")
    assert len(drawn[1].axes) == 10  # two lines of five, without a gap


@pytest.mark.parametrize(("high", "extends"), [(0.5, "neither"), (3.0, "max")])
def test_a_field_says_where_its_colours_are_clipped(drawn, tmp_path, high, extends):
    fields = [torch.full((5, 5, 2), value) for value in (0.0, high, -0.5)]
    heat.draw_state(tmp_path / "a.png", *fields, [0.5, 1.0])
    bar = drawn[0].axes[-1]
    assert ("clipped at the ends" in bar.get_ylabel()) == (extends == "max")
    assert f"to {high:.2g}" in bar.get_ylabel()
    assert drawn[0].axes[0].get_ylabel() == "t = 0.5\ny"


def test_points_of_a_sweep_far_above_the_others_are_at_the_edge(drawn, tmp_path):
    trials = [
        {"number": n, "state": "complete", "value": value, "last_value": value, "parameters": {"lr": 0.1 * (n + 1)}}
        for n, value in enumerate([3.0, 2.0, 2.5, 2.2, 1e6])
    ]
    trials.append({"number": 5, "state": "pruned", "value": None, "last_value": 2.4, "parameters": {"lr": 1.0}})
    about = {"task": "t", "method": "m", "selection": "outer_loss", "budget_words": "1 s", "space": {"lr": "0.1..1"}}
    given = {
        "about": about | {"ranges": {"lr": [0.1, 1.0]}},
        "trials": trials,
        "importance": {"lr": 1.0},
        "logarithmic": [],
    }
    sweep.draw_trials([tmp_path / "a.png"], given)
    sweep.draw_parameters([tmp_path / "b.png"], given)
    axes = drawn[0].axes[0]
    assert axes.get_ylim()[1] < 10
    (best,) = axes.get_lines()
    assert list(best.get_ydata()) == [3.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    labels = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert labels == ["trial", "beyond the axis", "pruned, last value", "best so far"]
    trials[-1]["last_value"] = 1e5
    sweep.draw_trials([tmp_path / "c.png"], given)
    labels = [text.get_text() for text in drawn[2].legends[0].get_texts()]
    assert labels == ["trial", "beyond the axis", "pruned, last value, beyond the axis", "best so far"]
    assert drawn[1].axes[0].get_xlim() == pytest.approx((0.073, 1.027))
