"""check_along: the truth about inverses at several points of a run, which goes on as if nobody had looked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import nhgd
from nhgd._along import spread
from nhgd.algorithm import AID, NHGD
from nhgd.inverse import CG, EKFAC, KFAC, FisherDense, FisherDiagonal, FisherWindow, Refined
from nhgd.oracle import Oracle
from nhgd.schedule import Decay
from tests import catalogue, oracles
from tests.commands import answer, invoke, refusal
from tests.histories import CLOCKED

STEPS = 12


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Every command runs in an empty folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def solver(make=catalogue.frozen_layer, method="nhgd", **settings) -> tuple[nhgd.Solver, Any, Any]:
    torch.manual_seed(0)
    problem, inner, outer = make()
    settings = {"inner_steps": 3, "inner_lr": 0.2, "outer_lr": 0.1, "seed": 5} | settings
    halves = [tuple(part[some] for part in inner) for some in (slice(None, None, 2), slice(1, None, 2))]
    return nhgd.Solver(problem, halves, [outer], method=method, **settings), inner, outer


def by_step(report: nhgd.AlongReport, name: str) -> dict[int, dict[str, Any]]:
    return {row["step"]: row for row in report.rows if row["inverse"] == name}


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.cosine_similarity(a, b, dim=0))


def stops(made: nhgd.Solver, at: list[int]):
    """The solver of the same run where its hypergradient is asked for: theta after the inner loop, v before it moves."""
    for k in range(1, max(at) + 1):
        v = made.problem.v.flat()
        row = made.step()
        if k in at:
            with made.loop.temporarily_at(made.problem.theta.flat(), v):
                yield k, row


def test_points_are_spread_geometrically():
    assert spread(1000, 4) == [1, 10, 100, 1000]
    assert spread(7, 7) == [1, 2, 3, 4, 5, 6, 7]
    assert spread(5, 1) == [5]
    for steps in range(1, 40):
        for points in range(1, steps + 1):
            found = spread(steps, points)
            assert len(set(found)) == points
            assert found == sorted(found)
            assert found[-1] == steps
            assert found[0] >= 1


@pytest.mark.parametrize("dense_below", [2000, 0])
def test_every_number_is_what_dense_matrices_say(dense_below):
    """The run's own inverse is dense, so that its x is a solve with a matrix that the state shows."""
    method = NHGD(inverse=FisherDense())
    watched, inner, outer = solver(method=method)
    report = nhgd.check_along(
        watched, inner, outer, steps=STEPS, points=3, inverses=["fisher_dense", "cg"], dense_below=dense_below
    )
    plain, *_ = solver(method=method)
    own, taught, cg = (by_step(report, n) for n in ("fisher_dense of the run", "fisher_dense", "cg"))
    assert list(own) == list(taught) == list(cg) == [1, 3, 12]
    for k, row in stops(plain, [1, 3, 12]):
        problem = plain.problem
        h, damping = oracles.hessian(problem, inner), row["damping"]
        assert damping > 0
        eye = torch.eye(len(h), dtype=h.dtype)
        exact = oracles.hypergradient(problem, inner, outer)
        damped = oracles.hypergradient(problem, inner, outer, h + damping * eye)
        u = torch.func.grad(lambda t: oracles.outer(problem, outer, t))(oracles.theta_of(problem))  # noqa: B023
        away = torch.linalg.solve(h, oracles.gradient(problem, inner)).norm() / oracles.theta_of(problem).norm()
        state, horizon = plain.executor.keep(), plain.state.horizon
        ridge = oracles.ridge_hessian(problem) + damping * eye
        x = horizon.scale * torch.linalg.solve(state.matrix + ridge, u)
        x = x if horizon.correction is None else x + horizon.correction
        c = oracles.cross(problem, inner)
        direct = exact + c.T @ torch.linalg.solve(h, u)
        found = {
            "own": (own[k], direct - c.T @ x, x),
            "taught": (
                taught[k],
                oracles.hypergradient(problem, inner, outer, oracles.fisher(problem, inner) + ridge),
                torch.linalg.solve(oracles.fisher(problem, inner) + ridge, u),
            ),
            "cg": (cg[k], exact, torch.linalg.solve(h, u)),
        }
        for told, grad, x in found.values():
            assert told["step"] == k
            assert told["damping"] == damping
            assert told["error"] is None
            assert told["inner_distance"] == pytest.approx(float(away), rel=1e-6)
            assert told["cosine"] == pytest.approx(cosine(grad, exact), abs=1e-8)
            assert told["cosine_damped"] == pytest.approx(cosine(grad, damped), abs=1e-8)
            assert told["relative_error"] == pytest.approx(
                float((grad - exact).norm() / exact.norm()), rel=1e-6, abs=1e-7
            )
            assert told["residual"] == pytest.approx(float((h @ x - u).norm() / u.norm()), rel=1e-6, abs=1e-7)
    # What the run has learnt is older than what is learnt on the spot.
    assert own[12]["relative_error"] != pytest.approx(taught[12]["relative_error"], rel=1e-3)


def net_with_everything():
    """BatchNorm in training mode, whose buffers move, and dropout, which draws."""
    net = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 3)
    )
    return catalogue.of_classifier(net)


RUNS = {
    "nhgd": (catalogue.mlp_module, "nhgd"),
    "refined": (catalogue.mlp_module, "nhgd-refined"),
    "window": (catalogue.mlp_module, NHGD(inverse=FisherWindow(window=8))),
    "dense": (catalogue.mlp_module, "nhgd-paper"),
    "diagonal": (catalogue.mlp_module, NHGD(inverse=FisherDiagonal())),
    "kept decompositions": (catalogue.mlp_module, NHGD(inverse=EKFAC(invert_every=2), cross="final")),
    "natural": (catalogue.mlp_module, NHGD(inverse=KFAC(), inner="natural")),
    "batchnorm and dropout": (net_with_everything, "nhgd"),
    "conv": (catalogue.conv_net, "nhgd"),
    "cg": (catalogue.mlp_module, AID(inverse=CG(steps=3, damping="auto"))),
    "soba": (catalogue.mlp_module, "soba"),
    "single": (catalogue.mlp_module, "nhgd_single"),
    "itd": (catalogue.mlp_module, "itd"),
}


@pytest.mark.parametrize("execution", ["inline", "thread"])
@pytest.mark.parametrize("name", RUNS)
def test_the_run_is_what_it_would_have_been(name, execution):
    make, method = RUNS[name]
    settings: dict[str, Any] = {"outer_optimizer": torch.optim.Adam, "outer_lr": Decay(0.05)}
    settings |= {"metrics": lambda theta, v: {"seen": float(torch.rand(()))}}
    if execution == "thread" and name in ("cg", "soba", "itd", "natural"):
        pytest.skip("nothing to run beside the inner loop")
    runs = []
    for looked_at in (True, False):
        made, inner, outer = solver(make, method, execution=execution, **settings)
        torch.manual_seed(9)
        if looked_at:
            inverses = ["kfac", "nystrom", "cg-3"]
            state = torch.get_rng_state()
            report = nhgd.check_along(made, inner, outer, steps=8, points=3, inverses=inverses)
            assert torch.equal(torch.get_rng_state(), state)
            assert sorted({row["step"] for row in report.rows}) == [1, 3, 8]
            solution = report.solution
        else:
            solution = made.run(steps=8)
        runs.append((made, solution, [made.step() for _ in range(2)]))
        made.close()
    (a, found, more), (b, expected, as_many) = runs
    assert torch.equal(a.problem.theta.flat(), b.problem.theta.flat())
    assert torch.equal(a.problem.v.flat(), b.problem.v.flat())
    for one, other in zip(a.problem.point(), b.problem.point(), strict=True):
        assert torch.equal(one, other)
    timeless = [[{k: x for k, x in row.items() if k not in CLOCKED} for row in rows] for rows in (more, as_many)]
    assert timeless[0] == timeless[1]
    assert [repr(timed(row)) for row in found.history] == [repr(timed(row)) for row in expected.history]
    assert found.result == expected.result == "steps"


def timed(row: dict[str, Any]) -> dict[str, Any]:
    return {k: x for k, x in row.items() if k not in CLOCKED}


def test_the_runs_own_inverse_has_a_row_where_it_learns():
    for name, own in (
        ("nhgd", "kfac of the run"),
        ("nhgd-refined", "refined(kfac, 5) of the run"),
        ("aid-cg", None),
        ("itd", None),
    ):
        made, inner, outer = solver(catalogue.frozen_layer, name)
        report = nhgd.check_along(made, inner, outer, steps=2, points=2, inverses="identity")
        names = ["identity"] if own is None else [own, "identity"]
        assert [row["inverse"] for row in report.rows] == 2 * names
        assert all(row["damping"] > 0 for row in report.rows) == name.startswith("nhgd")


def test_a_refined_solve_begins_where_the_run_began_it():
    """With one product it ends elsewhere from anywhere else."""
    method = NHGD(inverse=Refined(KFAC(overhead=None), steps=1), cross="final")
    made, inner, outer = solver(catalogue.mlp_module, method)
    report = nhgd.check_along(made, inner, outer, steps=6, points=1, inverses="identity")
    plain, *_ = solver(catalogue.mlp_module, method)
    for _ in range(5):
        plain.step()
    start, v = plain.state.adjoint.clone(), plain.problem.v.flat()
    row = plain.step()
    with plain.loop.temporarily_at(plain.problem.theta.flat(), v):
        at, exact = Oracle(plain.problem, [inner], outer), oracles.hypergradient(plain.problem, inner, outer)
        at.damp(row["damping"])
        errors = []
        for begin in (start, None):
            x, _ = plain.loop.inverse.apply(plain.executor.keep(), at.outer().theta, at, begin)
            grad = torch.cat([(f - c).flatten() for f, c in zip(at.outer().v, at.cross(x), strict=True)])
            errors.append(float((grad - exact).norm() / exact.norm()))
    assert report.rows[0]["inverse"] == "refined(kfac, 1) of the run"
    assert report.rows[0]["relative_error"] == pytest.approx(errors[0], rel=1e-9)
    assert report.rows[0]["relative_error"] != pytest.approx(errors[1], rel=1e-5)


def test_an_interrupted_run_is_looked_at_from_where_it_stands(tmp_path):
    first, inner, outer = solver(checkpoint=tmp_path / "a", checkpoint_every=1)
    first.on_step.append(lambda row: row["step"] < 4 or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        first.run(steps=9)
    first.close()
    torch.manual_seed(0)
    problem, inner, outer = catalogue.frozen_layer()
    halves = [tuple(part[some] for part in inner) for some in (slice(None, None, 2), slice(1, None, 2))]
    second = nhgd.Solver.resume(tmp_path / "a", problem, halves, [outer])
    stood = second.loop.clock.k
    report = nhgd.check_along(second, inner, outer, steps=9, points=2, inverses="cg")
    assert sorted({row["step"] for row in report.rows}) == [stood + 1, 9]
    whole, *_ = solver()
    assert torch.equal(whole.run(steps=9).v, report.solution.v)
    assert len(report.solution.history) == 9


def test_what_cannot_be_told_is_none_and_refusals_are_said_once():
    """At a saddle nothing is an inner minimum; without layers there is no K-FAC."""
    signs = torch.tensor([1.0, -2.0]).double()
    problem = nhgd.Bilevel(
        lambda theta, v, x: (signs * theta.square()).sum() + v * theta.sum() + 0 * x,
        lambda theta, v, x: theta.sum(),
        torch.tensor([0.1, 0.2]).double(),
        torch.zeros(()).double(),
    )
    x = torch.zeros(3).double()
    made = nhgd.Solver(problem, [x], [x], method="aid-cg-2", inner_steps=1, inner_lr=0.01)
    with pytest.warns(nhgd.InverseWarning):
        report = nhgd.check_along(made, x, x, steps=3, points=2, inverses=["exact", "kfac"])
    assert all(row["inner_distance"] is None for row in report.rows)
    assert all(row["error"] for row in report.rows if row["inverse"] == "kfac")
    assert str(report).count("no such layer holds a parameter of theta") == 1
    assert "exact" in str(report)


def test_errors_are_sentences():
    made, inner, outer = solver()
    with pytest.raises(nhgd.InputError, match=r"does not have 4 points to examine\. Ask for at most 3"):
        nhgd.check_along(made, inner, outer, steps=3, points=4)
    with pytest.raises(nhgd.InputError, match="points must be a whole number of at least 1"):
        nhgd.check_along(made, inner, outer, steps=3, points=0)
    with pytest.raises(nhgd.InputError, match="steps must be a whole number of at least 1"):
        nhgd.check_along(made, inner, outer, steps=0)
    with pytest.raises(nhgd.InputError, match="Did you mean 'identity'"):
        nhgd.check_along(made, inner, outer, steps=3, points=2, inverses="identiti")
    with pytest.raises(nhgd.InputError, match="inner_batch must be one batch"):
        nhgd.check_along(made, nhgd.Data(*inner[:2]), outer, steps=3, points=2)
    assert made.loop.clock.k == 0
    with pytest.raises(nhgd.InputError, match="solver must be"):
        nhgd.check_along(made.problem, inner, outer, steps=3)


def test_nothing_watches_the_next_run():
    made, inner, outer = solver()
    nhgd.check_along(made, inner, outer, steps=2, points=1, inverses="identity")
    assert made.on_step == []
    assert len(made.run(steps=2).history) == 4


def test_a_bar_is_drawn_when_it_is_asked_for(capsys):
    made, inner, outer = solver()
    nhgd.check_along(made, inner, outer, steps=2, points=2, inverses="identity", progress=True)
    assert "100 %" in capsys.readouterr().err


KEYS = [
    "step",
    "inverse",
    "cosine",
    "relative_error",
    "cosine_damped",
    "residual",
    "inner_distance",
    "damping",
    "error",
]


@pytest.mark.parametrize(
    ("task", "own", "more"),
    [
        ("l2", "kfac of the run", ()),
        ("quadratic", "kfac of the run", ()),
        ("cleaning", "kfac of the run", ("--set", "inner_steps=2")),
        ("distillation", "ekfac of the run", ("--set", "method.inner=optimizer", "--set", "inverse=ekfac")),
    ],
)
def test_the_command_looks_along_a_run_of_a_bundled_task(task, own, more):
    words = ("check", task, "--preset", "quick", "--device", "cpu", "--along", 2, "--steps", 3, "--inverses", "cg-2,cg")
    found = answer(*words, *more, "--set", "cg.steps=4")
    assert [row["step"] for row in found["rows"]] == [1, 1, 1, 3, 3, 3]
    assert [row["inverse"] for row in found["rows"]] == 2 * [own, "cg-2", "cg"]
    assert all(sorted(row) == sorted(KEYS) for row in found["rows"])
    assert (found["task"], found["method"], found["steps"]) == (task, "nhgd", 3)
    for row in found["rows"]:
        assert row["error"] is None
        assert -1 <= row["cosine"] <= 1
        assert row["residual"] >= 0


def test_the_commands_run_is_that_of_run():
    """The same numbers are damped with, in float64 as the comparison takes them."""
    common = ("cleaning", "--preset", "quick", "--device", "cpu", "--steps", 4)
    found = answer("check", *common, "--along", 4, "--inverses", "identity")
    invoke("run", *common, "--method", "nhgd", "--set", "dtype=float64", "--out", "out")
    rows = [json.loads(line) for line in Path("out/history.jsonl").read_text().splitlines()]
    assert [row["damping"] for row in found["rows"] if row["inverse"] == "identity"] == [row["damping"] for row in rows]


def test_the_command_shows_a_table():
    shown = invoke("check", "l2", "--preset", "quick", "--along", 2, "--steps", 3, "--inverses", "cg,identity").stdout
    assert all(word in shown for word in ("damped cosine", "inner distance", "kfac of the run", "identity"))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--along", 0), "--along must be a whole number"),
        (("--along", 5, "--steps", 4), "--steps 4 are fewer outer steps than the 5"),
        (("--along", 500), "does not have 500 points"),
        (("--method", "soba"), "Add it, or omit them"),
        (("--steps", 4), "Add it, or omit them"),
        (("--along", 2, "--set", "cg.stepz=3"), "Did you mean 'cg.steps'?"),
        (("--along", 2, "--set", "outer_lrr=3"), "Did you mean 'outer_lr'?"),
        (("--along", 2, "--method", "nhdg"), "Did you mean 'nhgd'?"),
    ],
)
def test_the_commands_errors_are_sentences(more, words):
    assert words in refusal("check", "l2", "--preset", "quick", "--inverses", "cg", *more)
