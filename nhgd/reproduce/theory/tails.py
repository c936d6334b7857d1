"""How fast the quantiles of an error grow with certainty: the claim of high probability, rather than of the mean."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nhgd.inverse import FisherDense
from nhgd.reproduce.theory.inner_loop import Estimator, Followed, distances
from nhgd.reproduce.theory.models import WellSpecified
from nhgd.reproduce.theory.rates import begun
from nhgd.reproduce.theory.slopes import RESAMPLED, interval

DELTAS = (0.5, 0.2, 0.1, 0.05, 0.02)


def tails(
    model: WellSpecified, runs: int, T: int, seed: int = 0, tick: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Quantiles of the errors of one inner loop of T steps, and their growth, see `growth`."""
    inverse = Followed(Estimator(FisherDense(form="inverse")), runs, len(model.phi))
    loop = begun(model, runs, 1, seed, {"average": inverse})
    loop.run(T)
    tick()
    errors = {
        "inverse": distances(inverse.A, torch.linalg.inv(model.hessian(loop.v))),
        "cross": distances(loop.cross, model.cross(loop.v)),
        "theta": (loop.theta - model.solution(loop.v)).norm(dim=1),
    }
    return {"model": model.name, "T": T, "runs": runs, "errors": {name: growth(one) for name, one in errors.items()}}


def growth(errors: Tensor, seed: int = 0) -> dict[str, Any]:
    """The quantiles at 1 - delta, and the power of sqrt(log(1 / delta)) with which they grow.

    The bounds of the paper grow with the power 1 at most. The power is fitted in double logarithms; its interval comes
    from resampled runs.

    >>> radii = (-torch.linspace(1, 0, 1001, dtype=torch.float64)[:-1].log()).sqrt()
    >>> round(growth(radii)["power"], 1)
    1.0
    """
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(errors), (RESAMPLED, len(errors)), generator=generator)
    drawn = torch.stack([_quantiles(errors[rows]) for rows in chosen])  # (n, deltas)
    powers = sorted(_power(row) for row in drawn)
    low, high = interval(powers)
    found = _quantiles(errors)
    ends = drawn.sort(0).values
    cut = int(0.025 * RESAMPLED)
    return {
        "delta": list(DELTAS),
        "quantile": found.tolist(),
        "low": ends[cut].tolist(),
        "high": ends[RESAMPLED - 1 - cut].tolist(),
        "power": _power(found),
        "power_low": low,
        "power_high": high,
    }


def _quantiles(errors: Tensor) -> Tensor:
    levels = torch.tensor([1 - delta for delta in DELTAS], dtype=errors.dtype)
    return errors.quantile(levels)


def _power(quantiles: Tensor) -> float:
    x = torch.tensor([0.5 * math.log(-math.log(delta)) for delta in DELTAS], dtype=torch.float64)
    x = x - x.mean()
    return float((x * quantiles.log()).sum() / x.square().sum())
