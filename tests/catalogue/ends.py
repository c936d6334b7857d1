"""Where an algorithm ends on the quadratic with full batches, in closed form, its bias included."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nhgd.task import Instance


def v_star(instance: Instance) -> Tensor:
    """Where a consistent algorithm ends on the quadratic."""
    return instance.answers.v_star()


def ends_with(
    matrix: Callable[[Instance, Tensor], Tensor], reached: Callable[[Instance], Tensor] | None = None
) -> Callable[[Instance], Tensor]:
    """Where an algorithm ends that takes matrix(instance, v) for the inner Hessian, theta at its optimum.

    There grad_v f = X^T M(v)^{-1} grad_theta f(theta*(v)), with X the cross derivative: a linear equation for given M.
    With reached(instance) = R, (d, d), theta is at R theta*(v) instead.
    """

    def end(instance: Instance) -> Tensor:
        a = instance.answers
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
    return torch.eye(len(instance.answers.hessian), dtype=v.dtype)


def kfac_matrix(instance: Instance, v: Tensor) -> Tensor:
    """The Hessian that K-FAC assumes on one linear output: its mean squared score times mean a a^T, and the ridge."""
    a, b, c = instance.full_inner
    scores = a @ instance.answers.theta_star(v) - b - c @ v
    eye = torch.eye(a.shape[1], dtype=v.dtype)
    return scores.square().mean() * a.T @ a / len(a) + instance.problem.ridge_diagonal()[0] * eye


def fisher_matrix(instance: Instance, v: Tensor) -> Tensor:
    """The empirical Fisher matrix at the inner optimum, and the ridge."""
    a, b, c = instance.full_inner
    scores = a @ instance.answers.theta_star(v) - b - c @ v
    eye = torch.eye(a.shape[1], dtype=v.dtype)
    return (a * scores.square()[:, None]).T @ a / len(a) + instance.problem.ridge_diagonal()[0] * eye


def unrolled_matrix(steps: int) -> Callable[[Instance, Tensor], Tensor]:
    """The Hessian that differentiating through so many gradient steps assumes: its inverse is (I - (I - eta H)^n) H^{-1}."""

    def matrix(instance: Instance, v: Tensor) -> Tensor:
        hessian, eye = instance.answers.hessian, torch.eye(len(instance.answers.hessian), dtype=v.dtype)
        left = torch.linalg.matrix_power(eye - instance.solver_settings()["inner_lr"] * hessian, steps)
        return hessian @ torch.linalg.inv(eye - left)

    return matrix


def penalty_matrix(multiplier: float) -> Callable[[Instance, Tensor], Tensor]:
    """The Hessian that a penalty with a finite multiplier assumes: H + d2_theta f / multiplier."""
    return lambda instance, v: (
        instance.answers.hessian + instance.answers.B.T @ instance.answers.B / (len(instance.answers.B) * multiplier)
    )


def neumann_matrix(products: int, phi: float) -> Callable[[Instance, Tensor], Tensor]:
    """The Hessian that a Neumann series with so many products assumes: its inverse is phi sum_k (I - phi H)^k."""

    def matrix(instance: Instance, v: Tensor) -> Tensor:
        step = torch.eye(len(instance.answers.hessian), dtype=v.dtype) - phi * instance.answers.hessian
        return torch.linalg.inv(phi * sum(torch.linalg.matrix_power(step, k) for k in range(products + 1)))

    return matrix


def cold_start(steps: int) -> Callable[[Instance], Tensor]:
    """How much of theta* so many gradient steps from zero reach: I - (I - eta H)^n."""

    def reached(instance: Instance) -> Tensor:
        eye = torch.eye(len(instance.answers.hessian), dtype=instance.answers.hessian.dtype)
        return eye - torch.linalg.matrix_power(
            eye - instance.solver_settings()["inner_lr"] * instance.answers.hessian, steps
        )

    return reached


def literal_matrix(beta: float, steps: int) -> Callable[[Instance, Tensor], Tensor]:
    """What is left of the identity in nhgd-paper once the gradients of full batches have vanished: beta^T I."""
    return lambda instance, v: beta**steps * identity_matrix(instance, v)
