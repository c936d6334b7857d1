"""The solve of one layer by products of matrices alone: nothing is decomposed, and no number is read by the host."""

from __future__ import annotations

import torch
from torch import Tensor

from nhgd import _tape as tape
from nhgd.inverse._learned.eigenbasis import Solve
from nhgd.inverse._learned.layer_ridge import tolerance


def matrix_solver(a: Tensor, g: Tensor, extra: float | Tensor, iterations: int) -> Solve:
    """b -> x close to (A (x) G + extra)^{-1} b for matrices b, (G, out, in), by conjugate gradients.

        X -> G X A + extra * X,        preconditioned by its diagonal  g_ii a_jj + extra

    All iterations are made; after the relative residual has reached its tolerance they change nothing. Each group has
    step lengths of its own. The relative error falls by a factor of about (sqrt(c) - 1) / (sqrt(c) + 1) with each,
    where c is the condition of the preconditioned system, so a small `extra` needs many.

    Args:
        a: (G, in, in).
        g: (G, out, out).
        extra: ridge and damping, a number or one for each entry, (G, out, in).
    """
    shift = extra if isinstance(extra, Tensor) else tape.on_device(extra)
    shift = shift.to(a.dtype) if isinstance(shift, Tensor) else shift
    diagonal = g.diagonal(dim1=1, dim2=2)[:, :, None] * a.diagonal(dim1=1, dim2=2)[:, None] + shift

    return conjugate(a, g, shift, lambda r: r / diagonal, iterations, tolerance(a.dtype))


def conjugate(a: Tensor, g: Tensor, shift: float | Tensor, near: Solve, iterations: int, tol: float = 0.0) -> Solve:
    """b -> (A (x) G + shift)^{-1} b for matrices b, (G, out, in), by iterations that `near` preconditions.

    They change nothing once the relative residual is at most `tol`.
    """

    def solve(b: Tensor) -> Tensor:
        x, r = torch.zeros_like(b), b
        z = near(r)
        p, rz = z, _dot(r, z)
        enough = tol**2 * _dot(b, b)
        for last in range(iterations - 1, -1, -1):
            hp = g @ p @ a + shift * p
            curvature = _dot(p, hp)
            going = (curvature > 0) & (_dot(r, r) > enough)
            alpha = torch.where(going, rz / curvature, 0.0)
            x = x.addcmul(alpha, p)
            if last:
                r = r.addcmul(alpha, hp, value=-1)
                z = near(r)
                old, rz = rz, _dot(r, z)
                p = z.addcmul(torch.where(old > 0, rz / old, 0.0), p)
        return x

    return solve


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Of each group, (G, 1, 1)."""
    return (a * b).sum((1, 2), keepdim=True)
