"""Outer steps that are captured and repeated, on a stand-in for CUDA graphs: what they must share with plain ones."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nhgd
from nhgd._captured.captured import CompileWarning
from nhgd.algorithm import AID, FSLA, MASOBA, NHGD, NHGDSingle
from nhgd.inverse import CG, EKFAC, KFAC, FisherDense, FisherDiagonal, FisherWindow, Refined
from nhgd.schedule import Decay
from tests.recorded import HostRead, RecordedCapture

solver_module = importlib.import_module("nhgd._solver")
captured_module = importlib.import_module("nhgd._captured.captured")
CLOCKED = ("seconds", "inner_seconds", "curvature_seconds", "waited_seconds", "overlap", "largest_lag")
FULL = KFAC(overhead=None)

METHODS = {
    "identity": "aid-identity",
    "soba": "soba",
    "kfac": NHGD(FULL),
    "kfac, final": NHGD(FULL, cross="final"),
    "kfac within a budget": NHGD(),
    "kfac, kept bases": NHGD(KFAC(factor_every=2, invert_every=3)),
    "kfac, sampled": NHGD(KFAC(overhead=None, fisher="auto")),
    "kfac, all batches": NHGD(FULL, cross="final", batches=2),
    "kfac, cold": NHGD(FULL, warm_start=False),
    "aid-kfac": AID(FULL),
    "ekfac": NHGD(EKFAC(overhead=None)),
    "diagonal": NHGD(FisherDiagonal(overhead=None)),
    "ma_soba": MASOBA(momentum=Decay(0.4)),
    "fsla": FSLA(adjoint_lr=Decay(0.2)),
    "single": NHGDSingle(FULL),
    "single within a budget": NHGDSingle(),
}
PRODUCTS = {
    "cg": AID(CG(steps=4)),
    "cg, damped": AID(CG(steps=4, damping=0.1)),
    "cg of the horizon": AID(CG(steps=4, damping="auto")),
    "refined": NHGD(Refined(FULL, steps=3)),
}


@pytest.fixture(params=["stand-in", "operations"])
def recorded(request, monkeypatch):
    """Solvers record what a GPU would capture; or they capture as they do on the CPU."""
    if request.param == "stand-in":
        original = captured_module.Captured
        monkeypatch.setattr(solver_module, "Captured", lambda mode: original(mode, RecordedCapture()))


@pytest.fixture
def plain_first(recorded, monkeypatch):
    """A function that runs all steps eagerly, in the arithmetic of captured ones."""
    return lambda: monkeypatch.setattr(captured_module, "WARM_UP_STEPS", 10**9)


def inner(model, v, batch):
    x, y, i = batch
    z = model(x)
    return nhgd.Losses(F.cross_entropy(z, y, reduction="none"), weights=v[i], outputs=z)


def outer(model, v, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def made(method, compile="graph", inner=inner, dropout=0.0, batch=16, shuffle=True, outer_batch=None, **settings):
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Dropout(dropout), nn.Linear(4, 3)) if dropout else nn.Sequential(nn.Linear(4, 3))
    x, y = torch.randn(40, 4, generator=generator).double(), torch.randint(3, (40,), generator=generator)
    problem = nhgd.Bilevel(
        inner, outer, net.double(), torch.full((30,), 0.5).double(), l2=1e-2, likelihood="categorical"
    )
    settings = {"inner_steps": 3, "inner_lr": 0.2, "outer_lr": 0.5, "project_v": (0, 1)} | settings
    inner_data = nhgd.Data(x[:30], y[:30], batch=batch, shuffle=shuffle)
    outer_data = nhgd.Data(x[30:], y[30:], batch=outer_batch)
    return nhgd.Solver(problem, inner_data, outer_data, method=method, compile=compile, **settings)


def rows(solution, but=()):
    return [{k: v for k, v in row.items() if k not in (*CLOCKED, *but)} for row in solution.history]


def assert_alike(found, wanted):
    """Rows that agree to rounding."""
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one == {k: pytest.approx(v, rel=1e-8, abs=1e-12) if type(v) is float else v for k, v in other.items()}


def assert_same(found, wanted, but=(), exact=False):
    """In every bit, or to rounding, where the last batch of a pass is shorter: captured steps fill it up."""
    if exact:
        assert torch.equal(found.v, wanted.v)
        assert rows(found, but) == rows(wanted, but)
    else:
        torch.testing.assert_close(found.v, wanted.v, rtol=1e-10, atol=1e-12)
        assert_alike(rows(found, but), rows(wanted, but))
    assert [list(row) for row in found.history] == [list(row) for row in wanted.history]


def run(method, steps=24, **settings):
    return made(method, **settings).run(steps=steps)


def assert_repeated(solution, least=5):
    said = solution.stats["compile"]
    assert said["taken"] in ("graph", "operations")
    assert said["repeated"] >= least, said["why"]
    assert "in every bit" in said["why"]


@pytest.mark.filterwarnings("ignore::nhgd.InverseWarning", "ignore::nhgd._stagnation.StagnationWarning")
def test_repeated_steps_average_several_outer_batches(recorded, plain_first):
    def averaged():
        solver = made(METHODS["kfac"], inner_steps=20, inner_lr=0.05, outer_batch=4)
        solver.state.horizon.determined = True  # as if v had ten entries
        return solver.run(steps=24)

    found = averaged()
    assert_repeated(found)
    assert found.stats["oracle_calls"]["outer_gradients"] == 3 * 24
    plain_first()
    assert_same(found, averaged())


@pytest.mark.filterwarnings("ignore::nhgd.InverseWarning", "ignore::nhgd._stagnation.StagnationWarning")
@pytest.mark.parametrize("name", METHODS)
def test_repeated_steps_are_the_steps_themselves(recorded, plain_first, name):
    found = run(METHODS[name], steps=30)
    assert_repeated(found)
    plain_first()
    assert_same(found, run(METHODS[name], steps=30), exact=True)


@pytest.mark.filterwarnings("ignore::nhgd.InverseWarning", "ignore::nhgd._stagnation.StagnationWarning")
@pytest.mark.parametrize(
    "name", ["identity", "soba", "kfac", "kfac, final", "ekfac", "diagonal", "single", "ma_soba", "fsla"]
)
def test_they_are_those_of_a_run_without_them(recorded, name):
    found = run(METHODS[name])
    assert_repeated(found)
    assert_same(found, run(METHODS[name], compile=False))


@pytest.mark.filterwarnings("ignore::nhgd.InverseWarning", "ignore::nhgd._stagnation.StagnationWarning")
@pytest.mark.parametrize("name", ["kfac", "kfac within a budget", "single"])
def test_running_means_may_be_read_later(recorded, monkeypatch, tmp_path, plain_first, name):
    """As on a GPU, where they are heeded two steps later, however far the host is ahead."""
    pytest.importorskip("safetensors")
    # Else u shrinks to nothing, and with it the means.
    monkeypatch.setattr("nhgd.loop.hypergradient.half_of", lambda *arguments: None)
    early = run(METHODS[name], steps=40)
    monkeypatch.setattr("nhgd.loop.horizon.Horizon.lags", True)
    found = run(METHODS[name], steps=40)
    assert_repeated(found)
    made(METHODS[name], checkpoint=tmp_path, checkpoint_every=1).run(steps=33)
    fresh = made(METHODS[name])
    resumed = nhgd.Solver.resume(tmp_path, fresh.problem, fresh.loop.inner.source, fresh.loop.outer.source)
    assert_same(resumed.run(steps=40), found)
    plain_first()
    assert_same(found, run(METHODS[name], steps=40), exact=True)
    assert not torch.equal(found.v, early.v)


@pytest.mark.filterwarnings("ignore::nhgd.InverseWarning", "ignore::nhgd._stagnation.StagnationWarning")
def test_outer_batches_are_averaged_for_a_while(recorded, monkeypatch):
    monkeypatch.setattr("nhgd.loop.horizon.ARRIVES", -1.0)  # then no longer, once it is not too early to say
    settings = {"steps": 30, "outer_batch": 5, "inner_steps": 10}
    found = run(METHODS["kfac, final"], **settings)
    assert_repeated(found, least=18)
    plain = run(METHODS["kfac, final"], compile=False, **settings)
    assert_same(found, plain)
    assert [row["outer_gradients"] for row in plain.history[3:7]] == [8, 10, 11, 12]


@pytest.mark.filterwarnings("ignore::nhgd.InverseWarning", "ignore::nhgd._stagnation.StagnationWarning")
@pytest.mark.parametrize("name", PRODUCTS)
def test_solves_of_a_fixed_number_of_products_end_where_others_do(recorded, name):
    found = run(PRODUCTS[name])
    assert_repeated(found)
    wanted = run(PRODUCTS[name], compile=False)
    assert_same(found, wanted, but=("hvps", "gradients", "inner_gradients", "samples", "residual"))
    assert found.history[-1]["hvps"] >= wanted.history[-1]["hvps"]


@pytest.mark.filterwarnings("ignore::nhgd.InverseWarning", "ignore::nhgd._stagnation.StagnationWarning")
@pytest.mark.parametrize(
    "settings",
    [
        {"inner_lr": Decay(0.3), "outer_lr": Decay(0.5, final=0.1)},
        {"inner_lr": lambda k: 0.3 / (1 + k)},
        {"inner_optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)},
        {"inner_lr": Decay(0.1), "inner_optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)},
        {"project": 0.4},
        {"outer_clip": 1e-3},
        {"metrics": lambda theta, v: {"sum": float(v.sum())}, "metrics_every": 4},
        {"batch": 10},
        {"batch": 30},
    ],
    ids=["decay", "function", "nesterov", "nesterov, decay", "ball", "clip", "metrics", "no ragged batch", "all data"],
)
def test_settings_hold_for_repeated_steps(recorded, settings):
    found = run(NHGD(FULL), **settings)
    assert_repeated(found)
    assert_same(found, run(NHGD(FULL), compile=False, **settings))


def test_batches_of_neighbours_are_gathered_in_captured_steps(recorded):
    found, wanted = (
        made("aid-identity", compile=compile, shuffle="blocks").run(steps=24) for compile in ("graph", False)
    )
    assert_repeated(found)
    assert_same(found, wanted)


def test_a_step_size_of_the_adjoint_follows_its_schedule(recorded):
    method = nhgd.algorithm.SOBA(adjoint_lr=Decay(0.2))
    found = run(method)
    assert_repeated(found)
    assert_same(found, run(method, compile=False))


def test_a_wrong_number_is_seen(recorded, monkeypatch):
    """A step size that is baked into the captured work differs in a later step, which is compared before work is believed."""
    monkeypatch.setattr("nhgd.loop.mover.Mover.scheduled_rate", lambda self, clock: self.rate(clock))
    with pytest.warns(CompileWarning, match="gave different results"):
        found = run("aid-identity", inner_lr=Decay(0.5), outer_lr=1.0)
    monkeypatch.undo()
    assert found.stats["compile"]["repeated"] == 0
    assert_same(found, run("aid-identity", compile=False, inner_lr=Decay(0.5), outer_lr=1.0))


@pytest.mark.parametrize("rules", [{"budget": 0.3}, {"plateau": 10, "steps": 200}])
def test_stop_rules_are_asked_in_time(recorded, rules):
    found = made("aid-identity").run(**rules)
    assert [row["step"] for row in found.history] == list(range(1, found.stats["steps"] + 1))
    assert found.result in ("plateau", "budget")
    if "plateau" in rules:
        wanted = made("aid-identity", compile=False).run(**rules)
        assert_same(found, wanted)


def test_rows_are_complete_one_by_one(recorded):
    solver = made(NHGD(FULL))
    wanted = run(NHGD(FULL), compile=False, steps=20)
    found = [{k: v for k, v in solver.step().items() if k not in CLOCKED} for _ in range(20)]
    assert_alike(found, rows(wanted))
    assert solver.solution().stats["compile"]["repeated"] > 0


@pytest.mark.filterwarnings("ignore::nhgd.InverseWarning", "ignore::nhgd._stagnation.StagnationWarning")
@pytest.mark.parametrize("name", ["identity", "kfac", "kfac, kept bases", "diagonal"])
def test_a_run_that_is_resumed_goes_on_bit_for_bit(recorded, tmp_path, name):
    pytest.importorskip("safetensors")
    method = METHODS[name]
    wanted = run(method, steps=32)
    made(method, checkpoint=tmp_path, checkpoint_every=7).run(steps=18)
    fresh = made(method)
    solver = nhgd.Solver.resume(tmp_path, fresh.problem, fresh.loop.inner.source, fresh.loop.outer.source)
    found = solver.run(steps=32)
    assert found.stats["compile"]["repeated"] > 0
    assert_same(found, wanted)


@pytest.mark.parametrize("method", ["aid-identity", NHGD(FULL)], ids=["identity", "kfac"])
@pytest.mark.parametrize("at", [19, 23])
def test_numbers_that_are_not_finite_are_reported_with_their_step(recorded, method, at):
    def wild(k):
        return 1e300 if k == at else 0.2

    failed = []
    for compile in ("graph", False):
        solver = made(method, compile=compile, inner_lr=wild)
        with pytest.raises(nhgd.NhgdError) as error:
            solver.run(steps=40)
        problem = solver.problem
        failed.append((str(error.value), rows(solver), problem.theta.flat(), problem.v.flat(), solver.loop.clock.k))
    assert f"Outer step {at + 1}:" in failed[0][0]
    assert failed[0][0] == failed[1][0]
    assert_alike(failed[0][1], failed[1][1])
    assert len(failed[0][1]) == at
    for found, wanted in zip(failed[0][2:4], failed[1][2:4], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    assert failed[0][4] == failed[1][4] == at


def test_negative_weights_are_reported_with_their_step(recorded):
    for compile in ("graph", False):
        solver = made("aid-identity", compile=compile, project_v=None, outer_lr=30.0)
        with pytest.raises(nhgd.InputError, match="Weights must be at least 0"):
            solver.run(steps=200)
        if compile:
            steps = len(solver.history)
    assert steps == len(solver.history)


def test_a_number_that_is_read_keeps_steps_from_being_captured(recorded):
    def reading(model, v, batch):
        found = inner(model, v, batch)
        assert math.isfinite(found.values.sum().item())
        return found

    with pytest.warns(CompileWarning, match="item reads a number"):
        found = run("aid-identity", inner=reading)
    assert found.stats["compile"]["taken"] == "eager"
    assert_same(found, run("aid-identity", compile=False, inner=reading))


def test_steps_that_do_other_work_than_their_kind_are_refused(recorded, monkeypatch):
    monkeypatch.setattr(KFAC, "signature", lambda self, *given: ())
    with pytest.warns(CompileWarning, match="other work than an earlier one of its kind"):
        found = run(NHGD(KFAC(factor_every=2, invert_every=3)), steps=30)
    monkeypatch.undo()
    assert_same(found, run(NHGD(KFAC(factor_every=2, invert_every=3)), steps=30, compile=False))


def test_a_method_without_an_inner_loop_has_few_kinds_of_steps(recorded):
    found = run(NHGDSingle(KFAC(factor_every=4, invert_every=2)), steps=80, batch=15)
    said = found.stats["compile"]
    assert said["captured"] <= 4, said  # with a record or without, with a measurement or without
    assert said["repeated"] >= 70, said


def test_functions_that_change_are_found_out_in_the_end(recorded, monkeypatch):
    monkeypatch.setattr(captured_module, "RECOMPARE_AFTER", 4)
    factor = [1.0]

    def changing(model, v, batch):
        found = inner(model, v, batch)
        return replace(found, values=factor[0] * found.values)

    solver = made("aid-identity", inner=changing, batch=30)
    for _ in range(20):
        solver.step()
    assert solver.solution().stats["compile"]["repeated"] > 5
    factor[0] = 2.0
    with pytest.warns(CompileWarning, match="gave different results"):
        solver.run(steps=20)


def test_theta_may_be_put_elsewhere_between_steps(recorded):
    found = []
    for compile in ("graph", False):
        solver = made("aid-identity", compile=compile)
        for k in range(30):
            if k == 12:
                weight = solver.problem.theta.given[0].weight
                weight.data = weight.detach().clone() + 1
            solver.step()
        found.append(solver.solution())
    assert_repeated(found[0])
    assert_same(*found)


def test_a_recorded_read_is_an_error():
    capture = RecordedCapture()
    capture.open()
    try:
        with pytest.raises(HostRead):
            float(torch.ones(()))
        with pytest.raises(HostRead):
            torch.ones(3).nonzero()
        with pytest.raises(HostRead):
            torch.ones(3).tolist()
    finally:
        capture.abandon()


@pytest.mark.filterwarnings("ignore::nhgd.InverseWarning")
@pytest.mark.parametrize(
    ("method", "settings", "why"),
    [
        ("aid-identity", {"dropout": 0.2}, "draws random numbers"),
        (NHGD(FisherWindow(window=40)), {}, "samples of several batches"),
        (NHGD(FisherDense()), {}, "depends on values it computes"),
        (NHGD(FULL, inner="natural"), {}, "natural steps"),
        ("aid-cg", {"inner_optimizer": torch.optim.Adam}, "capturable=True"),
        ("stocbio", {}, "reads values"),
        ("aid-identity", {"project_v": lambda v: v.clamp_(0, 1)}, "project_v is a function"),
        (NHGD(replace(FULL, solver="cholesky")), {}, "depends on values"),
    ],
    ids=["dropout", "window", "dense", "natural", "adam", "stocbio", "projection", "cholesky"],
)
def test_what_cannot_be_captured_is_taken_plainly(recorded, method, settings, why):
    with pytest.warns(CompileWarning, match=why):
        found = run(method, steps=5, **settings)
    assert found.stats["compile"]["taken"] == "eager"
    assert why in found.stats["compile"]["why"]
    assert_same(found, run(method, steps=5, compile=False, **settings))
    quiet = run(method, steps=5, compile="auto", **settings)
    assert quiet.stats["compile"]["taken"] == "eager"


def test_on_the_cpu_steps_are_captured_where_that_is_asked_for():
    quiet = run("aid-identity", steps=12, compile="auto")
    assert "need a CUDA device" in quiet.stats["compile"]["why"]
    found = run("aid-identity", steps=12, compile="graph")
    assert found.stats["compile"]["taken"] == "operations"
    assert found.stats["compile"]["repeated"] > 0
    assert_same(found, quiet)
    assert "compile=False was given" in run("aid-identity", steps=2, compile=False).stats["compile"]["why"]


@pytest.mark.parametrize("mode", ["inductor", "fast", True])
def test_other_modes_are_refused(mode):
    with pytest.raises(nhgd.InputError, match="compile"):
        made("aid-identity", compile=mode)


@pytest.mark.filterwarnings("ignore::nhgd.InverseWarning", "ignore::nhgd._stagnation.StagnationWarning")
@pytest.mark.parametrize("method", [NHGD(FULL), AID(CG(steps=4)), "aid-identity"], ids=["kfac", "cg", "identity"])
def test_images_are_learnt_by_repeated_steps(recorded, method):
    """v enters the losses themselves, and the cross derivative comes from the graph of the gradient."""

    def distilled(compile):
        generator = torch.Generator().manual_seed(1)
        torch.manual_seed(0)
        net, v = nn.Linear(4, 3).double(), {"images": torch.randn(6, 4, generator=generator).double()}
        labels, x = torch.arange(3).repeat(2), torch.randn(20, 4, generator=generator).double()
        problem = nhgd.Bilevel(
            lambda model, v, batch: nhgd.Losses(
                F.cross_entropy(z := model(v["images"][batch[1]]), batch[0], reduction="none"), outputs=z
            ),
            outer,
            net,
            v,
            l2=1e-2,
            likelihood="categorical",
        )
        data = nhgd.Data(labels), nhgd.Data(x, x.argmax(1) % 3, batch=7)
        settings = {"inner_steps": 3, "inner_lr": 0.3, "outer_lr": 0.3, "compile": compile}
        return nhgd.Solver(problem, *data, method=method, **settings).run(steps=30)

    found, wanted = distilled("graph"), distilled(False)
    assert_repeated(found)
    assert torch.equal(found.v["images"], wanted.v["images"])
    but = ("hvps", "gradients", "inner_gradients", "samples", "residual")
    assert rows(found, but) == rows(wanted, but)
    for row, like in zip(found.history, wanted.history, strict=True):  # a root, taken on the device or in Python
        if like["residual"] is None:
            assert row["residual"] is None
        else:
            assert row["residual"] == pytest.approx(like["residual"], rel=1e-14)
