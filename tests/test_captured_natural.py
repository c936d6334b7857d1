"""Outer steps with a window of the whole batch and with natural inner steps, captured and repeated."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nhgd
from nhgd import _tape as tape
from nhgd._captured import decision
from nhgd.algorithm import NHGD
from nhgd.inverse import FisherWindow
from nhgd.task import PDE, Distillation
from tests.recorded import RecordedCapture
from tests.test_captured import rows

pytestmark = pytest.mark.filterwarnings("ignore::nhgd.InverseWarning", "ignore::nhgd._stagnation.StagnationWarning")
solver_module = importlib.import_module("nhgd._solver")
captured_module = importlib.import_module("nhgd._captured.captured")
WINDOW = FisherWindow(window=30, fisher="exact")
NATURAL = NHGD(WINDOW, inner="natural")
METHODS = {
    "window": NHGD(replace(WINDOW, overhead=None)),
    "window within a budget": NHGD(WINDOW),
    "window, without a ridge": NHGD(replace(WINDOW, damping=None, overhead=None)),
    "natural": NATURAL,
    "natural, of samples": NHGD(replace(WINDOW, records="sample", weights="ema"), inner="natural"),
    "natural, final": replace(NATURAL, cross="final"),
    "natural, twice": replace(NATURAL, natural_steps=2),
    "natural, at the end": replace(NATURAL, inverse=replace(WINDOW, records="sample", damping=1e-4), observe="end"),
    "natural, twice, at the end": replace(NATURAL, natural_steps=2, observe="end", natural_floor=1e-6),
}


@pytest.fixture(params=["stand-in", "operations"])
def recorded(request, monkeypatch):
    """Solvers record what a GPU would capture; or they capture as they do on the CPU."""
    if request.param == "stand-in":
        original = captured_module.Captured
        monkeypatch.setattr(solver_module, "Captured", lambda mode: original(mode, RecordedCapture()))
    return request.param


def inner(model, v, batch):
    x, y, i = batch
    z = model(x)
    return nhgd.Losses(F.cross_entropy(z, y, reduction="none"), weights=v[i], outputs=z)


def outer(model, v, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def made(method, compile="graph", inner=inner, l2=1e-2, **settings):
    """A net whose natural steps are taken back now and then, with outer batches in a random order."""
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x, y = torch.randn(40, 4, generator=generator).double(), torch.randint(3, (40,), generator=generator)
    v = torch.full((30,), 0.5).double()
    problem = nhgd.Bilevel(inner, outer, net, v, l2=l2, likelihood="categorical")
    data = nhgd.Data(x[:30], y[:30]), nhgd.Data(x[30:], y[30:], batch=4)
    settings = {"inner_steps": 1, "inner_lr": 0.2, "outer_lr": 0.5, "project_v": (0, 1)} | settings
    return nhgd.Solver(problem, *data, method=method, compile=compile, **settings)


def without_ridge(name):
    return {"l2": 0.0} if "without" in name else {}


def assert_repeated(solution, least):
    said = solution.stats["compile"]
    assert said["repeated"] >= least, said["why"]
    assert "in every bit" in said["why"]


@pytest.mark.parametrize("name", METHODS)
def test_captured_steps_are_the_steps_themselves(recorded, name):
    settings = {"inner_steps": 3} if name.startswith("window") else {}
    given = settings | without_ridge(name)
    found = made(METHODS[name], **given).run(steps=40)
    wanted = made(METHODS[name], compile=False, **given).run(steps=40)
    assert_repeated(found, 25)
    if name != "window within a budget":  # which is another for captured steps
        assert torch.equal(found.v, wanted.v)
        assert rows(found) == rows(wanted)


@pytest.mark.parametrize("trusted_after", [0, 1, 10**9])
def test_steps_that_are_taken_back_are_tried_again(recorded, trusted_after, monkeypatch):
    """Also where all that follows has been launched before that was known."""
    monkeypatch.setattr(decision, "TRUSTED_AFTER", trusted_after)
    method = METHODS["natural, final"]
    running = made(method, outer_lr=5.0)
    found = running.run(steps=40)
    assert_repeated(found, 30)
    taken_back = [row["taken_back"] for row in found.history]
    assert taken_back[-1] > taken_back[10]
    wanted = made(method, compile=False, outer_lr=5.0).run(steps=40)
    assert torch.equal(found.v, wanted.v)
    assert rows(found) == rows(wanted)
    if recorded == "stand-in":
        repeated = sum(made.repeated for made in decisions(running))
        assert repeated == 0 if trusted_after > 1 else repeated > 0


def decisions(running):
    """Those that are not waited for."""
    scripts = [graph.script for graph in running._captured._graphs.values()]
    return [script._decision for script in scripts if script._decision is not None]


def test_work_that_adds_to_something_that_is_no_state_is_not_launched_early(recorded):
    """The cross derivative of the inner step is summed up in memory of its own."""
    running = made(NATURAL)
    assert_repeated(running.run(steps=30), 10)
    assert decisions(running) == []


def test_one_choice_after_another_is_waited_for(recorded):
    """The damping of the second natural step follows from the first."""
    running = made(replace(METHODS["natural, final"], natural_steps=2))
    running.run(steps=30)
    assert all(len(graph.script.segments) == 3 for graph in running._captured._graphs.values())
    if recorded == "stand-in":
        assert {made.first for made in decisions(running)} == {2}


def test_a_run_that_is_resumed_goes_on_bit_for_bit(recorded, tmp_path):
    whole = made(NATURAL).run(steps=30)
    made(NATURAL, checkpoint=tmp_path / "run", checkpoint_every=1).run(steps=14)
    again = made(NATURAL)
    resumed = nhgd.Solver.resume(
        tmp_path / "run", again.problem, again.loop.inner.source, again.loop.outer.source, method=NATURAL
    ).run(steps=30)
    assert torch.equal(resumed.v, whole.v)
    assert rows(resumed) == rows(whole)


def pushed(running, at):
    for row in running:
        if row["step"] == at:
            running.problem.v.assign(running.problem.v.flat() + 20)


@pytest.mark.parametrize("name", ["window", "natural", "natural, at the end"])
def test_numbers_that_are_not_finite_are_reported_with_their_step(recorded, name):
    """A weight whose square is infinite makes the window so."""

    def wild(model, v, batch):
        found = inner(model, v, batch)
        return replace(found, weights=(1 + 1e308 * (v.mean() > 10).double()) * found.weights)

    failed = []
    for compile in ("graph", False):
        running = made(METHODS[name], compile=compile, inner=wild, outer_lr=lambda k: 1e-3, project_v=None)
        with pytest.raises(nhgd.NhgdError) as error:
            pushed(running, at=24)
        failed.append(
            (str(error.value).split(".")[0], rows(running), running.problem.v.flat(), running.problem.theta.flat())
        )
    assert failed[0][0] == "Outer step 25: numbers became non-finite"
    assert failed[0][:2] == failed[1][:2]
    for found, wanted in zip(failed[0][2:], failed[1][2:], strict=True):
        assert torch.equal(found, wanted)


def test_windows_of_several_batches_are_not_captured(recorded):
    found = made(NHGD(replace(WINDOW, window=60)), compile="auto").run(steps=5)
    if recorded == "stand-in":
        assert "samples of several batches" in found.stats["compile"]["why"]
    with pytest.warns(captured_module.CompileWarning, match="samples of several batches"):
        made(NHGD(replace(WINDOW, window=60))).run(steps=5)


def test_both_matrices_of_a_step_are_factorised_at_once(recorded, monkeypatch):
    """In captured steps, where the record of a natural step is also what the hypergradient solves with."""
    factorised = []
    own = FisherWindow._factorised

    def spied(self, state, ridge):
        factorised.append((tape.tape() is not None, self.damping == "auto"))
        return own(self, state, ridge)

    monkeypatch.setattr(FisherWindow, "_factorised", spied)
    made(METHODS["natural, final"]).run(steps=20)
    taped = [of_hypergradient for noted, of_hypergradient in factorised if noted]
    assert taped[:2] == [True, False]  # that of the hypergradient is the first
    assert len(taped) % 2 == 0
    assert [of_hypergradient for noted, of_hypergradient in factorised if not noted][-1] is False
    made(METHODS["natural, final"], compile=False).run(steps=1)
    assert factorised[-2:] == [(False, False), (False, True)]


@pytest.mark.parametrize(
    "task",
    [
        Distillation(dataset="digits", train=200, per_class=1, outer="sgd", dtype="float64"),
        PDE(interior=48, side=6, initial=6, width=6, depth=2, times=7, pretraining=10, dtype="float64"),
    ],
    ids=["distillation", "pde"],
)
def test_tasks_that_take_natural_steps_are_captured(recorded, task):
    ends = []
    for compile in ("graph", False):
        instance = task.build(0, torch.device("cpu"))
        # Adam moves v in captured steps of a GPU alone.
        solution = instance.start(compile=compile, outer_optimizer=None, outer_lr=0.01, metrics_every=5).run(steps=14)
        ends.append((solution, instance.problem.v.flat()))
    assert ends[0][0].stats["compile"]["repeated"] >= 6, ends[0][0].stats["compile"]["why"]
    torch.testing.assert_close(ends[0][1], ends[1][1], rtol=1e-8, atol=1e-10)
    taken_back = [solution.history[-1]["taken_back"] for solution, _ in ends]
    assert taken_back[0] == taken_back[1]
