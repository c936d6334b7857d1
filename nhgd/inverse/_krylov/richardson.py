"""Richardson's iteration, gradient descent on 0.5 x.Hx - x.u, the basis of three methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from nhgd.inverse._krylov.spectrum import largest_eigenvalue
from nhgd.oracle import Oracle


def richardson(
    x: Tensor, r: Tensor, lr: float, residual: Callable[[Tensor, Tensor], Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Every x with its residual r, without end, the first included. A step is made when it is asked for.

        x <- x + lr r,      r <- residual(x, r)

    Args:
        residual: u - H x, from the new x or, as r - lr H r, from the residual before it.

    References: L. F. Richardson, The approximate arithmetical solution by finite differences of physical problems,
    1911.
    """
    while True:
        yield x, r
        x = x + lr * r
        r = residual(x, r)


def safe_step(at: Oracle, like: Tensor, power_steps: int, damping: float = 0.0) -> float:
    """1 / lambda_max of H + damping I from a power iteration, with which the iteration converges; 1 where H
    vanishes.
    """
    top = largest_eigenvalue(at, like, power_steps) + damping
    return 1.0 / top if top > 0 else 1.0
