"""The method of minimal residuals, for Hessians that are indefinite or singular."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


def range_tolerance(dtype: torch.dtype) -> float:
    """From where on |H r| / (|H| |r|) is watched: a residual outside of the range of H has 0 there, but for
    rounding.
    """
    return max(1e-8, 100 * torch.finfo(dtype).eps)


class Minimal(NamedTuple):
    """The end of an iteration: x, and the size of the largest eigenvalue seen."""

    x: Tensor
    largest: float


def minimal_residuals(product: Callable[[Tensor], Tensor], u: Tensor, tol: float, steps: int) -> Minimal:
    """x with the least |H x - u| for a symmetric H, from products alone.

    It stops after `steps` products, when |r| <= tol |u|, or when |H r| <= tol |H| |r|: the residual r = u - H x then
    lies outside of the range of H. For a u within the range x is the shortest solution.

    References: C. C. Paige, M. A. Saunders, Solution of sparse indefinite systems of linear equations, 1975, section 6;
    S.-C. Choi, C. C. Paige, M. A. Saunders, MINRES-QLP: a Krylov subspace method for indefinite or singular symmetric
    systems, 2011, section 2 (stopping rules).
    """
    x, w, before = torch.zeros_like(u), torch.zeros_like(u), torch.zeros_like(u)
    y, r1, r2 = u.clone(), u.clone(), u.clone()
    size = beta = left = float(u.norm())
    tiny = torch.finfo(u.dtype).tiny
    old, dbar, epsilon, squares, cosine, sine = 0.0, 0.0, 0.0, 0.0, -1.0, 0.0
    largest, flattest, found, watched = 0.0, math.inf, x, range_tolerance(u.dtype)
    for taken in range(steps if size > 0 else 0):
        v = y / beta
        y = product(v)
        largest = max(largest, float(y.norm()))
        if taken:
            y = y - (beta / old) * r1
        alpha = float(v.dot(y))
        y = y - (alpha / beta) * r2
        r1, r2 = r2, y
        old, beta = beta, float(y.norm())
        squares += alpha**2 + old**2 * (taken > 0) + beta**2
        delta, gbar = cosine * dbar + sine * alpha, sine * dbar - cosine * alpha
        last, epsilon, dbar = epsilon, sine * beta, -cosine * beta
        if not squares > 0:  # H u = 0
            break
        slope = math.hypot(gbar, dbar) / squares**0.5  # |H r| / (|H| |r|) of the x before this product
        if slope < flattest:
            flattest, found = slope, x.clone() if slope < watched else found
        elif flattest < watched and slope > 10 * flattest:
            break  # rounding errors have taken over
        if slope <= tol:
            break
        gamma = max(math.hypot(gbar, beta), tiny)
        cosine, sine = gbar / gamma, beta / gamma
        step, left = cosine * left, sine * left
        before, w = w, (v - last * before - delta * w) / gamma
        x.add_(w, alpha=step)
        if left <= tol * size or beta <= tiny:
            return Minimal(x, largest)
    return Minimal(found if flattest < watched else x, largest)
