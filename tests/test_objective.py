"""The inner objective on a batch against dense oracles; the same dropout wherever the same objective is asked."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import nhgd
from nhgd._recording.recorder import Recorder
from nhgd.objective import Objective, OracleCalls
from nhgd.oracle import Oracle
from tests import oracles
from tests.catalogue import PER_SAMPLE, PROBLEMS, Make, normal, of_classifier, plain_tensor


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def probe(problem: nhgd.Bilevel) -> Tensor:
    return torch.randn(problem.theta.numel, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("make", PROBLEMS, ids=lambda make: make.__name__)
def test_value_and_derivatives_of_every_problem(make: Make) -> None:
    problem, batch, _ = make()
    x, objective, calls = probe(problem), Objective(problem, batch), OracleCalls()
    with oracles.undisturbed(problem):
        value, gradient = objective.value(), objective.gradient(calls)
        product, crossed = objective.hvp(x, calls), objective.cross(x, calls)
    close(torch.tensor(value, dtype=torch.float64), oracles.objective(problem, batch).detach())
    close(gradient, oracles.gradient(problem, batch))
    close(product, oracles.hessian(problem, batch) @ x)
    close(oracles.join(crossed), oracles.cross(problem, batch).T @ x)
    assert calls.inner_gradients == 3


@pytest.mark.parametrize("make", PER_SAMPLE, ids=lambda make: make.__name__)
def test_fisher_and_ggn_products_without_the_ridge(make: Make) -> None:
    problem, batch, _ = make()
    x, objective = probe(problem), Objective(problem, batch)
    with oracles.undisturbed(problem):
        fisher, ggn = objective.fisher(x), objective.ggn(x)
    close(fisher, oracles.fisher(problem, batch) @ x)
    close(ggn, oracles.ggn(problem, batch) @ x)


@pytest.mark.parametrize("make", PROBLEMS, ids=lambda make: make.__name__)
def test_an_inner_step_has_the_gradient_of_the_objective(make: Make) -> None:
    problem, batch, _ = make()
    calls = OracleCalls()
    step = Objective(problem, batch).step(calls=calls)
    close(problem.theta.flatten(step.gradient), oracles.gradient(problem, batch))
    assert step.record is None
    assert calls.as_dict()["inner_gradients"] == 1


def dropping() -> tuple[nhgd.Bilevel, object]:
    problem, batch, _ = of_classifier(nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.5), nn.Linear(6, 3)))
    return problem, batch


def test_the_same_objective_has_the_same_dropout_everywhere() -> None:
    problem, batch = dropping()
    objective, other = Objective(problem, batch, seed=4), Objective(problem, batch, seed=5)
    gradient = problem.theta.flatten(objective.step().gradient)  # as an inner step takes it
    close(gradient, objective.gradient())
    close(gradient, Oracle.over([objective]).gradient())
    close(gradient, problem.theta.flatten(objective.step(Recorder(problem, "layer")).gradient))
    assert not torch.allclose(gradient, other.gradient())
    here = problem.theta.flat()
    problem.theta.assign(here + 1)
    elsewhere = objective.gradient()
    problem.theta.assign(here)
    assert not torch.allclose(elsewhere, gradient)
    close(objective.gradient(), gradient)  # it keeps nothing of where it was asked


def test_questions_leave_the_callers_generator_alone_and_steps_without_a_seed_draw_from_it() -> None:
    problem, batch = dropping()
    objective = Objective(problem, batch, seed=4)
    before = torch.get_rng_state()
    objective.value()
    objective.gradient()
    objective.hvp(probe(problem))
    assert torch.equal(torch.get_rng_state(), before)
    free = Objective(problem, batch)
    first, second = (problem.theta.flatten(free.step().gradient) for _ in range(2))
    assert not torch.allclose(first, second)
    torch.set_rng_state(before)
    close(problem.theta.flatten(free.step().gradient), first)


def test_an_oracle_is_the_mean_of_its_objectives_by_samples() -> None:
    problem, batch, _ = plain_tensor()
    parts = [tuple(t[:7] for t in batch), tuple(t[7:] for t in batch)]
    objectives = [Objective(problem, part) for part in parts]
    at = Oracle.over(objectives)
    shares = [7 / 10, 3 / 10]
    x = normal(problem.theta.numel)
    for found, terms in (
        (at.gradient(), [o.gradient() for o in objectives]),
        (at.hvp(x), [o.hvp(x) for o in objectives]),
        (oracles.join(at.cross(x)), [oracles.join(o.cross(x)) for o in objectives]),
    ):
        close(found, sum(share * term for share, term in zip(shares, terms, strict=True)))
    assert at.inner_value() == pytest.approx(
        sum(share * o.value() for share, o in zip(shares, objectives, strict=True)), abs=1e-12
    )
    with pytest.raises(nhgd.InputError, match="at least one inner batch"):
        Oracle.over([])


def test_the_ridge_of_a_large_theta_is_a_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(8, 3)
    for l2 in (0.0, 0.3, 1):
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        problem = nhgd.Bilevel(lambda net, v, b: v * net(b).square()[:, 0], lambda net, v, b: v, net, normal(), l2)
        expected = problem.ridge().detach()
        monkeypatch.setattr("nhgd.problem.LARGE", 4)
        asked: list[int] = []
        norms = torch._foreach_norm
        monkeypatch.setattr(
            torch, "_foreach_norm", lambda given, norms=norms, asked=asked: asked.append(1) or norms(given)
        )
        found = problem.ridge_value()
        assert bool(asked) == (l2 > 0)
        assert not found.requires_grad
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        value = Objective(problem, x).step().value
        torch.testing.assert_close(value, problem.objective(x).detach(), rtol=1e-12, atol=0)
        monkeypatch.undo()
