"""Every estimator of grad Phi against finite differences of the true objective."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nhgd
from nhgd.hypergradients import ESTIMATORS, Implicit, Unrolled, resolve
from nhgd.inverse import CG
from nhgd.objective import OracleCalls
from tests import oracles
from tests.catalogue import (
    CONVEX,
    HYPERGRADIENTS,
    PROBLEMS,
    HypergradientCase,
    Make,
    mlp_module,
    normal,
    of_classifier,
    plain_tensor,
    ridge_scalar,
    settled,
    weighted_logistic,
)

each_problem = pytest.mark.parametrize("make", PROBLEMS, ids=lambda make: make.__name__)
each_estimator = pytest.mark.parametrize("case", HYPERGRADIENTS, ids=lambda case: case.name)


def flat(found: nhgd.Hypergradient) -> Tensor:
    return oracles.join(found.leaves)


def error(found: Tensor, true: Tensor) -> float:
    return float((found - true).norm() / true.norm())


# The truth.


@each_problem
def test_exact_is_the_derivative_of_the_true_objective(make: Make) -> None:
    """The inner problem is solved anew at every v, to a gradient of 1e-12."""
    problem, inner_batch, outer_batch = settled(make)
    with oracles.undisturbed(problem):
        found = nhgd.hypergradient(problem, inner_batch, outer_batch, inverse="exact")
    true = oracles.hypergradient(problem, inner_batch, outer_batch)
    assert error(flat(found), true) < 1e-10
    v = oracles.v_of(problem)
    for _ in range(2):
        direction = normal(len(v))
        measured = oracles.slope(lambda at: oracles.phi(problem, inner_batch, outer_batch, at), v, direction)
        assert abs(float(flat(found) @ direction) - measured) < 1e-7 * float(true.norm() * direction.norm())
    assert found.value == pytest.approx(oracles.phi(problem, inner_batch, outer_batch))


def test_exact_is_the_derivative_in_every_coordinate() -> None:
    problem, inner_batch, outer_batch = settled(weighted_logistic)
    found = nhgd.hypergradient(problem, inner_batch, outer_batch, inverse="exact")
    measured = oracles.finite_differences(
        lambda v: oracles.phi(problem, inner_batch, outer_batch, v), oracles.v_of(problem)
    )
    assert error(flat(found), measured) < 1e-7


def test_the_ridge_in_closed_form() -> None:
    """theta*(v) = (X^T X / n + 2 e^v I)^{-1} X^T y / n."""
    problem, (x, y), (a, b) = ridge_scalar()
    v = torch.tensor(-1.0, dtype=torch.float64, requires_grad=True)
    gram = x.T @ x / len(x) + 2 * v.exp() * torch.eye(4, dtype=torch.float64)
    theta = torch.linalg.solve(gram, x.T @ y / len(x))
    expected = torch.autograd.grad((a @ theta - b).square().mean(), v)[0]
    problem.theta.assign(theta.detach())
    found = nhgd.hypergradient(problem, (x, y), (a, b))
    torch.testing.assert_close(found.grad, expected, rtol=1e-10, atol=1e-12)


@each_problem
def test_converged_cg_is_exact(make: Make) -> None:
    problem, inner_batch, outer_batch = settled(make)
    found = nhgd.hypergradient(problem, inner_batch, outer_batch, inverse=CG(steps=300, tol=1e-13))
    exact = nhgd.hypergradient(problem, inner_batch, outer_batch, inverse="exact")
    assert error(flat(found), flat(exact)) < 1e-8
    assert found.stats.converged


# The exam of every estimator.


@pytest.mark.parametrize(
    ("case", "make"),
    [pytest.param(case, make, id=f"{case.name}-{make.__name__}") for case in HYPERGRADIENTS for make in case.problems],
)
def test_it_finds_the_hypergradient(case: HypergradientCase, make: Make) -> None:
    problem, inner_batch, outer_batch = settled(make)
    for tensor in problem.theta.leaves:
        tensor.grad = torch.ones_like(tensor)
    with oracles.undisturbed(problem):
        found = nhgd.hypergradient(
            problem, inner_batch, outer_batch, CG(300, 1e-12) if case.make().inverts else None, case.make()
        )
    assert error(flat(found), oracles.hypergradient(problem, inner_batch, outer_batch)) < case.tol
    like = found.grad if isinstance(found.grad, dict) else {"": found.grad}
    given = oracles.named(problem.v.given)
    assert {k: t.shape for k, t in like.items()} == {k: t.shape for k, t in given.items()}
    assert torch.equal(oracles.join(list(like.values())), flat(found))
    assert found.value == pytest.approx(float(oracles.outer(problem, outer_batch)))


@each_estimator
def test_it_counts_its_work_and_describes_itself(case: HypergradientCase) -> None:
    problem, inner_batch, outer_batch = settled(case.problems[0])
    calls = OracleCalls()
    estimator = case.make()
    found = estimator.estimate(problem, [inner_batch], outer_batch, CG(), calls=calls)
    assert calls.outer_gradients >= 1
    assert calls.inner_gradients >= 1
    assert calls.hvps >= found.stats.hvps
    assert ESTIMATORS[estimator.name] is type(estimator)
    assert estimator.summary().endswith(".")
    assert type(resolve(estimator.name)) is type(estimator)


@each_estimator
def test_a_scalar_inner_loss_is_enough(case: HypergradientCase) -> None:
    problem, inner_batch, outer_batch = settled(case.problems[0])
    expected = nhgd.hypergradient(problem, inner_batch, outer_batch, estimator=case.make())
    inner = problem.inner

    def scalar(theta: Any, v: Any, batch: Any) -> Tensor:
        found = inner(theta, v, batch)
        return (found.values * found.weights).mean()

    problem.inner = scalar
    found = nhgd.hypergradient(problem, inner_batch, outer_batch, estimator=case.make())
    torch.testing.assert_close(flat(found), flat(expected), rtol=1e-10, atol=1e-12)
    with pytest.raises(nhgd.InputError, match="needs per-sample losses, but inner"):
        nhgd.hypergradient(problem, inner_batch, outer_batch, "kfac")


@each_estimator
def test_float32_stays_float32(case: HypergradientCase) -> None:
    problem, (x, y, i), (a, b) = plain_tensor()
    small = nhgd.Bilevel(problem.inner, problem.outer, problem.theta.given.float(), problem.v.given.float(), 0.1)
    found = nhgd.hypergradient(small, (x.float(), y.float(), i), (a.float(), b.float()), estimator=case.make())
    assert found.grad.dtype == torch.float32


# Unrolling.


@pytest.mark.parametrize("truncate", [None, 1, 3])
@pytest.mark.parametrize("make", [mlp_module, weighted_logistic, ridge_scalar], ids=lambda make: make.__name__)
def test_unrolling_is_the_derivative_of_its_own_map(make: Make, truncate: int | None) -> None:
    """From a theta that is not settled, over two batches in turn."""
    problem, batch, outer_batch = make()
    halves = [tuple(t[:5] for t in batch), tuple(t[5:] for t in batch)]
    estimator = Unrolled(steps=5, lr=0.3, truncate=truncate)
    with oracles.undisturbed(problem):
        found = nhgd.hypergradient(problem, halves[0], outer_batch, estimator=estimator, inner_data=halves)
    v = oracles.v_of(problem)

    def end(at: Tensor) -> float:
        return oracles.unrolled(problem, halves, outer_batch, at, 5, 0.3, truncate)

    measured = oracles.finite_differences(end, v)
    assert error(flat(found), measured) < 1e-8
    assert found.value == pytest.approx(end(v))
    assert found.stats.notes == {"lr": 0.3, "differentiated": truncate or 5}


@pytest.mark.parametrize("make", CONVEX, ids=lambda make: make.__name__)
def test_unrolling_improves_with_steps(make: Make) -> None:
    problem, inner_batch, outer_batch = settled(make)
    true = oracles.hypergradient(problem, inner_batch, outer_batch)
    errors = [
        error(flat(nhgd.hypergradient(problem, inner_batch, outer_batch, estimator=Unrolled(steps=n))), true)
        for n in (3, 60)
    ]
    assert errors[1] < errors[0]


def test_truncated_unrolling_is_the_neumann_series_at_the_optimum() -> None:
    """Where gradients vanish, differentiating k steps sums k terms of the series with phi = lr."""
    problem, inner_batch, outer_batch = settled(mlp_module)
    unrolled = nhgd.hypergradient(problem, inner_batch, outer_batch, estimator=Unrolled(steps=9, lr=0.3, truncate=4))
    with pytest.warns(nhgd.InverseWarning, match="neumann ended with a relative residual of 0.71"):
        series = nhgd.hypergradient(problem, inner_batch, outer_batch, nhgd.inverse.Neumann(terms=3, phi=0.3))
    assert error(flat(unrolled), flat(series)) < 1e-9


def test_unrolling_sees_swapped_weights_through_attributes() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.LSTM(3, 2, batch_first=True)
            self.head = nn.Linear(2, 3)

    def scores(model: Any, x: Tensor) -> Tensor:
        return model.head(model.encoder(x)[0][:, -1])

    net = Parts().double()
    x, y, i = normal(6, 2, 3), torch.arange(6) % 3, torch.arange(6)
    problem = nhgd.Bilevel(
        lambda m, v, b: (F.cross_entropy(scores(m, b[0]), b[1], reduction="none"), v[b[2]].sigmoid()),
        lambda m, v, b: F.cross_entropy(scores(m, b[0]), b[1]),
        net,
        normal(6),
        l2=0.02,
    )
    with oracles.undisturbed(problem):
        found = nhgd.hypergradient(problem, (x, y, i), (x, y), estimator=Unrolled(steps=4, lr=0.5))
    theta, v = oracles.theta_of(problem), oracles.v_of(problem)

    def end(at: Tensor) -> float:
        """Plain gradient steps on the module itself: nothing is swapped."""
        oracles.assign(net, theta)
        problem.v.given.copy_(at)
        for _ in range(4):
            losses, weights = problem.inner(net, problem.v.given, (x, y, i))
            objective = (losses * weights).mean() + 0.02 * sum(p.square().sum() for p in net.parameters())
            gradients = torch.autograd.grad(objective, list(net.parameters()))
            oracles.assign(net, oracles.theta_of(problem) - 0.5 * oracles.join(gradients))
        return problem.outer(net, problem.v.given, (x, y)).item()

    assert error(flat(found), oracles.finite_differences(end, v)) < 1e-8


@pytest.mark.parametrize("estimator", ["implicit", "unrolled"])
def test_dropout_is_drawn_from_the_seed(estimator: str) -> None:
    problem, inner_batch, outer_batch = of_classifier(nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.Linear(5, 3)))

    def at(seed: int) -> Tensor:
        with oracles.undisturbed(problem), warnings.catch_warnings():
            warnings.simplefilter("ignore", nhgd.InverseWarning)
            return flat(nhgd.hypergradient(problem, inner_batch, outer_batch, estimator=estimator, seed=seed))

    assert torch.equal(at(1), at(1))
    assert not torch.equal(at(1), at(2))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"steps": 0}, "steps must be a whole number"),
        ({"lr": -0.1}, "lr must be above 0"),
        ({"lr": float("nan")}, "lr must be above 0"),
        ({"steps": 5, "truncate": 6}, r"truncate must lie between 1 and steps \(5\), got 6"),
        ({"truncate": 0}, "truncate must lie between 1"),
    ],
)
def test_wrong_settings_of_unrolling(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(nhgd.InputError, match=sentence):
        Unrolled(**options)


# The one call.


def test_several_batches_are_one_objective() -> None:
    problem, batch, outer_batch = settled(plain_tensor)
    whole = nhgd.hypergradient(problem, batch, outer_batch)
    parts = [tuple(t[:7] for t in batch), tuple(t[7:] for t in batch)]
    split = nhgd.hypergradient(problem, None, outer_batch, inner_data=parts)
    torch.testing.assert_close(split.grad, whole.grad, rtol=1e-10, atol=1e-12)
    assert split.stats.hvps == 2 * whole.stats.hvps


def test_the_residual_is_measured_when_the_inverse_does_not_know_it() -> None:
    problem, batch, outer_batch = settled(plain_tensor)
    found = nhgd.hypergradient(problem, batch, outer_batch, "identity")
    u = torch.autograd.grad(
        oracles.outer(problem, outer_batch, theta := oracles.theta_of(problem).requires_grad_()), theta
    )[0]
    assert torch.equal(found.adjoint, u)
    residual = float((oracles.hessian(problem, batch) @ u - u).norm() / u.norm())
    assert found.stats.residual == pytest.approx(residual)
    assert found.stats.hvps == 0
    silent = nhgd.hypergradient(problem, batch, outer_batch, "identity", Implicit(measure=False))
    assert silent.stats.residual is None


def test_the_direct_part_alone() -> None:
    """An outer loss that does not see theta has no implicit part."""
    problem, batch, _ = plain_tensor()
    problem.outer = lambda theta, v, b: v.square().sum()
    found = nhgd.hypergradient(problem, batch, None)
    torch.testing.assert_close(found.grad, 2 * problem.v.given)


def test_weights_that_depend_on_the_losses_are_constants_in_theta() -> None:
    """The user detaches them; exact then means: with the weights held."""
    v = normal(2)

    def inner(net: Any, v: Any, batch: Any) -> tuple[Tensor, Tensor]:
        losses = F.cross_entropy(net(batch[0]), batch[1], reduction="none")
        return losses, torch.sigmoid(v[0] - v[1].exp() * losses.detach())

    net = nn.Linear(3, 3).double()
    x, y = normal(8, 3), torch.arange(8) % 3
    problem = nhgd.Bilevel(inner, lambda net, v, b: F.cross_entropy(net(b[0]), b[1]), net, v, l2=0.05)
    found = nhgd.hypergradient(problem, (x, y), (x, y), "exact")
    assert error(flat(found), oracles.hypergradient(problem, (x, y), (x, y))) < 1e-10


def test_what_the_call_refuses() -> None:
    problem, batch, outer_batch = plain_tensor()
    with pytest.raises(nhgd.InputError, match=r"There is no estimator called 'unroled'.*Did you mean 'unrolled'"):
        nhgd.hypergradient(problem, batch, outer_batch, estimator="unroled")
    with pytest.raises(nhgd.InputError, match="The estimator must be a name or an object, got a int"):
        nhgd.hypergradient(problem, batch, outer_batch, estimator=3)  # type: ignore[arg-type]
    with pytest.raises(nhgd.InputError, match=r"unrolled applies no inverse, so inverse='exact' would be ignored"):
        nhgd.hypergradient(problem, batch, outer_batch, "exact", estimator="unrolled")
    with pytest.raises(nhgd.InputError, match="inner_data yields no batch"):
        nhgd.hypergradient(problem, batch, outer_batch, inner_data=[])
    with pytest.raises(nhgd.InputError, match="inner_data is a one-shot iterator"):
        nhgd.hypergradient(problem, batch, outer_batch, inner_data=iter([batch]))
    bad = (batch[0] * float("nan"), *batch[1:])
    with pytest.raises(nhgd.InputError, match=r"The inner batch contains nan or inf: tensor \[0\], row 0"):
        nhgd.hypergradient(problem, bad, outer_batch)


def test_a_hypergradient_that_is_no_number_is_refused_by_a_sentence():
    """float32 ends at 3.4e38: the inner Hessian is 1e-38, and grad_theta f is 1e30."""
    problem = nhgd.Bilevel(
        inner=lambda theta, v, x: 0.5e-38 * (theta - v).square().expand(len(x)),
        outer=lambda theta, v, x: 1e30 * theta,
        theta=torch.tensor(1.0),
        v=torch.tensor(1.0),
    )
    batch = torch.zeros(4)
    with pytest.raises(nhgd.errors.NonFiniteError, match=r"hypergradient by exact contains nan or inf\. Train"):
        nhgd.hypergradient(problem, batch, batch, inverse="exact")
