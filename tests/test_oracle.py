"""Derivatives at a point against dense matrices, and modules that are hard to differentiate twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nhgd
from nhgd.oracle import Oracle
from tests import oracles
from tests.catalogue import PER_SAMPLE, PROBLEMS, Make, cross_entropy, mlp_module, normal, of_classifier, plain_tensor


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def probe(problem: nhgd.Bilevel) -> Tensor:
    return torch.randn(problem.theta.numel, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("make", PROBLEMS, ids=lambda make: make.__name__)
def test_derivatives_of_every_problem(make: Make) -> None:
    problem, inner_batch, outer_batch = make()
    x, point = probe(problem), Oracle(problem, [inner_batch], outer_batch)
    with oracles.undisturbed(problem):
        outer, product, crossed, gradient = point.outer(), point.hvp(x), point.cross(x), point.gradient()
    hessian = oracles.hessian(problem, inner_batch)
    close(product, hessian @ x)
    close(point.dense(), hessian)
    close(oracles.join(crossed), oracles.cross(problem, inner_batch).T @ x)
    close(gradient, oracles.gradient(problem, inner_batch))
    theta, v = oracles.theta_of(problem).requires_grad_(), oracles.v_of(problem).requires_grad_()
    value = oracles.outer(problem, outer_batch, theta, v)
    expected = torch.autograd.grad(value, (theta, v), allow_unused=True, materialize_grads=True)
    close(outer.value, value.detach())
    close(outer.theta, expected[0])
    close(oracles.join(outer.v), expected[1])


@pytest.mark.parametrize("make", PER_SAMPLE, ids=lambda make: make.__name__)
def test_fisher_and_ggn_products(make: Make) -> None:
    problem, batch, _ = make()
    x, point = probe(problem), Oracle(problem, [batch])
    ridge = oracles.ridge_hessian(problem)
    with oracles.undisturbed(problem):
        fisher, ggn = point.empirical_fisher(x), point.ggn(x)
    close(fisher, (oracles.fisher(problem, batch) + ridge) @ x)
    close(ggn, (oracles.ggn(problem, batch) + ridge) @ x)


@pytest.mark.parametrize("make", [mlp_module, plain_tensor], ids=lambda make: make.__name__)
def test_several_batches_count_by_their_sizes(make: Make) -> None:
    problem, batch, outer_batch = make()
    parts = [tuple(t[:6] for t in batch), tuple(t[6:7] for t in batch), tuple(t[7:] for t in batch)]
    whole, split = Oracle(problem, [batch], outer_batch), Oracle(problem, parts, outer_batch)
    x = probe(problem)
    close(split.hvp(x), whole.hvp(x))
    close(split.gradient(), whole.gradient())
    close(oracles.join(split.cross(x)), oracles.join(whole.cross(x)))
    close(split.empirical_fisher(x), whole.empirical_fisher(x))
    close(split.ggn(x), whole.ggn(x))
    assert split.calls.hvps == 2 * 3
    assert whole.calls.hvps == 2


def test_calls_are_counted() -> None:
    problem, batch, outer_batch = plain_tensor()
    point = Oracle(problem, [batch], outer_batch)
    x = probe(problem)
    point.outer()
    point.hvp(x)
    point.hvp(x)
    point.cross(x)
    # One gradient with its graph serves all products of a single batch.
    assert point.calls.as_dict() == {
        "gradients": 2,
        "inner_gradients": 1,
        "outer_gradients": 1,
        "hvps": 2,
        "cross": 1,
        "samples": 10,
    }


def test_a_point_needs_a_batch() -> None:
    with pytest.raises(nhgd.InputError, match="at least one inner batch"):
        Oracle(plain_tensor()[0], [])


def test_the_ggn_says_what_it_lacks() -> None:
    problem, batch, _ = mlp_module()
    inner = problem.inner
    problem.inner = lambda *args: inner(*args).values
    with pytest.raises(nhgd.InputError, match="The GGN needs the model's outputs"):
        Oracle(problem, [batch]).ggn(probe(problem))
    problem.inner = lambda *args: nhgd.Losses(inner(*args).values, outputs=inner(*args).outputs.detach())
    with pytest.raises(nhgd.InputError, match=r"The GGN differentiates.*detached from theta"):
        Oracle(problem, [batch]).ggn(probe(problem))
    problem.inner = lambda *args: nhgd.Losses(inner(*args).values, outputs=inner(*args).outputs)
    with pytest.raises(nhgd.InputError, match=r"not computed from Losses.outputs. Return the same tensor"):
        Oracle(problem, [batch]).ggn(probe(problem))
    problem.inner = lambda *args: inner(*args).values.mean()
    with pytest.raises(nhgd.InputError, match=r"needs per-sample losses, but inner.* returned a scalar"):
        Oracle(problem, [batch]).empirical_fisher(probe(problem))


# Dropout.


@pytest.mark.parametrize("split", [False, True])
def test_dropout_is_replayed(split: bool) -> None:
    problem, batch, outer_batch = of_classifier(nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.Linear(5, 3)))
    batches = [tuple(t[:4] for t in batch), tuple(t[4:] for t in batch)] if split else [batch]
    point = Oracle(problem, batches, outer_batch, seed=7)
    x, y = normal(problem.theta.numel), normal(problem.theta.numel)
    with oracles.undisturbed(problem):
        first, second = point.hvp(x), point.hvp(y)
        assert torch.equal(point.hvp(x), first)
        assert torch.equal(Oracle(problem, batches, outer_batch, seed=7).hvp(x), first)
        assert not torch.equal(Oracle(problem, batches, outer_batch, seed=8).hvp(x), first)
        close(y @ first, x @ second)
        close(point.hvp(2 * x + y), 2 * first + second)
        assert torch.equal(point.outer().theta, point.outer().theta)
    # The mask of the gradient is that of its derivatives.
    theta = oracles.theta_of(problem)

    def along(t: float) -> Tensor:
        oracles.assign(problem.theta.given, theta + t * x)
        return Oracle(problem, batches, outer_batch, seed=7).gradient()

    h = 1e-3
    fd = (8 * (along(h) - along(-h)) - (along(2 * h) - along(-2 * h))) / (12 * h)
    torch.testing.assert_close(fd, first, rtol=1e-7, atol=1e-9)


# Modules that are used in unusual ways.


class Attributes(nn.Module):
    """Used through its attributes; it has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(3, 2)
        self.heads = nn.ModuleDict({"only": nn.Linear(2, 3)})


def by_attributes(model: Any, v: Tensor, batch: Any) -> nhgd.Losses:
    return cross_entropy(lambda x: model.heads["only"](torch.tanh(model.encoder(x))), v, batch)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 2, batch_first=True)
        self.head = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


class Fused(nn.Module):
    """Attention on the fused kernel, which has no second derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(3, 12, bias=False)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)[:, None].chunk(3, dim=-1)
        return self.head(F.scaled_dot_product_attention(q, k, v)[:, 0].mean(1))


def unusual(name: str) -> tuple[nhgd.Bilevel, Any, Any]:
    if name == "attributes":
        problem, inner_batch, outer_batch = of_classifier(nn.Linear(3, 3))
        problem = nhgd.Bilevel(
            by_attributes,
            lambda m, v, b: F.cross_entropy(m.heads["only"](m.encoder(b[0])), b[1]),
            Attributes().double(),
            problem.v.given,
            0.02,
        )
        return problem, inner_batch, outer_batch
    if name == "lstm":
        return of_classifier(Recurrent(), features=6, shape=(2, 3))
    if name == "tied":
        return of_classifier(Tied())
    return of_classifier(Fused(), features=6, shape=(2, 3))


UNUSUAL = ["attributes", "lstm", "tied", "fused attention"]


def by_differences(problem: nhgd.Bilevel, function: Any, x: Tensor) -> Tensor:
    """The derivative of a vector along x by moving the user's own tensors: no tensor is swapped."""
    theta, h = oracles.theta_of(problem), 1e-3

    def at(t: float) -> Tensor:
        oracles.assign(problem.theta.given, theta + t * x)
        return function()

    found = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h)
    oracles.assign(problem.theta.given, theta)
    return found


@pytest.mark.parametrize("name", UNUSUAL)
def test_second_derivatives_of_unusual_modules(name: str) -> None:
    problem, batch, outer_batch = unusual(name)
    x = probe(problem)

    def gradient() -> Tensor:
        for t in problem.theta.leaves:
            t.grad = None
        loss = problem.inner(problem.theta.given, problem.v.given, batch)
        (loss.weights * loss.values).mean().backward()
        found = oracles.join([t.grad for t in problem.theta.leaves]) + 0.04 * oracles.theta_of(problem)
        for t in problem.theta.leaves:
            t.grad = None
        return found

    expected = by_differences(problem, gradient, x)
    point = Oracle(problem, [batch], outer_batch)
    with oracles.undisturbed(problem):
        found = point.hvp(x)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)
    close(point.gradient(), gradient())


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_modules_hold_other_weights(name: str) -> None:
    problem, batch, _ = unusual(name)
    other = normal(problem.theta.numel)
    with oracles.undisturbed(problem):
        swapped = problem.objective(batch, problem.theta.unflatten(other)).detach()
    oracles.assign(problem.theta.given, other)
    assert torch.equal(problem.objective(batch).detach(), swapped)


@pytest.mark.filterwarnings("ignore:Guards may run slower")  # torch's, on the first Python 3.13
def test_a_compiled_module_is_differentiated_twice() -> None:
    """The backend is one whose graphs have no second derivative."""
    problem, batch, outer_batch = mlp_module()
    x = probe(problem)
    expected = oracles.hessian(problem, batch) @ x
    compiled = torch.compile(problem.theta.given, backend="aot_eager")
    compiled(batch[0])  # compiled before the library sees it
    other = nhgd.Bilevel(problem.inner, problem.outer, compiled, problem.v.given, problem.l2, "categorical")
    point = Oracle(other, [batch], outer_batch)
    close(point.hvp(x), expected)
    close(point.ggn(x), (oracles.ggn(problem, batch) + oracles.ridge_hessian(problem)) @ x)
    close(other.objective(batch, other.theta.unflatten(x)), oracles.objective(problem, batch, x))


def test_a_linear_loss_has_no_curvature() -> None:
    problem = nhgd.Bilevel(lambda t, v, x: x @ t * v, lambda t, v, x: t.sum(), normal(3), normal())
    batch = normal(4, 3)
    point = Oracle(problem, [batch], batch)
    assert torch.equal(point.hvp(normal(3)), torch.zeros(3, dtype=torch.float64))
    close(point.cross(torch.ones(3, dtype=torch.float64))[0], batch.mean(0).sum())


def test_an_unused_leaf_has_zero_derivatives() -> None:
    theta = {"used": normal(3), "unused": normal(2)}
    problem = nhgd.Bilevel(
        lambda t, v, x: (x @ t["used"] - v).square(), lambda t, v, x: t["used"].sum(), theta, normal()
    )
    point = Oracle(problem, [normal(4, 3)], None)
    assert torch.equal(point.dense()[3:], torch.zeros(2, 5, dtype=torch.float64))
    assert torch.equal(point.outer().theta[3:], torch.zeros(2, dtype=torch.float64))
