"""K-FAC's solve by Cholesky factors, one for each score: equal to that in the eigenbasis, without the wide decomposition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import nhgd
from nhgd.algorithm import NHGD
from nhgd.inverse import KFAC
from nhgd.inverse._learned import eigenbasis, kronecker, shifted
from nhgd.inverse._learned.learning import learn
from nhgd.ridge import Ridge
from tests import catalogue
from tests.test_matrix_products import made

CLOSE = {"rtol": 1e-10, "atol": 1e-12}


@pytest.mark.parametrize("groups", [1, 2])
def test_it_is_the_solve_in_the_eigenbasis(groups, monkeypatch):
    problem, batch = made(groups)
    u = torch.randn(problem.theta.numel).double()
    inverse = KFAC(overhead=None, damping=0.1)
    state = learn(inverse, problem, [batch])
    wanted = inverse.solve(state, u, Ridge(2e-2))[0]
    widest = max(a.shape[1] for a, _ in map(state.factors, state.inputs))
    decomposed, own = [], eigenbasis.eigenvalues

    def counted(name, matrix):
        decomposed.append(matrix.shape[1])
        return own(name, matrix)

    for module in (eigenbasis, shifted):
        monkeypatch.setattr(module, "eigenvalues", counted)
    monkeypatch.setattr(shifted, "pays", lambda a, g: True)
    found, stats = inverse.solve(state, u, Ridge(2e-2))
    torch.testing.assert_close(found, wanted, **CLOSE)
    assert max(decomposed) < widest
    other = torch.randn_like(u)
    decomposed.clear()
    torch.testing.assert_close(stats.again(other), inverse.solve(state, other, Ridge(2e-2))[0], **CLOSE)
    assert len(decomposed) == len(state.inputs)  # by the second solve alone


def test_an_uneven_ridge_and_one_of_zero_are_solved_as_before(monkeypatch):
    problem, batch = made()
    u = torch.randn(problem.theta.numel).double()
    inverse = KFAC(overhead=None, damping=0.1)
    state = learn(inverse, problem, [batch])
    uneven = Ridge(2e-2 + torch.rand(problem.theta.numel).double())
    wanted = [inverse.solve(state, u, ridge)[0] for ridge in (uneven, Ridge(0.0))]
    monkeypatch.setattr(shifted, "pays", lambda a, g: True)
    for ridge, expected in zip((uneven, Ridge(0.0)), wanted, strict=True):
        torch.testing.assert_close(inverse.solve(state, u, ridge)[0], expected, **CLOSE)


def test_where_digits_do_not_suffice_there_is_none():
    a = torch.ones(1, 4, 4)
    assert shifted.shifted_solver("layer", a, torch.eye(2)[None], 1e-20) is None
    assert shifted.shifted_solver("layer", a, torch.eye(2)[None], 1e-2) is not None


def test_on_a_cpu_and_for_many_scores_it_does_not_pay():
    assert not shifted.pays(torch.eye(785)[None], torch.eye(10)[None])


def test_a_measured_step_factorises_once(monkeypatch):
    """Its solve, and the preconditioner of its measurement, are of one system."""
    problem, inner, outer = catalogue.mlp_module()
    made, own = [], kronecker.AbstractKronecker._prepared
    monkeypatch.setattr(KFAC, "_prepared", lambda self, *args: (made.append(1), own(self, *args))[1])
    with nhgd.Solver(problem, [inner], [outer], method=NHGD(replace(KFAC(), overhead=None)), inner_steps=5) as solver:
        solver.step()
    assert solver.history[0]["residual"] is not None
    assert len(made) == 1
