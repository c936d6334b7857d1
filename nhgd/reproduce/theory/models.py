"""Models whose data are drawn from themselves, so that the Hessian of the inner problem is its Fisher matrix.

All of them have the same outer variable: it scales the natural parameters phi, so that every v is well-specified,

    l(v, theta, xi) = nll(phi, xi),    phi = e^(W v) * theta,    theta*(v) = e^(-W v) * phi*

and expectations over xi are exact sums or closed forms: nothing that a measurement is compared with is estimated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeAlias, final

import torch
from torch import Tensor
from typing_extensions import override

Draws: TypeAlias = tuple[Tensor, ...]  # samples, (R, B, ...) each: B of them in each of R runs


@dataclass(frozen=True, eq=False)
class WellSpecified(ABC):
    """A model with the parameters its data are drawn from.

    Attributes:
        name: as results show it.
        phi: what the data are drawn from, (D,).
        W: how v scales it, (D, d_1).
    """

    name: ClassVar[str]
    phi: Tensor
    W: Tensor

    @abstractmethod
    def draw(self, shape: tuple[int, int], generator: torch.Generator) -> Draws:
        """Samples of the model, (R, B, ...)."""

    @abstractmethod
    def score(self, phi: Tensor, xi: Draws) -> Tensor:
        """The gradient of nll in phi of every sample, (R, B, D), at one phi (R, D) for each run."""

    @abstractmethod
    def curvature(self, phi: Tensor, xi: Draws) -> Tensor:
        """The Hessian of nll in phi of every sample, (R, B, D, D)."""

    @abstractmethod
    def expected(self, phi: Tensor) -> Tensor:
        """The expectation of nll over the data, for one phi (D,)."""

    @abstractmethod
    def negative_log_likelihood(self, phi: Tensor, xi: Draws) -> Tensor:
        """The loss of every sample, (R, B); `score` and `curvature` are its derivatives."""

    def kept(self, phi: Tensor) -> Tensor:
        """Parameters (R, D) projected on where the model is defined; a ball around 0 by default."""
        radius = 4 * float(self.phi.norm())
        shrunk: Tensor = phi * (radius / phi.norm(dim=-1, keepdim=True)).clamp(max=1)
        return shrunk

    @property
    def fisher(self) -> Tensor:
        """The Hessian of the expectation at phi*, which is the Fisher matrix there, (D, D)."""
        return hessian(self.expected)(self.phi)

    @property
    def curvatures(self) -> tuple[float, float]:
        """The smallest and the largest eigenvalue of it: mu and L of the step sizes."""
        values = torch.linalg.eigvalsh(self.fisher)
        return float(values[0]), float(values[-1])

    def scale(self, v: Tensor) -> Tensor:
        """e^(W v), (R, D), for v (R, d_1)."""
        return (v @ self.W.T).exp()

    def solution(self, v: Tensor) -> Tensor:
        """theta*(v), (R, D)."""
        return self.phi / self.scale(v)

    def derivatives(self, v: Tensor, theta: Tensor, xi: Draws) -> tuple[Tensor, Tensor]:
        """Of every sample the gradient in theta, (R, B, D), and the cross derivative, (R, B, D, d_1), by the chain
        rule.
        """
        scale = self.scale(v)  # (R, D)
        phi = scale * theta
        scores, hessians = self.score(phi, xi), self.curvature(phi, xi)
        gradients = scale[:, None] * scores
        moved = hessians * phi[:, None, None]  # what a relative change of phi does to the scores, (R, B, D, D)
        moved = moved + torch.diag_embed(scores)
        return gradients, (scale[:, None, :, None] * moved) @ self.W

    def cross(self, v: Tensor) -> Tensor:
        """The expected cross derivative at theta*(v), (R, D, d_1)."""
        scale = self.scale(v)
        return (scale[:, :, None] * self.fisher * self.phi) @ self.W

    def hessian(self, v: Tensor) -> Tensor:
        """The expected Hessian in theta at theta*(v), (R, D, D)."""
        scale = self.scale(v)
        return scale[:, :, None] * self.fisher * scale[:, None]


@final
@dataclass(frozen=True, eq=False)
class GaussianMean(WellSpecified):
    """The mean of a Gaussian with a known precision, (D, D)."""

    name: ClassVar[str] = "gaussian mean"
    precision: Tensor

    @classmethod
    def example(cls) -> GaussianMean:
        """Four dimensions, precisions from 1 to 2."""
        phi = torch.tensor([1.0, -0.6, 0.8, 0.5]).double()
        return cls(phi, torch.eye(4).double(), _rotated(torch.linspace(1, 2, 4).double()))

    @override
    def draw(self, shape: tuple[int, int], generator: torch.Generator) -> Draws:
        noise = torch.randn(*shape, len(self.phi), generator=generator, dtype=torch.float64)
        root = torch.linalg.cholesky(torch.linalg.inv(self.precision))
        return (self.phi + noise @ root.T,)

    @override
    def score(self, phi: Tensor, xi: Draws) -> Tensor:
        return (phi[:, None] - xi[0]) @ self.precision

    @override
    def curvature(self, phi: Tensor, xi: Draws) -> Tensor:
        return self.precision.expand(*xi[0].shape[:2], -1, -1)

    @override
    def expected(self, phi: Tensor) -> Tensor:
        return (phi - self.phi) @ self.precision @ (phi - self.phi) / 2

    @override
    def negative_log_likelihood(self, phi: Tensor, xi: Draws) -> Tensor:
        away = phi[:, None] - xi[0]
        return ((away @ self.precision) * away).sum(-1) / 2


@final
@dataclass(frozen=True, eq=False)
class GaussianCovariance(WellSpecified):
    """The precision matrix of a Gaussian around 0, by its upper triangle; entry (i, j) is scaled by e^(v_i + v_j).

    Attributes:
        spread: from the triangle to the entries of the matrix, (p^2, D).
    """

    name: ClassVar[str] = "gaussian covariance"
    spread: Tensor

    @classmethod
    def example(cls) -> GaussianCovariance:
        """Three dimensions, so six parameters."""
        p = 3
        row, column = torch.triu_indices(p, p)
        spread = torch.zeros(p * p, len(row), dtype=torch.float64)
        W = torch.zeros(len(row), p, dtype=torch.float64)
        for k, (i, j) in enumerate(zip(row.tolist(), column.tolist(), strict=True)):
            spread[i * p + j, k] = spread[j * p + i, k] = 1
            W[k, i] += 1
            W[k, j] += 1
        precision = _rotated(torch.tensor([0.8, 1.0, 1.2]).double())
        return cls(precision[row, column], W, spread)

    def matrix(self, phi: Tensor) -> Tensor:
        """The precision, (..., p, p)."""
        p = self.W.shape[1]
        found: Tensor = (phi @ self.spread.T).unflatten(-1, (p, p))
        return found

    @override
    def draw(self, shape: tuple[int, int], generator: torch.Generator) -> Draws:
        root = torch.linalg.cholesky(torch.linalg.inv(self.matrix(self.phi)))
        noise = torch.randn(*shape, len(root), generator=generator, dtype=torch.float64)
        return (noise @ root.T,)

    @override
    def score(self, phi: Tensor, xi: Draws) -> Tensor:
        outer = xi[0][..., :, None] * xi[0][..., None, :]
        away = outer - torch.linalg.inv(self.matrix(phi))[:, None]
        found: Tensor = away.flatten(-2) @ self.spread / 2
        return found

    @override
    def curvature(self, phi: Tensor, xi: Draws) -> Tensor:
        covariance = torch.linalg.inv(self.matrix(phi))
        squared = torch.einsum("rij,rkl->rikjl", covariance, covariance).flatten(-4, -3).flatten(-2)
        hessian = self.spread.T @ squared @ self.spread / 2  # (R, D, D), the same for all samples
        return hessian[:, None].expand(-1, xi[0].shape[1], -1, -1)

    @override
    def expected(self, phi: Tensor) -> Tensor:
        precision = self.matrix(phi)
        covariance = torch.linalg.inv(self.matrix(self.phi))
        found: Tensor = ((precision * covariance).sum() - torch.logdet(precision)) / 2
        return found

    @override
    def negative_log_likelihood(self, phi: Tensor, xi: Draws) -> Tensor:
        precision = self.matrix(phi)
        squares = ((xi[0] @ precision) * xi[0]).sum(-1)
        return (squares - torch.logdet(precision)[:, None]) / 2

    @override
    def kept(self, phi: Tensor) -> Tensor:
        """With precisions from 0.4 to 2.4."""
        values, vectors = torch.linalg.eigh(self.matrix(phi))
        kept = (vectors * values.clamp(0.4, 2.4)[..., None, :]) @ vectors.mT
        p = kept.shape[-1]
        row, column = torch.triu_indices(p, p)
        found: Tensor = kept[..., row, column]
        return found


@dataclass(frozen=True, eq=False)
class _Regression(WellSpecified):
    """The outcome of a row of a fixed design, which is drawn uniformly; x: (n, P)."""

    x: Tensor

    def rows(self, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
        """Rows of the design, (R, B, P)."""
        return self.x[torch.randint(len(self.x), shape, generator=generator)]


@final
@dataclass(frozen=True, eq=False)
class Quadratic(_Regression):
    """Least squares: y = x . phi + noise of deviation 1."""

    name: ClassVar[str] = "quadratic"

    @classmethod
    def example(cls) -> Quadratic:
        """Four coefficients."""
        return cls(torch.tensor([0.9, -0.7, 0.5, 1.1]).double(), torch.eye(4).double(), _design(64, 4))

    @override
    def draw(self, shape: tuple[int, int], generator: torch.Generator) -> Draws:
        x = self.rows(shape, generator)
        return x, x @ self.phi + torch.randn(*shape, generator=generator, dtype=torch.float64)

    @override
    def score(self, phi: Tensor, xi: Draws) -> Tensor:
        x, y = xi
        return ((x @ phi[:, :, None])[..., 0] - y)[..., None] * x

    @override
    def curvature(self, phi: Tensor, xi: Draws) -> Tensor:
        x, _ = xi
        return x[..., :, None] * x[..., None, :]

    @override
    def expected(self, phi: Tensor) -> Tensor:
        return (self.x @ (phi - self.phi)).square().mean() / 2

    @override
    def negative_log_likelihood(self, phi: Tensor, xi: Draws) -> Tensor:
        x, y = xi
        return ((x @ phi[:, :, None])[..., 0] - y).square() / 2


@final
@dataclass(frozen=True, eq=False)
class Softmax(_Regression):
    """A linear softmax model whose last class has scores of 0; with two classes a logistic one.

    Attributes:
        classes: C; phi is (C - 1) rows of P coefficients.
        given: the probability of each class at each row of the design, (n, C); None: the model's own. Others make the
            model wrong.
    """

    name: ClassVar[str] = "softmax"
    classes: int
    given: Tensor | None = None

    @classmethod
    def example(cls) -> Softmax:
        """Three classes, three features."""
        phi = torch.tensor([0.5, -0.3, 0.4, -0.4, 0.5, 0.3]).double()
        return cls(phi, torch.eye(6).double(), _design(64, 3), classes=3)

    @classmethod
    def logistic(cls) -> Softmax:
        """Two classes, four features."""
        phi = torch.tensor([0.8, -0.6, 0.5, 0.7]).double()
        return cls(phi, torch.eye(4).double(), _design(64, 4), classes=2)

    def scores(self, phi: Tensor, x: Tensor) -> Tensor:
        """(R, B, C) for phi (R, D) and x (R, B, P)."""
        rows = phi.unflatten(-1, (self.classes - 1, -1))  # (R, C - 1, P)
        found = x @ rows.mT
        return torch.cat([found, torch.zeros_like(found[..., :1])], -1)

    def probabilities(self, phi: Tensor) -> Tensor:
        """At every row of the design, (n, C), for one phi."""
        return torch.softmax(self.scores(phi[None], self.x[None])[0], -1)

    @property
    def truth(self) -> Tensor:
        """What labels are drawn from, (n, C)."""
        return self.probabilities(self.phi) if self.given is None else self.given

    @override
    def draw(self, shape: tuple[int, int], generator: torch.Generator) -> Draws:
        index = torch.randint(len(self.x), shape, generator=generator)
        steps = self.truth.cumsum(-1)[index]
        u = torch.rand(*shape, 1, generator=generator, dtype=torch.float64)
        return self.x[index], (u > steps[..., :-1]).sum(-1)

    @override
    def score(self, phi: Tensor, xi: Draws) -> Tensor:
        x, y = xi
        away = torch.softmax(self.scores(phi, x), -1)[..., :-1] - _one_hot(y, self.classes)[..., :-1]
        return (away[..., :, None] * x[..., None, :]).flatten(-2)

    @override
    def curvature(self, phi: Tensor, xi: Draws) -> Tensor:
        x, _ = xi
        p = torch.softmax(self.scores(phi, x), -1)[..., :-1]
        middle = torch.diag_embed(p) - p[..., :, None] * p[..., None, :]
        squared = x[..., :, None] * x[..., None, :]
        return torch.einsum("rbij,rbkl->rbikjl", middle, squared).flatten(-4, -3).flatten(-2)

    @override
    def expected(self, phi: Tensor) -> Tensor:
        scores = self.scores(phi[None], self.x[None])[0]
        return -(self.truth * torch.log_softmax(scores, -1)).sum(-1).mean()

    @override
    def negative_log_likelihood(self, phi: Tensor, xi: Draws) -> Tensor:
        x, y = xi
        return -torch.log_softmax(self.scores(phi, x), -1).gather(-1, y[..., None])[..., 0]


def hessian(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The Hessian of a function of one vector, in reverse mode twice."""
    found: Callable[[Tensor], Tensor] = torch.func.jacrev(torch.func.grad(function))
    return found


def examples() -> dict[str, WellSpecified]:
    """Every model that is measured, by its name."""
    return {
        "gaussian mean": GaussianMean.example(),
        "gaussian covariance": GaussianCovariance.example(),
        "logistic": Softmax.logistic(),
        "softmax": Softmax.example(),
        "quadratic": Quadratic.example(),
    }


def _one_hot(y: Tensor, classes: int) -> Tensor:
    return torch.nn.functional.one_hot(y, classes).double()


def _design(n: int, features: int) -> Tensor:
    """Rows whose columns are orthogonal and of mean square 1; the last is constant."""
    generator = torch.Generator().manual_seed(features)
    x = torch.randn(n, features, generator=generator, dtype=torch.float64)
    x[:, 0] = 1
    q, _ = torch.linalg.qr(x)
    found: Tensor = (q * q[0, 0].sign() * n**0.5).flip(-1)
    return found


def _rotated(values: Tensor) -> Tensor:
    """A symmetric matrix with these eigenvalues."""
    generator = torch.Generator().manual_seed(0)
    q, _ = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator, dtype=torch.float64))
    found: Tensor = q @ torch.diag(values) @ q.T
    return found
