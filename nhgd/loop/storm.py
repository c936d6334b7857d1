"""Recursive momentum: a direction corrected by how the same samples saw the last point.

    h <- D(here) + (1 - eta) (h - D(there)),      both D on the same fresh samples, `there` being the point before

With eta = 1 it is the plain stochastic direction; as eta falls, h averages more and more samples without lagging
behind.

References: A. Cutkosky, F. Orabona, Momentum-based variance reduction in non-convex SGD, 2019, algorithm 1 (STORM).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nhgd import _tape as tape
from nhgd.errors import InputError
from nhgd.loop.loop import Loop, StepInfo
from nhgd.loop.neumann_estimate import Estimator, draw, estimate, scaled
from nhgd.schedule import Clock, Schedule


def check_momentum(owner: str, **values: float | Schedule) -> None:
    """Refuse a momentum parameter outside (0, 1]."""
    for name, value in values.items():
        if isinstance(value, Schedule):
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
            raise InputError(
                f"{owner}: {name} must be above 0 and at most 1, where 1 means no momentum; got {value!r}."
            )


def momentum_at(value: float | Schedule, clock: Clock) -> float:
    """The current eta; 1 at the first outer step, when there is nothing to correct."""
    if clock.k == 0:
        return 1.0
    schedule = value
    return tape.number(lambda: min(schedule.rate(clock), 1.0)) if isinstance(schedule, Schedule) else value


@dataclass
class Trail:
    """The point before, (D,) and (P,), and the directions that were taken from it, of the same shapes.

    phi is the scale of the Neumann series that in_v was taken with, once it is known.
    """

    theta: Tensor
    v: Tensor
    in_theta: Tensor
    in_v: Tensor
    phi: float | None = None


def set_out(loop: Loop, phi: float | None) -> Trail:
    """A trail with nothing behind it."""
    theta, v = loop.problem.theta.flat(), loop.problem.v.flat()
    return Trail(theta, v, torch.zeros_like(theta), torch.zeros_like(v), phi)


def both_levels(
    loop: Loop,
    trail: Trail,
    estimator: Estimator,
    products: int,
    phi: float | None,
    inner_momentum: float | Schedule,
    outer_momentum: float | Schedule,
) -> tuple[Trail, StepInfo]:
    """One iteration with recursive momentum on theta and on v: both directions at the same point, then both moves."""
    theta, v = loop.problem.theta, loop.problem.v
    eta_theta, eta_v = momentum_at(inner_momentum, loop.clock), momentum_at(outer_momentum, loop.clock)

    objective = loop.objective(loop.inner_batch(), loop.seed() + 1)
    found = loop.gradient(objective)
    in_theta = theta.flatten(found.gradient)
    sample = draw(loop, estimator, products)
    series, phi = scaled(loop, sample, phi, trail.phi)
    in_v = v.flatten(series.leaves)

    with loop.temporarily_at(trail.theta, trail.v):
        if eta_theta < 1:
            there = loop.replay(objective).inner_gradients(in_v=False).theta
            in_theta = in_theta + (1 - eta_theta) * (trail.in_theta - there)
        # A direction of another scale is no memory of this one: momentum begins again when phi is halved.
        if eta_v < 1 and phi == trail.phi:
            old = estimate(loop, sample, phi)
            in_v = in_v + (1 - eta_v) * (trail.in_v - v.flatten(old.leaves))

    here = Trail(theta.flat(), v.flat(), in_theta, in_v, phi)
    loop.move_theta(theta.unflatten(in_theta))
    norm = loop.move_v(v.unflatten(in_v))
    loop.recent.clear()  # many batches, and none of them bad
    notes = {"products": sample.products, "phi": phi}
    return here, StepInfo(float(series.value), float(found.value), norm, notes=notes)
