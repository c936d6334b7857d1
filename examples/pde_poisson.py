"""Another equation by subclassing: the source of a Poisson problem that makes its solution follow a target.

    python examples/pde_poisson.py              half a minute on a laptop
    python examples/pde_poisson.py --tiny       seconds

    -(u_xx + u_yy) = f(x, y) on the unit square,  u = 0 on its sides,   f = sum_kl v_kl sin(k pi x) sin(l pi y)
    minimise  mean (u - u_ref)^2 + alpha mean f^2,                      u_ref = sin(pi x) sin(pi y)

On the first mode the equation reads 2 pi^2 u = f, so the best source is v_11 = 2 pi^2 / (1 + alpha (2 pi^2)^2) with all
other coefficients zero. The script compares its result with it.
"""

import argparse
import math

import torch

import nhgd
from nhgd.inverse import FisherWindow
from nhgd.task._inner_solver import gauss_newton
from nhgd.task.pde.equation import AbstractResidual, box, sides

ALPHA = 1e-3


def source(v, x):
    """f at points (N, 2) from its coefficients (K, K)."""
    k = torch.arange(1, len(v) + 1, dtype=x.dtype, device=x.device)
    return torch.einsum("nk,kl,nl->n", torch.sin(math.pi * k * x[:, :1]), v, torch.sin(math.pi * k * x[:, 1:]))


def wanted(x):
    """u_ref."""
    return torch.sin(math.pi * x[:, 0]) * torch.sin(math.pi * x[:, 1])


class Poisson(AbstractResidual):
    """The equation, in three methods."""

    dimension = 2
    space = 2

    def __init__(self, interior, side):
        self.interior, self.side = interior, side

    def sample(self, seed):
        """Where the points of each condition are: inside, and on the sides."""
        low, high = torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
        return box(self.interior, low, high, (*seed, 0)), sides(self.side, low, high, (*seed, 1))

    def residuals(self, u, control, x):
        """What each condition wants to be zero."""
        return -u.laplacian - source(control, x), u.value

    def outer(self, net, control, batch):
        """What the source is judged by."""
        x = batch[0]
        return (net(x) - wanted(x)).square().mean() + ALPHA * source(control, x).square().mean()


def main(arguments=None):
    """Solve, and tell how far the source is from the best one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    tiny = parser.parse_args(arguments).tiny
    equation = Poisson(interior=64 if tiny else 256, side=12 if tiny else 32)
    net = equation.net((10, 10) if tiny else (20, 20), seed=0).double()
    v = torch.zeros(2, 2, dtype=torch.float64) if tiny else torch.zeros(4, 4, dtype=torch.float64)
    problem = equation.problem(net, v)
    points = equation.collocation((0,), dtype=torch.float64)
    line = torch.linspace(0, 1, 21, dtype=torch.float64)
    gauss_newton(problem, points, steps=10, floor=1e-8)  # the state of the first source

    inverse = FisherWindow(window=len(points[0]), fisher="exact", records="sample", damping=1e-6)
    method = nhgd.algorithm.NHGD(inverse, observe="end", inner="natural", natural_steps=1, natural_floor=1e-8)
    solver = nhgd.Solver(
        problem,
        nhgd.Data(*points),
        [(torch.cartesian_prod(line, line),)],
        method=method,
        outer_optimizer=torch.optim.Adam,
        outer_lr=nhgd.schedule.Decay(0.5, final=0.05, hold=0.3),
    )
    history = solver.run(steps=120 if tiny else 200).history
    best = torch.zeros_like(v)
    best[0, 0] = 2 * math.pi**2 / (1 + ALPHA * (2 * math.pi**2) ** 2)
    error = float((v - best).norm() / best.norm())
    print(f"outer loss {history[0]['outer_loss']:.4f} -> {history[-1]['outer_loss']:.4f}")
    print(f"source: relative distance {error:.4f} from the best, inner loss {history[-1]['inner_loss']:.1e}")
    return error


if __name__ == "__main__":
    main()
