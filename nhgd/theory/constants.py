"""The constants of the paper's assumptions, on which every bound depends."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import final

from nhgd._validation import Validated, not_negative, positive
from nhgd.errors import InputError


@final
@dataclass(frozen=True)
class Constants(Validated):
    """The constants of assumptions 1 to 4 of the NHGD paper, for a loss l(v, theta, xi) of one sample, ridge included.

    Those of the inner problem suffice for theorem 1; the others default to None, and a function that needs one of them
    says so. A Lipschitz constant is "in theta" at fixed v, or "in v" at fixed theta.

    Args:
        mu: strong convexity of l in theta (assumption 1).
        L: smoothness of l in (v, theta) jointly (assumption 1).
        R: radius of the ball around 0 that theta is projected on. Two of its points are at most 2 R apart.
        C_1: largest distance between the gradient of one sample and the mean gradient (assumption 4).
        d_2: number of inner parameters.
        d_1: number of outer parameters.
        D_1: bound of |grad_theta f| (assumption 2).
        L_f_v, L_f_theta: Lipschitz constants in theta of grad_v f and grad_theta f.
        Lbar_f_v, Lbar_f_theta: the same in v.
        L_cross, L_hessian: Lipschitz constants in theta of the cross derivative and of the Hessian of the inner
            objective (L_{l_{theta,v}} and L_{l_{theta,theta}} in the paper).
        Lbar_cross, Lbar_hessian: the same in v.
        C_a, C_b: the absolute constants that the proof of the SGD lemma takes from a textbook without a value. 1
            suffices for both: Hoeffding's lemma gives the bound on the moment generating function of (theta - theta*).e
            with C_a = 1, and |e| is bounded, which gives that of |e|^2 with C_b = 1.

    >>> Constants(mu=0.5, L=1.0, R=1.0, C_1=1.0, d_2=10).q
    32.0
    """

    mu: float
    L: float
    R: float
    C_1: float
    d_2: int
    d_1: int | None = None
    D_1: float | None = None
    L_f_v: float | None = None
    L_f_theta: float | None = None
    Lbar_f_v: float | None = None
    Lbar_f_theta: float | None = None
    L_cross: float | None = None
    L_hessian: float | None = None
    Lbar_cross: float | None = None
    Lbar_hessian: float | None = None
    C_a: float = 1.0
    C_b: float = 1.0

    def __post_init__(self) -> None:
        positive("Constants", mu=self.mu, L=self.L, R=self.R, C_a=self.C_a, C_b=self.C_b)
        not_negative("Constants", C_1=self.C_1)
        if self.mu > self.L:
            raise InputError(
                f"mu = {self.mu:g} is above L = {self.L:g}: no function is more convex than smooth. Exchange them, or"
                " estimate them again."
            )
        for name in ("d_1", "d_2"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} counts parameters, so it is at least 1; got {value}.")
        for f in fields(self)[6:15]:
            if getattr(self, f.name) is not None:
                not_negative("Constants", **{f.name: getattr(self, f.name)})

    @property
    def q(self) -> float:
        """8 L^2 / mu^2, the shift of the inner step sizes."""
        return 8 * self.L**2 / self.mu**2

    @property
    def distance(self) -> float:
        """The largest distance between two points of the ball, 2 R.

        The proofs write R for it (l. 796, 1091), as if the minimiser were the centre of the ball.
        """
        return 2 * self.R

    @property
    def gradient(self) -> float:
        """The bound of |grad_theta l| for one sample, L 2R + C_1; L R + C_1 in the paper, see `distance`."""
        return self.L * self.distance + self.C_1

    def needed(self, *names: str) -> tuple[float, ...]:
        """The values of constants that may be missing.

        Raises:
            InputError: naming those that are None.
        """
        missing = [name for name in names if getattr(self, name) is None]
        if missing:
            raise InputError(
                f"This bound needs {', '.join(missing)}, which these Constants do not have. Give them:"
                f" dataclasses.replace(constants, {missing[0]}=...)."
            )
        return tuple(float(getattr(self, name)) for name in names)
