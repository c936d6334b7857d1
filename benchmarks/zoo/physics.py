"""Problems whose theta is a field or a vector that minimises a quadratic energy, and whose v drives it."""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import nhgd
from benchmarks.zoo.case import Batch, Case, half_stable_step, randomness

POWER = 20.0  # of a source of strength 1, which makes the plate about as warm


def poisson(seed: int, file: Path | None = None) -> Case:
    """Sixteen heat sources v on a plate whose edge is cold, chosen so that the temperature theta is what sensors say.

    - Laplace theta = sum_j v_j bump_j,     as the least of the energy |grad theta|^2 / 2 - f theta, summed over a grid
    """
    generator = randomness(seed)
    side, coarse = 12, 4
    step = 1 / (side + 1)
    line = torch.arange(1, side + 1, dtype=torch.float64) * step
    centres = (torch.arange(coarse, dtype=torch.float64) + 0.5) / coarse

    def bumps(points: Tensor) -> Tensor:
        """Each source at each point of a line, (points, coarse)."""
        return (-(points[:, None] - centres).square() / (2 * 0.15**2)).exp()

    def field(v: Tensor) -> Tensor:
        return POWER * torch.einsum("ai,bj,ij->ab", bumps(line), bumps(line), v.reshape(coarse, coarse))

    def inner(theta: Tensor, v: Tensor, batch: Batch) -> nhgd.Losses:
        cold = F.pad(theta, (1, 1, 1, 1))
        down, right = cold[1:, 1:] - cold[:-1, 1:], cold[1:, 1:] - cold[1:, :-1]  # (side + 1, side + 1)
        heat = F.pad(field(v) * theta, (0, 1, 0, 1))
        energy = (down.square() + right.square()) / 2 - step**2 * heat
        return nhgd.Losses(energy.reshape(-1)[batch[0]] * len(energy) ** 2)

    def outer(theta: Tensor, v: Tensor, batch: Batch) -> Tensor:
        index, value = batch[:2]
        return (theta.reshape(-1)[index] - value).square().mean()

    laplace = torch.zeros(side**2, side**2, dtype=torch.float64)
    for i in range(side**2):
        a, b = divmod(i, side)
        laplace[i, i] = 4
        for c, d in ((a - 1, b), (a + 1, b), (a, b - 1), (a, b + 1)):
            if 0 <= c < side and 0 <= d < side:
                laplace[i, c * side + d] = -1
    truth = 2 * torch.rand(coarse**2, generator=generator, dtype=torch.float64) - 0.5
    heat = torch.linalg.solve(laplace, step**2 * field(truth).reshape(-1))
    noise = torch.randn(side**2, generator=generator, dtype=torch.float64)
    sensed = heat + 0.02 * heat.std() * noise
    order = torch.randperm(side**2, generator=generator)
    parts = [(part, sensed[part]) for part in order.split([48, 32, 64])]
    problem = nhgd.Bilevel(
        inner,
        outer,
        theta=torch.zeros(side, side, dtype=torch.float64),
        v=torch.zeros(coarse**2, dtype=torch.float64),
    )
    cells = torch.arange((side + 1) ** 2)
    return Case(
        problem,
        nhgd.Data(cells),
        nhgd.Data(*parts[0]),
        parts[1],
        parts[2],
        inner_lr=half_stable_step(problem, (cells,)),
        inner_steps=20,
        outer_steps=100,
    )


def quadratic(seed: int, file: Path | None = None) -> Case:
    """Least squares whose targets are linear in v, with a Hessian of condition number 1,000."""
    generator = randomness(seed)
    width, drivers = 40, 10

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    turn = torch.linalg.qr(normal(width, width)).Q
    spectrum = torch.logspace(0, -3, width, dtype=torch.float64)
    x = normal(200, width) * spectrum.sqrt() @ turn.T
    response = normal(width, drivers) / math.sqrt(drivers)
    drive = x @ response + 0.1 * normal(200, drivers)  # targets are drive @ v
    target = torch.linalg.lstsq(x, drive @ normal(drivers)).solution

    def samples(count: int) -> Batch:
        found = normal(count, width)
        return found, found @ target + 0.1 * normal(count)

    def inner(theta: Tensor, v: Tensor, batch: Batch) -> nhgd.Losses:
        x, drive, _ = batch
        outputs = (x @ theta)[:, None]
        return nhgd.Losses((outputs[:, 0] - drive @ v).square() / 2, outputs=outputs)

    def outer(theta: Tensor, v: Tensor, batch: Batch) -> Tensor:
        return (batch[0] @ theta - batch[1]).square().mean() / 2

    problem = nhgd.Bilevel(
        inner,
        outer,
        theta=torch.zeros(width, dtype=torch.float64),
        v=torch.zeros(drivers, dtype=torch.float64),
        likelihood="gaussian",
    )
    data = nhgd.Data(x, drive, batch=100)
    return Case(
        problem,
        data,
        nhgd.Data(*samples(60), batch=30),
        samples(200),
        samples(1000),
        inner_lr=half_stable_step(problem, data.take(torch.arange(200))),
        inner_steps=20,
        outer_steps=100,
    )
