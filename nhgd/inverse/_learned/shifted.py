"""The exact solve of one layer whose factor of scores is small, without decomposing that of its inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from nhgd.inverse._learned.eigenbasis import Solve, check_finite, eigenvalues

FEW = 16  # rows of the factor of scores: a Cholesky factor of the other is held for each
WIDE = 128  # rows of the other: smaller ones a GPU decomposes in as short a time
MOST = 2**26  # numbers in all Cholesky factors


def pays(a: Tensor, g: Tensor) -> bool:
    """Whether that is faster than eigendecompositions: on a GPU, three times, where few systems are wide."""
    few = g.shape[1] <= FEW and len(g) * g.shape[1] * a.shape[1] ** 2 <= MOST
    return a.is_cuda and a.shape[1] >= WIDE and few


@torch.no_grad()
def shifted_solver(layer: str, a: Tensor, g: Tensor, extra: float) -> Solve | None:
    """b -> (A (x) G + extra I)^{-1} b for matrices b, (G, out, in), by a Cholesky factor for each eigenvalue of G.

        G = Q diag(g) Q^T,        X = Q Y,        (g_i A + extra I) y_i = (Q^T b)_i        for the rows of Y

    None where `extra` is too small for Cholesky factors in these digits.

    Args:
        layer: its name, for errors.
        a: (G, in, in).
        g: (G, out, out).
        extra: ridge and damping, above 0.
    """
    check_finite(layer, a)
    values, q = eigenvalues(layer, g)
    eye = torch.eye(a.shape[1], dtype=a.dtype, device=a.device)
    systems = torch.addcmul(extra * eye, values.clamp_min(0)[:, :, None, None], a[:, None])
    lower, info = torch.linalg.cholesky_ex(systems)
    if bool((info != 0).any()):
        return None
    return lambda b: q @ torch.cholesky_solve((q.mT @ b)[..., None], lower)[..., 0]
