"""How fast one inner loop's estimates approach what they estimate, as the number of its steps grows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nhgd.inverse import FisherDense
from nhgd.reproduce.theory.inner_loop import Estimator, Followed, InnerLoop, distances
from nhgd.reproduce.theory.models import WellSpecified
from nhgd.reproduce.theory.slopes import fitted

BATCH = 8
BETA = 0.99
WINDOWS = 10  # of an average that grows with T: so many of them fit into T
FRESH_RUNS = 40
APART = 0.3  # how far from the solution theta starts, in each coordinate


@dataclass
class Curve:
    """An error over steps, in every run.

    Attributes:
        x: steps, or what the theory counts in their place.
        errors: (R,) for each x.
        aim: the slope that the theory says; None where it says none.
    """

    x: list[float]
    errors: list[Tensor]
    aim: float | None

    def described(self) -> dict[str, Any]:
        """For JSON: mean, band and fitted slope."""
        errors = torch.stack(self.errors, 1)  # (R, n)
        found = fitted(self.x, errors)
        return {
            "x": self.x,
            "mean": errors.mean(0).tolist(),
            "tenth": errors.quantile(0.1, 0).tolist(),
            "nine tenths": errors.quantile(0.9, 0).tolist(),
            "aim": self.aim,
            **found.as_dict(),
        }


def rates(
    model: WellSpecified,
    runs: int,
    steps: Sequence[int],
    batch_steps: Sequence[int],
    seed: int = 0,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Curves of all errors, and how far the matrices of the first run are from those of `FisherDense` itself.

    Args:
        runs: how many.
        steps: where the errors of steps of one sample are looked at, rising.
        batch_steps: the same for steps of `BATCH` samples.
        tick: called at each of them.
    """
    single, apart = _single(model, runs, steps, seed, tick)
    batch, apart_too = _batches(model, runs, batch_steps, seed + 1, tick)
    return {
        "model": model.name,
        "parameters": len(model.phi),
        "curvatures": list(model.curvatures),
        "q": shift(model),
        "curves": {name: curve.described() for name, curve in (single | batch).items()},
        "largest_difference_from_FisherDense": max(apart, apart_too),
    }


def shift(model: WellSpecified) -> float:
    """q = 8 L^2 / mu^2 of the step sizes."""
    mu, L = model.curvatures
    return 8 * (L / mu) ** 2


def begun(
    model: WellSpecified, runs: int, batch: int, seed: int, followed: Mapping[str, Followed] | None = None
) -> InnerLoop:
    """An inner loop at v = 0 whose runs start at different points near the solution."""
    generator = torch.Generator().manual_seed(seed)
    v = torch.zeros(runs, model.W.shape[1], dtype=torch.float64)
    away = torch.randn(runs, len(model.phi), generator=generator, dtype=torch.float64)
    theta = model.kept(model.phi + APART * model.phi.abs().mean() * away)
    return InnerLoop(model, v, theta, batch, generator, followed or {})


def _single(
    model: WellSpecified, runs: int, steps: Sequence[int], seed: int, tick: Callable[[], None]
) -> tuple[dict[str, Curve], float]:
    average = _followed(model, runs, FisherDense(form="inverse"))
    smoothed = _followed(model, runs, FisherDense(form="inverse", update="ema", beta=BETA))
    growing = {
        T: _followed(model, runs, FisherDense(form="inverse", update="ema", beta=1 - WINDOWS / T), checked=False)
        for T in steps
    }
    every: dict[str, Followed] = {"average": average, "ema": smoothed}
    loop = begun(model, runs, 1, seed, every | {f"ema {T}": one for T, one in growing.items()})
    inverse, cross, v = torch.linalg.inv(model.hessian(loop.v)), model.cross(loop.v), loop.v
    curves = {
        "inverse, average": Curve([], [], -0.5),
        f"inverse, ema with beta = {BETA}": Curve([], [], None),
        f"inverse, ema over T / {WINDOWS}": Curve([], [], -0.5),
        "cross, trajectory": Curve([], [], -0.5),
        "cross, M = T fresh samples": Curve([], [], -0.5),
        "theta": Curve([], [], -0.5),
    }
    apart = 0.0
    for T in steps:
        loop.run(T)
        some = InnerLoop(model, v[:FRESH_RUNS], loop.theta[:FRESH_RUNS], 1, loop.generator)
        fresh = some.fresh_cross(T)
        errors = (
            distances(average.A, inverse),
            distances(smoothed.A, inverse),
            distances(growing[T].A, inverse),
            distances(loop.cross, cross),
            distances(fresh, cross[:FRESH_RUNS]),
            (loop.theta - model.solution(v)).norm(dim=1),
        )
        for (name, curve), error in zip(curves.items(), errors, strict=True):
            curve.x.append(T + shift(model) if name == "theta" else float(T))
            curve.errors.append(error)
        apart = max(apart, average.difference, smoothed.difference)
        loop.followed = {name: one for name, one in loop.followed.items() if name != f"ema {T}"}
        tick()
    return curves, apart


def _batches(
    model: WellSpecified, runs: int, steps: Sequence[int], seed: int, tick: Callable[[], None]
) -> tuple[dict[str, Curve], float]:
    followed = {
        f"inverse, average, {BATCH} samples": _followed(model, runs, FisherDense(form="inverse")),
        f"inverse, average, mean of {BATCH}, scaled": _followed(
            model, runs, FisherDense(form="inverse", records="batch")
        ),
        f"inverse, average, mean of {BATCH} as printed": _followed(
            model, runs, FisherDense(form="inverse", records="raw")
        ),
    }
    loop = begun(model, runs, BATCH, seed, followed)
    inverse = torch.linalg.inv(model.hessian(loop.v))
    first, second, third = followed
    wrong = f"the same against {BATCH} H^-1"
    curves = {name: Curve([], [], None if name == third else -0.5) for name in (first, second, third, wrong)}
    for T in steps:
        loop.run(T)
        for name, one in followed.items():
            curves[name].x.append(float(T))
            curves[name].errors.append(distances(one.A, inverse))
        curves[wrong].x.append(float(T))
        curves[wrong].errors.append(distances(followed[third].A, BATCH * inverse))
        tick()
    return curves, max(one.difference for one in followed.values())


def _followed(model: WellSpecified, runs: int, inverse: FisherDense, checked: bool = True) -> Followed:
    return Followed(Estimator(inverse), runs, len(model.phi), checked)
