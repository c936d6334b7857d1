"""As its knob grows, the error of every iterative inverse falls as its own theory says."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from nhgd.inverse import BFGS, CG, Broyden, FixedPoint, Neumann, Nystrom, QuadraticSGD
from tests.catalogue import normal
from tests.test_inverse import positive, quadratic

SIZE = 8
KNOBS = (1, 2, 4, 7)


@pytest.fixture
def system() -> tuple[Tensor, Tensor, Tensor]:
    """H with eigenvalues from 1 to 10, u, and H^{-1} u."""
    torch.manual_seed(0)
    hessian, u = positive(SIZE), normal(SIZE)
    return hessian, u, torch.linalg.solve(hessian, u)


def decay(hessian: Tensor, step: float, power: int) -> Tensor:
    """(I - step H)^power."""
    return torch.linalg.matrix_power(torch.eye(len(hessian), dtype=hessian.dtype) - step * hessian, power)


def krylov(hessian: Tensor, u: Tensor, count: int) -> Tensor:
    """An orthonormal basis of u, Hu, ..., H^(count - 1) u, (D, count)."""
    basis = [u / u.norm()]
    for _ in range(count - 1):
        new = hessian @ basis[-1]
        for _ in range(2):
            for q in basis:
                new = new - q * (q @ new)
        basis.append(new / new.norm())
    return torch.stack(basis, dim=1)


@pytest.mark.parametrize("terms", KNOBS)
def test_neumann_is_off_by_a_power(system, terms: int) -> None:
    """x - x* = -(I - phi H)^(terms + 1) x*."""
    hessian, u, solution = system
    x, _ = Neumann(terms=terms, phi=0.1).solve(u, quadratic(hessian))
    torch.testing.assert_close(x - solution, -decay(hessian, 0.1, terms + 1) @ solution, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("steps", KNOBS)
def test_the_fixed_point_and_the_quadratic_forget_the_start_at_the_same_rate(system, steps: int) -> None:
    """x - x* = (I - lr H)^steps (x_0 - x*)."""
    hessian, u, solution = system
    start = solution + 0.01 * normal(SIZE)  # good enough for the fixed point to take it
    left = decay(hessian, 0.1, steps) @ (start - solution)
    for inverse in (FixedPoint(steps=steps, lr=0.1, tol=0), QuadraticSGD(steps=steps, beta=0.1)):
        x, _ = inverse.solve(u, quadratic(hessian), start)
        torch.testing.assert_close(x - solution, left, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("steps", KNOBS)
def test_cg_is_the_best_of_its_krylov_space_and_keeps_below_chebyshevs_bound(system, steps: int) -> None:
    hessian, u, solution = system
    x, _ = CG(steps=steps, tol=0).solve(u, quadratic(hessian))
    K = krylov(hessian, u, steps)
    best = K @ torch.linalg.solve(K.T @ hessian @ K, K.T @ u)  # minimises the energy over the space
    torch.testing.assert_close(x, best, rtol=1e-9, atol=1e-12)
    root = 10**0.5
    energy = (x - solution) @ hessian @ (x - solution)
    bound = 2 * ((root - 1) / (root + 1)) ** steps
    assert float(energy.sqrt()) <= bound * float((solution @ hessian @ solution).sqrt())


def test_broyden_approaches_the_least_residual_of_its_krylov_space(system) -> None:
    """With s steps it has seen s + 1 products: no method does better in that space, and at D steps nothing is left."""
    hessian, u, solution = system
    residuals = []
    for steps in range(1, SIZE + 1):
        x, stats = Broyden(steps=steps, tol=0).solve(u, quadratic(hessian))
        K = krylov(hessian, u, min(steps + 1, SIZE))
        least = (u - hessian @ K @ torch.linalg.lstsq(hessian @ K, u[:, None]).solution[:, 0]).norm() / u.norm()
        assert stats.residual >= float(least) - 1e-12
        residuals.append(stats.residual)
    assert residuals == sorted(residuals, reverse=True)
    assert residuals[0] > 0.1
    assert float((x - solution).norm() / solution.norm()) < 1e-10


def test_broyden_with_more_pairs_leaves_less(system) -> None:
    """Only with a pair for every dimension is G the inverse."""
    hessian, u, _ = system
    left = [Broyden(steps=SIZE, pairs=n, tol=0).solve(u, quadratic(hessian))[1].residual for n in (1, 4, SIZE)]
    assert left[0] > left[1] > left[2]
    assert left[1] > 1e-4
    assert left[2] < 1e-10


@pytest.mark.parametrize("pairs", [1, 3, SIZE])
def test_bfgs_with_exact_steps_is_conjugate_gradients(system, pairs: int) -> None:
    """Whatever the memory: the directions that are forgotten are conjugate to all that follow."""
    hessian, u, _ = system
    for steps in KNOBS:
        x, _ = BFGS(steps=steps, pairs=pairs, tol=0).solve(u, quadratic(hessian))
        torch.testing.assert_close(x, CG(steps=steps, tol=0).solve(u, quadratic(hessian))[0], rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("pairs", [2, SIZE])
def test_bfgs_with_unit_steps_is_the_recursion_on_dense_matrices(system, pairs: int) -> None:
    """G is built anew from its last pairs, as the update is printed; the residual tells the last iterate."""
    hessian, u, _ = system
    eye = torch.eye(SIZE, dtype=torch.float64)
    x, G, kept = torch.zeros_like(u), eye, []
    for taken in range(1, 6):
        r = u - hessian @ x
        p = G @ r
        s = p if taken > 1 else float(r @ p) / float(p @ hessian @ p) * p
        x = x + s
        kept = [*kept, (s, hessian @ s)][-pairs:]
        newest, its_y = kept[-1]
        G = float(newest @ its_y) / float(its_y @ its_y) * eye
        for s, y in kept:
            left = eye - torch.outer(s, y) / (s @ y)
            G = left @ G @ left.T + torch.outer(s, s) / (s @ y)
        torch.testing.assert_close(G @ kept[-1][1], kept[-1][0])  # the secant equation
        found, stats = BFGS(steps=taken, pairs=pairs, tol=0, line_search=False).solve(u, quadratic(hessian))
        residual = float((u - hessian @ x).norm() / u.norm())
        assert stats.residual <= residual * (1 + 1e-9)
        if stats.residual == pytest.approx(residual, rel=1e-9):
            torch.testing.assert_close(found, x, rtol=1e-8, atol=1e-11)
        else:
            assert residual > 1  # no better than zero, so the best of the iterates is returned
    assert stats.notes["iterations"] == 5


def test_nystrom_falls_monotonically_with_the_rank(system) -> None:
    """The columns are nested, so H - C W^+ C^T, a Schur complement, shrinks in every direction, and u . x with it."""
    hessian, u, solution = system
    point = quadratic(hessian)
    energies = [float(u @ Nystrom(rank=k, rho=1e-2).solve(u, point)[0]) for k in range(1, SIZE + 1)]
    assert all(b < a for a, b in pairwise(energies))
    shifted = torch.linalg.solve(hessian + 1e-2 * torch.eye(SIZE, dtype=torch.float64), u)
    assert energies[-1] == pytest.approx(float(u @ shifted), rel=1e-10)
    x, stats = Nystrom(rank=SIZE).solve(u, point)
    torch.testing.assert_close(x, solution, rtol=1e-10, atol=1e-12)
    assert stats.notes["rho"] == 0


def test_nystrom_loses_its_bias_with_rho(system) -> None:
    """At full rank x - x* = -rho (H + rho I)^{-1} x*."""
    hessian, u, solution = system
    for rho in (1.0, 1e-2, 1e-6):
        x, _ = Nystrom(rank=SIZE, rho=rho).solve(u, quadratic(hessian))
        shifted = hessian + rho * torch.eye(SIZE, dtype=torch.float64)
        torch.testing.assert_close(x - solution, -rho * torch.linalg.solve(shifted, solution), rtol=1e-8, atol=1e-13)
