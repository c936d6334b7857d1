"""The driver: stop rules, randomness, optimisers, projections, refusals."""

from __future__ import annotations

import random
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nhgd
from nhgd._duration import seconds
from nhgd.algorithm import AID
from nhgd.inverse import CG
from nhgd.schedule import ByStep, Clock, Constant, Decay, Power, Strong
from nhgd.task import Quadratic
from tests import catalogue


def small(**settings):
    """A tiny quadratic with everything in closed form."""
    return Quadratic(**{"dim": 4, "outer_dim": 2, "samples": 30, **settings}).build(0, torch.device("cpu"))


def solver(instance, **settings):
    chosen = {"method": "aid-cg", **instance.solver_settings(), **settings}
    return nhgd.Solver(instance.problem, instance.inner_data, instance.outer_data, **chosen)


def test_reaches_the_closed_form_optimum():
    instance = small()
    solution = solver(instance).run(steps=200)
    torch.testing.assert_close(solution.v, instance.answers.v_star(), rtol=1e-6, atol=1e-8)
    assert solution.result == "steps"
    assert solution.v is instance.problem.v.given
    assert solution.theta is instance.problem.theta.given


def test_history_and_stats():
    instance = small()
    solution = solver(instance, metrics=instance.metrics, metrics_every=2).run(steps=5)
    assert [row["step"] for row in solution.history] == [1, 2, 3, 4, 5]
    assert ["v_error" in row for row in solution.history] == [True, True, False, True, False]
    first, last = solution.history[0], solution.history[-1]
    assert {"seconds", "outer_loss", "inner_loss", "lag", "gradients", "hvps", "cross", "samples"} <= set(first)
    assert first["seconds"] < last["seconds"]
    # 20 inner gradients a step, one more for the graph of the Hessian, one outer gradient.
    assert first["inner_gradients"] == 21
    assert first["outer_gradients"] == 1
    assert last["cross"] == 5
    execution = solution.stats["execution"]
    told = {"name": "inline", "processes": 1, "bytes_sent": 0, "waited_seconds": 0.0, "workers": 1, "division": {}}
    assert {key: execution[key] for key in told} == told
    assert solution.stats["oracle_calls"]["cross"] == 5


def test_the_callers_own_loop_gives_the_same_run():
    ours, theirs = small(), small()
    expected = solver(ours).run(steps=7)
    running = solver(theirs)
    for row in running:
        if row["step"] == 7:
            break
    found = running.solution()
    assert torch.equal(found.v, expected.v)
    assert found.result == "stopped"
    assert [r["outer_loss"] for r in found.history] == [r["outer_loss"] for r in expected.history]


def test_a_run_can_be_continued():
    whole, parts = small(batch=10), small(batch=10)
    expected = solver(whole).run(steps=6).v
    running = solver(parts)
    running.run(steps=2)
    assert torch.equal(running.run(steps=4).v, expected)


def test_same_seed_same_run_and_the_callers_generators_stay():
    def run(seed):
        instance = small(batch=7)
        return solver(instance, seed=seed).run(steps=5).v.clone()

    torch.manual_seed(5)
    np.random.seed(5)  # noqa: NPY002
    random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    first = run(3)
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()  # noqa: NPY002
    assert before[2] == random.getstate()
    torch.manual_seed(77)
    assert torch.equal(first, run(3))
    assert not torch.equal(first, run(4))


@pytest.mark.parametrize(
    "rules", [{"steps": 3}, {"budget": "0.05s"}, {"plateau": 4}, {"steps": 1000, "budget": 0.05, "plateau": 5}]
)
def test_stop_rules(rules):
    instance = small()
    solution = solver(instance, outer_lr=0.9).run(**rules)
    expected = {"steps"} if rules == {"steps": 3} else {"budget", "plateau"}
    assert solution.result in expected
    if rules == {"steps": 3}:
        assert len(solution.history) == 3


def test_non_finite_numbers_stop_the_run_and_put_theta_and_v_back():
    instance = small()
    running = solver(instance, inner_lr=1e6, inner_steps=60)
    v = instance.problem.v.given.clone()
    with pytest.raises(nhgd.NonFiniteError, match=r"Outer step 1: .*put back.*inner_lr"):
        running.run(steps=100)
    assert torch.equal(v, instance.problem.v.given)
    assert bool(torch.isfinite(instance.problem.theta.flat()).all())


def test_nan_in_a_later_batch_is_named():
    instance = small()
    a, b, c = instance.full_inner
    spoilt = a.clone()
    spoilt[3, 1] = float("nan")
    data = [(a, b, c), (a, b, c), (spoilt, b, c)]
    running = nhgd.Solver(instance.problem, data, instance.outer_data, method="aid-identity", inner_steps=1)
    with pytest.raises(
        nhgd.InputError, match=r"Outer step \d: an inner batch contains nan or inf: tensor \[0\], row 3"
    ):
        running.run(steps=5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"inner_steps": 0}, "inner_steps must be a whole number of at least 1, got 0"),
        ({"inner_lr": -0.1}, "inner_lr must be above 0, got -0.1"),
        ({"outer_lr": 0.0}, "outer_lr must be above 0"),
        ({"method": "aid-gc"}, "Did you mean 'aid-cg'"),
        ({"execution": "inlin"}, "Did you mean 'inline'"),
        ({"project": -1.0}, "radius above 0"),
        ({"project_v": (1, 0)}, "low < high"),
        ({"metrics_every": 0}, "metrics_every"),
        ({"inner_optimizer": torch.optim.Adam([torch.zeros(1, requires_grad=True)])}, "does not hold exactly"),
        ({"method": 3}, "A method must be a name or an object"),
    ],
)
def test_refusals(settings, message):
    with pytest.raises(nhgd.InputError, match=message):
        solver(small(), **settings)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({}, "when to stop"),
        ({"steps": 0}, "steps must be a whole number"),
        ({"budget": "soon"}, "A budget is a time"),
        ({"budget": -1}, "A budget is a time"),
        ({"plateau": 0}, "plateau"),
    ],
)
def test_run_refusals(rules, message):
    with pytest.raises(nhgd.InputError, match=message):
        solver(small()).run(**rules)


def test_one_shot_generators_and_empty_loaders_are_refused():
    instance = small()
    for data, message in (
        ((batch for batch in [instance.full_inner]), "one-shot"),
        ([], "yields no batch"),
        (instance.full_inner, "tuple of tensors"),
    ):
        with pytest.raises(nhgd.InputError, match=message):
            nhgd.Solver(instance.problem, data, instance.outer_data)


OPTIMISERS = {
    "class": torch.optim.Adam,
    "factory": partial(torch.optim.SGD, lr=0.05, momentum=0.5),
    "lambda": lambda params: torch.optim.RMSprop(params, lr=0.01),
    "lbfgs": partial(torch.optim.LBFGS, lr=1.0, max_iter=5),
}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_any_torch_optimiser_inside_and_outside(name):
    instance = small()
    start = float(instance.answers.phi(instance.problem.v.given))
    settings = {**instance.solver_settings(), "inner_optimizer": OPTIMISERS[name]}
    if name == "class":
        settings["inner_lr"] = 0.05
    else:
        del settings["inner_lr"]
    settings |= {"outer_optimizer": torch.optim.Adam, "outer_lr": 0.1}
    solution = nhgd.Solver(instance.problem, instance.inner_data, instance.outer_data, method="aid", **settings).run(
        steps=60
    )
    best = float(instance.answers.phi(instance.answers.v_star()))
    assert float(instance.answers.phi(solution.v)) < best + 0.2 * (start - best)
    assert all(p.grad is None for p in instance.problem.theta.leaves)


def test_an_optimiser_instance_keeps_its_state():
    instance = small()
    optimiser = torch.optim.Adam(instance.problem.theta.given.parameters(), lr=0.05)
    settings = {k: s for k, s in instance.solver_settings().items() if k != "inner_lr"}
    nhgd.Solver(
        instance.problem, instance.inner_data, instance.outer_data, inner_optimizer=optimiser, method="aid", **settings
    ).run(steps=2)
    assert int(optimiser.state[instance.problem.theta.leaves[0]]["step"]) == 2 * settings["inner_steps"]


def test_weight_decay_of_the_inner_optimiser_is_warned_about():
    instance = small()
    with pytest.warns(UserWarning, match="weight_decay, which the hypergradient does not see"):
        solver(instance, inner_optimizer=torch.optim.AdamW)


def test_projections_hold_at_every_step():
    instance = small()
    running = solver(instance, project=0.1, project_v=(-0.05, 0.2))
    for row in running:
        assert float(instance.problem.theta.flat().norm()) <= 0.1 + 1e-12
        assert float(instance.problem.v.flat().min()) >= -0.05
        assert float(instance.problem.v.flat().max()) <= 0.2
        if row["step"] == 10:
            break


@pytest.mark.parametrize("method", ["aid-cg", "nhgd", "itd", "soba", "f2sa", "bome"])
def test_theta_inside_the_ball_stays_where_it_is(method):
    free, held = (small(noise=0.1) for _ in range(2))
    for instance, radius in ((free, None), (held, 1e3)):
        solver(instance, method=method, project=radius).run(steps=3)
    assert torch.equal(free.problem.theta.flat(), held.problem.theta.flat())
    assert torch.equal(free.problem.v.flat(), held.problem.v.flat())
    assert 0 < float(held.problem.theta.flat().norm()) < 1e3


def test_projections_may_be_functions():
    instance = small()

    def half_space(v):
        v[0].clamp_(max=0.0)

    def frozen(model):
        model.weight[0, 0] = 0.0

    running = solver(instance, project=frozen, project_v=half_space)
    running.run(steps=5)
    assert float(instance.problem.v.given[0]) <= 0
    assert float(instance.problem.theta.given.weight.detach()[0, 0]) == 0


def test_inner_steps_are_projected_gradient_steps():
    """Against the recursion written out, ridge included."""
    instance = small()
    a, b, _ = instance.full_inner
    theta = torch.zeros(4, dtype=torch.float64)
    for _ in range(3):
        gradient = a.T @ (a @ theta - b) / len(a) + 2 * 0.01 * theta
        theta = theta - 0.05 * gradient
        theta = theta * min(1.0, 0.02 / float(theta.norm()))
    running = solver(instance, inner_steps=3, inner_lr=0.05, project=0.02)
    running.step()
    torch.testing.assert_close(instance.problem.theta.flat(), theta, rtol=1e-12, atol=1e-14)


def test_warm_start_of_theta_is_an_option():
    def losses(warm):
        history = solver(small(), method=AID(CG(), warm_start=warm), inner_steps=1, outer_lr=1e-9).run(steps=5).history
        return [row["inner_loss"] for row in history]

    warm, cold = losses(True), losses(False)
    assert all(after < before for before, after in pairwise(warm))
    assert cold == pytest.approx([cold[0]] * 5, rel=1e-6)


def test_warm_solve_saves_products():
    def products(warm):
        instance = small(dim=12, samples=60)
        return solver(instance, method=AID(CG(steps=100, tol=1e-8), warm_solve=warm)).run(steps=60).history[-1]["hvps"]

    assert products(True) < 0.9 * products(False)


@pytest.mark.filterwarnings("ignore::nhgd.InverseWarning")  # one step is not enough
def test_batches_all_is_one_pass_over_the_data():
    instance = small(batch=10)
    solution = solver(instance, method=AID(CG(steps=1), batches="all", warm_solve=False)).run(steps=1)
    assert solution.history[0]["hvps"] == 3
    assert solution.history[0]["cross"] == 3


def test_batchnorm_learns_its_statistics_from_inner_steps_alone():
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)).double()
    x, y = torch.randn(16, 3).double() + 4, torch.arange(16) % 2
    v = torch.zeros((), dtype=torch.float64)
    problem = nhgd.Bilevel(
        lambda m, v, b: F.cross_entropy(m(b[0]), b[1], reduction="none"),
        lambda m, v, b: F.cross_entropy(m(b[0] + 100), b[1]),
        net,
        v,
        l2=lambda v: v.exp(),
    )
    nhgd.Solver(problem, [(x, y)], [(x, y)], method="aid-cg", inner_steps=3).run(steps=2)
    assert int(net[0].num_batches_tracked) == 6
    assert float(net[0].running_mean.max()) < 10
    assert net.training


@pytest.mark.filterwarnings("ignore::nhgd.InverseWarning")  # a net with dropout is not convex
def test_dropout_runs_are_reproducible():
    def run():
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 2)).double()
        x, y = torch.randn(20, 4).double(), torch.arange(20) % 2
        v = torch.zeros((), dtype=torch.float64)
        problem = nhgd.Bilevel(
            lambda m, v, b: F.cross_entropy(m(b[0]), b[1], reduction="none"),
            lambda m, v, b: F.cross_entropy(m(b[0]), b[1]),
            net,
            v,
            l2=lambda v: (v - 2).exp(),
        )
        return nhgd.Solver(problem, [(x, y)], [(x, y)], method="aid-cg").run(steps=4).v

    assert torch.equal(run(), run())


def test_plot_writes_a_picture_and_returns_the_figure(tmp_path):
    solution = solver(small()).run(steps=3)
    figure = solution.plot(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert [axes.lines[0].get_ydata().tolist() for axes in figure.axes] == [
        [row[loss] for row in solution.history] for loss in ("outer_loss", "inner_loss")
    ]


def test_progress_bar_goes_to_standard_error(capsys):
    solver(small()).run(steps=2, progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "aid" in captured.err


def test_schedules():
    assert Constant(0.1).rate(Clock(t=9, k=9)) == 0.1
    assert Strong(mu=0.5, smoothness=2.0).rate(Clock(t=3)) == pytest.approx(4 / (0.5 * (3 + 8 * 16)))
    assert Power(2.0, 0.5).rate(Clock(k=8)) == pytest.approx(2 / 3)
    assert Decay(1.0, final=0.1, hold=0.5).rate(Clock(done=0.25)) == 1.0
    assert Decay(1.0, final=0.1).rate(Clock(done=1.0)) == pytest.approx(0.1)
    assert ByStep(lambda k: 1 / (k + 1)).rate(Clock(k=3)) == 0.25
    for bad in (lambda: Strong(mu=2, smoothness=1), lambda: Decay(1.0, hold=1.0), lambda: Power(-1, 0)):
        with pytest.raises(nhgd.InputError):
            bad()


def test_schedules_reach_the_optimisers():
    instance = small()
    running = solver(instance, outer_lr=Decay(0.5, final=0.0), inner_lr=Strong(mu=1.0, smoothness=2.0))
    running.run(steps=10)
    assert running.loop.v.optimizer.param_groups[0]["lr"] < 0.05
    # t restarts with every outer step: the last inner step was number 19.
    assert running.loop.theta.optimizer.param_groups[0]["lr"] == pytest.approx(4 / (19 + 32))


def test_budgets_are_read():
    assert [seconds(b) for b in ("60s", "5m", "1h", "2", 0.5)] == [60, 300, 3600, 2, 0.5]


def test_an_optimiser_may_hold_a_plain_v():
    instance = small()
    v = instance.problem.v.given
    running = solver(instance, outer_optimizer=torch.optim.Adam([v], lr=0.1), outer_lr=None)
    running.run(steps=5)
    assert bool((v != 0).all())
    assert v.grad is None


def test_a_projection_may_return_its_result():
    instance = small()
    solver(instance, project_v=lambda v: v.clamp(-0.01, 0.01)).run(steps=3)
    assert float(instance.problem.v.given.abs().max()) <= 0.01


def test_bad_outer_batches_are_named():
    instance = small()
    x, y = instance.full_outer
    with pytest.raises(nhgd.InputError, match="different lengths"):
        nhgd.Solver(instance.problem, instance.inner_data, [(x, y[:-1])], method="aid")
    spoilt = x.clone()
    spoilt[2, 0] = float("inf")
    running = nhgd.Solver(
        instance.problem, instance.inner_data, [(x, y), (spoilt, y)], method="aid", **instance.solver_settings()
    )
    with pytest.raises(nhgd.InputError, match=r"Outer step 2: an outer batch contains nan or inf: tensor \[0\], row 2"):
        running.run(steps=3)


def test_a_loss_that_turns_bad_is_named_with_its_sample():
    instance = small()
    calls = []
    inner = instance.problem.inner

    def turning(theta, v, batch):
        calls.append(1)
        losses = inner(theta, v, batch)
        values = (
            losses.values * (torch.arange(len(losses.values)) != 7).double().log() if len(calls) > 30 else losses.values
        )
        return nhgd.Losses(values)

    instance.problem.inner = turning
    with pytest.raises(nhgd.NonFiniteError, match=r"Outer step \d: .* The inner loss is .* for sample 7 of the batch"):
        solver(instance, method="aid-identity").run(steps=5)


def test_buffers_are_put_back_too():
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)).double()
    x, y = torch.randn(16, 3).double(), torch.arange(16) % 2
    problem = nhgd.Bilevel(
        lambda m, v, b: F.cross_entropy(m(b[0] * m[1].weight.sum()), b[1], reduction="none"),
        lambda m, v, b: F.cross_entropy(m(b[0]), b[1]),
        net,
        torch.zeros(()).double(),
        l2=lambda v: v.exp(),
    )
    with pytest.raises(nhgd.NonFiniteError, match="put back"):
        nhgd.Solver(problem, [(x, y)], [(x, y)], method="aid-identity", inner_lr=1e200).run(steps=3)
    assert bool(torch.isfinite(net[0].running_mean).all())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seed": "a"}, "seed must be"),
        ({"inner_optimizer": "adam"}, "must be a torch optimiser"),
        ({"project_v": ("a", "b")}, "project_v must be a box"),
        ({"project_v": lambda v: 3}, "must change its argument in place"),
    ],
)
def test_more_refusals(settings, message):
    with pytest.raises(nhgd.InputError, match=message):
        solver(small(), **settings).run(steps=1)


@pytest.mark.parametrize(
    "wrong", [int, "adam", lambda params: None, lambda params: 5], ids=["a class", "text", "nothing", "5"]
)
def test_what_makes_no_optimiser_is_refused(wrong):
    problem, inner, outer = catalogue.weighted_logistic()
    with pytest.raises(nhgd.InputError, match="outer_optimizer must be a torch optimiser, its class, or a function"):
        nhgd.Solver(problem, [inner], [outer], method="aid-cg", outer_optimizer=wrong)


def test_metrics_that_raise_leave_no_hole_in_the_history(tmp_path):
    calls = []

    def metrics(theta, v):
        calls.append(1)
        if len(calls) == 3:
            raise ZeroDivisionError
        return {"mine": len(calls)}

    data = [torch.zeros(4)]

    def toy():
        return nhgd.Bilevel(
            inner=lambda theta, v, x: (theta - v).square().expand(len(x)),
            outer=lambda theta, v, x: (theta - 3).square(),
            theta=torch.tensor(0.0),
            v=torch.tensor(0.0),
        )

    solver = nhgd.Solver(toy(), data, data, method="aid-cg", metrics=metrics, checkpoint=tmp_path, checkpoint_every=1)
    with pytest.raises(ZeroDivisionError):
        solver.run(steps=5)
    solver.run(steps=2)
    assert [(row["step"], row.get("mine")) for row in solver.history] == [(1, 1), (2, 2), (3, None), (4, 4), (5, 5)]
    continued = nhgd.Solver.resume(tmp_path, toy(), data, data, metrics=metrics)
    assert continued.history == solver.history
