"""The best iterate of a solve."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

GAIN = 0.9  # of the residual at the first suspicion: a smaller one is not a rounding error


class LeastResidual:
    """Of the iterates so far and their combinations, one whose residual is least.

        y <- x, s <- r                                    where |r| <= |s|
        y <- y + eta (x - y),   s <- s + eta (r - s)      else, with eta = -s.(r - s) / |r - s|^2

    The residuals of conjugate gradients rise and fall, and if u has a part outside the range of H they grow without
    bound, together with x. The residual here never grows: if they rise from the first step on, it is that of the method
    of minimal residuals; if they always fall, it is that of the last iterate. It costs no product.

    Args:
        x, r: the first iterate and its residual u - H x. Both may be changed in place afterwards.

    Attributes:
        x: the best x.
        length: of its residual.

    References: R. Weiss, Convergence behavior of generalized conjugate gradient methods, 1990 (residual smoothing).
    """

    def __init__(self, x: Tensor, r: Tensor) -> None:
        self.x, self._r = x.clone(), r.clone()
        self.length = float(r.norm())
        self._sure: tuple[Tensor, float] | None = None

    def suspect_rounding(self) -> None:
        """Residuals may be mere rounding errors from now on: keep the best iterate of the first such moment."""
        if self._sure is None:
            self._sure = self.x.clone(), self.length

    def note(self, x: Tensor, r: Tensor, length: float) -> None:
        """One more iterate, its residual and the length of that."""
        if length <= self.length:
            self.x.copy_(x)
            self._r.copy_(r)
            self.length = length
            return
        change = r - self._r
        eta = float(-self._r.dot(change) / change.dot(change))
        if math.isfinite(eta):
            self.x.lerp_(x, eta)
            self._r.add_(change, alpha=eta)
            self.length = float(self._r.norm())

    def unless_sound(self, x: Tensor, length: float, size: float) -> tuple[Tensor, float]:
        """The last iterate, if its residual is at most that of zero, `size`, and at most ten times the least; else the
        best x.

        On a positive definite system the last iterate is closest to the solution, even if its residual is not the
        least: up to twice as close as the combination. If it is not sound, it can be anything.
        """
        return (x, length) if length <= min(size, 10 * self.length) else (self.x, self.length)

    def lost(self, length: float) -> bool:
        """Whether a residual of this length, after a suspicion, shows that the iteration follows rounding errors."""
        return self._sure is not None and not length * torch.finfo(self.x.dtype).eps <= self._sure[1]

    def confirmed(self, x: Tensor, residual: Callable[[Tensor], Tensor]) -> tuple[Tensor, float, bool]:
        """x, the length of its residual, and True, if that residual, recomputed, is clearly below the one at the
        first suspicion.

        Otherwise the best at that time, and False.
        """
        if self._sure is None:
            return self.x, self.length, True
        length = float(residual(x).norm())
        return (x, length, True) if length <= GAIN * self._sure[1] else (*self._sure, False)
