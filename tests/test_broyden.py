"""Broyden's method on linear systems."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nhgd
from nhgd.inverse import Broyden
from tests.catalogue import CONVEX, normal, settled
from tests.test_inverse import positive, quadratic


def error(inverse, hessian, u) -> float:
    x, _ = inverse.solve(u, quadratic(hessian))
    solution = torch.linalg.solve(hessian, u)
    return float((x - solution).norm() / solution.norm())


@given(st.integers(1, 8), st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_it_is_exact_after_as_many_steps_as_dimensions(size, seed):
    torch.manual_seed(seed)
    hessian, u = positive(size), normal(size)
    assert error(Broyden(steps=size, tol=0), hessian, u) < 1e-6
    assert error(Broyden(steps=size, tol=0, line_search=False), hessian, u) < 1e-6


@given(st.integers(1, 8), st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_the_classical_one_needs_twice_as_many(size, seed):
    torch.manual_seed(seed)
    hessian, u = positive(size), normal(size)
    classical = Broyden(steps=2 * size, tol=0, line_search=False, projected=False)
    assert error(classical, hessian, u) < 1e-6


def test_the_classical_one_is_not_done_after_as_many_steps_as_dimensions():
    torch.manual_seed(0)
    assert error(Broyden(steps=8, tol=0, projected=False, line_search=False), positive(8), normal(8)) > 1e-4


@pytest.mark.parametrize("make", CONVEX, ids=lambda make: make.__name__)
def test_as_many_steps_as_parameters_on_real_problems(make):
    problem, inner, outer = settled(make)
    size = problem.theta.numel
    exact = nhgd.hypergradient(problem, inner, outer, inverse="exact")
    found = nhgd.hypergradient(problem, inner, outer, inverse=Broyden(steps=size, pairs=size + 1, tol=0))
    exact, found = (torch.cat([leaf.reshape(-1) for leaf in hg.leaves]) for hg in (exact, found))
    assert float((found - exact).norm() / exact.norm()) < 1e-6


def test_one_product_a_step_and_one_for_the_first_x():
    hessian, u = positive(10, 3), normal(10)
    _, stats = Broyden(steps=4, tol=0).solve(u, quadratic(hessian))
    assert stats.hvps == 5
    assert not stats.converged
    _, stats = Broyden(steps=50, tol=1e-6, pairs=20).solve(u, quadratic(hessian))
    assert stats.converged
    assert stats.hvps == stats.notes["iterations"] + 1 < 50


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_the_scale_of_the_problem_does_not_matter(scale):
    torch.manual_seed(0)
    hessian, u = positive(6), normal(6)
    x, stats = Broyden(steps=4).solve(scale * u, quadratic(scale * hessian))
    y, plain = Broyden(steps=4).solve(u, quadratic(hessian))
    torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-10)
    assert stats.residual == pytest.approx(plain.residual, rel=1e-6)


def test_a_multiple_of_the_identity_takes_no_step():
    u = normal(6)
    x, stats = Broyden().solve(u, quadratic(2 * torch.eye(6, dtype=torch.float64)))
    torch.testing.assert_close(x, u / 2, rtol=1e-14, atol=0)
    assert stats.hvps == 1


def test_it_starts_where_it_is_told_unless_that_is_worse_than_zero():
    torch.manual_seed(0)
    hessian, u = positive(10, 2), normal(10)
    solution = torch.linalg.solve(hessian, u)
    x, stats = Broyden().solve(u, quadratic(hessian), start=solution)
    assert stats.hvps == 1
    assert torch.equal(x, solution)
    _, near = Broyden(steps=3).solve(u, quadratic(hessian), start=solution + 1e-4 * normal(10))
    _, far = Broyden(steps=3).solve(u, quadratic(hessian))
    assert near.residual < far.residual
    bad, stats = Broyden(steps=3).solve(u, quadratic(hessian), start=1e3 * normal(10))
    assert stats.hvps == 5
    assert torch.equal(bad, Broyden(steps=3).solve(u, quadratic(hessian))[0])


def test_the_best_iterate_is_returned_when_later_ones_are_worse():
    """Without a line search the residual may rise a thousandfold before it falls."""
    torch.manual_seed(3)
    hessian, u = positive(20, 3), normal(20)
    rose = 0
    for steps in range(1, 12):
        x, stats = Broyden(steps=steps, tol=0, line_search=False).solve(u, quadratic(hessian))
        assert stats.residual == pytest.approx(float((u - hessian @ x).norm() / u.norm()), abs=1e-8)
        assert stats.residual <= 1
        rose += stats.notes["last"] > stats.residual
    assert rose > 0


def test_an_indefinite_hessian_is_solved_too():
    hessian, u = torch.diag(torch.tensor([3.0, -2, 1, -0.5], dtype=torch.float64)), normal(4)
    x, stats = Broyden(steps=20, tol=1e-10).solve(u, quadratic(hessian))
    assert stats.converged
    torch.testing.assert_close(x, u / hessian.diagonal(), rtol=1e-8, atol=1e-8)


def test_a_singular_hessian_leaves_the_least_residual():
    hessian = torch.diag(torch.tensor([3.0, 1, 0], dtype=torch.float64))
    u = torch.ones(3, dtype=torch.float64)
    x, stats = Broyden(steps=50, tol=1e-10).solve(u, quadratic(hessian))
    assert not stats.converged
    assert stats.residual == pytest.approx(3**-0.5, rel=1e-4)
    torch.testing.assert_close(hessian @ x, torch.tensor([1.0, 1, 0], dtype=torch.float64), rtol=0, atol=1e-2)


def test_damping_is_added_to_the_diagonal():
    hessian, u = positive(5), normal(5)
    x, _ = Broyden(steps=20, tol=1e-12, damping=0.7).solve(u, quadratic(hessian))
    expected = torch.linalg.solve(hessian + 0.7 * torch.eye(5, dtype=torch.float64), u)
    torch.testing.assert_close(x, expected, rtol=1e-8, atol=1e-10)


def test_what_is_not_finite_is_named():
    with pytest.raises(nhgd.NonFiniteError, match="Broyden: the residual is nan after 0 steps"):
        Broyden().solve(torch.full((3,), float("nan")).double(), quadratic(positive(3)))


def test_the_number_behind_the_name_counts_steps():
    assert nhgd.inverse.resolve("broyden-12") == Broyden(steps=12)
