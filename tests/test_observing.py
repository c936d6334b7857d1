"""Curvature learnt from a training loop of the user's own, against nhgd.hypergradient, a solver's loop and dense oracles."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nhgd
from nhgd.execution import Inline
from nhgd.inverse import KFAC, FisherDense, FisherWindow
from nhgd.loop.hypergradient import hypergradient
from nhgd.loop.loop import Loop
from nhgd.loop.settings import LoopSettings
from tests import oracles
from tests.catalogue import normal, of_classifier

pytestmark = pytest.mark.filterwarnings("ignore::nhgd.InverseWarning")
LEARNED = ["kfac", "ekfac", "fisher_dense", "fisher_window", "fisher_diagonal", "refined-kfac-4"]


class Scaled(nn.Module):
    """Two layers, and a parameter outside of them."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.body(x).tanh() * self.scale))  # type: ignore[no-any-return]


def made(dropout: float = 0.0) -> tuple[nhgd.Bilevel, list[Any], Any]:
    """Sample weights for a small network: three batches, and an outer one."""
    torch.manual_seed(3)
    problem, batch, outer_batch = of_classifier(Scaled(dropout), samples=12)
    return problem, [tuple(t[i : i + 4] for t in batch) for i in (0, 4, 8)], outer_batch


@pytest.mark.parametrize("inverse", [*LEARNED, "cg", "identity", KFAC(damping=0.1), FisherWindow(records="sample")])
def test_at_one_place_it_is_the_hypergradient(inverse: Any) -> None:
    problem, batches, outer_batch = made()
    with nhgd.observing(problem, inverse) as curvature, oracles.undisturbed(problem):
        for batch in batches:
            curvature.inner(batch).backward()
            problem.theta.given.zero_grad()  # type: ignore[union-attr]
        found = curvature.hypergradient(outer_batch)
    whole = nhgd.hypergradient(problem, batches[2], outer_batch, inverse, inner_data=batches)
    if inverse in LEARNED[:-1]:  # the cross derivative, and products, are those of the last batch alone
        at = nhgd.hypergradient(problem, batches[2], outer_batch, inverse, inner_data=batches[2:])
        assert found.value == at.value
        torch.testing.assert_close(found.adjoint, whole.adjoint, rtol=1e-12, atol=1e-12)
    one = nhgd.observing(problem, inverse)
    with one:
        one.inner(batches[2]).backward()
        alone = one.hypergradient(outer_batch)
    expected = nhgd.hypergradient(problem, batches[2], outer_batch, inverse)
    torch.testing.assert_close(alone.grad, expected.grad, rtol=1e-12, atol=1e-12)
    assert alone.value == expected.value
    problem.theta.given.zero_grad()  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["tensor", "dict"])
def test_against_a_dense_fisher_matrix(kind: str) -> None:
    torch.manual_seed(1)
    x, y, a = normal(9, 3), normal(9), normal(5, 3)
    w = normal(3).requires_grad_()
    theta: Any = w if kind == "tensor" else {"w": w}
    problem = nhgd.Bilevel(
        lambda theta, v, batch: (
            0.5 * (batch[0] @ (theta if kind == "tensor" else theta["w"]) - batch[1]).square(),
            v[batch[2]].sigmoid(),
        ),
        lambda theta, v, batch: (batch @ (theta if kind == "tensor" else theta["w"])).square().mean(),
        theta,
        normal(9),
        l2=0.1,
    )
    batch = (x, y, torch.arange(9))
    with nhgd.observing(problem, FisherDense(damping=0.0)) as curvature:
        loss = curvature.inner(batch)
        loss.backward()
        found = curvature.hypergradient(a)
    torch.testing.assert_close(loss.detach(), oracles.objective(problem, batch).detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(w.grad, oracles.gradient(problem, batch), rtol=1e-12, atol=1e-12)
    matrix = oracles.fisher(problem, batch) + oracles.ridge_hessian(problem)
    expected = oracles.hypergradient(problem, batch, a, matrix)
    torch.testing.assert_close(found.grad, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("inverse", ["kfac", "fisher_window", KFAC(factor_every=2), "cg"])
def test_a_loop_of_ones_own_learns_what_a_solver_learns(inverse: Any, optimizer: Any) -> None:
    problem, batches, outer_batch = made(dropout=0.3)
    other = copy.deepcopy(problem)
    chosen = nhgd.inverse.resolve(inverse)
    settings = LoopSettings(inner_optimizer=lambda leaves: optimizer(leaves, lr=0.05))
    loop = Loop(other, batches, [outer_batch], settings, Inline(), chosen)
    torch.manual_seed(8)
    loop.begin()
    losses = [float(loop.inner_step()) for _ in range(6)]
    expected, *_ = hypergradient(loop, [batches[2]])

    steps = optimizer(problem.theta.given.parameters(), lr=0.05)  # type: ignore[union-attr]
    torch.manual_seed(8)
    found_losses = []
    with nhgd.observing(problem, inverse) as curvature:
        for batch in batches * 2:
            loss = curvature.inner(batch)
            steps.zero_grad()
            loss.backward()
            steps.step()
            found_losses.append(loss.item())
        curvature.seed = loop_seed()
        found = curvature.hypergradient(outer_batch)
    assert found_losses == losses
    assert torch.equal(problem.theta.flat(), other.theta.flat())
    torch.testing.assert_close(found.grad, expected.grad, rtol=1e-12, atol=1e-12)
    assert curvature.steps == 6


def loop_seed() -> int:
    """What a loop draws for its oracle, from where the generator stands."""
    return int(torch.randint(2**31 - 1, ()))


def test_accumulated_and_scaled_gradients_are_batches_of_their_own() -> None:
    problem, batches, outer_batch = made()
    module: Any = problem.theta.given
    with nhgd.observing(problem, "fisher_dense") as curvature:
        for batch in batches:
            (curvature.inner(batch) / 3).backward()
        found = curvature.hypergradient(outer_batch)
    mean = sum(oracles.gradient(problem, batch) for batch in batches) / 3
    torch.testing.assert_close(oracles.join([p.grad for p in module.parameters()]), mean, rtol=1e-12, atol=1e-12)
    expected = nhgd.hypergradient(problem, batches[2], outer_batch, "fisher_dense", inner_data=batches)
    torch.testing.assert_close(found.adjoint, expected.adjoint, rtol=1e-12, atol=1e-12)


def test_a_loss_that_is_not_differentiated_is_not_observed() -> None:
    problem, batches, outer_batch = made()
    with nhgd.observing(problem, "fisher_dense") as curvature:
        with torch.no_grad():
            value = curvature.inner(batches[1])
        assert not value.requires_grad
        curvature.inner(batches[1])
        loss = curvature.inner(batches[0])
        loss.backward(retain_graph=True)
        loss.backward()
        assert curvature.steps == 1
        found = curvature.hypergradient(outer_batch)
    expected = nhgd.hypergradient(problem, batches[0], outer_batch, "fisher_dense")
    torch.testing.assert_close(found.grad, expected.grad, rtol=1e-12, atol=1e-12)


def plain(module: nn.Module, v: Tensor, batch: Any) -> nhgd.Losses:
    z = module(batch[0])
    return nhgd.Losses(F.cross_entropy(z, batch[1], reduction="none"), outputs=z)


@pytest.mark.parametrize("inverse", [*LEARNED, KFAC(fisher="exact"), FisherDense(records="batch"), "cg"])
def test_losses_of_ones_own(inverse: Any) -> None:
    weighted, batches, outer_batch = made()
    module: Any = weighted.theta.given
    problem = nhgd.Bilevel(plain, weighted.outer, module, normal(3), l2=lambda v: v.exp()[0], likelihood="categorical")
    x, y, _ = batches[0]
    with nhgd.observing(problem, inverse) as curvature:
        module(x)  # a pass that is not observed is none of its business
        z = module(x)
        loss = curvature.observe(nhgd.Losses(F.cross_entropy(z, y, reduction="none"), outputs=z))
        (loss + problem.ridge()).backward()
        found = curvature.hypergradient(outer_batch, (x, y))
    torch.testing.assert_close(
        oracles.join([p.grad for p in module.parameters()]), oracles.gradient(problem, (x, y)), rtol=1e-12, atol=1e-12
    )
    expected = nhgd.hypergradient(problem, (x, y), outer_batch, inverse)
    torch.testing.assert_close(found.grad, expected.grad, rtol=1e-11, atol=1e-12)
    assert found.stats.notes["assumed"] == "the mean over samples of weight one"
    assert "assumed" not in expected.stats.notes


@pytest.mark.parametrize("inverse", ["kfac", "ekfac", "fisher_diagonal", "fisher_window", "fisher_dense"])
def test_a_bare_backward_pass_is_observed(inverse: Any) -> None:
    weighted, batches, outer_batch = made()
    classes = int(max(batch[1].max() for batch in batches)) + 1
    module = nn.Sequential(nn.Linear(batches[0][0].shape[1], 4), nn.Tanh(), nn.Linear(4, classes)).double()
    problem = nhgd.Bilevel(plain, weighted.outer, module, normal(3), l2=lambda v: v.exp()[0], likelihood="categorical")
    x, y, _ = batches[0]
    with nhgd.observing(problem, inverse) as curvature:
        (F.cross_entropy(module(x), y) + problem.ridge()).backward()
        first = curvature.hypergradient(outer_batch, (x, y))
        found = curvature.hypergradient(outer_batch, (x, y))  # whose own passes are none of the loop's
    expected = nhgd.hypergradient(problem, (x, y), outer_batch, inverse)
    torch.testing.assert_close(found.grad, expected.grad, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(first.grad, found.grad, rtol=0, atol=0)
    assert curvature.steps == 1
    assert found.stats.notes["assumed"] == "the mean over samples of weight one"


def test_what_a_bare_backward_pass_does_not_tell() -> None:
    problem, batches, outer_batch = made()
    x, y, _ = batches[0]
    module: Any = problem.theta.given
    with nhgd.observing(problem, KFAC(fisher="sampled")) as curvature:
        F.cross_entropy(module(x), y).backward()
        with pytest.raises(nhgd.InputError, match=r"fisher='sampled' needs the model's outputs"):
            curvature.hypergradient(outer_batch, batches[0])
    with nhgd.observing(problem) as curvature:
        F.cross_entropy(module(x), y).backward()
        with pytest.raises(nhgd.InputError, match=r"'scale' belongs to no Linear or Conv2d layer"):
            curvature.hypergradient(outer_batch, batches[0])
    with nhgd.observing(problem) as curvature:  # a validation loss beside inner() is none of its business
        curvature.inner(batches[0]).backward()
        F.cross_entropy(module(x), y).backward()
    assert curvature.steps == 1


def test_no_hook_is_left_behind() -> None:
    problem, batches, _ = made()
    registered = nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks
    with nhgd.observing(problem) as curvature:
        curvature.inner(batches[0]).backward()
        assert all(registered)
    with pytest.raises(RuntimeError), nhgd.observing(problem):
        problem.theta.given(normal(2, 5))  # type: ignore[operator]  # of the wrong shape
    assert not any(registered)


def test_what_it_refuses() -> None:
    problem, batches, outer_batch = made()
    x, y, _ = batches[0]
    module: Any = problem.theta.given
    with nhgd.observing(problem) as curvature:
        with pytest.raises(nhgd.InputError, match=r"no inner batch yet to take derivatives on"):
            curvature.hypergradient(outer_batch)
        with pytest.raises(nhgd.InputError, match=r"kfac has learnt nothing yet"):
            curvature.hypergradient(outer_batch, batches[0])
        with pytest.raises(nhgd.InputError, match=r"one loss for each sample.*got a scalar"):
            curvature.observe(F.cross_entropy(module(x), y))
        with pytest.raises(nhgd.InputError, match=r"got losses without a graph"):
            curvature.observe(F.cross_entropy(module(x), y, reduction="none").detach())
        with pytest.raises(nhgd.InputError, match=r"cannot be differentiated twice"):
            torch.autograd.grad(curvature.inner(batches[0]), list(module.parameters()), create_graph=True)
    frozen = nhgd.Bilevel(lambda t, v, x: (x @ t).square(), lambda t, v, x: t.sum(), normal(3), normal())
    with (
        nhgd.observing(frozen, "fisher_dense") as curvature,
        pytest.raises(nhgd.InputError, match="theta does not require a gradient"),
    ):
        curvature.inner(normal(4, 3))
    with pytest.raises(nhgd.InputError, match=r"'kfak'.*'kfac'"):
        nhgd.observing(problem, "kfak")
