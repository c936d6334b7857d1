"""check and plan: the truth about an inverse, and what it costs."""

from __future__ import annotations

import pytest
import torch

import nhgd
from nhgd._memory import PeakMemory
from nhgd._plan import readable
from nhgd.inverse import CG, INVERSES
from tests import catalogue, oracles


def test_every_inverse_has_a_row_with_the_error_the_oracle_gives():
    problem, inner, outer = catalogue.settled(catalogue.frozen_layer)
    with oracles.undisturbed(problem):
        report = nhgd.check(problem, inner, outer)
    assert [row["inverse"] for row in report.rows] == list(INVERSES)
    exact = oracles.hypergradient(problem, inner, outer)
    for row in report.rows:
        assert row["error"] is None
        found = nhgd.hypergradient(problem, inner, outer, inverse=row["inverse"]).grad
        assert row["relative_error"] == pytest.approx(float((found - exact).norm() / exact.norm()), rel=1e-5, abs=1e-9)
        assert row["cosine"] == pytest.approx(float(torch.cosine_similarity(found, exact, dim=0)), abs=1e-9)
        assert row["milliseconds"] > 0
        assert row["megabytes"] > 0
    by_name = {row["inverse"]: row for row in report.rows}
    assert by_name["exact"]["relative_error"] < 1e-10
    assert by_name["cg"]["relative_error"] < 1e-7 < by_name["identity"]["relative_error"]
    assert by_name["identity"]["hvps"] == 0


def test_the_reference_above_the_dense_limit_is_as_exact():
    problem, inner, outer = catalogue.settled(catalogue.mlp_module)
    dense = nhgd.check(problem, inner, outer, inverses=["cg-3"])
    iterative = nhgd.check(problem, inner, outer, inverses=["cg-3"], dense_below=1)
    assert iterative.reference["method"] == "preconditioned conjugate gradients"
    assert iterative.reference["residual"] < 1e-9
    assert iterative.rows[0]["relative_error"] == pytest.approx(dense.rows[0]["relative_error"], rel=1e-6)


def test_batchnorm_in_training_mode_refuses_per_sample_inverses_in_their_row_alone():
    problem, inner, outer = catalogue.settled(catalogue.batchnorm_train)
    report = nhgd.check(problem, inner, outer, inverses=["fisher_window", "cg"], dense_below=1)
    assert "BatchNorm" in report.rows[0]["error"]
    assert report.rows[1]["relative_error"] < 1e-6
    assert "BatchNorm" in str(report)


def test_distance_from_the_inner_optimum():
    problem, inner, outer = catalogue.settled(catalogue.weighted_logistic)
    settled = nhgd.check(problem, inner, outer, inverses=["cg"])
    assert settled.inner_distance < 1e-9
    assert "at the inner optimum" in settled.advice[0]
    theta = problem.theta.flat()
    problem.theta.assign(theta + 0.3)
    away = nhgd.check(problem, inner, outer, inverses=["cg"])
    matrix = oracles.hessian(problem, inner)
    step = torch.linalg.solve(matrix, oracles.gradient(problem, inner))
    assert away.inner_distance == pytest.approx(float(step.norm() / (theta + 0.3).norm()), rel=1e-8)
    assert "away from the inner optimum" in away.advice[0]


def test_distance_of_the_fisher_matrix():
    problem, inner, outer = catalogue.settled(catalogue.plain_tensor)
    report = nhgd.check(problem, inner, outer, inverses=["cg"])
    f, h = oracles.fisher(problem, inner) + torch.diag(problem.ridge_diagonal()), oracles.hessian(problem, inner)
    # Eight Gaussian probes from a fixed seed: the ratio of two norms, each within a factor of 2 with near certainty.
    assert report.fisher_distance == pytest.approx(float((f - h).norm() / h.norm()), rel=0.5)
    u = torch.func.grad(lambda t: oracles.outer(problem, outer, t))(oracles.theta_of(problem))
    x = torch.linalg.solve(h, u)
    assert report.fisher_residual == pytest.approx(float(((f - h) @ x).norm() / u.norm()), rel=1e-8)


def test_a_scalar_loss_has_no_fisher_matrix():
    x = torch.randn(6, 2).double()
    problem = nhgd.Bilevel(
        lambda theta, v, x: ((x @ theta - 1) ** 2).mean() + v * theta.sum(),
        lambda theta, v, x: theta.square().sum(),
        torch.zeros(2).double(),
        torch.zeros(()).double(),
        l2=0.1,
    )
    report = nhgd.check(problem, x, x, inverses=["cg", "kfac"])
    assert report.fisher_distance is None
    assert report.rows[0]["relative_error"] < 1e-7
    assert "scalar" in report.rows[1]["error"]
    assert "scalar" in report.advice[-1]


def test_a_saddle_is_called_one():
    x = torch.zeros(3).double()
    signs = torch.tensor([1.0, -2.0]).double()
    problem = nhgd.Bilevel(
        lambda theta, v, x: ((signs * theta.square()).sum() + v * theta.sum()).expand(len(x)),
        lambda theta, v, x: theta.sum(),
        torch.zeros(2).double(),
        torch.zeros(()).double(),
    )
    assert "not positive definite" in nhgd.check(problem, x, x, inverses=["identity"]).advice[0]


def test_learn_from_other_batches_than_the_products():
    problem, inner, outer = catalogue.settled(catalogue.frozen_layer)
    x, y, i = inner
    parts = [(x[:5], y[:5], i[:5]), (x[5:], y[5:], i[5:])]
    whole = nhgd.check(problem, inner, outer, inverses=["fisher_window", "cg"])
    split = nhgd.check(problem, inner, outer, inverses=["fisher_window", "cg"], inner_data=parts)
    half = nhgd.check(problem, inner, outer, inverses=["fisher_window", "cg"], learn_from=parts[:1])
    for a, b in zip(whole.rows, split.rows, strict=True):
        assert a["relative_error"] == pytest.approx(b["relative_error"], rel=1e-6, abs=1e-9)
    assert half.rows[0]["relative_error"] != pytest.approx(whole.rows[0]["relative_error"], rel=1e-3)
    assert half.rows[1]["relative_error"] < 1e-7
    assert split.rows[1]["hvps"] == 2 * whole.rows[1]["hvps"]


def test_unknown_inverse():
    problem, inner, outer = catalogue.weighted_logistic()
    with pytest.raises(nhgd.InputError, match="Did you mean 'identity'"):
        nhgd.check(problem, inner, outer, inverses=["identiti"])


def test_inverses_may_be_one_name_and_must_not_be_none():
    problem, inner, outer = catalogue.weighted_logistic()
    assert [row["inverse"] for row in nhgd.check(problem, inner, outer, inverses="cg").rows] == ["cg"]
    with pytest.raises(nhgd.InputError, match="inverses is empty"):
        nhgd.check(problem, inner, outer, inverses=[])
    rows = nhgd.check(problem, inner, outer, inverses=[CG(steps=3), CG(steps=30)]).rows
    assert "steps=3," in rows[0]["inverse"]
    assert "steps=30," in rows[1]["inverse"]


def test_peak_memory_counts_what_lives_at_once():
    with PeakMemory() as peak:
        a = torch.zeros(1000)  # 4000 bytes
        b = a + 1
        del a
        c = b * 2  # never more than two of them at once
        del b, c
    assert peak.bytes == 8000
    with PeakMemory() as peak:
        x = torch.zeros(500, requires_grad=True)
        y = x.exp()  # kept for the backward pass
        z = y * 2
        torch.autograd.grad(z.sum(), x)
    assert peak.bytes >= 3 * 2000


def test_plan_allocates_nothing_of_the_size_it_speaks_of():
    problem = nhgd.Bilevel(
        lambda theta, v, x: (x @ theta - v) ** 2,
        lambda theta, v, x: theta.sum(),
        torch.zeros(200_000),
        torch.zeros(()),
    )
    with PeakMemory() as peak:
        plan = nhgd.plan(problem)
    by_name = {row["inverse"]: row for row in plan.rows}
    assert set(by_name) == set(INVERSES)
    assert by_name["exact"]["bytes"] == 200_000**2 * 32
    assert "refused above max_dim" in by_name["exact"]["note"]
    assert not by_name["exact"]["fits"]
    assert "does not fit" in by_name["exact"]["note"]
    assert by_name["cg"]["bytes"] == 6 * 800_000
    assert peak.bytes < 20e6
    assert "960.0 GB" in str(plan)


@pytest.mark.parametrize("name", ["kfac", "ekfac", "fisher_window", "fisher_dense", "fisher_diagonal", "exact", "cg"])
def test_plans_hold_within_a_factor_of_three(name):
    """What is planned against what is measured, where the state outweighs the batch."""
    torch.manual_seed(0)
    net = torch.nn.Linear(200, 3)
    x, y, i = torch.randn(8, 200), torch.arange(8) % 3, torch.arange(8)
    problem = nhgd.Bilevel(
        lambda m, v, b: nhgd.Losses(torch.nn.functional.cross_entropy(m(b[0]), b[1], reduction="none"), v[b[2]]),
        lambda m, v, b: torch.nn.functional.cross_entropy(m(b[0]), b[1]),
        net,
        torch.full((8,), 0.5),
        l2=0.01,
    )
    inverse = nhgd.inverse.FisherWindow(window=8) if name == "fisher_window" else name  # the window full, as planned
    planned = nhgd.plan(problem, inverses=[inverse]).rows[0]["bytes"]
    measured = nhgd.check(problem, (x, y, i), (x, y), inverses=[inverse], dense_below=0).rows[0]["megabytes"] * 1e6
    base = nhgd.check(problem, (x, y, i), (x, y), inverses=["identity"], dense_below=0).rows[0]["megabytes"] * 1e6
    assert planned / 3 <= measured <= 3 * planned + base


@pytest.mark.parametrize("dense_below", [0, 500])
def test_a_saddle_is_told_from_a_minimum(dense_below):
    """(theta^2 - 1)^2 bends downwards at 0.1, whichever way the reference is made."""
    theta = torch.full((3,), 0.1, dtype=torch.float64)
    problem = nhgd.Bilevel(
        lambda theta, v, x: (x * (theta.square() - 1).square() + v * theta).sum(1),
        lambda theta, v, x: theta.sum(),
        theta,
        torch.zeros(3, dtype=torch.float64),
    )
    x = torch.tensor([[1.0, 1.0, 1.0], [1.0, 2.0, 1.0]], dtype=torch.float64)
    report = nhgd.check(problem, x, x, inverses=["identity"], dense_below=dense_below)
    assert not report.reference["positive_definite"]
    assert any("not positive definite" in sentence for sentence in report.advice)


def weight_normed():
    """A layer whose weight is g v / |v|, by torch's own operation."""
    net = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 2)).double()
    batch = torch.randn(8, 3).double(), torch.arange(8) % 2, torch.arange(8)

    def losses(net, batch):
        return torch.nn.functional.cross_entropy(net(batch[0]), batch[1], reduction="none")

    problem = nhgd.Bilevel(
        lambda m, v, b: (losses(m, b), v[b[2]].sigmoid()),
        lambda m, v, b: losses(m, b).mean(),
        net,
        torch.zeros(8).double(),
        l2=0.1,
    )
    return problem, batch


def test_broken_second_derivatives_are_named():
    """torch's weight_norm has a wrong one on a CPU, and products with it are not symmetric."""
    torch.manual_seed(0)
    problem, batch = weight_normed()
    hessian = oracles.hessian(problem, batch)
    broken = float((hessian - hessian.T).norm() / hessian.norm()) > 1e-6
    report = nhgd.check(problem, batch, batch, inverses=["cg"])
    if not broken:
        pytest.skip("this torch has mended it")
    assert report.reference["asymmetry"] > 1e-4
    assert "not symmetric" in report.advice[0]
    assert "weight_norm" in report.advice[0]


@pytest.mark.parametrize("make", catalogue.PROBLEMS, ids=lambda make: make.__name__)
def test_products_of_sound_problems_are_symmetric(make):
    problem, inner, outer = make()
    report = nhgd.check(problem, inner, outer, inverses=["identity"])
    assert report.reference["asymmetry"] < 1e-12
    assert not any("not symmetric" in sentence for sentence in report.advice)


def test_one_batch_is_asked_for_by_name():
    problem, (x, y, i), outer = catalogue.weighted_logistic()
    data = nhgd.Data(x, y)
    for given in (data, torch.utils.data.DataLoader([0]), iter([(x, y, i)])):
        with pytest.raises(nhgd.InputError, match=r"inner_batch must be one batch.*next\(.*inner_data= takes"):
            nhgd.check(problem, given, outer)
        with pytest.raises(nhgd.InputError, match="outer_batch must be one batch"):
            nhgd.check(problem, (x, y, i), given)
        with pytest.raises(nhgd.InputError, match="inner_batch must be one batch"):
            nhgd.hypergradient(problem, given, outer)
    assert nhgd.check(problem, next(iter(data)), outer, inverses="cg").rows[0]["relative_error"] < 1e-6


@pytest.mark.parametrize("unpacking", [True, False])
def test_a_batch_without_the_index_is_told_what_is_missing(unpacking):
    x, y = torch.randn(6, 2).double(), torch.randn(6).double()

    def inner(theta, v, batch):
        if unpacking:
            features, targets, index = batch
        else:
            features, targets, index = batch[0], batch[1], batch[2]
        return (features @ theta - targets) ** 2, v[index].sigmoid()

    problem = nhgd.Bilevel(
        inner, lambda theta, v, b: (theta - 1).square().sum(), torch.zeros(2).double(), torch.zeros(6).double(), l2=0.1
    )
    match = r"inner\(\) failed on a batch of 2 entries.*nhgd.Data appends, pass \(x, y, torch.arange\(len\(x\)\)\)"
    for call in (
        lambda: nhgd.check(problem, (x, y), (x, y)),
        lambda: nhgd.hypergradient(problem, (x, y), (x, y)),
        lambda: nhgd.Solver(problem, [(x, y)], [(x, y)]),
    ):
        with pytest.raises(nhgd.InputError, match=match):
            call()
    assert nhgd.check(problem, (x, y, torch.arange(6)), (x, y), inverses="cg").rows[0]["relative_error"] < 1e-6


def test_other_errors_of_the_users_function_stay_what_they_are():
    def inner(theta, v, batch):
        raise ValueError("the user's own")

    problem = nhgd.Bilevel(inner, lambda theta, v, b: theta.sum(), torch.zeros(2), torch.zeros(2))
    with pytest.raises(ValueError, match="the user's own"):
        nhgd.check(problem, (torch.zeros(2),), (torch.zeros(2),))


def test_a_bar_is_drawn_when_it_is_asked_for(capsys):
    problem, inner, outer = catalogue.settled(catalogue.weighted_logistic)
    nhgd.check(problem, inner, outer, inverses=["cg", "identity"])
    assert capsys.readouterr().err == ""
    nhgd.check(problem, inner, outer, inverses=["cg", "identity"], progress=True)
    shown = capsys.readouterr()
    assert "check" in shown.err
    assert "100 %" in shown.err
    assert shown.out == ""


def test_the_dense_solve_is_a_row_on_small_problems_alone_unless_it_is_named():
    problem = nhgd.Bilevel(
        lambda theta, v, x: (theta - v).square().sum() * x,
        lambda theta, v, x: (theta - 1).square().sum(),
        torch.zeros(501).double(),
        torch.zeros(()).double(),
    )
    x = torch.ones(2).double()
    names = [row["inverse"] for row in nhgd.check(problem, x, x).rows]
    assert names == [name for name in INVERSES if name != "exact"]
    assert [row["inverse"] for row in nhgd.check(problem, x, x, inverses=["exact"]).rows] == ["exact"]


def test_a_slow_row_is_run_once():
    """The dense Hessian of the reference is formed once, too: D products and no more."""
    problem, inner, outer = catalogue.settled(catalogue.weighted_logistic)
    report = nhgd.check(problem, inner, outer, inverses=["identity"])
    assert report.reference["hvps"] == problem.theta.numel


def test_readable():
    assert [readable(n) for n in (5, 1500, 2_000_000, 3 * 10**12)] == ["5 B", "1.5 kB", "2.0 MB", "3.0 TB"]
