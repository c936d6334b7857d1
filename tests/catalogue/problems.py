"""Problems with a theta and a v of every shape, small enough for dense answers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nhgd
from tests import oracles

Made: TypeAlias = tuple[nhgd.Bilevel, Any, Any]
Make: TypeAlias = Callable[[], Made]

PROBLEMS: list[Make] = []


def enrolled(make: Make) -> Make:
    """Add a problem to PROBLEMS. Its numbers are always the same, and the global generator is left alone."""

    @wraps(make)
    def seeded() -> Made:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return make()

    PROBLEMS.append(seeded)
    return seeded


def normal(*shape: int) -> Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(shape, dtype=torch.float64)


def classes(n: int, features: int = 3, count: int = 3) -> tuple[Tensor, Tensor]:
    """A batch (x, y) of a classification problem that a linear model solves in part."""
    x = normal(n, features)
    return x, (x[:, :count] + normal(n, count)).argmax(1)


def cross_entropy(model: Any, v: Any, batch: Any) -> nhgd.Losses:
    """Per-sample cross-entropy weighted by sigmoid(v[index])."""
    x, y, i = batch
    z = model(x)
    return nhgd.Losses(F.cross_entropy(z, y, reduction="none"), v[i].sigmoid(), z)


def mean_cross_entropy(model: Any, v: Any, batch: Any) -> Tensor:
    """The usual outer loss."""
    x, y = batch
    return F.cross_entropy(model(x), y)


def of_classifier(net: nn.Module, features: int = 3, shape: tuple[int, ...] = (3,), samples: int = 10) -> Made:
    """Sample weights for a classifier with three classes."""
    x, y = classes(samples, features)
    a, b = classes(8, features)
    problem = nhgd.Bilevel(
        cross_entropy, mean_cross_entropy, net.double(), normal(samples), l2=0.02, likelihood="categorical"
    )
    return problem, (x.reshape(-1, *shape), y, torch.arange(samples)), (a.reshape(-1, *shape), b)


@enrolled
def weighted_logistic() -> Made:
    """Binary labels, one weight a sample, theta a dict of two tensors."""
    x, a = normal(12, 3), normal(8, 3)
    y, b = (x[:, 0] + normal(12) > 0).double(), (a[:, 0] > 0).double()

    def inner(theta: Any, v: Any, batch: Any) -> nhgd.Losses:
        x, y, i = batch
        z = x @ theta["w"] + theta["b"]
        return nhgd.Losses(F.binary_cross_entropy_with_logits(z, y, reduction="none"), v[i].sigmoid(), z)

    def outer(theta: Any, v: Any, batch: Any) -> Tensor:
        x, y = batch
        return F.binary_cross_entropy_with_logits(x @ theta["w"] + theta["b"], y)

    theta = {"w": normal(3), "b": normal()}
    problem = nhgd.Bilevel(inner, outer, theta, normal(12), l2=0.05, likelihood="bernoulli")
    return problem, (x, y, torch.arange(12)), (a, b)


def _regression(theta: Any, v: Any, batch: Any) -> nhgd.Losses:
    x, y = batch
    z = x @ theta
    return nhgd.Losses(0.5 * (z - y).square().reshape(len(x), -1).sum(1), outputs=z)


@enrolled
def ridge_scalar() -> Made:
    """Least squares with one learnt ridge; theta a vector; everything in closed form."""
    x, a = normal(10, 4), normal(8, 4)
    true = normal(4)
    problem = nhgd.Bilevel(
        _regression,
        lambda theta, v, batch: (batch[0] @ theta - batch[1]).square().mean(),
        normal(4),
        torch.tensor(-1.0, dtype=torch.float64),
        l2=lambda v: v.exp(),
        likelihood="gaussian",
    )
    return problem, (x, x @ true + normal(10)), (a, a @ true)


@enrolled
def ridge_tree() -> Made:
    """A ridge for each parameter, shaped like theta or broadcast to it; theta a module, v a dict."""
    net = nn.Linear(3, 3).double()
    x, y = classes(10)
    v = {"weight": normal(3, 3) - 3, "bias": normal() - 3}

    def inner(model: Any, v: Any, batch: Any) -> nhgd.Losses:
        x, y = batch
        z = model(x)
        return nhgd.Losses(F.cross_entropy(z, y, reduction="none"), outputs=z)

    problem = nhgd.Bilevel(
        inner,
        mean_cross_entropy,
        net,
        v,
        l2=lambda v: {name: t.exp() for name, t in v.items()},
        likelihood="categorical",
    )
    return problem, (x, y), classes(8)


@enrolled
def mlp_module() -> Made:
    """A small network and one weight a sample."""
    return of_classifier(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)))


@enrolled
def dict_theta() -> Made:
    """A network written by hand with a dict of tensors; v is the training data itself, as in distillation."""
    y, (a, b) = torch.arange(6) % 3, classes(8)

    def model(theta: Any, x: Tensor) -> Tensor:
        return torch.tanh(x @ theta["first"] + theta["bias"]) @ theta["second"]

    def inner(theta: Any, v: Any, batch: Any) -> nhgd.Losses:
        y, i = batch
        z = model(theta, v[i])
        return nhgd.Losses(F.cross_entropy(z, y, reduction="none"), outputs=z)

    problem = nhgd.Bilevel(
        inner,
        lambda theta, v, batch: F.cross_entropy(model(theta, batch[0]), batch[1]),
        {"first": normal(3, 2), "bias": normal(2), "second": normal(2, 3)},
        normal(6, 3),
        l2=0.05,
        likelihood="categorical",
    )
    return problem, (y, torch.arange(6)), (a, b)


@enrolled
def dict_v() -> Made:
    """v is a dict that enters the loss, the ridge and the outer problem."""
    x, y = classes(10)

    def inner(model: Any, v: Any, batch: Any) -> nhgd.Losses:
        x, y = batch
        z = model(x) * v["scale"].exp() + v["shift"]
        return nhgd.Losses(F.cross_entropy(z, y, reduction="none"), outputs=z)

    def outer(model: Any, v: Any, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y) + 0.1 * v["shift"].square().sum()

    v = {"scale": normal(), "shift": normal(3), "log_l2": torch.tensor(-3.0, dtype=torch.float64)}
    problem = nhgd.Bilevel(
        inner, outer, nn.Linear(3, 3).double(), v, l2=lambda v: v["log_l2"].exp(), likelihood="categorical"
    )
    return problem, (x, y), classes(8)


@enrolled
def module_v() -> Made:
    """v is a module that gives every sample its weight from its features."""
    x, y = classes(10)

    def inner(model: Any, v: Any, batch: Any) -> nhgd.Losses:
        x, y = batch
        z = model(x)
        return nhgd.Losses(F.cross_entropy(z, y, reduction="none"), v(x).sigmoid()[:, 0], z)

    weigh = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    problem = nhgd.Bilevel(
        inner, mean_cross_entropy, nn.Linear(3, 3).double(), weigh, l2=0.02, likelihood="categorical"
    )
    return problem, (x, y), classes(8)


@enrolled
def frozen_layer() -> Made:
    """The first layer of the network is not trained."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    net[0].requires_grad_(False)
    return of_classifier(net)


@enrolled
def batchnorm_eval() -> Made:
    """BatchNorm that uses its running statistics."""
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)).eval()
    net[0].running_mean.normal_()
    net[0].running_var.uniform_(0.5, 2.0)
    return of_classifier(net)


@enrolled
def batchnorm_train() -> Made:
    """BatchNorm that uses, and updates from, the statistics of the batch."""
    return of_classifier(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)).train())


@enrolled
def conv_net() -> Made:
    """One convolution and one linear layer on images of nine pixels."""
    net = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3))
    return of_classifier(net, features=9, shape=(1, 3, 3))


@enrolled
def plain_tensor() -> Made:
    """theta is a matrix, the loss has several outputs, v weighs them and the samples."""
    x, a = normal(10, 3), normal(8, 3)
    true = normal(3, 2)

    def inner(theta: Any, v: Any, batch: Any) -> nhgd.Losses:
        x, y, i = batch
        z = x @ theta
        return nhgd.Losses((z - y).square().mean(1), v[i].exp(), z)

    problem = nhgd.Bilevel(
        inner,
        lambda theta, v, batch: (batch[0] @ theta - batch[1]).square().mean(),
        normal(3, 2),
        0.3 * normal(10),
        l2=0.1,
        likelihood="gaussian",
    )
    return problem, (x, x @ true + normal(10, 2), torch.arange(10)), (a, a @ true)


# Problems on which the gradient of one sample is defined.
PER_SAMPLE = [make for make in PROBLEMS if make is not batchnorm_train]
# Problems with a convex inner objective: the Hessian is positive definite everywhere.
CONVEX = [weighted_logistic, ridge_scalar, ridge_tree, dict_v, module_v, frozen_layer, plain_tensor]
# Those on which a few hundred gradient steps converge.
WELL_CONDITIONED = (weighted_logistic, ridge_scalar, dict_v, plain_tensor)

# Problems with Linear or Conv2d layers and one ridge for all parameters.
LAYERED = [dict_v, module_v, mlp_module, frozen_layer, batchnorm_eval, conv_net]


@cache
def _solution(make: Make) -> Tensor:
    problem, inner_batch, _ = make()
    return oracles.solve_inner(problem, inner_batch)


def settled(make: Make) -> Made:
    """The problem with theta at theta*(v)."""
    made = make()
    oracles.assign(made[0].theta.given, _solution(make))
    return made
