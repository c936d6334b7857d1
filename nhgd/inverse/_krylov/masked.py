"""Conjugate gradients with a fixed number of products and no host reads: after convergence, iterates stay unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nhgd import _tape as tape
from nhgd.errors import NonFiniteError


class Smoothed:
    """`LeastResidual`, without a number that the host reads."""

    def __init__(self, x: Tensor, r: Tensor) -> None:
        self.x, self._r, self.length = x.clone(), r.clone(), r.norm().double()

    def note(self, x: Tensor, r: Tensor, length: Tensor, going: Tensor) -> None:
        """Note one more iterate, if the iteration was still `going`."""
        take = going & (length <= self.length)
        change = r - self._r
        eta = (-self._r.dot(change)).double() / change.dot(change).double()
        mix = going & ~take & torch.isfinite(eta)
        part = torch.where(mix, eta, 0.0).to(x.dtype)
        mixed = self._r.addcmul(change, part)
        self.x = torch.where(take, x, torch.where(mix, self.x.lerp(x, part), self.x))
        self._r = torch.where(take, r, torch.where(mix, mixed, self._r))
        self.length = torch.where(take, length, torch.where(mix, mixed.norm().double(), self.length))


def masked(
    owner: str,
    product: Callable[[Tensor], Tensor],
    u: Tensor,
    steps: int,
    tol: float,
    start: Tensor | None,
    precondition: Callable[[Tensor], Tensor] | None,
) -> tuple[Tensor, Any, dict[str, Any]]:
    """x, its relative residual and notes, as `pcg` has them, with the same arguments.

    All products are taken, also those that follow the end. Where the curvature vanishes, or below a preconditioner is
    negative at once, the values must be read on the host: the run then continues without captured steps.
    """
    eps, tiny = torch.finfo(u.dtype).eps, torch.finfo(u.dtype).tiny
    length = u.norm().double()
    fresh = torch.ones((), dtype=torch.bool, device=u.device)  # begun at zero
    size = length.clamp_min(tiny)
    x, r = torch.zeros_like(u), u.clone()
    if start is not None:
        left = u - product(start)
        better = left.norm() < u.norm()
        fresh = ~(better & start.ne(0).any())
        x, r = torch.where(better, start, x), torch.where(better, left, r)
    z = r if precondition is None else precondition(r)
    p, rz = z.clone(), r.dot(z).double()
    best = Smoothed(x, r)
    length = rz.sqrt() if precondition is None else best.length

    def reached() -> Tensor:
        found: Tensor = length <= tol * size if precondition is None else ~(best.length / size > tol)
        return found

    no = torch.zeros((), dtype=torch.bool, device=u.device)
    going, negative, vanished, bad = ~reached(), no, no, no
    largest, taken = torch.zeros_like(size), torch.zeros_like(size)
    for last in range(steps - 1, -1, -1):
        hp = product(p)
        taken = taken + going
        wide = (p.float(), hp.float()) if p.dtype.itemsize < 4 else (p, hp)
        along, pp, steepness = torch.stack([wide[0].dot(wide[1]), wide[0].dot(wide[0]), wide[1].dot(wide[1])]).double()
        bad = bad | (going & ~torch.isfinite(along))
        largest = torch.where(going & (pp > 0), torch.maximum(largest, (steepness / pp).sqrt()), largest)
        rounding = eps * largest * pp
        small, clearly = going & ~(along > rounding), along < -100 * rounding
        negative, vanished = negative | (small & clearly), vanished | (small & ~clearly)
        going = going & (along > 0)
        negative, vanished = negative | (going & (rz < 0)), vanished | (going & (rz == 0))
        going = going & (rz > 0)
        alpha = torch.where(going, rz / along, 0.0).to(u.dtype)
        x, r, old = x.addcmul(p, alpha), r.addcmul(hp, -alpha), rz
        if precondition is None:
            rz = torch.where(going, r.dot(r).double(), rz)
            length = torch.where(going, rz.sqrt(), length)
        else:
            length = torch.where(going, r.norm().double(), length)
        best.note(x, r, length, going)
        going = going & ~reached()
        if last and precondition is not None:
            z = precondition(r)
            rz = torch.where(going, r.dot(z).double(), rz)
        if last:
            p = torch.where(going, p * (rz / old).to(p.dtype) + (r if precondition is None else z), p)
    sound = ~negative & (length <= torch.minimum(size, 10 * best.length))
    found, length = torch.where(sound, x, best.x), torch.where(sound, length, best.length)
    vanished = vanished & ~negative
    doubt = vanished if precondition is None else vanished | (negative & fresh & (taken == 1))
    tape.defer(_looked_at, owner, tape.reading(bad), tape.reading(doubt))
    notes = {
        "iterations": tape.defer(int, tape.reading(taken)),
        "negative_curvature": tape.defer(bool, tape.reading(negative)),
    }
    return found, tape.reading(length / size), notes


def _looked_at(owner: str, bad: float, doubt: float) -> None:
    if bad:
        raise NonFiniteError(f"{owner}: the curvature along a search direction is not finite.")
    if doubt:
        raise tape.NotRepeatable(f"{owner} met zero or negative curvature, and must read its values on the host")
