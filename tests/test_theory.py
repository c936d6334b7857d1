"""The theory's functions against a plain re-computation, their shapes, and what they refuse."""

from __future__ import annotations

import math
from dataclasses import replace

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nhgd
from nhgd import theory
from tests.commands import answer, refusal

C = theory.Constants(
    mu=0.5, L=1.5, R=0.75, C_1=0.4, d_2=7, d_1=3, D_1=0.9, L_f_v=0.2, L_f_theta=1.1, Lbar_f_v=0.3, Lbar_f_theta=0.4,
    L_cross=0.15, L_hessian=0.25, Lbar_cross=0.35, Lbar_hessian=0.45,
)  # fmt: skip
INNER = ("mu", "L", "R", "C_1")
deltas = st.floats(1e-9, 0.999)


@st.composite
def constants(draw):
    mu = draw(st.floats(0.01, 2))
    size = st.floats(0, 3)
    rest = {name: draw(size) for name in ("L_f_theta", "Lbar_f_v", "Lbar_f_theta", "L_cross", "L_hessian")}
    return theory.Constants(
        mu=mu,
        L=mu * draw(st.floats(1, 20)),
        R=draw(st.floats(0.05, 5)),
        C_1=draw(size),
        d_2=draw(st.integers(1, 1000)),
        d_1=draw(st.integers(1, 1000)),
        D_1=draw(st.floats(0.01, 3)),
        L_f_v=draw(st.floats(0.01, 3)),
        Lbar_cross=draw(size),
        Lbar_hessian=draw(size),
        **rest,
    )


def by_hand(T, K, delta, gap):
    """The formulas of the paper with its slips mended, once more, in fifty digits."""
    mpmath.mp.dps = 50
    f = {name: mpmath.mpf(value) for name, value in vars(C).items()}
    mu, L, log, sqrt = f["mu"], f["L"], mpmath.log, mpmath.sqrt
    D, q = 2 * f["R"], 8 * L**2 / mu**2
    G = L * D + f["C_1"]
    c_prime = 256 / mu**2 * G**2 * 2
    gamma = (4 * sqrt(2) * G / sqrt(T)) * (
        G * sqrt(log(2 * f["d_2"] * (1 + T) / delta))
        + 2 * L**2 / mu * sqrt(c_prime * (1 + log((1 + T) / delta)))
        + 8 * L**4 * D / mu**3
    )
    L_v = (
        f["Lbar_f_v"]
        + L / mu * (f["L_f_v"] + f["Lbar_f_theta"])
        + L**2 / mu**2 * f["L_f_theta"]
        + f["D_1"]
        * (f["Lbar_cross"] / mu + L / mu**2 * (f["Lbar_hessian"] + f["L_cross"]) + L**2 * f["L_hessian"] / mu**3)
    )
    alpha = 1 / (4 * L_v)
    k = f["L_f_v"] + L * f["L_f_theta"] / mu
    rho = q / (T + q)
    Lambda_1, Lambda_2 = 5 * (1 + alpha * L / mu * k) ** 2 * rho**2, 5 * alpha**2 * L**2 / mu**2 * rho**2
    b = 5 * c_prime * (1 + log(1 / delta)) / (T + q)
    T_hat = q * sqrt(45 * L**2 / (8 * L_v**2 * mu**2) * k**2 + 5 * (1 + L / (4 * L_v * mu) * k) ** 2) - q
    return {
        "eta": 4 / (mu * (T + q)), "c_prime": c_prime, "gamma": gamma, "L_v": L_v, "alpha": alpha, "psi": 3 * k**2,
        "Lambda_1": Lambda_1, "Lambda_2": Lambda_2, "b": b, "T_hat": T_hat, "sgd": rho * D + sqrt(c_prime * (1 + log(1 / delta)) / (T + q)),
        "inverse": gamma / ((mu - gamma) * mu),
        "cross": 4 * sqrt(2) * L / sqrt(T) * sqrt(log(2 * (f["d_1"] + f["d_2"]) * (1 + T) / delta))
        + 2 * sqrt(2) * f["L_cross"] / sqrt(T) * L / mu * (8 * L**2 * D / mu**2 + 2 * sqrt(c_prime * (1 + log((1 + T) / delta)))),
    }  # fmt: skip


@pytest.mark.parametrize("T", [1, 40, 10**13])
def test_the_formulas_are_those_of_the_paper_with_its_slips_mended(T):
    delta = 0.07
    expected = by_hand(mpmath.mpf(T), 5, mpmath.mpf(delta), 1)
    found = {
        "eta": theory.eta(C, T), "c_prime": theory.c_prime(C), "gamma": theory.gamma(C, T, delta), "L_v": theory.L_v(C),
        "alpha": theory.alpha(C), "psi": theory.psi(C), "Lambda_1": theory.Lambda_1(C, T),
        "Lambda_2": theory.Lambda_2(C, T), "b": theory.b(C, T, delta), "T_hat": theory.T_hat(C),
        "sgd": theory.sgd_error(C, T, delta), "cross": theory.cross_error(C, T, delta),
    }  # fmt: skip
    for name, value in found.items():
        assert value == pytest.approx(float(expected[name]), rel=1e-12), name
    inverse = theory.inverse_error(C, T, delta)
    assert inverse == (math.inf if expected["gamma"] >= 0.5 else pytest.approx(float(expected["inverse"]), rel=1e-9))


def test_the_inner_step_is_that_of_the_schedule():
    schedule = nhgd.schedule.Strong(mu=C.mu, smoothness=C.L)
    for t in (0, 3, 100):
        assert theory.eta(C, t) == pytest.approx(schedule.rate(nhgd.schedule.Clock(t=t)), rel=1e-15)


@settings(max_examples=60, deadline=None)
@given(constants(), deltas)
def test_the_conditions_hold_from_their_step_on_and_not_before(c, delta):
    t = theory.T_0(c, delta)
    assert theory.gamma(c, t, delta) <= c.mu / 2
    assert t == 1 or theory.gamma(c, t - 1, delta) > c.mu / 2 * (1 - 1e-9)
    assert theory.T_1(c, delta) == max(t, math.ceil(theory.T_hat(c)))
    edge = theory.T_hat(c)
    if edge > 0:  # the root of 6 psi Lambda_2 + Lambda_1 = 1
        total = 6 * theory.psi(c) * theory.Lambda_2(c, edge) + theory.Lambda_1(c, edge)
        assert total == pytest.approx(1, rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(constants(), deltas, st.floats(1.01, 100))
def test_bounds_fall_with_steps_and_rise_with_certainty_and_size(c, delta, factor):
    T = theory.T_0(c, delta)
    for bound in (theory.gamma, theory.inverse_error, theory.cross_error, theory.b):
        assert bound(c, factor * T, delta) < bound(c, T, delta) < bound(c, T, delta / factor)
    assert theory.sgd_error(c, 2 * T, delta) < theory.sgd_error(c, T, delta)
    assert theory.sgd_error(c, T, delta, start=0) < theory.sgd_error(c, T, delta)
    assert theory.final_cross_error(c, T, 8, delta) < theory.final_cross_error(c, T, 4, delta)
    for name in ("R", "C_1", "L"):
        larger = replace(c, **{name: getattr(c, name) * factor + 1e-3})
        assert theory.gamma(larger, T, delta) > theory.gamma(c, T, delta)
        assert theory.T_0(larger, delta) >= T
    assert theory.T_1(c, delta, K=10) >= theory.T_1(c, delta)


def test_the_rates_are_those_of_the_theorems():
    """Per decade of T the bounds fall by its root, up to the logarithm; T of a target grows as 1 / epsilon."""
    big = 10.0**16
    for bound in (theory.gamma, theory.cross_error):
        slope = math.log10(bound(C, 10 * big, 0.1) / bound(C, big, 0.1))
        assert -0.5 < slope < -0.48
    first, second = (theory.prescribed(C, epsilon, 0.1, gap=1.0) for epsilon in (1e-2, 1e-3))
    assert 9.9 < second.K / first.K < 10.1
    assert 10 < second.T / first.T < 12
    assert second.samples == second.K * second.T


def test_a_prescription_reaches_its_target_and_wastes_little():
    found = theory.prescribed(C, 0.05, 0.1, gap=2.0)
    assert theory.T_1(C, 0.1, found.K) <= found.T
    assert theory.stationarity(C, found.K, found.T, 0.1, 2.0) <= 0.05
    assert theory.stationarity(C, found.K, found.T // 2, 0.1, 2.0) > 0.025
    assert theory.stationarity(C, max(1, found.K // 4), found.T, 0.1, 2.0) > 0.05
    assert theory.stationarity(C, 10, 5, 0.1, 2.0) == math.inf


def test_a_hypergradient_errs_by_its_parts():
    assert theory.hypergradient_error(C, 0, 0, 0) == 0
    k = 0.2 + 1.5 * 1.1 / 0.5
    assert theory.hypergradient_error(C, 0.1, 0.2, 0.3) == pytest.approx(
        k * 0.1 + 0.9 * 0.3 * (2 + 0.2) + 1.5 * 0.9 * 0.2
    )


def test_a_wrong_model_is_off_by_no_more_than_its_total_variation():
    """A Gaussian model on a grid of outcomes, with data from a mixture: H and I are sums, so nothing is estimated."""
    x = torch.linspace(-2, 2, 401, dtype=torch.float64)
    p = torch.softmax(-(x**2) / 2, 0)
    other = torch.softmax(-8 * (x.abs() - 1) ** 2, 0)
    for share in (0.0, 0.1, 0.5):
        q = (1 - share) * p + share * other
        epsilon = float((p - q).abs().sum()) / 2
        theta = float((q * x).sum())  # the maximum of likelihood; l = (x - theta)^2 / 2, so that H = 1
        fisher = float((q * (x - theta) ** 2).sum())
        largest = float((x - theta).abs().max())
        c = theory.Constants(mu=1.0, L=1.0, R=largest / 4, C_1=largest / 2, d_2=1)
        assert c.gradient == pytest.approx(largest)
        slack = abs(float((p * x**2).sum()) - 1)  # the grid cuts the tails, so the model itself is off by as much
        assert abs(1 - fisher) <= theory.misspecification(c, epsilon) + slack
    assert theory.misspecification(C, 0) == 0


def test_the_floor_of_a_wrong_model_remains():
    wrong = 1e-3
    T = theory.T_0(C, 0.1, floor=wrong)
    assert theory.T_0(C, 0.1) < T
    assert theory.inverse_error(C, 10.0**30, 0.1, floor=wrong) == pytest.approx(wrong / ((0.5 - wrong) * 0.5), rel=1e-3)
    with pytest.raises(nhgd.InputError, match="The model is too wrong for the theorem"):
        theory.T_0(C, 0.1, floor=0.25)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mu": 2.0}, r"mu = 2 is above L = 1\.5"),
        ({"mu": 0.0}, "mu must be"),
        ({"R": -1.0}, "R must be"),
        ({"C_1": -1.0}, "C_1"),
        ({"d_2": 0}, "d_2 counts parameters"),
        ({"D_1": -0.1}, "D_1"),
        ({"L": math.nan}, "L must be"),
        ({"mu": "x"}, "mu"),
    ],
)
def test_impossible_constants_are_refused(change, words):
    with pytest.raises(nhgd.InputError, match=words):
        replace(C, **change)


@pytest.mark.parametrize("delta", [0.0, 1.0, -0.1, 2.0, math.nan])
def test_a_delta_outside_of_0_and_1_is_refused(delta):
    for call in (theory.T_0, theory.T_1):
        with pytest.raises(nhgd.InputError, match="delta is a probability of failure"):
            call(C, delta)
    with pytest.raises(nhgd.InputError, match="delta is a probability of failure"):
        theory.stationarity(C, 10, 10, delta, 1.0)


def test_what_is_missing_is_named():
    inner = theory.Constants(**{name: getattr(C, name) for name in INNER}, d_2=7)
    assert theory.T_0(inner, 0.1) == theory.T_0(C, 0.1)
    with pytest.raises(nhgd.InputError, match="This bound needs d_1, L_cross, which these Constants do not have"):
        theory.cross_error(inner, 10, 0.1)
    with pytest.raises(nhgd.InputError, match="needs L_f_v"):
        theory.L_v(inner)
    with pytest.raises(nhgd.InputError, match="counts steps"):
        theory.gamma(C, 0, 0.1)
    with pytest.raises(nhgd.InputError, match="counts outer steps"):
        theory.T_1(C, 0.1, K=0)


def quadratic(l2: float = 0.5):
    instance = nhgd.task.Quadratic.preset("quick").with_settings({"l2": l2}).build(0, torch.device("cpu"))
    instance.solve_inner()
    return instance


def test_the_constants_of_a_quadratic_are_those_of_its_matrices():
    """Hessians are the same everywhere, so that nothing depends on the points; all samples are looked at."""
    instance = quadratic()
    a, b, c = instance.full_inner
    n, answers = len(a), instance.answers
    theta, v = instance.problem.theta.flat(), instance.problem.v.flat()
    found = theory.estimated(instance.problem, instance.full_inner, instance.full_outer, R=3.0, samples=n, points=1)
    rows = torch.cat([a, -c], 1)  # l_i = (a.theta - b - c.v)^2 / 2
    ridge = torch.diag(torch.cat([torch.ones(6), torch.zeros(3)])).double()  # 2 l2 = 1
    joint = max(float(torch.linalg.eigvalsh(torch.outer(row, row) + ridge)[-1]) for row in rows)
    scores = (a @ theta - b - c @ v)[:, None] * a
    outer = answers.B.T @ answers.B / len(answers.B)
    expected = {
        "mu": 1.0,
        "L": joint,
        "R": 3.0,
        "C_1": float((scores - scores.mean(0)).norm(dim=1).max()),
        "D_1": float((answers.B.T @ (answers.B @ theta - answers.target) / len(answers.B)).norm()),
        "L_f_theta": float(torch.linalg.eigvalsh(outer)[-1]),
        "Lbar_f_v": 0.1,
        "d_1": 3,
        "d_2": 6,
    } | dict.fromkeys(("L_f_v", "Lbar_f_theta", "L_cross", "L_hessian", "Lbar_cross", "Lbar_hessian"), 0.0)
    for name, value in expected.items():
        assert getattr(found.constants, name) == pytest.approx(value, rel=1e-9, abs=1e-9), name
    assert found.how["R"] == found.how["d_1"] == "given"
    assert found.how["mu"] == "estimate"


def test_third_derivatives_are_seen_where_they_are():
    """l = sum cosh(theta) + v theta: the Hessian is cosh(theta), whose slope at 1 is sinh(1)."""
    theta, v = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    problem = nhgd.Bilevel(
        lambda theta, v, x: torch.cosh(theta).expand(len(x)) + (v * theta).exp(),
        lambda theta, v, x: theta.sum() * v.sum(),
        theta,
        v,
    )
    batch = torch.zeros(3, dtype=torch.float64)
    c = theory.estimated(problem, batch, batch, points=1).constants
    assert c.L_hessian == pytest.approx(math.sinh(1), rel=0.02)
    assert c.L_f_v == pytest.approx(1)
    # d2/dtheta dv exp(v theta) = (1 + v theta) exp(v theta): its derivative in v is 2 theta at v = 0, in theta 0.
    assert c.Lbar_cross == pytest.approx(2, rel=0.02)
    assert pytest.approx(0, abs=1e-12) == c.C_1


def test_bounds_of_a_linear_softmax_model_hold_for_it():
    torch.manual_seed(0)
    x, y = torch.randn(40, 4, dtype=torch.float64), torch.randint(3, (40,))
    net, v = torch.nn.Linear(4, 3).double(), torch.full((40,), 0.5, dtype=torch.float64)

    def inner(net, v, batch):
        z = net(batch[0])
        return nhgd.Losses(torch.nn.functional.cross_entropy(z, batch[1], reduction="none"), weights=v[batch[2]])

    problem = nhgd.Bilevel(inner, lambda net, v, batch: net(batch[0]).square().mean(), net, v, l2=0.05)
    batch = (x, y, torch.arange(40))
    bound = theory.linear_softmax(x, classes=3, l2=0.05, R=2.0).constants
    seen = theory.estimated(problem, batch, batch, R=2.0, samples=40, points=2).constants
    assert seen.mu == pytest.approx(bound.mu)
    assert bound.d_2 == seen.d_2 == 15
    for name in ("L", "C_1"):
        assert 0.1 * getattr(bound, name) < getattr(seen, name) <= getattr(bound, name)


def test_a_loss_that_is_not_convex_is_refused():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    problem = nhgd.Bilevel(
        lambda net, v, x: (net(x)[:, 0] - v).square(), lambda net, v, x: net(x).mean(), net, torch.zeros(1)
    )
    x = torch.randn(5, 2)
    with pytest.raises(nhgd.InputError, match="so it is not strongly convex, as the theory assumes"):
        theory.estimated(problem, x, x)


def test_the_command_prescribes_what_the_functions_do():
    said = answer("theory", "quadratic", "--preset", "quick", "--set", "l2=0.5", "--epsilon", "0.5")
    given = {name: row["value"] for name, row in said["constants"].items()}
    c = theory.Constants(**given)
    assert given["mu"] == pytest.approx(1.0)
    assert said["constants"]["mu"]["how"] == "estimate"
    prescribed = said["prescribed"]
    assert prescribed["T_0"] == theory.T_0(c, 0.1)
    assert prescribed["alpha"] == pytest.approx(theory.alpha(c))
    expected = theory.prescribed(c, 0.5, 0.1, said["gap"])
    assert (prescribed["K"], prescribed["T"]) == (expected.K, expected.T)
    assert prescribed["years"] > 1  # worst cases are


def test_the_commands_refusals_are_sentences():
    words = refusal("theory", "quadratic", "--preset", "quick", "--delta", "2")
    assert words.startswith("delta is a probability of failure")
    assert "would be ignored" in refusal("theory", "quadratic", "--set", "inner_steps=3")
