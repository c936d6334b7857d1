"""Control of the heat equation, and the true value of a control without any network.

u is linear in the control, so the misfit is a quadratic form in the control's values over time. By Duhamel's principle

    u(x, y, t) = int_0^t f(s) g(x, t - s) g(y, t - s) ds
    g(x, tau)  = 1 - sum_{j >= 0} (-1)^j ( erfc((j + x) / r) + erfc((j + 1 - x) / r) ),      r = 2 sqrt(nu tau)

where g is the heat flow of the constant 1 on the unit interval with zero ends, by reflection. A square factorises, so
one dimension is enough; no series in sines has to resolve the thin layers at the sides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, final

import torch
from torch import Tensor
from typing_extensions import override

from nhgd._validation import counted, positive
from nhgd.task.pde.equation import AbstractResidual, Control, box, sides
from nhgd.task.pde.jet import Jet, JetNet

END = 2.0  # the last time
NODES = 201  # of the control in time
SIDE = 11  # nodes in x and in y where the public reference code evaluates


def target(x: Tensor, y: Tensor, t: Tensor) -> Tensor:
    """The target of the state: 16 x (1 - x) y (1 - y) sin(pi t)."""
    return 16 * x * (1 - x) * y * (1 - y) * torch.sin(math.pi * t)


def grid(side: int, times: int) -> Tensor:
    """All nodes of a uniform grid over the square and time, both ends included, (side^2 times, 3)."""
    line = torch.linspace(0, 1, side, dtype=torch.float64)
    return torch.cartesian_prod(line, line, torch.linspace(0, END, times, dtype=torch.float64))


@final
class Heat(AbstractResidual):
    """The heat equation on the unit square, driven by a source that depends on time alone.

        u_t - nu (u_xx + u_yy) = f(t),      u = 0 on the sides and at t = 0
        outer: mean ( u - u_ref )^2 over the outer points

    Args:
        nu: the conductivity.
        interior, side, initial: how many points there are inside, on each of the four sides, and at t = 0.

    >>> heat = Heat(interior=16, side=8, initial=4)
    >>> [len(x) for x in heat.sample(seed=(0,))]
    [16, 32, 4]
    """

    dimension = 3
    space = 2

    def __init__(self, nu: float = 1e-3, interior: int = 1024, side: int = 256, initial: int = 256) -> None:
        positive("heat", nu=nu)
        counted("heat", interior=interior, side=side, initial=initial)
        self.nu = nu
        self.interior = interior
        self.side = side
        self.initial = initial

    @override
    def sample(self, seed: tuple[int, ...]) -> list[Tensor]:
        low, high = torch.zeros(3, dtype=torch.float64), torch.tensor([1.0, 1.0, END], dtype=torch.float64)
        first = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
        return [
            box(self.interior, low, high, (*seed, 0)),
            sides(self.side, low, high, (*seed, 1), coordinates=(0, 1)),
            box(self.initial, low, first, (*seed, 2)),
        ]

    @override
    def residuals(self, u: Jet, control: Control, x: Tensor) -> tuple[Tensor, ...]:
        """The residuals of the equation, and of the state where it must vanish."""
        source = control(x[:, 2:])[:, 0]
        return u.gradient[:, 2] - self.nu * u.laplacian - source, u.value, u.value

    @override
    def outer(self, net: JetNet, control: Control, batch: Any) -> Tensor:
        x, wanted = batch[:2]
        misfit: Tensor = (net(x) - wanted).square().mean()
        return misfit


def flow(x: Tensor, tau: Tensor, nu: float) -> Tensor:
    """g(x, tau): the rest, after a time tau, of a line that began at 1, its ends held at 0; arguments broadcast."""
    r = 2 * (nu * tau).sqrt()
    images = max(1, math.ceil(6 * float(r.max())))
    r = r.clamp_min(1e-30)
    left = torch.ones_like(x * tau)
    for j in range(images + 1):
        left = left - (-1) ** j * (torch.erfc((j + x) / r) + torch.erfc((j + 1 - x) / r))
    return left


@dataclass(frozen=True)
class QuadraticForm:
    """J(f) = f'A f - 2 b'f + c over the control's values at `times`, piecewise linear between them."""

    times: Tensor  # (n,)
    A: Tensor  # (n, n)
    b: Tensor  # (n,)
    c: float

    def value(self, f: Tensor) -> float:
        """J(f)."""
        return float(f @ (self.A @ f) - 2 * self.b @ f) + self.c

    def gradient(self, f: Tensor) -> Tensor:
        """dJ/df, (n,)."""
        return 2 * (self.A @ f - self.b)

    def best(self) -> Tensor:
        """A minimiser, without the directions that J hardly feels.

        The node values of u are blind to a control that swings from node to node, so that with a size of 1e5 it would
        cheat a grid. Eigenvalues below 1e-4 of the largest are such directions; leaving them out costs less than 1e-6.
        """
        values, vectors = torch.linalg.eigh(self.A)
        kept = values > 1e-4 * values[-1]
        found: Tensor = vectors[:, kept] @ ((vectors[:, kept].T @ self.b) / values[kept])
        return found

    def bound(self) -> float:
        """The least value that a control piecewise linear on `times` can reach."""
        return self.value(self.best())


def responses(line: Tensor, i: Tensor, j: Tensor, nu: float, times: int = NODES) -> tuple[Tensor, Tensor]:
    """The contribution of a cell of time to the state at the points (line_i, line_j), for each of its two ends, (P,
    cells) both.

        u(t_k) = sum_c  near_c f(t_k - c h) + far_c f(t_k - (c + 1) h),      c = 0 .. k - 1

    for f linear in each cell. The integrals over a cell, where the flow is smooth, are taken by Gauss's rule.
    """
    h = END / (times - 1)
    nodes, weights = gauss(8)
    tau = h * (torch.arange(times - 1, dtype=torch.float64)[:, None] + nodes)  # (cells, 8)
    g = flow(line[:, None, None], tau, nu)  # (L, cells, 8)
    both = torch.stack([(1 - nodes) * weights, nodes * weights])
    near, far = h * torch.einsum("pce,pce,se->spc", g[i], g[j], both)
    return near, far


def duhamel(near: Tensor, far: Tensor) -> Tensor:
    """The matrices T with u(t_k) = sum_l T[p, k, l] f_l, (P, times, times), from responses (P, cells)."""
    last = near.shape[1]
    k = torch.arange(last + 1)
    age = k[:, None] - k
    found = torch.where((age >= 0) & (k >= 1), near[:, age.clamp(0, last - 1)], 0.0)
    return found + torch.where(age >= 1, far[:, (age - 1).clamp(0, last - 1)], 0.0)


def gauss(count: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights of Gauss's rule on (0, 1), from the Jacobi matrix of the Legendre polynomials."""
    k = torch.arange(1, count, dtype=torch.float64)
    off = k / (4 * k * k - 1).sqrt()
    values, vectors = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    return (values + 1) / 2, vectors[0].square()


def quadratic_form(nu: float, line: Tensor, i: Tensor, j: Tensor, weights: Tensor, moments: Tensor) -> QuadraticForm:
    """sum_p sum_k weights_p moments_k ( u(x_p, y_p, t_k) - u_ref )^2 as a quadratic form.

    Args:
        nu: the conductivity.
        line, i, j, weights: a rule over the square: points (line_i, line_j), (P,), and their weights.
        moments: (m,): a rule over time, on m uniform nodes that are also the control's.
    """
    times = torch.linspace(0, END, len(moments), dtype=torch.float64)
    near, far = responses(line, i, j, nu, len(times))
    wanted = target(line[i][:, None], line[j][:, None], times)  # (P, m)
    both = weights[:, None] * moments
    A = torch.zeros(len(times), len(times), dtype=torch.float64)
    b = torch.zeros(len(times), dtype=torch.float64)
    for some in torch.arange(len(i)).split(16):
        T = duhamel(near[some], far[some]).flatten(0, 1)
        weighted = both[some].flatten()[:, None] * T
        A += T.T @ weighted
        b += weighted.T @ wanted[some].flatten()
    return QuadraticForm(times, (A + A.T) / 2, b, float((both * wanted.square()).sum()))


@cache
def on_grid(nu: float) -> QuadraticForm:
    """The mean over the reference grid: 11 x 11 x 201 nodes with the boundary, where state and target vanish."""
    line = torch.linspace(0, 1, SIDE, dtype=torch.float64)[1:-1]
    i, j = torch.cartesian_prod(torch.arange(len(line)), torch.arange(len(line))).T
    weights = torch.full((len(i),), 1 / SIDE**2, dtype=torch.float64)
    moments = torch.full((NODES,), 1 / NODES, dtype=torch.float64)
    return quadratic_form(nu, line, i, j, weights, moments)


@cache
def continuous(nu: float) -> QuadraticForm:
    """The mean over the square and over time.

    In space Gauss's rule under x = sin^2, which crowds nodes at the sides; eight-fold symmetry leaves a triangle of the
    square. In time Simpson's rule.
    """
    z, w = gauss(16)
    line, share = torch.sin(math.pi * z / 4).square(), w * (math.pi / 4) * torch.sin(math.pi * z / 2)
    i, j = torch.triu_indices(len(line), len(line))
    weights = share[i] * share[j] * torch.where(i == j, 4.0, 8.0)
    moments = torch.full((NODES,), 2.0, dtype=torch.float64)
    moments[1::2] = 4.0
    moments[0] = moments[-1] = 1.0
    return quadratic_form(nu, line, i, j, weights, moments / moments.sum())


def state(nu: float, f: Tensor, side: int) -> Tensor:
    """The true state of a control, given at uniform times (m,), on a uniform grid over the square, (side, side, m)."""
    line = torch.linspace(0, 1, side, dtype=torch.float64)
    i, j = torch.cartesian_prod(torch.arange(side), torch.arange(side)).T
    near, far = responses(line, i, j, nu, len(f))
    age = torch.arange(len(f)) - torch.arange(len(f) - 1)[:, None]  # k - c, (cells, times)
    now = torch.where(age >= 1, f[age.clamp_min(0)], 0.0)
    before = torch.where(age >= 1, f[(age - 1).clamp_min(0)], 0.0)
    return (near @ now + far @ before).reshape(side, side, len(f))
