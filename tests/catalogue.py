"""What every member of a kind is examined with. One line here enrols a newcomer in every test of its kind."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, wraps
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nhgd
from nhgd.algorithm import (
    AID,
    ALSET,
    BOME,
    BSA,
    F2SA,
    FSLA,
    ITD,
    MRBO,
    NHGD,
    SABA,
    SOBA,
    SUSTAIN,
    TTSA,
    VRBO,
    AbstractAlgorithm,
    AmIGO,
    NHGDSingle,
    StocBiO,
)
from nhgd.hypergradients import AbstractHypergradient, Implicit, Unrolled
from nhgd.inverse import AbstractInverse, FisherDense, FisherWindow
from nhgd.schedule import Power
from nhgd.task import L2, PDE, AbstractTask, Cleaning, Distillation, Instance, Quadratic
from tests import noise, oracles

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


@dataclass(frozen=True)
class InverseCase:
    """An inverse and what is expected of it.

    Args:
        make: the inverse with settings that make it exact, or converged, on the problems.
        matrix: (problem, batch) -> the dense matrix (D, D) that it inverts after learning from that one batch; None when it
            is an approximation that no simple matrix describes.
        problems: where `matrix` holds to `tol`; linearity, symmetry and manners are examined there too.
        symmetric: whether u1 . solve(u2) equals u2 . solve(u1).
        tol: relative to the size of the solution.
    """

    make: Callable[[], AbstractInverse]
    matrix: Callable[[nhgd.Bilevel, Any], Tensor] | None = oracles.hessian
    problems: tuple[Make, ...] = tuple(PROBLEMS)
    symmetric: bool = True
    tol: float = 1e-8

    @property
    def name(self) -> str:
        """The name of the inverse."""
        return self.make().name

    @property
    def label(self) -> str:
        """What it is called in the list of tests."""
        return self.make().label


@dataclass(frozen=True)
class HypergradientCase:
    """An estimator with settings that make it converge, at theta*(v), to grad Phi(v) within `tol`, relative."""

    make: Callable[[], AbstractHypergradient]
    problems: tuple[Make, ...] = tuple(PROBLEMS)
    tol: float = 1e-8

    @property
    def name(self) -> str:
        """The name of the estimator."""
        return self.make().name


def _identity(problem: nhgd.Bilevel, batch: Any) -> Tensor:
    return torch.eye(problem.theta.numel, dtype=torch.float64) / 0.5


def _diagonal(problem: nhgd.Bilevel, batch: Any) -> Tensor:
    return torch.diag(oracles.damped_fisher(problem, batch).diagonal())


def _kfac(problem: nhgd.Bilevel, batch: Any) -> Tensor:
    return oracles.kfac(problem, [batch]) + oracles.ridge_hessian(problem)


def _ekfac(problem: nhgd.Bilevel, batch: Any) -> Tensor:
    return oracles.ekfac(problem, batch) + oracles.ridge_hessian(problem)


INVERSES = [
    InverseCase(lambda: nhgd.inverse.Identity(scale=0.5), _identity),
    InverseCase(nhgd.inverse.Exact),
    InverseCase(lambda: nhgd.inverse.CG(steps=300, tol=1e-12)),
    InverseCase(lambda: nhgd.inverse.Neumann(terms=600, tol=1e-10), problems=WELL_CONDITIONED),
    InverseCase(lambda: nhgd.inverse.FixedPoint(steps=600, tol=1e-10), problems=WELL_CONDITIONED),
    InverseCase(lambda: nhgd.inverse.Broyden(steps=200, pairs=60, tol=1e-12)),
    InverseCase(lambda: nhgd.inverse.Nystrom(rank=60)),
    InverseCase(lambda: nhgd.inverse.QuadraticSGD(steps=300), problems=WELL_CONDITIONED),
    InverseCase(nhgd.inverse.FisherDense, oracles.damped_fisher, problems=tuple(PER_SAMPLE)),
    InverseCase(nhgd.inverse.FisherWindow, oracles.damped_fisher, problems=tuple(PER_SAMPLE)),
    InverseCase(nhgd.inverse.FisherDiagonal, _diagonal, problems=tuple(PER_SAMPLE)),
    InverseCase(nhgd.inverse.KFAC, _kfac, problems=tuple(LAYERED)),
    InverseCase(nhgd.inverse.EKFAC, _ekfac, problems=tuple(LAYERED)),
    InverseCase(lambda: nhgd.inverse.refined("fisher_dense", steps=100, tol=1e-12), problems=tuple(PER_SAMPLE)),
]

HYPERGRADIENTS = [
    HypergradientCase(Implicit),
    HypergradientCase(lambda: Unrolled(steps=400), problems=(weighted_logistic, ridge_scalar, plain_tensor)),
]


def v_star(instance: Instance) -> Tensor:
    """Where a consistent algorithm ends on the quadratic."""
    return instance.extra.v_star()


def ends_with(
    matrix: Callable[[Instance, Tensor], Tensor], reached: Callable[[Instance], Tensor] | None = None
) -> Callable[[Instance], Tensor]:
    """Where an algorithm ends that takes matrix(instance, v) for the inner Hessian, theta at its optimum.

    There grad_v f = X^T M(v)^{-1} grad_theta f(theta*(v)), with X the cross derivative: a linear equation for given M.
    With reached(instance) = R, (d, d), theta is at R theta*(v) instead.
    """

    def end(instance: Instance) -> Tensor:
        a = instance.extra
        R = torch.eye(len(a.hessian), dtype=a.hessian.dtype) if reached is None else reached(instance)
        outer, m = a.B.T @ a.B / len(a.B), a.B.T @ (a.B @ R @ a.theta_0 - a.target) / len(a.B)
        v = a.v_star()
        for _ in range(200):
            pulled = torch.linalg.solve(matrix(instance, v), a.cross).T  # X^T M^{-1}, (p, d)
            eye = torch.eye(len(v), dtype=v.dtype)
            v = torch.linalg.solve(a.rho * eye - pulled @ outer @ R @ a.S, pulled @ m)
        return v

    return end


def identity_matrix(instance: Instance, v: Tensor) -> Tensor:
    """The Hessian that T1-T2 assumes."""
    return torch.eye(len(instance.extra.hessian), dtype=v.dtype)


def kfac_matrix(instance: Instance, v: Tensor) -> Tensor:
    """The Hessian that K-FAC assumes on one linear output: its mean squared score times mean a a^T, and the ridge."""
    a, b, c = instance.full_inner
    scores = a @ instance.extra.theta_star(v) - b - c @ v
    eye = torch.eye(a.shape[1], dtype=v.dtype)
    return scores.square().mean() * a.T @ a / len(a) + instance.problem.ridge_diagonal()[0] * eye


def fisher_matrix(instance: Instance, v: Tensor) -> Tensor:
    """The empirical Fisher matrix at the inner optimum, and the ridge."""
    a, b, c = instance.full_inner
    scores = a @ instance.extra.theta_star(v) - b - c @ v
    eye = torch.eye(a.shape[1], dtype=v.dtype)
    return (a * scores.square()[:, None]).T @ a / len(a) + instance.problem.ridge_diagonal()[0] * eye


def unrolled_matrix(steps: int) -> Callable[[Instance, Tensor], Tensor]:
    """The Hessian that differentiating through so many gradient steps assumes: its inverse is (I - (I - eta H)^n) H^{-1}."""

    def matrix(instance: Instance, v: Tensor) -> Tensor:
        hessian, eye = instance.extra.hessian, torch.eye(len(instance.extra.hessian), dtype=v.dtype)
        left = torch.linalg.matrix_power(eye - instance.solver["inner_lr"] * hessian, steps)
        return hessian @ torch.linalg.inv(eye - left)

    return matrix


def penalty_matrix(multiplier: float) -> Callable[[Instance, Tensor], Tensor]:
    """The Hessian that a penalty with a finite multiplier assumes: H + d2_theta f / multiplier."""
    return lambda instance, v: (
        instance.extra.hessian + instance.extra.B.T @ instance.extra.B / (len(instance.extra.B) * multiplier)
    )


def neumann_matrix(products: int, phi: float) -> Callable[[Instance, Tensor], Tensor]:
    """The Hessian that a Neumann series with so many products assumes: its inverse is phi sum_k (I - phi H)^k."""

    def matrix(instance: Instance, v: Tensor) -> Tensor:
        step = torch.eye(len(instance.extra.hessian), dtype=v.dtype) - phi * instance.extra.hessian
        return torch.linalg.inv(phi * sum(torch.linalg.matrix_power(step, k) for k in range(products + 1)))

    return matrix


def cold_start(steps: int) -> Callable[[Instance], Tensor]:
    """How much of theta* so many gradient steps from zero reach: I - (I - eta H)^n."""

    def reached(instance: Instance) -> Tensor:
        eye = torch.eye(len(instance.extra.hessian), dtype=instance.extra.hessian.dtype)
        return eye - torch.linalg.matrix_power(eye - instance.solver["inner_lr"] * instance.extra.hessian, steps)

    return reached


BATCH = 80


def noisy_instance() -> Instance:
    """The small quadratic with every sample there four times and batches of a third of them.

    The copies change no answer and make the noise of a batch smaller against them. Of the first seeds this one has the
    largest v.
    """
    instance = Quadratic.preset("quick").build(5, torch.device("cpu"))
    columns = tuple(column.repeat(4, *[1] * (column.ndim - 1)) for column in instance.full_inner)
    return replace(instance, inner_data=nhgd.Data(*columns, batch=BATCH), full_inner=columns)


@dataclass(frozen=True)
class Noisy:
    """How an algorithm is run on `noisy_instance`.

    Args:
        run: the same method in `tests/noise.py`.
        settings: of the solver, over those of the task.
        steps: outer steps.
        own: the centre is the mean of such runs, because noise moves the end; otherwise it is the case's own end.
        make: the algorithm, where it is not the one of the case.
    """

    run: noise.Run
    settings: dict[str, Any]
    steps: int = 120
    own: bool = False
    make: Callable[[], AbstractAlgorithm] | None = None


@dataclass(frozen=True)
class AlgorithmCase:
    """An algorithm, how to run it on the small quadratic (d = 6, p = 3, n = 60), and where it must end.

    Args:
        make: the algorithm.
        end: the v it converges to with full batches: v_star, or what its own bias predicts in closed form.
        settings: of the solver, over those of the task.
        steps: outer steps that suffice.
        tol: relative error of v then.
        noisy: the same with noise; None: not examined. Each algorithm is in one form at least; where it is not in another,
            the two share what noise could upset, or the reason stands beside the case.
    """

    make: Callable[[], AbstractAlgorithm]
    end: Callable[[Instance], Tensor] = v_star
    settings: dict[str, Any] = field(default_factory=dict)
    steps: int = 150
    tol: float = 1e-4
    noisy: Noisy | None = None
    label: str = ""

    @property
    def name(self) -> str:
        """The name of the algorithm, and what tells this case from its others."""
        return f"{self.make().name} {self.label}".strip()


FAST = {"inner_steps": 8, "inner_lr": 1.5, "outer_lr": 1.0}  # near the largest stable steps of the small quadratic
FALLING = Power(1.0, 1.0, offset=12)
# So many inner steps that the batches of an outer step are not a whole number of passes, which are three batches long:
# otherwise the cross derivative would always be taken on what the inner steps have left of a pass.
CALM = {"inner_steps": 4, "inner_lr": 0.6, "outer_lr": FALLING}
SINGLE = {"inner_lr": Power(0.9, 0.3), "outer_lr": FALLING}


def literal_matrix(beta: float, steps: int) -> Callable[[Instance, Tensor], Tensor]:
    """What is left of the identity in nhgd-paper once the gradients of full batches have vanished: beta^T I."""
    return lambda instance, v: beta**steps * identity_matrix(instance, v)


ALGORITHMS: list[AlgorithmCase] = [
    # The inverses of aid that solve the system differ in nothing that noise could show, so one of them takes its exam. On
    # single batches they are biased: the mean of an inverse is not the inverse of the mean.
    AlgorithmCase(AID, settings=FAST, steps=60),
    AlgorithmCase(
        lambda: AID(batches="all"),
        v_star,
        FAST,
        60,
        noisy=Noisy(noise.double_loop(noise.solved), CALM, 60),
        label="all data",
    ),
    AlgorithmCase(lambda: AID(nhgd.inverse.Neumann(terms=100, tol=1e-6)), v_star, FAST, 60, label="neumann"),
    AlgorithmCase(lambda: AID(nhgd.inverse.FixedPoint(steps=100, tol=1e-6)), v_star, FAST, 60, label="fixed_point"),
    AlgorithmCase(
        lambda: AID(nhgd.inverse.Identity()),
        ends_with(identity_matrix),
        FAST,
        100,
        noisy=Noisy(noise.double_loop(noise.identity), CALM),
        label="identity",
    ),
    AlgorithmCase(lambda: AID(nhgd.inverse.Broyden(steps=20)), v_star, FAST, 60, label="broyden"),
    AlgorithmCase(lambda: AID(nhgd.inverse.Nystrom(rank=6)), v_star, FAST, 60, label="nystrom"),
    AlgorithmCase(lambda: AID(nhgd.inverse.QuadraticSGD(steps=150)), v_star, FAST, 60, label="sgd"),
    AlgorithmCase(NHGD, ends_with(kfac_matrix), FAST, 80, noisy=Noisy(noise.learning(noise.Kronecker), CALM)),
    AlgorithmCase(
        lambda: NHGD(FisherWindow(window=480)),
        ends_with(fisher_matrix),
        FAST,
        80,
        noisy=Noisy(noise.learning(lambda: noise.Window(batches=6)), CALM),
        label="window",
    ),
    AlgorithmCase(
        lambda: NHGD(FisherWindow(window=480, fisher="exact")),
        v_star,
        FAST,
        60,
        noisy=Noisy(noise.learning(lambda: noise.Window(batches=6, exact=True)), CALM),
        label="exact window",
    ),
    AlgorithmCase(
        lambda: NHGD(FisherDense()),
        ends_with(fisher_matrix),
        FAST,
        80,
        noisy=Noisy(noise.learning(noise.Average), CALM),
        label="dense",
    ),
    AlgorithmCase(
        lambda: NHGD.presets()["nhgd-paper"],
        ends_with(literal_matrix(0.8, 8)),
        {**FAST, "outer_lr": 0.5},
        100,
        noisy=Noisy(noise.learning(noise.Literal, 5), CALM, own=True),
        label="paper",
    ),
    AlgorithmCase(
        lambda: NHGD(refine=6, batches="all"),
        v_star,
        FAST,
        60,
        noisy=Noisy(noise.learning(noise.Kronecker, "all", exact=True), CALM, 60),
        label="refined",
    ),
    AlgorithmCase(
        lambda: NHGD(refine=6, batches="all", cross="trajectory"),
        v_star,
        FAST,
        60,
        noisy=Noisy(noise.learning(noise.Kronecker, "all", exact=True, trajectory=True), CALM, 60),
        label="trajectory",
    ),
    # Natural steps adapt their damping to the loss of each batch, which is no formula in the moments of the batches.
    AlgorithmCase(lambda: NHGD(inner="natural"), ends_with(kfac_matrix), {"inner_steps": 5}, label="natural"),
    AlgorithmCase(
        ITD, ends_with(unrolled_matrix(4)), {"inner_steps": 4}, noisy=Noisy(noise.unrolled(), {"outer_lr": FALLING})
    ),
    AlgorithmCase(ITD, settings={"inner_steps": 50, "inner_lr": 1.69, "outer_lr": 1.5}, steps=40, label="long"),
    AlgorithmCase(
        lambda: ITD(truncate=3),
        ends_with(unrolled_matrix(3)),
        {"inner_steps": 10, "outer_lr": 1.0},
        80,
        noisy=Noisy(noise.unrolled(3), {"inner_steps": 4, "outer_lr": FALLING}),
        label="truncated",
    ),
    AlgorithmCase(
        lambda: F2SA(first=1.0, growth=0.0),
        ends_with(penalty_matrix(1.0)),
        {"inner_steps": 4, "inner_lr": 0.3},
        noisy=Noisy(noise.penalty(1.0, False), {"inner_steps": 1, "outer_lr": Power(0.8, 1.0, offset=6)}, 300),
    ),
    AlgorithmCase(lambda: F2SA(first=1e4, shared=True), settings={"inner_steps": 6, "inner_lr": 1.6}, label="growing"),
    AlgorithmCase(
        lambda: F2SA(first=2.0, growth=0.0, shared=True),
        ends_with(penalty_matrix(2.0)),
        {"inner_steps": 4, "outer_lr": 1.0},
        100,
        noisy=Noisy(noise.penalty(2.0, True), CALM),
        label="shared",
    ),
    AlgorithmCase(
        lambda: BOME(pulled_lr=Power(0.5, 1.0, offset=40)),
        ends_with(unrolled_matrix(5)),
        {"inner_steps": 5, "outer_lr": Power(0.5, 1.0, offset=40)},
        400,
        tol=0.05,  # falls like 1 / k; tests/test_first_order.py follows it further
        noisy=Noisy(noise.barrier(Power(0.5, 1.0, offset=40)), {"inner_lr": 0.6}, own=True),
    ),
    AlgorithmCase(
        lambda: BSA(K=5, phi=0.5),
        ends_with(neumann_matrix(4, 0.5)),
        {"inner_steps": 2, "outer_lr": Power(1.0, 0.6)},
        120,
        tol=0.12,  # noise of the random product, which full batches do not remove
        noisy=Noisy(
            noise.double_loop(noise.series(lambda k: 4, 0.5, True), 0.5),
            {"inner_lr": 0.9, "outer_lr": Power(1.0, 1.0, offset=6)},
            80,
            own=True,
        ),
    ),
    AlgorithmCase(
        lambda: BSA(K=5, phi=0.5, estimator="sum", growth=0.0),
        ends_with(neumann_matrix(4, 0.5), cold_start(8)),
        {"inner_steps": 8, "outer_lr": 1.5},
        60,
        noisy=Noisy(noise.double_loop(noise.series(lambda k: 4, 0.5), 0.0), {"inner_lr": 0.6, "outer_lr": FALLING}),
        label="sum, constant",
    ),
    AlgorithmCase(
        lambda: ALSET(K=5, phi=0.5),
        ends_with(neumann_matrix(4, 0.5)),
        {"inner_steps": 3, "outer_lr": Power(1.0, 0.6)},
        200,
        tol=0.08,  # noise of the random product, which full batches do not remove
        noisy=Noisy(noise.double_loop(noise.series(lambda k: 4, 0.5, True)), {**CALM, "inner_steps": 3}),
    ),
    AlgorithmCase(
        lambda: ALSET(K=5, phi=0.5, estimator="sum"),
        ends_with(neumann_matrix(4, 0.5)),
        {"inner_steps": 5, "outer_lr": 1.0},
        80,
        label="sum",
    ),
    AlgorithmCase(
        lambda: StocBiO(K=4, phi=0.5, B=30, mu=0.3),
        ends_with(neumann_matrix(4, 0.5)),
        {"inner_steps": 5, "outer_lr": 1.0},
        80,
        noisy=Noisy(noise.double_loop(noise.shrinking([120, 102, 87, 74], 0.5)), CALM),
    ),
    AlgorithmCase(
        lambda: AmIGO(K=3, beta=0.9),
        settings={"inner_steps": 5, "outer_lr": 1.0},
        steps=80,
        noisy=Noisy(noise.amigo(3, 0.9), CALM),
    ),
    AlgorithmCase(
        lambda: VRBO(K=2, phi=0.5, q=3),
        ends_with(neumann_matrix(2, 0.5)),
        {"inner_steps": 3, "outer_lr": 1.5},
        50,
        noisy=Noisy(noise.vrbo(2, 0.5, 3), {"inner_lr": 0.5, "outer_lr": 0.7}, 40),  # constant steps: the noise is gone
    ),
    # Single loops: one inner step for each outer one, so inner_lr is as large as the curvature allows.
    AlgorithmCase(
        SOBA,
        settings={"inner_lr": 1.5, "outer_lr": 0.2},
        steps=250,
        noisy=Noisy(noise.soba, {"inner_lr": 0.5, "outer_lr": 0.1}, 300),
    ),
    AlgorithmCase(
        SABA,
        settings={"inner_lr": 1.5, "outer_lr": 0.2},
        steps=250,
        noisy=Noisy(noise.saba, {"inner_lr": 0.5, "outer_lr": 0.1}, 400),  # variance reduction: constant steps converge
    ),
    AlgorithmCase(
        lambda: TTSA(K=5, phi=0.1, growth="none"),
        ends_with(neumann_matrix(5, 0.1)),
        {"inner_lr": 1.5, "outer_lr": 2.0},
        60,
        noisy=Noisy(noise.double_loop(noise.series(lambda k: 5, 0.1)), {**SINGLE, "inner_steps": 1}),
    ),
    AlgorithmCase(
        lambda: TTSA(K=5, phi=0.1, growth="none", estimator="randomised"),
        ends_with(neumann_matrix(5, 0.1)),
        {"inner_lr": 0.9, "outer_lr": Power(2.0, 0.6)},
        150,
        tol=0.03,  # the series is random with full batches too
        noisy=Noisy(noise.double_loop(noise.series(lambda k: 5, 0.1, True)), {**SINGLE, "inner_steps": 1}),
        label="randomised",
    ),
    AlgorithmCase(
        TTSA,
        settings={"inner_lr": 1.5, "outer_lr": 1.0},
        steps=100,
        noisy=Noisy(
            noise.double_loop(noise.series(lambda k: int(2 * math.sqrt(1 + k)), 0.8)),
            {"inner_lr": Power(0.9, 0.3), "outer_lr": Power(1.0, 1.0, offset=6), "inner_steps": 1},
            100,
            make=lambda: TTSA(K=2, phi=0.8),
        ),
        label="growing",
    ),
    AlgorithmCase(
        lambda: TTSA.presets()["ttsa-original"],
        settings={"inner_lr": 1.5, "outer_lr": Power(1.0, 0.6)},
        steps=100,
        tol=0.3,
        noisy=Noisy(
            noise.double_loop(noise.series(lambda k: int(2 * (1 + math.log(1 + k))), 0.5, True)),
            {"inner_lr": Power(0.9, 0.3), "outer_lr": Power(1.0, 1.0, offset=6), "inner_steps": 1},
            120,
            own=True,
            make=lambda: TTSA(K=2, phi=0.5, estimator="randomised", growth="log"),
        ),
        label="original",
    ),
    AlgorithmCase(
        FSLA,
        settings={"inner_lr": 1.5, "outer_lr": 0.4},
        steps=250,
        noisy=Noisy(noise.fsla(0.5), {"inner_lr": Power(0.6, 0.3), "outer_lr": Power(0.3, 0.5)}, 250),
    ),
    AlgorithmCase(
        lambda: MRBO(K=5, phi=0.1),
        ends_with(neumann_matrix(5, 0.1)),
        {"inner_lr": 1.5, "outer_lr": 2.0},
        60,
        noisy=Noisy(noise.momentum(5, 0.1, False), SINGLE),
    ),
    AlgorithmCase(
        lambda: SUSTAIN(K=6, phi=0.1),
        ends_with(neumann_matrix(5, 0.1)),
        {"inner_lr": 0.9, "outer_lr": Power(2.0, 0.6)},
        150,
        tol=0.04,  # the series is random with full batches too
        noisy=Noisy(noise.momentum(5, 0.1, True), SINGLE),
    ),
    AlgorithmCase(
        lambda: SUSTAIN(K=6, phi=0.1, estimator="sum"),
        ends_with(neumann_matrix(5, 0.1)),
        {"inner_lr": 1.5, "outer_lr": 2.0},
        60,
        label="sum",
    ),  # with noise it is MRBO: tests/test_single_loop.py
    AlgorithmCase(
        NHGDSingle,
        ends_with(kfac_matrix),
        {"inner_lr": 1.5, "outer_lr": 1.0},
        100,
        noisy=Noisy(noise.learning(noise.Kronecker), {**SINGLE, "inner_steps": 1}),
    ),
    AlgorithmCase(
        lambda: NHGDSingle(refine=6, batches="all"),
        settings={"inner_lr": 1.5, "outer_lr": 1.0},
        steps=100,
        noisy=Noisy(noise.learning(noise.Kronecker, "all", exact=True), {**SINGLE, "inner_steps": 1}, 80),
        label="refined",
    ),
]
EXECUTORS: list[Any] = []


@dataclass(frozen=True)
class TaskCase:
    """A task, small, with outer steps of a method that lower its outer loss, and the inner gradient norm it can solve to."""

    make: Callable[[], AbstractTask]
    method: str = "aid"
    steps: int = 5
    tol: float = 1e-11
    label: str = ""

    @property
    def name(self) -> str:
        """The name of the task, and what tells this case from its others."""
        return f"{self.make().name} {self.label}".strip()


TASKS: list[TaskCase] = [
    TaskCase(lambda: Quadratic.preset("quick")),
    TaskCase(lambda: L2.preset("quick"), "nhgd"),
    TaskCase(
        lambda: Cleaning.preset("quick").with_settings({"weights": "clip", "momentum": 0.0, "start": None}),
        "nhgd",
        tol=3e-3,
        label="clip",
    ),
    TaskCase(
        lambda: Cleaning(dataset="digits", train=200, trusted=60, dtype="float64", start=0.95), tol=1e-6, label="loss"
    ),
    TaskCase(
        lambda: Cleaning(dataset="digits", train=200, trusted=60, dtype="float64", weights="net"),
        steps=15,
        tol=1e-6,
        label="net",
    ),
    TaskCase(lambda: Distillation.preset("quick").with_settings({"dtype": "float64"}), "nhgd", tol=1e-8),
    TaskCase(
        lambda: PDE(nu=0.1, interior=40, side=6, initial=8, width=9, depth=2, times=6, pretraining=40, dtype="float64"),
        "nhgd",
        15,
        tol=1e-6,
    ),
]
