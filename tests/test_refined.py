"""Any inverse, refined by a few products."""

from __future__ import annotations

import pytest
import torch

import nhgd
from nhgd.inverse import CG, Exact, Identity, Refined, refined
from nhgd.inverse._learned.learning import learn
from nhgd.oracle import Oracle
from tests import catalogue, oracles


def solve(inverse, make, start=None):
    problem, inner, outer = catalogue.settled(make)
    at = Oracle(problem, [inner], outer)
    state = learn(inverse, problem, [inner])
    u = at.outer().theta
    x, stats = inverse.apply(state, u, at, start)
    return x, stats, torch.linalg.solve(oracles.hessian(problem, inner), u), u


@pytest.mark.parametrize("name", ["kfac", "ekfac", "fisher_window", "fisher_dense", "fisher_diagonal", "identity"])
def test_enough_steps_are_exact_with_any_preconditioner(name):
    x, stats, exact, _ = solve(refined(name, steps=60, tol=1e-13), catalogue.frozen_layer)
    torch.testing.assert_close(x, exact, rtol=1e-8, atol=1e-10)
    assert stats.converged


def test_the_identity_gives_plain_conjugate_gradients():
    ours, _, _, _ = solve(Refined(Identity(), steps=3, tol=0.0), catalogue.weighted_logistic)
    plain, _, _, _ = solve(CG(steps=3, tol=0.0), catalogue.weighted_logistic)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-14)


def test_the_exact_inverse_needs_one_step():
    x, stats, exact, _ = solve(Refined(Exact(), steps=5, tol=1e-9), catalogue.weighted_logistic)
    torch.testing.assert_close(x, exact, rtol=1e-9, atol=1e-12)
    assert stats.notes["iterations"] == 1


def test_one_step_corrects_the_scale():
    """x = alpha M^{-1} u with the alpha that minimises the H-norm of the error."""
    raw, _, exact, u = solve(nhgd.inverse.KFAC(), catalogue.frozen_layer)
    x, stats, _, _ = solve(refined("kfac", steps=1), catalogue.frozen_layer)
    problem, inner, _ = catalogue.settled(catalogue.frozen_layer)
    h = oracles.hessian(problem, inner)
    alpha = float(raw @ u / (raw @ h @ raw))
    torch.testing.assert_close(x, alpha * raw, rtol=1e-9, atol=1e-12)
    assert stats.hvps == 1
    assert (x - exact) @ h @ (x - exact) <= (raw - exact) @ h @ (raw - exact)


def test_the_error_falls_with_every_step():
    problem, inner, _ = catalogue.settled(catalogue.frozen_layer)
    h = oracles.hessian(problem, inner)
    errors = []
    for steps in range(1, 8):
        x, _, exact, _ = solve(refined("kfac", steps=steps, tol=0.0), catalogue.frozen_layer)
        errors.append(float((x - exact) @ h @ (x - exact)))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-2 * errors[0]


def test_warm_start_from_the_solution_costs_one_product():
    _, _, exact, _ = solve(CG(steps=200, tol=1e-12), catalogue.weighted_logistic)
    x, stats, _, _ = solve(refined("fisher_window", tol=1e-8), catalogue.weighted_logistic, start=exact)
    assert stats.hvps == 1
    torch.testing.assert_close(x, exact)


def concave():
    """theta^T diag(1, -2) theta / 2: negative curvature in the second coordinate."""
    signs = torch.tensor([1.0, -2.0], dtype=torch.float64)

    def inner(theta, v, x):
        return (0.5 * (signs * theta.square()).sum() + v * theta.sum()).expand(len(x))

    return nhgd.Bilevel(
        inner, lambda theta, v, x: theta[1] + 0.5 * theta[0], torch.zeros(2).double(), torch.zeros(()).double()
    )


def test_negative_curvature_falls_back_to_the_inverse_itself_and_says_so():
    problem, x = concave(), torch.zeros(3).double()
    with pytest.warns(nhgd.InverseWarning, match="not positive definite"):
        found = nhgd.hypergradient(problem, x, x, inverse=Refined(Identity(scale=0.5), steps=5))
    assert found.stats.notes["negative_curvature"]
    assert not found.stats.converged
    torch.testing.assert_close(found.adjoint, 0.5 * torch.tensor([0.5, 1.0], dtype=torch.float64))


def test_negative_curvature_met_on_the_way_keeps_the_iterate_of_least_residual():
    """By hand: u = (1, 1/2), H = diag(1, -2), Hu = (1, -1).

    One step gives x = 2.5 u with a residual three times as long as u, and the next direction has negative curvature. Between
    zero and 2.5 u the residual is least at (u.Hu / Hu.Hu) u = u / 4, where it is (3/4, 3/4).
    """
    u = torch.tensor([1.0, 0.5], dtype=torch.float64)
    problem, x = concave(), torch.zeros(3).double()
    problem = nhgd.Bilevel(
        problem.inner, lambda theta, v, x: u @ theta, torch.zeros(2).double(), torch.zeros(()).double()
    )
    with pytest.warns(nhgd.InverseWarning, match=r"refined met negative curvature \(residual 0.95\)"):
        found = nhgd.hypergradient(problem, x, x, inverse=Refined(Identity(), steps=5))
    torch.testing.assert_close(found.adjoint, 0.25 * u)
    assert found.stats.notes == {"iterations": 2, "negative_curvature": True, "inverse": "identity"}
    assert found.stats.residual == pytest.approx(0.75 * 2**0.5 / 1.25**0.5)
    assert not found.stats.converged


@pytest.mark.parametrize("make", [catalogue.mlp_module, catalogue.conv_net, catalogue.dict_theta])
def test_the_ggn_has_no_negative_curvature_away_from_the_optimum(make):
    problem, inner, outer = make()
    found = nhgd.hypergradient(problem, inner, outer, inverse=refined("fisher_window", steps=200, matrix="ggn"))
    matrix = oracles.ggn(problem, inner) + oracles.ridge_hessian(problem)
    u = torch.linalg.solve(matrix, Oracle(problem, [inner], outer).outer().theta)
    torch.testing.assert_close(found.adjoint, u, rtol=1e-6, atol=1e-8)


def test_refusals():
    for bad, message in (
        (lambda: refined("kfac", steps=0), "steps must be a whole number"),
        (lambda: refined("kfac", matrix="fisher"), "matrix of Refined"),
        (lambda: Refined(Refined()), "refine itself"),
        (lambda: refined("kfcc"), "Did you mean 'kfac'"),
    ):
        with pytest.raises(nhgd.InputError, match=message):
            bad()
