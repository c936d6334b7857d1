"""What holds of a whole run: stationarity, and what it costs (section 4.2).

Where the paper's proof has a slip, the docstring names it and the function follows what the proof shows; lines are
those of the paper's source.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from nhgd._validation import positive
from nhgd.errors import InputError
from nhgd.theory.constants import Constants
from nhgd.theory.inner import T_0, c_prime, check_delta, cross_error, first_from, inverse_error


def L_v(c: Constants) -> float:
    """The smoothness of Phi (eq. L_v, from Ghadimi and Wang's lemma 2.2)."""
    f_v, f_theta, bar_f_v, bar_f_theta = c.needed("L_f_v", "L_f_theta", "Lbar_f_v", "Lbar_f_theta")
    cross, hessian, bar_cross, bar_hessian = c.needed("L_cross", "L_hessian", "Lbar_cross", "Lbar_hessian")
    (D_1,) = c.needed("D_1")
    k = c.L / c.mu
    moving = bar_cross / c.mu + k / c.mu * (bar_hessian + cross) + k**2 * hessian / c.mu
    return bar_f_v + k * (f_v + bar_f_theta) + k**2 * f_theta + D_1 * moving


def alpha(c: Constants) -> float:
    """The outer step size of theorem 2, 1 / (4 L_v)."""
    smoothness = L_v(c)
    if smoothness == 0:
        raise InputError("Phi is linear with these constants (L_v = 0), so theorem 2 prescribes no step size.")
    return 1 / (4 * smoothness)


def kappa(c: Constants) -> float:
    """L_f_v + L L_f_theta / mu: how an error of theta enters the hypergradient (lemma grad_error_decompose)."""
    f_v, f_theta = c.needed("L_f_v", "L_f_theta")
    return f_v + c.L * f_theta / c.mu


def psi(c: Constants) -> float:
    """psi = 3 (L_f_v + L L_f_theta / mu)^2 (eq. def_psi)."""
    return 3 * kappa(c) ** 2


def Lambda_1(c: Constants, T: float) -> float:
    """5 (1 + alpha L / mu (L_f_v + L L_f_theta / mu))^2 (q / (T + q))^2 (eq. def_Lambda1)."""
    return 5 * (1 + alpha(c) * c.L / c.mu * kappa(c)) ** 2 * (c.q / (T + c.q)) ** 2


def Lambda_2(c: Constants, T: float) -> float:
    """5 alpha^2 L^2 / mu^2 (q / (T + q))^2 (eq. def_Lambda2)."""
    return 5 * (alpha(c) * c.L / c.mu) ** 2 * (c.q / (T + c.q)) ** 2


def b(c: Constants, T: float, delta: float) -> float:
    """b(T, delta) = 5 c' (1 + log(1 / delta)) / (T + q) (eq. def_bT).

    Of the order log(1 / delta) / T; line 1589 says / sqrt(T).
    """
    return 5 * c_prime(c) * (1 - math.log(check_delta(delta))) / (T + c.q)


def T_hat(c: Constants) -> float:
    """The T from which a half of the squared hypergradients remains on the left (T_0 with a hat, l. 1610).

    q ( sqrt( 6 psi phi + beta ) - 1 ) with Lambda_1 = beta (q / (T + q))^2 and Lambda_2 = phi (q / (T + q))^2: the root
    of 6 psi Lambda_2 + Lambda_1 = 1.
    """
    return max(0.0, c.q * (math.sqrt(6 * psi(c) * Lambda_2(c, 0) + Lambda_1(c, 0)) - 1))


def T_1(c: Constants, delta: float, K: int | None = None) -> int:
    """The least number of inner steps for theorem 2: that of theorem 1, and `T_hat` (eq. condition_T1).

    Args:
        K: outer steps. The theorem needs the bounds of all of them at once, which takes delta down to 2 delta / (K (K +
            5)); its statement (l. 1641, 1674) leaves that out. None: for one outer step, as printed.
    """
    each = check_delta(delta) if K is None else _for_each(delta, K)
    return max(T_0(c, each), math.ceil(T_hat(c)))


def hypergradient_error(c: Constants, theta: float, inverse: float, cross: float) -> float:
    """A bound of the error of one hypergradient from those of its three parts (lemma grad_error_decompose).

        (L_f_v + L L_f_theta / mu) theta + D_1 cross (1 / mu + inverse) + L D_1 inverse

    The lemma has L R + C_1 (l. 1442) where D_1, the bound of |grad_theta f| of assumption 2 (l. 329), belongs.
    """
    (D_1,) = c.needed("D_1")
    return kappa(c) * theta + D_1 * cross * (1 / c.mu + inverse) + c.L * D_1 * inverse


def stationarity(c: Constants, K: int, T: float, delta: float, gap: float, floor: float = 0.0) -> float:
    """Theorem 2: a bound of the mean of |grad Phi(v_k)|^2 over K outer steps that holds with probability 1 - delta.

        32 L_v gap / K + 6 psi (2R)^2 / (K (1 - Lambda_1)) + 6 psi b / (1 - Lambda_1)
            + (6 psi Lambda_2 / (1 - Lambda_1) + 18) (D + F)
        D = D_1^2 cross^2 (1 / mu + inverse)^2,    F = L^2 D_1^2 inverse^2

    each bound taken at 2 delta / (K (K + 5)). In the printed one the squared distance is R (l. 1645), D and F are not
    squared and have an undefined C_2 (l. 1588), and the last term has lost M_3 and a factor of 3 (l. 1671, 1680).

    Args:
        gap: Phi(v_0) - min Phi.
        floor: see `misspecification`.

    Returns:
        inf for T below `T_1`, where the theorem says nothing.
    """
    _check_gap(gap)
    each = _for_each(delta, K)
    inverse = inverse_error(c, T, each, floor)
    if T_hat(c) > T or not math.isfinite(inverse) or Lambda_1(c, T) >= 1:
        return math.inf
    left = 1 - Lambda_1(c, T)
    (D_1,) = c.needed("D_1")
    D = (D_1 * cross_error(c, T, each) * (1 / c.mu + inverse)) ** 2
    F = (c.L * D_1 * inverse) ** 2
    falling = _falling(c, T, gap) / K
    return falling + 6 * psi(c) * b(c, T, each) / left + (6 * psi(c) * Lambda_2(c, T) / left + 18) * (D + F)


@dataclass(frozen=True)
class Prescription:
    """What theorem 2 prescribes for a target.

    Attributes:
        epsilon, delta: the mean squared hypergradient that is aimed at, and the probability of missing it.
        K, T: outer steps, and inner steps of one sample each.
        alpha: the outer step size. The inner ones are `eta`.
        samples: K T.
    """

    epsilon: float
    delta: float
    K: int
    T: int
    alpha: float
    samples: int


def prescribed(c: Constants, epsilon: float, delta: float, gap: float) -> Prescription:
    """K and T with which theorem 2 guarantees a mean squared hypergradient of epsilon, and the samples they take.

    Half of epsilon is for the terms that fall with K, half for those that fall with T. K is of the order 1 / epsilon, T
    of log(1 / (epsilon delta)) / epsilon.
    """
    positive("A prescription", epsilon=epsilon)
    _check_gap(gap)
    check_delta(delta)

    def outer_steps(T: float) -> int:
        return max(1, math.ceil(2 * _falling(c, T, gap) / epsilon))

    def suffices(T: int) -> bool:
        if T_hat(c) > T or Lambda_1(c, T) >= 1:
            return False
        K = outer_steps(T)
        return stationarity(c, K, T, delta, gap) - _falling(c, T, gap) / K <= epsilon / 2

    T = first_from(suffices)
    K = outer_steps(T)
    return Prescription(epsilon, delta, K, T, alpha(c), K * T)


def _falling(c: Constants, T: float, gap: float) -> float:
    """K times the terms that fall with K."""
    return 32 * L_v(c) * gap + 6 * psi(c) * c.distance**2 / (1 - Lambda_1(c, T))


def _for_each(delta: float, K: int) -> float:
    if K < 1:
        raise InputError(f"K counts outer steps, so it is at least 1; got {K}.")
    return 2 * check_delta(delta) / (K * (K + 5))


def _check_gap(gap: float) -> None:
    if not 0 <= gap < math.inf:
        raise InputError(f"gap is Phi(v_0) - min Phi, so it is at least 0; got {gap}.")
