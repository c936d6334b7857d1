"""Theorem 2: the mean squared hypergradient over outer steps K and inner steps T, against 1 / K + 1 / T."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nhgd.inverse import FisherDense
from nhgd.reproduce.theory.inner_loop import Estimator, Followed, InnerLoop
from nhgd.reproduce.theory.models import WellSpecified, hessian
from nhgd.reproduce.theory.slopes import fitted

AWAY = 0.3  # |v*_i|: how far the target's scales are from those of v = 0
RIDGE = 0.1


@dataclass(frozen=True, eq=False)
class Outer:
    """f(v, theta) = |theta - target|^2 / 2 + RIDGE |v|^2 / 2, whose target a v with entries +-AWAY would reach."""

    model: WellSpecified

    @property
    def target(self) -> Tensor:
        """(D,)."""
        signs = torch.ones(self.model.W.shape[1], dtype=torch.float64)
        signs[1::2] = -1
        return self.model.solution(AWAY * signs[None])[0]

    def gradients(self, v: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        """grad_v f and grad_theta f, (R, d_1) and (R, D)."""
        return RIDGE * v, theta - self.target

    def phi(self, v: Tensor) -> Tensor:
        """Phi(v) = f(v, theta*(v)) for one v, (d_1,)."""
        return (self.model.solution(v[None])[0] - self.target).square().sum() / 2 + RIDGE * v.square().sum() / 2

    def gradient(self, v: Tensor) -> Tensor:
        """grad Phi at every v, (R, d_1)."""
        found: Tensor = torch.func.vmap(torch.func.grad(self.phi))(v)
        return found

    def smoothness(self, v: Tensor) -> float:
        """The largest eigenvalue of the Hessian of Phi at a v, (d_1,)."""
        return float(torch.linalg.eigvalsh(hessian(self.phi)(v))[-1])

    def stationary(self) -> Tensor:
        """A v with grad Phi = 0, by Newton's method from where the target's scales are."""
        v = torch.zeros(self.model.W.shape[1], dtype=torch.float64)
        for _ in range(50):
            v = v - torch.linalg.solve(hessian(self.phi)(v), torch.func.grad(self.phi)(v))
        return v


def squared_hypergradients(
    outer: Outer, v: Tensor, K: int, T: int, alpha: float, seed: int, tick: Callable[[], None] = lambda: None
) -> tuple[Tensor, Tensor]:
    """Algorithm 1 in every run at once: |grad Phi(v_k)|^2 and the squared error of the hypergradient, (R, K) both.

    theta continues from one outer step to the next; A and L average the gradients of one inner loop, as theorem 1 does.
    """
    model, generator = outer.model, torch.Generator().manual_seed(seed)
    theta = model.solution(v)
    norms, errors = [], []
    for _ in range(K):
        A = Followed(Estimator(FisherDense(form="inverse")), len(v), len(model.phi), checked=False)
        loop = InnerLoop(model, v, theta, 1, generator, {"A": A})
        loop.run(T)
        theta = loop.theta
        f_v, f_theta = outer.gradients(v, theta)
        x = A.A @ f_theta[..., None]  # (R, D, 1)
        found = f_v - (loop.cross.mT @ x)[..., 0]
        true = outer.gradient(v)
        norms.append(true.square().sum(1))
        errors.append((found - true).square().sum(1))
        v = v - alpha * found
        tick()
    return torch.stack(norms, 1), torch.stack(errors, 1)


def convergence(
    model: WellSpecified,
    runs: int,
    T_values: Sequence[int],
    K: int,
    K_values: Sequence[int],
    longest: int,
    seed: int = 0,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Both terms of the theorem, each where the other is small.

    In T: K outer steps from a stationary point, so that what is met is the noise alone. In K: from v = 0, with the
    longest inner loop; "above the noise" what the same samples give from the stationary point is subtracted. The step
    size is 1 / (4 L_v) with the curvature of Phi at both ends in place of the worst case's L_v.
    """
    outer = Outer(model)
    stationary, zero = outer.stationary(), torch.zeros(model.W.shape[1], dtype=torch.float64)
    alpha = 1 / (4 * max(outer.smoothness(stationary), outer.smoothness(zero)))
    floors, wrong = [], []
    for T in T_values:
        norms, errors = squared_hypergradients(outer, stationary.repeat(runs, 1), K, T, alpha, seed + T, tick)
        floors.append(norms.mean(1))
        wrong.append(errors.mean(1))
    begun, settled = (
        squared_hypergradients(outer, start.repeat(runs, 1), max(K_values), longest, alpha, seed, tick)[0]
        for start in (zero, stationary)
    )
    x, ks = [float(T) for T in T_values], [float(k) for k in K_values]
    means = [begun[:, :k].mean(1) for k in K_values]
    above = [(begun - settled)[:, :k].mean(1) for k in K_values]
    return {
        "model": model.name,
        "alpha": alpha,
        "runs": runs,
        "in T": _described(x, floors) | {"K": K, "aim": logarithmic(x, K)},
        "hypergradient error in T": _described(x, wrong) | {"K": K, "aim": logarithmic(x, K)},
        "in K": _described(ks, means) | {"T": longest, "aim": None},
        "in K above the noise": _described(ks, above) | {"T": longest, "aim": -1.0},
    }


def logarithmic(T_values: Sequence[float], K: int) -> float:
    """The slope of log(K T) / T over these T, which theorem 2 allows: less steep than -1.

    >>> round(logarithmic([100.0, 1600.0], 8), 2)
    -0.87
    """
    bound = torch.tensor([[math.log(K * T) / T for T in T_values]], dtype=torch.float64)
    return fitted(T_values, bound).slope


def _described(x: list[float], values: list[Tensor]) -> dict[str, Any]:
    stacked = torch.stack(values, 1)
    return {"x": x, "mean": stacked.mean(0).tolist(), **fitted(x, stacked).as_dict()}
