"""theta as a function of v: torch's own backward pass against nhgd.hypergradient and dense oracles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nhgd
from tests import oracles
from tests.catalogue import PROBLEMS, Make, normal, of_classifier

# The formula is compared where theta is no inner minimum, too.
pytestmark = pytest.mark.filterwarnings("ignore::nhgd.InverseWarning")


def require_v(problem: nhgd.Bilevel) -> list[Tensor]:
    """v's own tensors, all of which require a gradient from now on."""
    return [tensor.requires_grad_() for tensor in problem.v.own()]


def outer_loss(problem: nhgd.Bilevel, theta: Any, batch: Any) -> Tensor:
    """The problem's outer loss as a user would write it: of the tensors that `solved` gave, and of v itself."""
    v = problem.v.given
    if not isinstance(problem.theta.given, nn.Module):
        return problem.outer(theta, v, batch)
    tensors = [theta[name] for name in problem.theta.names]
    with problem.theta.view(tensors) as module:
        return problem.outer(module, v, batch)


def exact(problem: nhgd.Bilevel, inner_batch: Any, outer_batch: Any) -> Tensor:
    return oracles.hypergradient(problem, inner_batch, outer_batch)


@pytest.mark.parametrize("make", PROBLEMS, ids=lambda make: make.__name__)
def test_backward_gives_the_exact_hypergradient(make: Make) -> None:
    problem, inner_batch, outer_batch = make()
    v = require_v(problem)
    with oracles.undisturbed(problem):
        theta = nhgd.solved(problem, inner_batch, inverse="exact")
    with problem.guarded():
        outer_loss(problem, theta, outer_batch).backward()
    found = oracles.join([torch.zeros_like(t) if t.grad is None else t.grad for t in v])
    torch.testing.assert_close(found, exact(problem, inner_batch, outer_batch), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "inverse", ["cg", "kfac", "fisher_dense", "fisher_window", "refined-kfac-3", "identity", "neumann"]
)
def test_every_inverse_gives_what_hypergradient_gives(inverse: str) -> None:
    problem, inner_batch, outer_batch = of_classifier(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)))
    (v,) = require_v(problem)
    batches = [tuple(t[:6] for t in inner_batch), tuple(t[6:] for t in inner_batch)]
    for inner_data in (None, batches):
        expected = nhgd.hypergradient(problem, inner_batch, outer_batch, inverse, inner_data=inner_data).grad
        theta = nhgd.solved(problem, inner_batch, inverse, inner_data)
        (found,) = torch.autograd.grad(outer_loss(problem, theta, outer_batch), v)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_functional_call_takes_it() -> None:
    problem, inner_batch, (x, y) = of_classifier(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)))
    (v,) = require_v(problem)
    theta = nhgd.solved(problem, inner_batch, "exact")
    F.cross_entropy(torch.func.functional_call(problem.theta.given, theta, (x,)), y).backward()
    torch.testing.assert_close(v.grad, exact(problem, inner_batch, (x, y)), rtol=1e-9, atol=1e-11)
    assert all(p.grad is None for p in problem.theta.given.parameters())


def weighted_by_a_module() -> tuple[nhgd.Bilevel, Any, Any]:
    """theta a dict with a frozen entry, v a module."""
    torch.manual_seed(0)
    weigh = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    theta = {"w": normal(3).requires_grad_(), "b": normal().requires_grad_(), "scale": torch.tensor(2.0).double()}

    def inner(theta: Any, v: Any, batch: Any) -> Any:
        x, y = batch
        return (x @ theta["w"] * theta["scale"] + theta["b"] - y).square(), v(x).squeeze(1).sigmoid()

    def outer(theta: Any, v: Any, batch: Any) -> Tensor:
        x, y = batch
        regular = sum(p.square().sum() for p in v.parameters())
        return (x @ theta["w"] * theta["scale"] + theta["b"] - y).square().mean() + 0.1 * regular

    return nhgd.Bilevel(inner, outer, theta, weigh, l2=0.1), (normal(9, 3), normal(9)), (normal(5, 3), normal(5))


def test_a_module_is_v_and_a_dict_is_theta() -> None:
    problem, inner_batch, outer_batch = weighted_by_a_module()
    weigh: Any = problem.v.given
    theta = nhgd.solved(problem, inner_batch, "exact")
    assert set(theta) == {"w", "b", "scale"}
    problem.outer(theta, weigh, outer_batch).backward()
    found = oracles.join([p.grad for p in weigh.parameters()])
    torch.testing.assert_close(found, exact(problem, inner_batch, outer_batch), rtol=1e-9, atol=1e-11)


def test_several_losses_share_one_handle_and_gradients_accumulate() -> None:
    problem, inner_batch, _ = weighted_by_a_module()
    leaves = list(problem.v.given.parameters())  # type: ignore[union-attr]
    theta: Any = nhgd.solved(problem, inner_batch, "exact")

    def first() -> Tensor:
        return theta["w"].square().sum()

    def second() -> Tensor:
        return (theta["b"] - 1).square()

    both = torch.autograd.grad(first() + 3 * second(), leaves)
    first().backward()
    (3 * second()).backward()
    for leaf, expected in zip(leaves, both, strict=True):
        torch.testing.assert_close(leaf.grad, expected, rtol=1e-9, atol=1e-12)


def test_an_outer_loop_of_ones_own_reaches_the_optimum() -> None:
    v = torch.tensor(0.0, dtype=torch.float64, requires_grad=True)
    x = normal(8)
    problem = nhgd.Bilevel(
        lambda theta, v, x: (theta - 2 * v - x).square(), lambda theta, v, x: theta.sum(), normal(), v
    )
    optimizer = torch.optim.SGD([v], lr=0.1)
    for _ in range(60):
        problem.theta.assign((2 * v + x.mean()).detach().reshape(1))
        optimizer.zero_grad()
        (nhgd.solved(problem, x) - 3).square().backward()
        optimizer.step()
    assert v.item() == pytest.approx((3 - float(x.mean())) / 2, abs=1e-9)


def test_dropout_of_the_inner_objective_is_that_of_the_seed() -> None:
    problem, inner_batch, outer_batch = of_classifier(nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.5), nn.Linear(6, 3)))
    (v,) = require_v(problem)
    found = {}
    for seed in (1, 2):
        theta = nhgd.solved(problem, inner_batch, "cg-200", seed=seed)
        torch.manual_seed(9)  # of the outer loss, which is the caller's own
        loss = outer_loss(problem, theta, outer_batch)
        before = torch.get_rng_state()
        found[seed] = torch.autograd.grad(loss, v, retain_graph=True)[0]
        assert torch.equal(torch.get_rng_state(), before)
        torch.testing.assert_close(torch.autograd.grad(loss, v)[0], found[seed], rtol=1e-12, atol=0)
    assert not torch.allclose(found[1], found[2])


def test_mixed_dtypes() -> None:
    theta = {"a": torch.randn(3), "b": normal(2)}
    v = torch.randn(3, requires_grad=True)

    def inner(theta: Any, v: Any, x: Any) -> Tensor:
        return ((theta["a"] - v).double().square().sum() + (theta["b"] - v.double().sum()).square().sum()).expand(
            len(x)
        )

    problem = nhgd.Bilevel(inner, lambda theta, v, x: theta["b"].sum(), theta, v)
    found: Any = nhgd.solved(problem, normal(4), "exact")
    assert found["a"].dtype == torch.float32
    assert found["b"].dtype == torch.float64
    (found["a"].sum().double() + found["b"].sum()).backward()
    torch.testing.assert_close(v.grad, torch.full((3,), 3.0))


def test_without_gradients_it_is_a_copy_of_theta() -> None:
    problem, inner_batch, _ = weighted_by_a_module()
    with torch.no_grad():
        theta: Any = nhgd.solved(problem, inner_batch)
    assert not theta["w"].requires_grad
    assert torch.equal(theta["w"], problem.theta.given["w"])  # type: ignore[index]
    assert theta["w"].data_ptr() != problem.theta.given["w"].data_ptr()  # type: ignore[index]


def test_what_it_refuses() -> None:
    problem, inner_batch, _ = weighted_by_a_module()
    module: Any = problem.v.given
    theta: Any = nhgd.solved(problem, inner_batch)
    with pytest.raises(nhgd.InputError, match=r"cannot be differentiated again.*without create_graph"):
        torch.autograd.grad(theta["b"], list(module.parameters()), create_graph=True)
    theta = nhgd.solved(problem, inner_batch)
    with torch.no_grad():
        problem.theta.given["w"].add_(1)  # type: ignore[index]
    with pytest.raises(nhgd.InputError, match=r"theta\['w'\] has moved since nhgd.solved"):
        theta["b"].backward()
    theta = nhgd.solved(problem, inner_batch)
    module[0].weight.data += 1
    with pytest.raises(nhgd.InputError, match=r"v\['0.weight'\] has moved since"):
        theta["b"].backward()
    module[0].weight.requires_grad_(False)
    with pytest.raises(nhgd.InputError, match=r"v\['0.weight'\] does not require a gradient.*requires_grad_\(\)"):
        nhgd.solved(problem, inner_batch)
    plain, batch, _ = of_classifier(nn.Linear(3, 3))
    with pytest.raises(nhgd.InputError, match=r"v does not require a gradient"):
        nhgd.solved(plain, batch)
    with pytest.raises(nhgd.InputError, match="inner_data yields no batch"):
        nhgd.solved(plain, batch, inner_data=[])


def test_a_poor_solve_is_warned_of() -> None:
    problem, inner_batch, outer_batch = of_classifier(nn.Linear(3, 3))
    require_v(problem)
    with pytest.warns(nhgd.InverseWarning, match="cg ended with a relative residual"):
        outer_loss(problem, nhgd.solved(problem, inner_batch, "cg-1"), outer_batch).backward()
