"""Conjugate gradients, with or without a preconditioner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from nhgd import _tape as tape
from nhgd.inverse._krylov.curvature import DirectionalCurvature
from nhgd.inverse._krylov.least_residual import LeastResidual
from nhgd.inverse._krylov.masked import masked

Product: TypeAlias = Callable[[Tensor], Tensor]


class Iterate(NamedTuple):
    """The end of an iteration: x, |H x - u| / |u|, and notes by name."""

    x: Tensor
    residual: float
    notes: dict[str, Any]


def pcg(
    owner: str,
    product: Product,
    u: Tensor,
    steps: int,
    tol: float,
    start: Tensor | None = None,
    precondition: Product | None = None,
) -> Iterate:
    """Approximate H^{-1} u by at most `steps` products, from `start` if it is better than zero.

        r = u - H x,  z = M^{-1} r,  p = z
        repeat:  alpha = r.z / p.Hp;  x += alpha p;  r_new = r - alpha Hp;  z_new = M^{-1} r_new
                 p = z_new + (r_new.z_new / r.z) p

    It stops at a relative residual of `tol`, and on curvature that is not positive. After a curvature of rounding size
    one more product shows whether the residual fell. On negative curvature in the first step from zero, x is M^{-1} u
    itself, shortened if its product is more than ten times as long as u.

    Args:
        owner: the name in messages.
        product: x -> H x.
        precondition: r -> M^{-1} r, symmetric and positive; None: the identity.

    References: J. Nocedal, S. J. Wright, Numerical Optimization, 2006, algorithms 5.2, 5.3 and 7.1 (negative
    curvature).
    """
    if tape.tape() is not None:
        return Iterate(*masked(owner, product, u, steps, tol, start, precondition))
    size = max(float(u.norm()), torch.finfo(u.dtype).tiny)
    x, r = first_iterate(u, product, start)
    untouched = not bool(x.any())
    z = r if precondition is None else precondition(r)
    p, hp = z.clone(), z
    rz = float(r.dot(z))
    best, seen = LeastResidual(x, r), DirectionalCurvature(owner, u.dtype)
    length = rz**0.5 if precondition is None else best.length
    taken = 0

    def reached() -> bool:
        # Without a preconditioner the last residual decides, which the recursion tracks; otherwise the least one.
        return length <= tol * size if precondition is None else not best.length / size > tol

    while not reached() and taken < steps:
        hp = product(p)
        taken += 1
        going = seen.positive(p, hp, taken)
        if going and not rz > 0:  # a positive M never gives this, one made from a Hessian with negative curvature may
            seen.negative, seen.vanished, going = rz < 0, rz == 0, False
        if seen.vanished:
            best.suspect_rounding()
        if not going:
            break
        alpha = rz / seen.last
        x.add_(p, alpha=alpha)
        r.sub_(hp, alpha=alpha)
        old = rz
        if precondition is None:
            rz = float(r.dot(r))
        length = rz**0.5 if precondition is None else float(r.norm())
        if best.lost(length):
            break
        best.note(x, r, length)
        if reached() or taken == steps:
            break
        if precondition is not None:
            z = precondition(r)
            rz = float(r.dot(z))
        p.mul_(rz / old).add_(z)
    found, length = (best.x, best.length) if seen.negative else best.unless_sound(x, length, size)
    if seen.vanished and not seen.negative:
        found, length, real = best.confirmed(found, lambda x: u - product(x))
        seen.vanished = not real
    notes = {"iterations": taken, **seen.notes(found, length, size)}
    if precondition is not None and seen.negative and untouched and taken == 1:
        long = float(hp.norm())
        shrink = 1.0 if long <= 10 * size else size / long
        return Iterate(shrink * z, float((r - shrink * hp).norm()) / size, notes)
    return Iterate(found, length / size, notes)


def first_iterate(u: Tensor, product: Product, start: Tensor | None) -> tuple[Tensor, Tensor]:
    """A first x, which may be changed in place, and its residual u - H x.

    A given start is taken only where its residual is smaller than that of zero: far from the last point it can be
    worse.
    """
    if start is not None:
        r = u - product(start)
        if float(r.norm()) < float(u.norm()):
            return start.clone(), r
    return torch.zeros_like(u), u.clone()
