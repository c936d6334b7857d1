"""The Nystrom approximation against its definition with dense matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import nhgd
from nhgd.inverse import Nystrom
from nhgd.oracle import Oracle
from tests import catalogue, oracles
from tests.catalogue import normal
from tests.test_inverse import positive, quadratic


def chosen(size: int, rank: int, seed: int = 0) -> Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))[:rank]


@pytest.mark.parametrize("rank", [1, 3, 6])
def test_the_formula_of_the_paper(rank):
    """x = u / rho - C (W + C^T C / rho)^{-1} C^T u / rho^2."""
    torch.manual_seed(0)
    hessian, u, rho = positive(6), normal(6), 0.1
    x, stats = Nystrom(rank=rank, rho=rho).solve(u, quadratic(hessian))
    K = chosen(6, rank)
    C, W = hessian[:, K], hessian[K][:, K]
    expected = u / rho - C @ torch.linalg.solve(W + C.T @ C / rho, C.T @ u) / rho**2
    torch.testing.assert_close(x, expected, rtol=1e-9, atol=1e-11)
    assert stats.hvps == rank + 1  # the last one measures the residual


@pytest.mark.parametrize("make", [catalogue.ridge_scalar, catalogue.ridge_tree, catalogue.dict_v])
@pytest.mark.parametrize("rho", [None, 0.05])
def test_the_ridge_is_added_exactly(make, rho):
    """Also one that differs from parameter to parameter: C W^+ C^T + R + rho I, with C and W of the Hessian less R."""
    problem, batch, _ = catalogue.settled(make)
    size = problem.theta.numel
    u = normal(size)
    R = oracles.ridge_hessian(problem)
    rest = oracles.hessian(problem, batch) - R
    for rank in (2, size):
        x, stats = Nystrom(rank=rank, rho=rho).solve(u, Oracle(problem, [batch]))
        K = chosen(size, rank)
        matrix = rest[:, K] @ torch.linalg.pinv(rest[K][:, K], hermitian=True) @ rest[K]
        shift = R + (rho or 0.0) * torch.eye(size, dtype=torch.float64)
        torch.testing.assert_close(x, torch.linalg.solve(matrix + shift, u), rtol=1e-6, atol=1e-8)
        assert stats.notes["rho"] == (rho or 0.0)


def test_a_hessian_of_low_rank_needs_no_more_columns():
    torch.manual_seed(0)
    half, u = normal(8, 3), normal(8)
    x, stats = Nystrom(rank=3, rho=0.1).solve(u, quadratic(half @ half.T))
    expected = torch.linalg.solve(half @ half.T + 0.1 * torch.eye(8, dtype=torch.float64), u)
    torch.testing.assert_close(x, expected, rtol=1e-9, atol=1e-11)
    x, stats = Nystrom(rank=6, rho=0.1).solve(u, quadratic(half @ half.T))
    torch.testing.assert_close(x, expected, rtol=1e-9, atol=1e-11)
    assert stats.notes["rank"] == 3  # what the other columns add is rounding error


def test_a_ridge_that_covers_some_parameters_only():
    """At full rank rho is 0 and there is no Woodbury identity, so the ridge goes into the columns."""
    torch.manual_seed(0)
    hessian, ridge, u = positive(4), torch.tensor([0.3, 0.0, 0.0, 0.7], dtype=torch.float64), normal(4)
    problem = nhgd.Bilevel(
        lambda theta, v, batch: 0.5 * theta @ hessian @ theta - v @ theta,
        lambda theta, v, batch: theta.sum(),
        normal(4),
        normal(4),
        l2=lambda v: ridge,
    )
    point = Oracle(problem, [None])
    x, _ = Nystrom(rank=4).solve(u, point)
    torch.testing.assert_close(x, torch.linalg.solve(hessian + 2 * torch.diag(ridge), u), rtol=1e-10, atol=1e-12)
    _, stats = Nystrom(rank=2).solve(u, point)
    assert stats.notes["rho"] == pytest.approx(1e-3 * float(hessian.diagonal()[chosen(4, 2)].mean()))


def test_ill_conditioned_systems_keep_their_digits():
    """With the formula of the paper, C^T C / rho is off by more than the answer here."""
    torch.manual_seed(0)
    hessian, u = positive(10, 6), normal(10)
    rho = 1e-7
    x, _ = Nystrom(rank=10, rho=rho).solve(u, quadratic(hessian))
    expected = torch.linalg.solve(hessian + rho * torch.eye(10, dtype=torch.float64), u)
    assert float((x - expected).norm() / expected.norm()) < 1e-6


@pytest.mark.parametrize("make", catalogue.PROBLEMS, ids=lambda make: make.__name__)
def test_chunks_and_batches_change_nothing(make):
    problem, batch, _ = catalogue.settled(make)
    u = normal(problem.theta.numel)
    whole, one = Nystrom(rank=7, chunk=7).solve(u, Oracle(problem, [batch]))
    for chunk in (1, 3):
        x, stats = Nystrom(rank=7, chunk=chunk).solve(u, Oracle(problem, [batch]))
        torch.testing.assert_close(x, whole, rtol=1e-9, atol=1e-11)
        assert stats.hvps == one.hvps == min(7, problem.theta.numel) + 1
    x, stats = Nystrom(rank=7).solve(u, Oracle(problem, [batch, batch]))
    torch.testing.assert_close(x, whole, rtol=1e-9, atol=1e-11)
    assert stats.hvps == 2 * one.hvps


class Cube(torch.autograd.Function):
    """x^3, with a backward pass that cannot be vectorised."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        if torch._C._functorch.is_batchedtensor(g):
            raise RuntimeError("no batches here")
        return 3 * x**2 * g


def test_columns_are_taken_one_by_one_where_they_cannot_be_vectorised():
    problem = nhgd.Bilevel(
        lambda theta, v, batch: Cube.apply(theta).sum() - v @ theta,
        lambda theta, v, batch: theta.sum(),
        torch.tensor([1.0, 2, 3], dtype=torch.float64),
        normal(3),
    )
    u = normal(3)
    x, stats = Nystrom(rank=3).solve(u, Oracle(problem, [None]))
    torch.testing.assert_close(x, u / torch.tensor([6.0, 12, 18], dtype=torch.float64))
    assert stats.hvps == 3 + 1


def test_the_columns_follow_from_the_point():
    """The same point gives the same columns, another seed others, and the caller's generator is left alone."""
    torch.manual_seed(0)
    problem, batch, _ = catalogue.settled(catalogue.mlp_module)
    u = normal(problem.theta.numel)
    state = torch.get_rng_state()
    found = [Nystrom(rank=4).solve(u, Oracle(problem, [batch], seed=seed))[0] for seed in (1, 1, 2)]
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[0], found[2])


def test_negative_curvature_is_told():
    hessian = torch.diag(torch.tensor([3.0, -2, 1], dtype=torch.float64))
    u = normal(3)
    x, stats = Nystrom(rank=3, rho=0.1).solve(u, quadratic(hessian))
    torch.testing.assert_close(x, u / (hessian.diagonal() + 0.1))
    assert stats.notes["negative_curvature"]
    assert not stats.converged


def test_the_number_behind_the_name_counts_columns():
    assert nhgd.inverse.resolve("nystrom-20") == Nystrom(rank=20)


def test_what_is_not_finite_is_named():
    with pytest.raises(nhgd.NonFiniteError, match="Nystrom: the columns of the Hessian contain nan or inf"):
        Nystrom(rank=2).solve(normal(3), quadratic(torch.full((3, 3), float("nan")).double()))
