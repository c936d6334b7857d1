"""Singular, rank-deficient, indefinite and interpolating inner problems: nothing is wrong without a word."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nhgd
from nhgd.algorithm import AID
from nhgd.inverse import CG, Broyden, Exact, FisherDense, Identity, Neumann, Nystrom, QuadraticSGD, Refined, resolve
from nhgd.oracle import Oracle
from nhgd.task import Cleaning
from nhgd.task._inner_solver import lbfgs, newton, newton_cg
from tests import oracles
from tests.catalogue import normal, settled, weighted_logistic
from tests.test_inverse import quadratic

ROUNDING = 1e-11  # of the largest eigenvalue: what counts as zero here


@dataclass(frozen=True)
class Truth:
    """What plain autograd and an eigendecomposition say of a point."""

    hessian: Tensor
    u: Tensor
    hypergradient: Tensor  # by the shortest adjoint
    negative: bool
    singular: bool
    outside: float  # of u, of its length
    open: float  # of the inner gradient, outside the range
    distance: float  # |H^+ g| / |theta|

    @classmethod
    def of(cls, problem: nhgd.Bilevel, inner: Any, outer: Any) -> Truth:
        theta, v = oracles.theta_of(problem), oracles.v_of(problem)
        hessian = oracles.hessian(problem, inner)
        values, vectors = torch.linalg.eigh((hessian + hessian.T) / 2)
        kept = values.abs() > ROUNDING * values.abs().max()
        basis = vectors[:, kept]

        def shortest(b: Tensor) -> Tensor:
            return basis @ ((basis.T @ b) / values[kept])

        u = torch.func.grad(lambda t: oracles.outer(problem, outer, t, v))(theta)
        direct = torch.func.grad(lambda w: oracles.outer(problem, outer, theta, w))(v)
        g = oracles.gradient(problem, inner)
        return cls(
            hessian,
            u,
            direct - oracles.cross(problem, inner).T @ shortest(u),
            bool((values[kept] < 0).any()),
            not bool(kept.all()),
            float((u - basis @ (basis.T @ u)).norm() / u.norm()),
            float((g - basis @ (basis.T @ g)).norm()),
            float(shortest(g).norm() / theta.norm()),
        )


def regression(weights: Any, targets: Any, theta: Tensor, v: Tensor) -> nhgd.Bilevel:
    """Linear least squares with batches (x, y, index), without a ridge."""
    return nhgd.Bilevel(
        lambda t, v, b: (0.5 * (b[0] @ t - targets(v, b)) ** 2, weights(v, b)),
        lambda t, v, b: 0.5 * ((b[0] @ t - b[1]) ** 2).mean(),
        theta,
        v,
    )


def samples(n: int, features: int) -> tuple[Tensor, Tensor, Tensor]:
    return normal(n, features), normal(n), torch.arange(n)


def rank_deficient() -> Any:
    """Fewer samples than parameters, away from the optimum; v weighs the samples."""
    inner, outer = samples(6, 14), samples(30, 14)
    problem = regression(lambda v, b: v[b[2]], lambda v, b: b[1], normal(14), torch.rand(6).double() + 0.2)
    return problem, inner, outer


def interpolating() -> Any:
    """The same at an optimum where every loss is zero; v is the targets."""
    inner, outer = samples(6, 14), samples(30, 14)
    theta, v = normal(14), normal(6)
    theta = theta + torch.linalg.pinv(inner[0]) @ (v - inner[0] @ theta)
    return regression(lambda v, b: torch.ones(len(b[1])).double(), lambda v, b: v[b[2]], theta, v), inner, outer


def judged_inside() -> Any:
    """Singular, but the outer loss depends on nothing that the inner problem leaves open."""
    inner = samples(6, 14)
    mixed = normal(30, 6) @ inner[0]
    theta, v = normal(14), normal(6)
    theta = theta + torch.linalg.pinv(inner[0]) @ (v - inner[0] @ theta)
    problem = regression(lambda v, b: torch.ones(len(b[1])).double(), lambda v, b: v[b[2]], theta, v)
    return problem, inner, (mixed, normal(30), torch.arange(30))


def indefinite() -> Any:
    """A net at its start."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    problem = nhgd.Bilevel(
        lambda m, v, b: ((m(b[0])[:, 0] - b[1]) ** 2, v[b[2]]),
        lambda m, v, b: ((m(b[0])[:, 0] - b[1]) ** 2).mean(),
        net,
        torch.rand(12).double() + 0.2,
    )
    return problem, samples(12, 3), samples(12, 3)


def singular_saddle() -> Any:
    """Curvature of both signs and of none."""
    basis = torch.linalg.qr(normal(9, 9))[0]
    matrix = basis @ torch.diag(torch.tensor([3.0, 2, 1, 0.5, -0.7, -2, 0, 0, 0]).double()) @ basis.T
    problem = nhgd.Bilevel(
        lambda t, v, x: (0.5 * t @ (matrix + matrix.T) @ t / 2 - t @ matrix @ v).expand(len(x)),
        lambda t, v, x: 0.5 * (t - 1).square().sum(),
        normal(9),
        normal(9),
    )
    return problem, torch.zeros(3).double(), torch.zeros(3).double()


KINDS = [rank_deficient, interpolating, judged_inside, indefinite, singular_saddle]
CASES = [pytest.param(make, seed, id=f"{make.__name__}-{seed}") for make in KINDS for seed in range(4)]
COMPARED = [
    "cg",
    "cg-4",
    "exact",
    "neumann",
    "nystrom-5",
    "broyden",
    "bfgs",
    "fixed_point",
    "sgd",
    "identity",
    Refined(Identity()),
]


def made(make: Any, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


@pytest.mark.parametrize("dense_below", [2000, 0])
@pytest.mark.parametrize(("make", "seed"), CASES)
def test_check_tells_the_truth(make: Any, seed: int, dense_below: int) -> None:
    problem, inner, outer = made(make, seed)
    truth = Truth.of(problem, inner, outer)
    assert truth.negative == (make in (indefinite, singular_saddle))
    assert truth.singular == (make is not indefinite)
    fisher = [FisherDense()] if make in (rank_deficient, indefinite) else []
    asked_for = [*COMPARED, *fisher] if dense_below else ["cg", "identity"]
    report = nhgd.check(problem, inner, outer, inverses=asked_for, dense_below=dense_below)

    # The reference is what it says it is, whichever way it was made.
    reference, advice = report.reference, " ".join(report.advice)
    assert reference["converged"]
    assert reference["outside"] == pytest.approx(truth.outside, abs=1e-6)
    assert reference["residual"] == pytest.approx(truth.outside, abs=1e-6)
    if dense_below:
        assert reference["negative_curvature"] == truth.negative
        assert reference["singular"] == truth.singular
        assert reference["positive_definite"] == (not truth.negative and not truth.singular)
    else:  # products along one solve do not show everything, but what they show is so
        assert bool(reference["negative_curvature"]) == truth.negative
        assert bool(reference["singular"]) == (truth.outside > 1e-6)
        assert not reference["positive_definite"]

    # Every row has the error it has, and none that did not solve the system is silent.
    for row, asked in zip(report.rows, asked_for, strict=True):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = nhgd.hypergradient(problem, inner, outer, inverse=asked)
        grad = torch.cat([leaf.reshape(-1) for leaf in found.leaves])
        error = float((grad - truth.hypergradient).norm() / truth.hypergradient.norm())
        residual = float((truth.hessian @ found.adjoint - truth.u).norm() / truth.u.norm())
        assert row["relative_error"] == pytest.approx(error, rel=1e-4, abs=1e-6)
        if bool(grad.any()):
            cosine = torch.cosine_similarity(grad, truth.hypergradient, dim=0)
            assert row["cosine"] == pytest.approx(float(cosine), abs=1e-6)
        else:
            assert row["cosine"] is None
        # sgd tells the residual of the x before its last step, which may double where it diverges.
        assert row["residual"] == pytest.approx(residual, rel=0.5 if asked == "sgd" else 1e-3, abs=1e-6)
        assert row["residual"] <= 0.1 or not row["converged"]
        assert bool(said) == (row["warning"] is not None)
        if asked not in ("identity", *fisher):
            assert residual <= 0.1 or row["warning"]
        if asked in ("cg", "cg-4", "exact", "broyden"):
            assert residual <= 1 + 1e-9
        if asked == "exact":
            assert error < 1e-7
        if asked == "cg" and not truth.negative:
            assert error < 1e-5

    # The advice says what is so and nothing else.
    assert ("not positive definite" in advice) == truth.negative
    assert ("not an inner minimum" in advice) == truth.negative
    assert ("not a strict one" in advice) == (bool(reference["singular"]) and not truth.negative)
    assert ("outside the range" in advice) == (truth.outside > 1e-6)
    assert "no reference" not in advice
    if truth.negative or truth.open > 1e-9:
        assert report.inner_distance is None
        assert "cannot be determined" in advice
        assert "at the inner optimum to" not in advice
    else:
        assert report.inner_distance == pytest.approx(truth.distance, rel=1e-6, abs=1e-9)
        assert ("at the inner optimum to" in advice) == (truth.distance <= 0.05)


@pytest.mark.parametrize("dense_below", [2000, 500])
def test_a_saddle_of_many_parameters_has_a_reference(dense_below: int) -> None:
    """Above the dense limit conjugate gradients stop at once, and minimal residuals go on."""
    torch.manual_seed(0)
    curvature = torch.cat([torch.linspace(0.5, 3, 500), torch.tensor([-1.0, -0.3]), torch.zeros(10)]).double()
    target = normal(512)
    problem = nhgd.Bilevel(
        lambda t, v, x: (0.5 * (curvature * t * t).sum() - (curvature * t) @ v).expand(len(x)),
        lambda t, v, x: 0.5 * (t - target).square().sum(),
        torch.zeros(512).double(),
        torch.ones(512).double(),
    )
    x = torch.zeros(2).double()
    report = nhgd.check(problem, x, x, inverses=["cg", "broyden-60"], dense_below=dense_below)
    assert report.reference["method"] == ("dense solve" if dense_below == 2000 else "minimal residuals")
    assert report.reference["negative_curvature"]
    assert report.reference["singular"]
    inside = curvature != 0
    exact = torch.where(inside, -target, 0)  # dPhi/dv through theta = v where there is curvature
    with pytest.warns(nhgd.InverseWarning):
        found = nhgd.hypergradient(problem, x, x, inverse="cg").grad
    error = float((found - exact).norm() / exact.norm())
    assert report.rows[0]["relative_error"] == pytest.approx(error, rel=1e-5)
    assert "exact" not in [row["inverse"] for row in nhgd.check(problem, x, x, dense_below=0, inverses=["cg"]).rows]


def test_without_a_reference_there_are_no_errors() -> None:
    """Eigenvalues over fourteen orders of magnitude of both signs: products alone do not solve this."""
    torch.manual_seed(0)
    sizes = torch.logspace(0, -14, 60).double() * (-1.0) ** torch.arange(60)
    basis = torch.linalg.qr(normal(60, 60))[0]
    matrix = basis @ torch.diag(sizes) @ basis.T
    problem = nhgd.Bilevel(
        lambda t, v, x: (0.5 * t @ (matrix + matrix.T) @ t / 2 - t @ v).expand(len(x)),
        lambda t, v, x: t.sum(),
        normal(60),
        normal(60),
    )
    x = torch.zeros(2).double()
    report = nhgd.check(problem, x, x, inverses=["identity", "cg"], dense_below=0)
    assert not report.reference["converged"]
    assert [(row["cosine"], row["relative_error"]) for row in report.rows] == [(None, None), (None, None)]
    assert report.inner_distance is None
    assert report.fisher_residual is None
    assert any("There is no reference here" in sentence for sentence in report.advice)
    assert "        -           -" in str(report)


@pytest.mark.parametrize("dense_below", [2000, 0])
def test_a_hessian_of_zeros(dense_below: int) -> None:
    problem = nhgd.Bilevel(
        lambda t, v, x: (t @ v) * x,
        lambda t, v, x: t.sum() + v.square().sum(),
        torch.ones(3).double(),
        torch.ones(3).double(),
    )
    x = torch.ones(2).double()
    report = nhgd.check(problem, x, x, inverses=["cg", "exact"], dense_below=dense_below)
    assert report.reference["outside"] == 1
    assert report.reference["singular"]
    assert report.inner_distance is None
    assert [row["relative_error"] for row in report.rows] == [0, 0]  # x = 0, and what v does itself is left
    assert all(row["warning"] for row in report.rows)


@pytest.mark.parametrize("make", [rank_deficient, judged_inside])
def test_single_precision_has_a_reference_too(make: Any) -> None:
    problem, inner, outer = made(make, 0)
    exact = Truth.of(problem, inner, outer)
    inner, outer = (tuple(t.float() if t.is_floating_point() else t for t in batch) for batch in (inner, outer))
    problem = nhgd.Bilevel(
        problem.inner,
        problem.outer,
        problem.theta.given.float(),
        problem.v.given.float(),
        problem.l2,
        problem.likelihood,
    )
    report = nhgd.check(problem, inner, outer, inverses=["cg"], dense_below=0)
    assert report.reference["converged"]
    assert report.reference["outside"] == pytest.approx(exact.outside, abs=1e-3)
    assert report.rows[0]["relative_error"] < 1e-2


# The solvers by themselves.


def flat_directions(seed: int = 0) -> tuple[Oracle, Tensor, Tensor]:
    """H of rank 12 in 60 dimensions, u with a part outside its range, and the shortest adjoint."""
    torch.manual_seed(seed)
    rows = normal(12, 60)
    hessian, u = rows.T @ rows / 12, normal(60)
    return quadratic(hessian), u, torch.linalg.pinv(hessian, rtol=1e-10) @ u


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("make", [lambda k: CG(steps=k), lambda k: Refined(Identity(), steps=k)])
def test_residuals_do_not_grow_with_more_steps_where_u_leaves_the_range(make: Any, seed: int) -> None:
    at, u, shortest = flat_directions(seed)
    least = float((at.hvp(shortest) - u).norm() / u.norm())
    found = [make(k).apply(None, u, at) for k in (2, 4, 8, 12, 20, 40, 100)]
    residuals = [stats.residual for _, stats in found]
    assert residuals == sorted(residuals, reverse=True)
    assert residuals[-1] == pytest.approx(least, rel=1e-8)
    for x, stats in found:
        assert stats.residual == pytest.approx(float((at.hvp(x) - u).norm() / u.norm()), rel=1e-6)
        assert not stats.converged
    x, stats = found[-1]
    assert not stats.notes["negative_curvature"]
    assert stats.notes["outside"] == pytest.approx(least, rel=1e-8)
    torch.testing.assert_close(at.hvp(x), at.hvp(shortest), rtol=1e-6, atol=1e-8)


def test_the_last_iterate_is_kept_where_the_system_is_sound() -> None:
    """On a positive definite system it is nearer to the solution than the one of least residual."""
    torch.manual_seed(0)
    values = torch.logspace(0, 3, 80).double()
    at, u = quadratic(torch.diag(values)), normal(80)
    x, r = torch.zeros(80).double(), u.clone()
    p, rr = r.clone(), float(r @ r)
    for _ in range(25):
        alpha = rr / float(p @ (values * p))
        x, r = x + alpha * p, r - alpha * values * p
        rr, old = float(r @ r), rr
        p = r + rr / old * p
    found, _ = CG(steps=25, tol=0).solve(u, at)
    torch.testing.assert_close(found, x, rtol=1e-4, atol=1e-6)


def test_exact_is_the_shortest_solution_and_says_what_it_left_out() -> None:
    at, u, shortest = flat_directions()
    x, stats = Exact().solve(u, at)
    torch.testing.assert_close(x, shortest, rtol=1e-9, atol=1e-11)
    assert stats.notes["null"] == 48
    assert stats.notes["outside"] == pytest.approx(stats.residual)
    assert not stats.notes["positive_definite"]
    assert not stats.notes["negative_curvature"]
    inside = at.hvp(normal(60))
    x, stats = Exact().solve(inside, at)
    assert stats.residual < 1e-12
    assert stats.notes["outside"] < 1e-12


@pytest.mark.parametrize("inverse", ["cg", "exact", Refined(Identity(), steps=50)], ids=str)
def test_a_u_outside_of_the_range_is_warned_of(inverse: Any) -> None:
    problem, inner, outer = made(rank_deficient, 0)
    match = r"singular at this point.*% of the outer gradient lies outside its range.*Add l2, set damping, or let the products"
    with pytest.warns(nhgd.InverseWarning, match=match) as said:
        nhgd.hypergradient(problem, inner, outer, inverse=inverse)
    assert said[0].filename == __file__


def test_a_small_part_outside_is_warned_of_too() -> None:
    """The residual is below 0.1, and still no x solves the system."""
    problem = nhgd.Bilevel(
        lambda t, v, x: (t[:2].square().sum() - v @ t[:2]).expand(len(x)),
        lambda t, v, x: t[0] + t[1] + 0.01 * t[2],
        torch.zeros(3).double(),
        torch.zeros(2).double(),
    )
    x = torch.zeros(2).double()
    for inverse in ("cg", "exact"):
        with pytest.warns(nhgd.InverseWarning, match=r"0.71 % of the outer gradient lies outside"):
            nhgd.hypergradient(problem, x, x, inverse=inverse)


@pytest.mark.parametrize(
    "inverse",
    [Neumann(), Nystrom(rank=3), "broyden-2", "fixed_point", QuadraticSGD()],
    ids=lambda i: str(i).split("(")[0],
)
def test_none_has_converged_far_from_the_solution(inverse: Any) -> None:
    problem, inner, outer = made(indefinite, 0)
    with pytest.warns(nhgd.InverseWarning):
        found = nhgd.hypergradient(problem, inner, outer, inverse=inverse)
    assert not found.stats.converged
    assert found.stats.trouble


def test_nystrom_measures_its_residual_by_one_product() -> None:
    at, u, _ = flat_directions()
    x, stats = Nystrom(rank=5).solve(u, at)
    assert stats.hvps == Nystrom(rank=5).products == 6
    assert stats.residual == pytest.approx(float((at.hvp(x) - u).norm() / u.norm()))
    damped, stats = Nystrom(rank=5, rho=0.1).solve(u, at)
    assert stats.residual == pytest.approx(float((at.hvp(damped) + 0.1 * damped - u).norm() / u.norm()))


@pytest.mark.parametrize("inverse", ["fisher_dense", "fisher_window", "fisher_diagonal"])
def test_a_fisher_matrix_that_vanishes_is_said(inverse: str) -> None:
    """At interpolation the gradients of all samples are zero, and the default damping is a share of nothing."""
    problem, inner, outer = made(interpolating, 0)
    problem.theta.assign(problem.theta.flat() + 1e-7)  # as near as training comes
    with pytest.warns(
        nhgd.InverseWarning, match=r"x far too long \(residual .*Add l2, set damping, use fisher='exact'"
    ):
        found = nhgd.hypergradient(problem, inner, outer, inverse=inverse)
    assert found.stats.residual > 1e10
    assert not found.stats.converged
    method = AID(replace(resolve(inverse), damping=None))
    with pytest.warns(nhgd.InverseWarning, match="far too long"):
        solution = nhgd.Solver(
            problem, [inner], [outer], method=method, inner_steps=1, inner_lr=1e-9, outer_lr=1e-40
        ).run(steps=2)
    assert solution.stats["poor_solves"] == 2


@pytest.mark.parametrize("inverse", ["fisher_dense", "fisher_window", "fisher_diagonal"])
def test_a_fisher_matrix_of_a_sound_problem_is_not_complained_of(inverse: str) -> None:
    problem, inner, outer = settled(weighted_logistic)
    assert nhgd.hypergradient(problem, inner, outer, inverse=inverse).stats.trouble is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_not_silently_wrong(dtype: torch.dtype) -> None:
    """Curvature over three orders of magnitude: three digits are enough for columns of any scale, two are not."""
    torch.manual_seed(0)
    scales = torch.logspace(0, -1.5, 20)
    x, y = torch.randn(40, 20) * scales, torch.randn(40)

    def problem(dtype: torch.dtype) -> nhgd.Bilevel:
        return nhgd.Bilevel(
            lambda t, v, b: (b[0].to(t.dtype) @ t - b[1].to(t.dtype)) ** 2 * v,
            lambda t, v, b: (b[0].to(t.dtype) @ t + t.sum() - b[1].to(t.dtype)).square().mean(),
            torch.full((20,), 0.5, dtype=dtype),
            torch.ones((), dtype=dtype),
        )

    exact = nhgd.hypergradient(problem(torch.float64), (x, y), (x, y), inverse="exact").grad
    if dtype == torch.float16:
        found = nhgd.hypergradient(problem(dtype), (x, y), (x, y), inverse="exact").grad
        assert float(found) == pytest.approx(float(exact), rel=0.01)
        return
    with pytest.warns(nhgd.InverseWarning, match="digits of"):
        found = nhgd.hypergradient(problem(dtype), (x, y), (x, y), inverse="exact").grad
    assert abs(float(found) - float(exact)) > 0.1 * abs(float(exact))


# Parameters on scales of their own.


def unscaled(scale: float, dtype: torch.dtype, twin: bool = False) -> Any:
    """Least squares at its optimum with one column times `scale`; with `twin` a column occurs twice, so H is singular."""
    torch.manual_seed(0)
    x, other = (torch.cat([scale * normal(n, 1), normal(n, 3)], 1) for n in (100, 50))
    y, target = (part @ torch.tensor([1 / scale, 1, -1, 2]).double() + 0.3 * normal(len(part)) for part in (x, other))
    if twin:
        x, other = (torch.cat([part, part[:, 3:]], 1) for part in (x, other))
    theta = torch.linalg.pinv(x / x.norm(dim=0)) @ y / x.norm(dim=0)
    x, y, other, target, theta = (part.to(dtype) for part in (x, y, other, target, theta))
    problem = nhgd.Bilevel(
        lambda t, v, b: nhgd.Losses((b[0] @ t - b[1]) ** 2, weights=v[b[2]].exp()),
        lambda t, v, b: ((b[0] @ t - b[1]) ** 2).mean(),
        theta,
        torch.zeros(100, dtype=dtype),
    )
    return problem, (x, y, torch.arange(100)), (other, target)


def scaled_truth(scale: float, twin: bool = False) -> Tensor:
    """The same by the normal equations with the column scaled back, which change nothing but theta's units."""
    problem, (x, y, _), (other, target) = unscaled(scale, torch.float64, twin)
    theta = problem.theta.flat()
    units = torch.ones(x.shape[1]).double()
    units[0] = 1 / scale
    u = 2 * (other * units).T @ (other @ theta - target) / len(other)
    adjoint = torch.linalg.pinv(2 * (x * units).T @ (x * units) / len(x), rtol=1e-10) @ u
    return -2 * (x @ theta - y) * (x @ (units * adjoint)) / len(x)


def apart(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


SINGLE = [
    (scale, inverse, torch.float32)
    for scale in (1e3, 1e4, 1e5)
    for inverse in ("exact", "cg", Refined(Identity(), steps=40))
]
DOUBLE = [
    (scale, inverse, torch.float64)
    for scale in (1e4, 1e6, 1e9)
    for inverse in ("exact", CG(tol=0), Refined(Identity(), steps=40, tol=0))
]


@pytest.mark.parametrize(("scale", "inverse", "dtype"), SINGLE + DOUBLE, ids=str)
def test_a_badly_scaled_column_is_no_singular_hessian(scale: float, inverse: Any, dtype: torch.dtype) -> None:
    found = nhgd.hypergradient(*unscaled(scale, dtype), inverse=inverse)
    assert apart(found.grad, scaled_truth(scale)) < (1e-4 if dtype == torch.float32 else 1e-6)
    assert "outside" not in found.stats.notes


@pytest.mark.parametrize(("scale", "dtype"), [(1e3, torch.float32), (1e4, torch.float32), (1e8, torch.float64)])
def test_broyden_goes_on_where_the_rest_is_badly_scaled(scale: float, dtype: torch.dtype) -> None:
    """It is not exact there, but what it had found of the small directions it keeps."""
    found = nhgd.hypergradient(*unscaled(scale, dtype), inverse=Broyden(tol=0))
    assert apart(found.grad, scaled_truth(scale)) < 0.5


@pytest.mark.parametrize(("scale", "dtype"), [(1e4, torch.float32), (1e8, torch.float64)])
@pytest.mark.parametrize("twin", [False, True])
def test_check_compares_badly_scaled_columns_with_the_whole_solution(
    scale: float, dtype: torch.dtype, twin: bool
) -> None:
    """Of a column that occurs twice, one direction is zero, and the badly scaled ones are not."""
    problem, inner, outer = unscaled(scale, dtype, twin)
    report = nhgd.check(problem, inner, outer, inverses=["exact", CG(tol=0)])
    assert report.reference["singular"] == twin
    assert not twin or "1 of 5 eigenvalues are zero" in " ".join(report.advice)
    truth = scaled_truth(scale, twin)
    assert all(row["relative_error"] < 1e-4 and row["warning"] is None for row in report.rows)
    assert apart(nhgd.hypergradient(problem, inner, outer, inverse="exact").grad, truth) < 1e-4


def test_a_curvature_that_cancelled_to_rounding_is_zero() -> None:
    """An intercept before a normalisation over the batch has no effect: its row of H holds rounding errors alone."""
    torch.manual_seed(0)
    x, y = torch.randn(60, 4), torch.randn(60)

    def scores(t: Tensor, x: Tensor) -> Tensor:
        raw = x @ t[:4] + t[4]
        return (raw - raw.mean()) / raw.std()

    def found(dtype: torch.dtype) -> Tensor:
        problem = nhgd.Bilevel(
            lambda t, v, b: ((scores(t, b[0]) - b[1]) ** 2 * v).mean() + 0.1 * t[:4].square().sum(),
            lambda t, v, b: (b[0] @ t[:4] + t[4] - b[1]).square().mean(),
            torch.tensor([0.5, -0.3, 0.2, 0.1, 0.7]).to(dtype),
            torch.ones(60, dtype=dtype),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return nhgd.hypergradient(problem, (x.to(dtype), y.to(dtype)), (x.to(dtype), y.to(dtype)), "exact").grad

    assert apart(found(torch.float32), found(torch.float64)) < 1e-3


@pytest.mark.parametrize("inverse", ["exact", "cg"])
def test_what_is_cut_is_told_where_it_matters(inverse: str) -> None:
    """A small part of u along a direction that the inner problem leaves open, beside a large one along a steep one."""
    basis = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).double())[0]
    matrix = (basis @ torch.diag(torch.tensor([1.0, 1, 1, 0]).double()) @ basis.T).float()
    u = (basis @ torch.tensor([1.0, 0, 0, 2e-4]).double()).float()
    problem = nhgd.Bilevel(
        lambda t, v, x: (0.5 * t @ matrix @ t - t @ v).expand(len(x)),
        lambda t, v, x: t @ u,
        torch.zeros(4),
        torch.zeros(4),
    )
    with pytest.warns(nhgd.InverseWarning, match="outside its range"):
        nhgd.hypergradient(problem, torch.zeros(2), torch.zeros(2), inverse=inverse)


# Runs.


def test_a_run_complains_once_and_counts() -> None:
    problem, inner, outer = made(rank_deficient, 0)
    solver = nhgd.Solver(problem, [inner], [outer], method="aid-cg-3", inner_steps=2, inner_lr=1e-3, outer_lr=1e-6)
    with pytest.warns(nhgd.InverseWarning, match="given once a run; poor_solves in its stats counts") as said:
        solution = solver.run(steps=5)
    assert len(said) == 1
    assert said[0].filename == __file__
    assert solution.stats["poor_solves"] == 5
    assert [row["poor_solve"] for row in solution.history] == [True] * 5
    problem, inner, outer = settled(weighted_logistic)
    solution = nhgd.Solver(problem, [inner], [outer], method="aid-cg", outer_lr=1e-6).run(steps=2)
    assert solution.stats["poor_solves"] == 0


# Solving inner problems to the end.


def spread_classifier(l2: float) -> tuple[nhgd.Bilevel, Any]:
    """A softmax classifier whose features differ in size by a thousand."""
    torch.manual_seed(0)
    x = normal(60, 8) * torch.logspace(0.5, -2.5, 8).double()
    y, index = torch.randint(3, (60,)), torch.arange(60)
    net = nn.Linear(8, 3).double()

    def inner(net: Any, v: Any, batch: Any) -> nhgd.Losses:
        z = net(batch[0])
        return nhgd.Losses(nn.functional.cross_entropy(z, batch[1], reduction="none"), v[batch[2]], z)

    outer = lambda net, v, batch: net(batch[0]).square().mean()  # noqa: E731
    return nhgd.Bilevel(inner, outer, net, torch.rand(60).double() + 0.1, l2, "categorical"), (x, y, index)


def test_newton_reaches_what_gradients_alone_do_not() -> None:
    problem, batch = spread_classifier(1e-7)
    start = problem.theta.flat()
    with pytest.raises(nhgd.RunError, match="could not be solved"):
        lbfgs(partial(problem.objective, batch), problem.theta.leaves, 1e-10, steps=200)
    problem.theta.assign(start)
    assert newton_cg(problem, batch, 1e-10) <= 1e-10
    assert float(oracles.gradient(problem, batch).norm()) <= 1e-10
    found = problem.theta.flat()
    problem.theta.assign(start)
    newton(problem, batch)
    torch.testing.assert_close(found, problem.theta.flat(), rtol=1e-4, atol=1e-5)


def test_newton_goes_down_where_the_hessian_is_indefinite() -> None:
    problem, inner, _ = made(indefinite, 0)
    problem.l2 = 1e-2
    assert Truth.of(problem, inner, inner).negative
    newton_cg(problem, inner, 1e-9)
    assert float(oracles.gradient(problem, inner).norm()) <= 1e-9
    assert not Truth.of(problem, inner, inner).negative


def test_newton_says_when_it_could_not() -> None:
    problem, batch = spread_classifier(0.0)
    with pytest.raises(nhgd.RunError, match=r"gradient norm is still .*, above 1e-30. Add l2"):
        newton_cg(problem, batch, 1e-30, steps=3)


def test_the_inner_problem_of_cleaning_is_solved_at_the_ridge_of_the_paper() -> None:
    task = Cleaning.preset("quick").with_settings({"weights": "clip", "l2": 1e-6, "dtype": "float64"})
    instance = task.build(0, torch.device("cpu"))
    assert instance.solve_inner() <= 1e-6
    assert float(oracles.gradient(instance.problem, instance.full_inner).norm()) <= 1e-6


# What is said.


def test_percentages_and_remedies_read_well() -> None:
    """All of u is outside the range: 100 %. And nobody is told to use what is in use."""
    problem = nhgd.Bilevel(
        lambda t, v, x: (t @ v) * x,
        lambda t, v, x: t.sum(),
        torch.ones(3).double(),
        torch.ones(3).double(),
    )
    x = torch.ones(2).double()
    with pytest.warns(nhgd.InverseWarning, match=" 100 % of the outer gradient"):
        nhgd.hypergradient(problem, x, x, inverse="exact")
    assert "100 % of the outer gradient" in " ".join(nhgd.check(problem, x, x, inverses=["cg"]).advice)
    problem, inner, outer = made(rank_deficient, 0)
    with pytest.warns(nhgd.InverseWarning, match=r"Give it more steps; use l2 or damping"):
        nhgd.hypergradient(problem, inner, outer, inverse=Refined(Identity(), steps=2))
    with pytest.warns(
        nhgd.InverseWarning, match=r"Give it more steps; use a preconditioner \(refined\), l2 or damping"
    ):
        nhgd.hypergradient(problem, inner, outer, inverse="cg-2")


def test_a_singular_gauss_newton_matrix_is_called_that() -> None:
    torch.manual_seed(0)
    inner, outer = (normal(4, 9), normal(4)), (normal(20, 9), normal(20))

    def losses(net: nn.Module, v: Tensor, batch: Any) -> nhgd.Losses:
        scores = net(batch[0])
        return nhgd.Losses(0.5 * (scores[:, 0] - batch[1]) ** 2 * v, outputs=scores)

    problem = nhgd.Bilevel(
        losses,
        lambda m, v, b: (m(b[0])[:, 0] - b[1]).square().mean(),
        nn.Linear(9, 1).double(),
        torch.ones(()).double(),
        likelihood="gaussian",
    )
    with pytest.warns(nhgd.InverseWarning, match="The generalised Gauss-Newton matrix is singular"):
        nhgd.hypergradient(problem, inner, outer, inverse=Refined(Identity(), steps=30, matrix="ggn"))
