"""What holds of one inner loop: theta, the inverse of the empirical Fisher matrix, the cross derivative (section 4.1).

Probabilities are joint over the whole loop. Where the paper's proof has a slip, the docstring names it and the function
follows what the proof shows; lines are those of the paper's source.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from nhgd.errors import InputError
from nhgd.theory.constants import Constants

_FURTHEST = 2**200  # no loop is longer: a condition that does not hold there never does


def check_delta(delta: float) -> float:
    """A probability of failure, strictly between 0 and 1."""
    if not 0 < delta < 1:
        raise InputError(f"delta is a probability of failure, strictly between 0 and 1; got {delta}.")
    return float(delta)


def _check_steps(name: str, value: float, least: int = 1) -> float:
    if not value >= least:
        raise InputError(f"{name} counts steps, so it is at least {least}; got {value}.")
    return float(value)


def eta(c: Constants, t: int) -> float:
    """The inner step size of both theorems, eta_t = 4 / (mu (t + 8 L^2 / mu^2)).

    `nhgd.schedule.Strong(mu, smoothness=L)` is the same as a schedule.
    """
    return 4 / (c.mu * (_check_steps("t", t, 0) + c.q))


def c_prime(c: Constants) -> float:
    """c' = 256 / mu^2 (L 2R + C_1)^2 max(2 C_b^2, C_a^2), of the SGD lemma (eq. def_c')."""
    return 256 / c.mu**2 * c.gradient**2 * max(2 * c.C_b**2, c.C_a**2)


def sgd_error(c: Constants, t: int, delta: float, start: float | None = None) -> float:
    """A bound of |theta_t - theta*| that holds with probability 1 - delta (lemma SGD_general).

        q / (t + q) |theta_0 - theta*| + sqrt( c' (1 + log(1 / delta)) / (t + q) )

    The last lines of the proof (l. 984) print t / (t + q) where the lemma and the product before it have q / (t + q).

    Args:
        start: |theta_0 - theta*|; the largest distance within the ball by default.
    """
    first = c.distance if start is None else start
    if first < 0:
        raise InputError(f"start is a distance, so it is at least 0; got {start}.")
    noise = c_prime(c) * (1 - math.log(check_delta(delta))) / (_check_steps("t", t, 0) + c.q)
    return c.q / (t + c.q) * first + math.sqrt(noise)


def gamma(c: Constants, t: float, delta: float) -> float:
    """gamma(t, delta): a bound of |I_t - I(theta*)| that holds with probability 1 - delta (eq. def_gamma).

        4 sqrt(2) G / sqrt(t) ( G sqrt(log(2 d_2 (1 + t) / delta))
                                + 2 L^2 / mu sqrt(c' (1 + log((1 + t) / delta))) + 8 L^4 2R / mu^3 ),    G = L 2R + C_1

    The lemma on the optimisation error claims probability 1 - delta (l. 1064), its proof shows 1 - t delta (l. 1101);
    (1 + t) / delta here already makes up for that.
    """
    t = _check_steps("t", t)
    each = math.log1p(t) - math.log(check_delta(delta))  # log((1 + t) / delta)
    noise = c.gradient * math.sqrt(math.log(2 * c.d_2) + each)
    drift = 2 * c.L**2 / c.mu * math.sqrt(c_prime(c) * (1 + each)) + 8 * c.L**4 * c.distance / c.mu**3
    return 4 * math.sqrt(2) * c.gradient / math.sqrt(t) * (noise + drift)


def T_0(c: Constants, delta: float, floor: float = 0.0) -> int:
    """The least number of inner steps for theorem 1: gamma(t, delta) + floor <= mu / 2 from there on (eq.
    condition_T0).

    Args:
        floor: the part of the error that no inner loop removes, see `misspecification`.
    """
    check_delta(delta)
    if floor >= c.mu / 2:
        raise InputError(
            f"The model is too wrong for the theorem: its floor of {floor:.3g} is not below mu / 2 = {c.mu / 2:.3g}, so no"
            " number of inner steps suffices."
        )
    return first_from(lambda t: gamma(c, t, delta) + floor <= c.mu / 2)


def inverse_error(c: Constants, T: float, delta: float, floor: float = 0.0) -> float:
    """Theorem 1: a bound of |A_T - H(theta*)^-1| that holds with probability 1 - delta, for T >= T_0(delta).

        e / ((mu - e) mu),    e = gamma(T, delta) + floor

    Returns:
        inf where e is not below mu, so that nothing is known.
    """
    e = gamma(c, T, delta) + floor
    return math.inf if e >= c.mu else e / ((c.mu - e) * c.mu)


def cross_error(c: Constants, T: float, delta: float) -> float:
    """A bound of |L_T - d2_{theta,v} l(theta*)| that holds with probability 1 - delta (proposition l_21_approx).

    4 sqrt(2) L / sqrt(T) sqrt(log(2 (d_1 + d_2) (1 + T) / delta))
        + 2 sqrt(2) L L_cross / (mu sqrt(T)) ( q 2R + 2 sqrt(c' (1 + log((1 + T) / delta))) )
    """
    T = _check_steps("T", T)
    d_1, L_cross = c.needed("d_1", "L_cross")
    each = math.log1p(T) - math.log(check_delta(delta))
    noise = 4 * math.sqrt(2) * c.L * math.sqrt(math.log(2 * (d_1 + c.d_2)) + each)
    drift = c.q * c.distance + 2 * math.sqrt(c_prime(c) * (1 + each))
    return (noise + 2 * math.sqrt(2) * c.L * L_cross / c.mu * drift) / math.sqrt(T)


def final_cross_error(c: Constants, T: float, M: float, delta: float) -> float:
    """The same for the mean of M samples at the last theta (lemma l_21_approx_practical).

        4 sqrt(2) L / sqrt(M) sqrt(log(4 (d_1 + d_2) / delta)) + L_cross times the bound of |theta_T - theta*|

    Each of both holds with probability 1 - delta / 2. The last display of the proof drops L_cross.
    """
    M = _check_steps("M", M)
    d_1, L_cross = c.needed("d_1", "L_cross")
    noise = math.log(2 * (d_1 + c.d_2)) - math.log(check_delta(delta) / 2)
    return 4 * math.sqrt(2) * c.L * math.sqrt(noise / M) + L_cross * sgd_error(c, int(T), delta / 2)


def misspecification(c: Constants, epsilon_D: float) -> float:
    """A bound of |H(theta*) - I(theta*)| where the model is within total variation epsilon_D of the data.

        epsilon_D ( G^2 + L - mu ),    G = L 2R + C_1

    The remark after assumption 5 names this case without a formula. H - I = -E_q[ grad^2 p / p ] = E_q[M] with
    M = grad^2 l - grad l grad l^T, and E_p[M] = 0. For a unit vector u, u.Mu lies between mu - G^2 and L, and an
    expectation of what lies in an interval changes by at most the length of the interval times the total variation.

    It adds to gamma(T, delta): pass it as `floor`. As a bound it is crude, as G^2 usually is.
    """
    if not 0 <= epsilon_D <= 1:
        raise InputError(f"epsilon_D is a total variation distance, from 0 to 1; got {epsilon_D}.")
    return epsilon_D * (c.gradient**2 + c.L - c.mu)


def first_from(holds: Callable[[int], bool]) -> int:
    """The least t >= 1 with holds(t), for a condition that stays true once it is."""
    high = 1
    while not holds(high):
        high *= 2
        if high > _FURTHEST:
            raise InputError(
                "No number of inner steps that a float can hold suffices: these constants are out of range."
            )
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
