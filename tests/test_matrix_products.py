"""K-FAC's solve by products of matrices: equal to that in the eigenbasis, without any decomposition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nhgd
from nhgd.algorithm import NHGD
from nhgd.inverse import KFAC
from nhgd.inverse._learned import eigenbasis
from nhgd.inverse._learned.learning import learn
from nhgd.ridge import Ridge

PRODUCTS = KFAC(solver="products", iterations=200, overhead=None)


def made(groups=1, samples=24, l2=1e-2):
    torch.manual_seed(0)
    x, y = torch.randn(samples, 4, 5, 5).double(), torch.randint(3, (samples,))
    layers = [nn.Conv2d(4, 4, 3, groups=groups), nn.Tanh(), nn.Flatten(), nn.Linear(36, 3)]
    net = nn.Sequential(*layers).double()
    v = torch.rand(samples).double()

    def inner(model, v, batch):
        return nhgd.Losses(F.cross_entropy(model(batch[0]), batch[1], reduction="none"), weights=v[batch[2]])

    def outer(model, v, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    problem = nhgd.Bilevel(inner, outer, theta=net, v=v, l2=l2)
    return problem, (x, y, torch.arange(samples))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("damping", [0.0, 0.3])
def test_it_is_the_solve_in_the_eigenbasis(groups, damping):
    problem, batch = made(groups)
    u = torch.randn(problem.theta.numel).double()
    state = learn(PRODUCTS, problem, [batch])
    for ridge in (Ridge(2e-2), Ridge(2e-2 + torch.rand(problem.theta.numel).double())):
        inverses = (replace(PRODUCTS, damping=damping), KFAC(overhead=None, damping=damping))
        found, wanted = (inverse.solve(state, u, ridge)[0] for inverse in inverses)
        # The residual of conjugate gradients is at most 1e-6, and the condition below 1e3; that of the eigenbasis is rounding.
        assert float((found - wanted).norm() / wanted.norm()) < 1e-4


def test_few_products_suffice_under_much_damping():
    problem, batch = made()
    u = torch.randn(problem.theta.numel).double()
    state = learn(PRODUCTS, problem, [batch])
    size = max(float(a.amax() * g.amax()) for a, g in map(state.factors, state.inputs))
    wanted = KFAC(overhead=None).solve(state, u, Ridge(size))[0]
    errors = []
    for iterations in (2, 4, 8):
        found = replace(PRODUCTS, iterations=iterations).solve(state, u, Ridge(size))[0]
        errors.append(float((found - wanted).norm() / wanted.norm()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-3


def test_nothing_is_decomposed_and_a_captured_step_is_one_piece(monkeypatch):
    def refused(*_):
        raise AssertionError("a factor was decomposed")

    monkeypatch.setattr(eigenbasis, "eigenvalues", refused)
    histories = []
    for compile in ("graph", False):
        problem, (x, y, _) = made(samples=24)
        data = nhgd.Data(x, y, batch=8)
        method = NHGD(replace(PRODUCTS, iterations=6))
        solver = nhgd.Solver(
            problem,
            data,
            nhgd.Data(x, y),
            method=method,
            inner_steps=2,
            outer_lr=0.1,
            project_v=(0, 1),
            compile=compile,
        )
        solution = solver.run(steps=20)
        histories.append([row["outer_loss"] for row in solution.history])
        if compile:
            assert solution.stats["compile"]["repeated"] > 5, solution.stats["compile"]["why"]
            segments = [len(graph.script.segments) for graph in solver._captured._graphs.values()]
            assert segments == [1] * len(segments)
    assert histories[0] == histories[1]


def test_it_needs_something_on_the_diagonal():
    problem, batch = made(l2=0.0)
    u = torch.randn(problem.theta.numel).double()
    state = learn(PRODUCTS, problem, [batch])
    with pytest.raises(nhgd.InputError, match="solver='products' needs a ridge or a damping"):
        replace(PRODUCTS, damping=0.0).solve(state, u, Ridge(0.0))


@pytest.mark.parametrize("settings", [{"invert_every": 2}, {"iterations": 0}], ids=["period", "none"])
def test_settings_that_do_not_fit_are_refused(settings):
    with pytest.raises(nhgd.InputError, match="KFAC"):
        replace(PRODUCTS, **settings)
