"""What of the outer gradient exceeds its sampling error, where the outer samples do not determine v."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nhgd
from nhgd.algorithm import NHGD
from nhgd.inverse import KFAC, FisherDiagonal, Refined
from nhgd.inverse._learned.learning import learn
from nhgd.inverse._learned.significance import shrunk, shrunk_by_leaf
from nhgd.loop.sampling_error import by_leaf, half_of
from nhgd.objective import OracleCalls
from tests import oracles

OUTER, INNER = 9, 40


def inner(net, v, batch):
    x, y, i = batch
    z = net(x)
    return nhgd.Losses(F.cross_entropy(z, y, reduction="none"), v[i], z)


def outer(net, v, batch):
    return F.cross_entropy(net(batch[0]), batch[1])


class Scaled(nn.Module):
    """Two layers, and parameters outside of them."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3, bias=False)
        self.scale = nn.Parameter(torch.rand(5))

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)) * self.scale)


def problem_of(net=None, samples=OUTER, noise=False):
    generator = torch.Generator().manual_seed(3)
    torch.manual_seed(0)
    net = nn.Linear(4, 3) if net is None else net()
    x = torch.randn(INNER + samples, 4, generator=generator).double()
    truth = torch.randn(4, 3, generator=generator).double()
    y = (4 * x @ truth).softmax(1).multinomial(1, generator=generator)[:, 0]
    if noise:
        y = torch.randint(3, y.shape, generator=generator)
    problem = nhgd.Bilevel(inner, outer, net.double(), torch.full((INNER,), 0.5).double(), 0.01, "categorical")
    return problem, (x[:INNER], y[:INNER]), (x[INNER:], y[INNER:])


def solver_of(method="nhgd", net=None, samples=OUTER, noise=False, outer_batch=None, **settings):
    problem, train, judge = problem_of(net, samples, noise)
    data = nhgd.Data(*train, batch=10), nhgd.Data(*judge, batch=outer_batch)
    kept = {"inner_steps": 4, "inner_lr": 0.5, "outer_lr": 0.5, "project_v": (0, 1)} | settings
    return nhgd.Solver(problem, *data, method=method, **kept)


def learnt(inverse, net=Scaled):
    problem, (x, y), (a, b) = problem_of(net)
    state = learn(inverse, problem, [(x, y, torch.arange(INNER))], 0, OracleCalls())
    u = nhgd.oracle.Oracle(problem, [(x, y, torch.arange(INNER))], (a, b)).outer().theta
    return problem, state, u


def by_hand(problem, state, u, error):
    """Each layer in the eigenvectors of its dense Fisher block; everything else by one factor."""
    own = dict(zip(problem.theta.names, error, strict=True))
    parts, found = dict(zip(problem.theta.names, problem.theta.unflatten(u), strict=True)), {}
    for layer in state.inputs:
        a, g = (factor[0] for factor in state.factors(layer))
        bias = layer.replace("weight", "bias")
        part, e = parts[layer], own[layer]
        if bias in parts:
            part, e = torch.cat([part, parts[bias][:, None]], 1), e + own[bias]
        (_, q_a), (_, q_g) = torch.linalg.eigh(a), torch.linalg.eigh(g)
        vectors, matrix = torch.kron(q_g, q_a), torch.kron(g, a)
        variances = e * (vectors.T @ matrix @ vectors).diagonal().clamp_min(0) / matrix.trace()
        entries = vectors.T @ part.reshape(-1)
        kept = torch.where(entries.square() > variances, 1 - variances / entries.square(), 0.0)
        left = (vectors @ (kept * entries)).reshape(part.shape)
        found[layer] = left[:, : parts[layer].shape[1]]
        if bias in parts:
            found[bias] = left[:, -1]
    for name, part in parts.items():
        if name not in found:
            found[name] = part * max(0.0, 1 - float(own[name] / part.square().sum()))
    return problem.theta.flatten([found[name] for name in problem.theta.names])


@pytest.mark.parametrize("share", [0.01, 0.3, 3.0])
@pytest.mark.parametrize("net", [Scaled, lambda: nn.Linear(4, 3)], ids=["several", "one layer"])
def test_kfac_shrinks_in_the_eigenvectors_of_its_fisher_matrix(net, share):
    problem, state, u = learnt(KFAC(), net)
    error = share * torch.stack([part.square().sum() for part in problem.theta.unflatten(u)])
    found, after = KFAC().significant(state, u, error)
    wanted = by_hand(problem, state, u, error)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    assert 0 <= float(found.norm()) < float(u.norm())
    # The decompositions serve the solve too, which is the same with them.
    assert set(after.bases) == set(state.inputs)
    ridge = nhgd.ridge.Ridge(0.1)
    torch.testing.assert_close(KFAC().solve(after, found, ridge)[0], KFAC().solve(state, found, ridge)[0])


def test_nothing_is_lost_where_nothing_errs_and_all_where_all_does():
    problem, state, u = learnt(KFAC())
    leaves = len(problem.theta.leaves)
    torch.testing.assert_close(KFAC().significant(state, u, torch.zeros(leaves).double())[0], u)
    assert not KFAC().significant(state, u, torch.full((leaves,), 1e9).double())[0].norm() > 1e-12
    places = problem.theta.slices()
    assert torch.equal(shrunk_by_leaf(u, torch.zeros(leaves).double(), places), u)
    assert not shrunk_by_leaf(u, torch.full((leaves,), 1e9).double(), places).any()
    assert not shrunk(torch.zeros(3), torch.zeros(3)).any()


@pytest.mark.parametrize("samples", [8, 9])
def test_the_halves_estimate_the_error_of_the_whole_without_bias(samples):
    """The mean over all halves is the sum of the sample variances of the gradients, over their number."""
    solver = solver_of(samples=samples)
    problem, loop = solver.problem, solver.loop
    batch = loop.outer.peek()
    half, factor = half_of(loop, batch, solver.state.horizon)
    count = len(half[0])
    assert count == samples // 2
    leaves = problem.theta.leaves

    def gradient(rows):
        value = outer(problem.theta.given, None, [t[list(rows)] for t in batch])
        return torch.cat([g.reshape(-1) for g in torch.autograd.grad(value, leaves)])

    each = torch.stack([gradient([i]) for i in range(samples)])
    halves = [gradient(rows) for rows in combinations(range(samples), count)]
    mean = torch.stack([factor * by_leaf(one - each.mean(0), loop) for one in halves]).mean(0)
    torch.testing.assert_close(mean, by_leaf(each.std(0) / samples**0.5, loop))


def test_the_first_outer_step_measures_it_and_uses_what_exceeds_it(monkeypatch):
    """By an outer step taken by hand, with the error by leaf and K-FAC as the run has it."""
    solver = solver_of(NHGD(KFAC(overhead=None), cross="final"), inner_steps=1)
    given = []
    original = KFAC.significant
    monkeypatch.setattr(KFAC, "significant", lambda *of: given.append((of, original(*of))) or given[-1][1])
    row = solver.step()
    ((_, state, u, error), (found, _)) = given[0]
    problem, net, batch = solver.problem, solver.problem.theta.given, solver.loop.outer.peek()
    rows = torch.randperm(OUTER, generator=torch.Generator().manual_seed(0))[: OUTER // 2].sort().values
    half, whole = (
        oracles.join(torch.autograd.grad(outer(net, None, [t[r] for t in batch]), problem.theta.leaves))
        for r in (rows, torch.arange(OUTER))
    )
    torch.testing.assert_close(u, whole)
    torch.testing.assert_close(error, 4 / 5 * by_leaf(half - whole, solver.loop))
    torch.testing.assert_close(found, by_hand(problem, state, u, error))
    assert row["significant"] == pytest.approx(float(found.norm() / u.norm()))
    assert row["outer_gradients"] == 2


def test_where_it_is_measured():
    def said(solver):
        return {"significant" in solver.step() for _ in range(3)}

    assert said(solver_of()) == {True}
    assert said(solver_of(NHGD(Refined(KFAC(), steps=2)))) == {True}
    assert said(solver_of(NHGD(FisherDiagonal()))) == {True}
    assert said(solver_of(accumulate=2)) == {True}
    assert said(solver_of(outer_batch=5)) == {False}  # whose noise the steps average
    assert said(solver_of(samples=INNER)) == {False}  # which determine v
    assert said(solver_of(NHGD(KFAC(damping=1e-3)))) == {False}


def test_of_labels_that_say_nothing_little_is_significant():
    def mean(noise):
        solver = solver_of(samples=30, noise=noise, inner_lr=0.05)
        return sum(solver.step()["significant"] for _ in range(20)) / 20

    assert mean(True) < 0.5 < mean(False)
