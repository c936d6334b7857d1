"""A bilevel problem whose every answer is a formula."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from nhgd._validation import not_negative, positive
from nhgd.data.loader import Data
from nhgd.errors import InputError
from nhgd.losses import Losses
from nhgd.problem import Bilevel
from nhgd.task._classifier import linear_classifier
from nhgd.task.base import AbstractTask, Instance


@dataclass(frozen=True)
class ClosedForm:
    """The answers: theta*(v) = theta_0 + S v, Phi(v), grad Phi(v) and the minimiser of Phi."""

    hessian: Tensor  # (d, d)
    cross: Tensor  # (d, p): d2 l / d theta d v
    theta_0: Tensor  # (d,)
    S: Tensor  # (d, p)
    B: Tensor  # (m, d)
    target: Tensor  # (m,)
    rho: float

    def theta_star(self, v: Tensor) -> Tensor:
        """The inner optimum."""
        return self.theta_0 + self.S @ v

    def phi(self, v: Tensor) -> Tensor:
        """The outer objective at the inner optimum."""
        misfit: Tensor = 0.5 * (self.B @ self.theta_star(v) - self.target).square().mean()
        value: Tensor = misfit + 0.5 * self.rho * v.square().sum()
        return value

    def hypergradient(self, v: Tensor) -> Tensor:
        """grad Phi(v)."""
        return self.S.T @ self.B.T @ (self.B @ self.theta_star(v) - self.target) / len(self.B) + self.rho * v

    def v_star(self) -> Tensor:
        """The minimiser of Phi."""
        m = len(self.B)
        curvature = self.S.T @ self.B.T @ self.B @ self.S / m
        curvature = curvature + self.rho * torch.eye(len(curvature), dtype=curvature.dtype, device=curvature.device)
        best: Tensor = torch.linalg.solve(curvature, -self.S.T @ self.B.T @ (self.B @ self.theta_0 - self.target) / m)
        return best


@final
@dataclass(frozen=True)
class Quadratic(AbstractTask):
    """Everything in closed form: least squares inside, least squares outside.

        l_i(v, theta) = 0.5 (a_i . theta - b_i - c_i . v)^2,      l2 ||theta||^2
        f(v, theta)   = 0.5 mean_j (B_j . theta - d_j)^2 + 0.5 rho ||v||^2

    grad_theta f does not vanish at the solution, so the inverse matters. With noise 1 the inner model is the Gaussian
    that drew the data, so that the empirical Fisher matrix estimates the Hessian; any other noise takes it off its
    model by that factor squared.
    """

    name: ClassVar[str] = "quadratic"
    headline: ClassVar[str] = "true_outer_loss"
    curve: ClassVar[str] = "true_outer_loss"
    selection: ClassVar[str] = "true_outer_loss"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "default": {},
        "quick": {"dim": 6, "outer_dim": 3, "samples": 60},
    }
    dim: int = 20
    outer_dim: int = 5
    samples: int = 400
    condition: float = 10.0
    noise: float = 1.0
    l2: float = 0.01
    rho: float = 0.1
    batch: int | None = None

    def __post_init__(self) -> None:
        positive("quadratic", dim=self.dim, outer_dim=self.outer_dim, samples=self.samples)
        not_negative("quadratic", noise=self.noise, l2=self.l2, rho=self.rho)
        if self.condition < 1:
            raise InputError(f"quadratic: condition must be at least 1, got {self.condition}.")
        if self.l2 == 0 and self.samples < self.dim:
            raise InputError("quadratic: with fewer samples than dim the inner problem needs l2 above 0.")
        if self.rho == 0 and self.outer_dim > self.dim:
            raise InputError("quadratic: with outer_dim above dim the outer problem needs rho above 0.")

    @override
    def build(self, seed: int, device: torch.device, data: str | Path | None = None) -> Instance:
        self.refuse_data(data)
        g = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, dtype=torch.float64).to(device)

        n, d, p, m = self.samples, self.dim, self.outer_dim, 2 * self.dim
        spread = torch.logspace(0, -0.5, d, base=self.condition, dtype=torch.float64, device=device)
        a, c = draw(n, d) * spread, draw(n, p)
        b = a @ draw(d) + self.noise * draw(n)
        # Targets that no theta meets keep grad_theta f away from 0 at the solution.
        outer_rows, target = draw(m, d), 3 * draw(m)

        eye = torch.eye(d, dtype=torch.float64, device=device)
        hessian = a.T @ a / n + 2 * self.l2 * eye
        answers = ClosedForm(
            hessian=hessian,
            cross=-a.T @ c / n,
            theta_0=torch.linalg.solve(hessian, a.T @ b / n),
            S=torch.linalg.solve(hessian, a.T @ c / n),
            B=outer_rows,
            target=target,
            rho=self.rho,
        )

        model = linear_classifier(d, 1, bias=False, device=device)
        v = torch.zeros(p, dtype=torch.float64, device=device)
        return QuadraticInstance(
            problem=Bilevel(_inner, self._outer, model, v, l2=self.l2, likelihood="gaussian"),
            inner_data=Data(a, b, c, batch=self.batch),
            outer_data=Data(outer_rows, target),
            full_inner=(a, b, c),
            full_outer=(outer_rows, target),
            method="aid",
            answers=answers,
        )

    def _outer(self, model: nn.Module, v: Tensor, batch: Any) -> Tensor:
        x, y = batch[:2]
        misfit: Tensor = 0.5 * (model(x)[:, 0] - y).square().mean()
        return misfit + 0.5 * self.rho * v.square().sum()


def _inner(model: nn.Module, v: Tensor, batch: Any) -> Losses:
    x, y, side = batch[:3]
    z = model(x)[:, 0]
    return Losses(0.5 * (z - y - side @ v).square(), outputs=z)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class QuadraticInstance(Instance):
    """The problem with its answers."""

    answers: ClosedForm

    @override
    def solver_settings(self) -> dict[str, Any]:
        top = float(torch.linalg.eigvalsh(self.answers.hessian)[-1])
        return {"inner_steps": 20, "inner_lr": 1.0 / top, "outer_lr": 0.5}

    @override
    def metrics(self, theta: nn.Module, v: Tensor) -> dict[str, float]:
        """How far v is from the minimiser of Phi, and Phi at both."""
        best = self.answers.v_star()
        return {
            "v_error": float((v - best).norm() / best.norm()),
            "true_outer_loss": float(self.answers.phi(v)),
            "optimal_outer_loss": float(self.answers.phi(best)),
        }

    @override
    def solve_inner(self) -> float:
        theta, v = self.problem.theta, self.problem.v.flat()
        a, b, c = self.full_inner
        theta.assign(self.answers.theta_star(v))
        return float((self.answers.hessian @ theta.flat() - a.T @ (b + c @ v) / len(a)).norm())
