"""Progress, callbacks and loggers: what is shown and handed on while a run goes on, and that it changes nothing."""

from __future__ import annotations

import io
import json
import sys
import types
from itertools import pairwise

import pytest
import torch

import nhgd
from nhgd import _progress as progress
from nhgd._progress import TextBar, bar
from nhgd.loggers import JSONLines, TensorBoard
from nhgd.task import Quadratic


def started(**more):
    return Quadratic.preset("quick").build(0, torch.device("cpu")).start(**more)


class Clock:
    """A time that passes when told to."""

    def __init__(self):
        self.time = 0.0

    def __call__(self):
        return self.time


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_time_left_follows_the_speed_since_the_fraction_was_known():
    clock, shown = Clock(), io.StringIO()
    text = TextBar("run", shown, clock)
    for clock.time, done, words in ((0, None, "preparing"), (8, 0.5, "step 1"), (10, 0.75, "step 2")):
        text.tick(done, words)
    text.end()
    drawn = shown.getvalue().split("\r")
    assert drawn[1] == "run  0:00  preparing"
    # Half was done when it was first known, a quarter took 2 s, and so will the last one.
    assert drawn[3].startswith("run ███████████████░░░░░  75 %  0:10, 0:02 left  step 2")
    assert shown.getvalue().endswith("\n")


def test_a_bar_of_text_is_drawn_seldom_and_leaves_nothing_of_a_longer_line():
    clock, shown = Clock(), io.StringIO()
    text = TextBar("run", shown, clock)
    for step in range(1000):
        clock.time = step / 1000
        text.tick(step / 1000, "long words indeed" if step < 500 else "short")
    text.end()
    lines = shown.getvalue().rstrip("\n").split("\r")[1:]
    assert len(lines) == 6  # five in the second, and the last
    assert "short" in lines[-1]
    assert all(len(after) >= len(before.rstrip()) for before, after in pairwise(lines))


def test_lines_come_at_once_and_then_seldom():
    clock, log = Clock(), io.StringIO()
    lines = progress._Lines("run", log, clock)
    lines.tick(None, "preparing")
    for clock.time in range(600):
        lines.tick(clock.time / 600, f"step {clock.time}")
    said = log.getvalue().splitlines()
    assert said[0] == "run: preparing; 0:00 gone"
    assert said[1] == "run: 0 % step 0; 0:00 gone".replace("0 % ", "0 %, ")
    assert said[2] == "run: 2 %, step 10; 0:10 gone, about 9:50 left"
    assert 15 < len(said) < 60


def test_a_notebook_gets_text_on_standard_output(monkeypatch, capsys):
    class ZMQInteractiveShell:
        """As IPython calls that of a kernel."""

    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=ZMQInteractiveShell))
    started().run(steps=3)
    said = capsys.readouterr()
    assert "100 %" in said.out
    assert "step 3, outer " in said.out
    assert "v error" in said.out
    assert said.err == ""


def test_without_a_terminal_nothing_is_shown_but_lines_when_they_are_asked_for(capsys):
    started().run(steps=3)
    assert capsys.readouterr() == ("", "")
    with bar("run", lines=True, shared=True) as tick:
        tick(None, "preparing the data")
        started().run(steps=3)
    err = capsys.readouterr().err.splitlines()
    assert err[0] == "run: preparing the data; 0:00 gone"
    assert err[1].startswith("run: 0 %, step 1, outer ")


def test_bars_inside_of_a_bar_continue_it_or_are_silent(monkeypatch):
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(progress, "_has_rich", lambda: False)
    with bar("outer"), bar("inner") as tick:
        tick(0.5, "unseen")
    assert "inner" not in shown.getvalue()
    assert "unseen" not in shown.getvalue()
    with bar("outer", shared=True), bar("inner") as tick, bar("inmost", show=False) as silent:
        tick(0.5, "seen")
        silent(0.6, "unseen")
    assert "outer" in shown.getvalue()
    assert "seen" in shown.getvalue()
    assert "unseen" not in shown.getvalue()


def test_every_function_sees_every_row_and_can_neither_change_the_history_nor_the_run():
    seen, steps = [], []

    def spoil(row):
        seen.append(dict(row))
        row.clear()

    solver = started(on_step=[spoil, lambda row: steps.append(row["step"])])
    solution = solver.run(steps=4)
    assert seen == solution.history
    assert steps == [1, 2, 3, 4]
    assert "v_error" in seen[0]
    plain = started().run(steps=4)
    torch.testing.assert_close(solution.v, plain.v, rtol=0, atol=0)


def test_a_loop_of_ones_own_calls_them_too():
    seen = []
    solver = started(on_step=seen.append)
    rows = [row for row, _ in zip(solver, range(3), strict=False)]
    assert seen[:3] == rows[:3]


def test_a_function_may_stop_the_run():
    solver = started(on_step=lambda row: solver.stop() if row["step"] == 3 else None)
    solution = solver.run(steps=10)
    assert (solution.result, len(solution.history)) == ("stopped", 3)


@pytest.mark.parametrize("odd", [3, "print", [print, 3]])
def test_what_is_no_function_is_refused(odd):
    with pytest.raises(nhgd.InputError, match="on_step takes a function of a row of the history, or a list of them"):
        started(on_step=odd)


def test_a_resumed_run_takes_new_functions(tmp_path):
    instance = Quadratic.preset("quick").build(0, torch.device("cpu"))
    instance.start(checkpoint=tmp_path / "c", on_step=print).run(steps=2)
    seen = []
    instance.start(checkpoint=tmp_path / "c", resume=True, on_step=seen.append).run(steps=4)
    assert [row["step"] for row in seen] == [3, 4]
    instance.start(checkpoint=tmp_path / "c", resume=True).run(steps=5)  # nor are they asked for


def test_lines_of_json_can_be_read_while_the_run_goes_on(tmp_path):
    path, counts = tmp_path / "deep" / "h.jsonl", []
    with JSONLines(path) as log:
        watch = lambda row: counts.append(len(path.read_text().splitlines()))  # noqa: E731
        history = started(on_step=[log, watch]).run(steps=3).history
    assert counts == [1, 2, 3]
    assert [json.loads(line)["outer_loss"] for line in path.read_text().splitlines()] == [
        row["outer_loss"] for row in history
    ]
    with pytest.raises(nhgd.InputError, match="cannot be written"):
        JSONLines(tmp_path)


def test_tensorboard_has_every_number(tmp_path):
    pytest.importorskip("tensorboard")
    with TensorBoard(tmp_path) as board:
        history = started(on_step=board).run(steps=3).history
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(tmp_path)).Reload()
    assert {"outer_loss", "inner_loss", "v_error"} <= set(found.Tags()["scalars"])
    scalars = found.Scalars("outer_loss")
    assert [s.step for s in scalars] == [1, 2, 3]
    assert [s.value for s in scalars] == pytest.approx([row["outer_loss"] for row in history], rel=1e-6)


def test_without_tensorboard_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(nhgd.InputError, match=r"pip install 'nhgd\[tensorboard\]'"):
        TensorBoard(tmp_path)
