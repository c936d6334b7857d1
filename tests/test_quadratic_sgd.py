"""SGD on the quadratic whose minimiser is H^{-1} u."""

from __future__ import annotations

import pytest
import torch

import nhgd
from nhgd.inverse import QuadraticSGD
from nhgd.oracle import Oracle
from tests import oracles
from tests.catalogue import normal, plain_tensor, settled
from tests.test_inverse import positive, quadratic


def thirds():
    """A problem at its optimum, its batch in three parts of unequal size, and their Hessians."""
    problem, batch, outer = settled(plain_tensor)
    parts = [tuple(t[a:b] for t in batch) for a, b in ((0, 5), (5, 8), (8, 10))]
    return problem, parts, outer, [oracles.hessian(problem, part) for part in parts]


@pytest.mark.parametrize("steps", [1, 3, 8])
def test_it_walks_over_the_batches(steps):
    problem, parts, _, hessians = thirds()
    u, start = normal(problem.theta.numel), normal(problem.theta.numel)
    expected, left = start, []
    for k in range(steps):
        residual = u - hessians[k % 3] @ expected
        left.append(residual)
        expected = expected + 0.1 * residual
    x, stats = QuadraticSGD(steps=steps, beta=0.1).solve(u, Oracle(problem, parts), start)
    torch.testing.assert_close(x, expected, rtol=1e-12, atol=1e-14)
    assert stats.hvps == steps
    if steps < 3:
        assert stats.residual is None
    else:  # the mean over the last walk
        assert stats.residual == pytest.approx(float((sum(left[-3:]) / 3).norm() / u.norm()))
    assert not stats.notes["diverged"]
    assert stats.notes["last"] == pytest.approx(float(residual.norm() / u.norm()))


def test_it_takes_any_start():
    """Also one that is worse than zero: the theory of the warm start has no exceptions."""
    hessian, u, start = positive(5), normal(5), 1e3 * normal(5)
    x, _ = QuadraticSGD(steps=1, beta=0.01).solve(u, quadratic(hessian), start)
    torch.testing.assert_close(x, start - 0.01 * (hessian @ start - u), rtol=1e-12, atol=1e-12)


def test_a_point_gives_products_on_one_batch():
    problem, parts, _, hessians = thirds()
    point, x = Oracle(problem, parts), normal(problem.theta.numel)
    for index, hessian in enumerate(hessians):
        torch.testing.assert_close(point.hvp_on(index, x), hessian @ x, rtol=1e-12, atol=1e-13)
    assert point.calls.hvps == 3
    many = normal(4, problem.theta.numel)
    torch.testing.assert_close(point.hvps(many), torch.stack([point.hvp(row) for row in many]), rtol=1e-12, atol=1e-13)
    assert point.calls.hvps == 3 + 2 * 4 * 3


def test_beta_comes_from_a_power_iteration():
    hessian, u = positive(5, 2), normal(5)
    _, stats = QuadraticSGD(steps=5, power_steps=50, damping=1.0).solve(u, quadratic(hessian))
    assert stats.notes["beta"] == pytest.approx(1 / 101, rel=1e-6)
    assert stats.hvps == 55


def test_too_large_a_step_is_reported():
    hessian, u = positive(5), normal(5)  # the largest eigenvalue is 10, so the step must be below 0.2
    x, stats = QuadraticSGD(steps=30, beta=0.5).solve(u, quadratic(hessian))
    assert stats.notes["diverged"]
    assert not stats.converged
    assert stats.residual > 10
    assert bool(torch.isfinite(x).all())
    problem, inner, outer = settled(plain_tensor)
    with pytest.warns(nhgd.InverseWarning, match="sgd diverged"):
        nhgd.hypergradient(problem, inner, outer, inverse=QuadraticSGD(beta=1e3))


def test_damping_is_added_to_the_diagonal():
    hessian, u = positive(5), normal(5)
    x, _ = QuadraticSGD(steps=300, damping=0.7).solve(u, quadratic(hessian))
    expected = torch.linalg.solve(hessian + 0.7 * torch.eye(5, dtype=torch.float64), u)
    torch.testing.assert_close(x, expected, rtol=1e-8, atol=1e-10)


def test_the_number_behind_the_name_counts_steps():
    assert nhgd.inverse.resolve("sgd-7") == QuadraticSGD(steps=7)
