"""The exam that every inverse sits, then what only some of them promise."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import nhgd
from nhgd._registry import summary
from nhgd.inverse import (
    CG,
    AbstractInverse,
    Exact,
    FixedPoint,
    Identity,
    Iterative,
    Learned,
    Neumann,
    SolveStats,
    base,
    capabilities,
)
from nhgd.inverse._krylov.spectrum import largest_eigenvalue
from nhgd.inverse._learned.learning import learn
from nhgd.inverse._learned.state import State
from nhgd.inverse.capabilities import preconditioner, warnings_for
from nhgd.objective import OracleCalls
from nhgd.oracle import Oracle
from tests import oracles
from tests.catalogue import INVERSES, InverseCase, Make, mlp_module, normal, of_classifier, plain_tensor, settled
from tests.storage import stored

PAIRS = [pytest.param(case, make, id=f"{case.label}-{make.__name__}") for case in INVERSES for make in case.problems]
each_pair = pytest.mark.parametrize(("case", "make"), PAIRS)
each_inverse = pytest.mark.parametrize("case", INVERSES, ids=lambda case: case.label)


def sizes(*vectors: Tensor) -> float:
    return max(float(v.norm()) for v in vectors)


def at_optimum(case: InverseCase, make: Make) -> tuple[AbstractInverse, nhgd.Bilevel, Any, Oracle, Any]:
    problem, inner_batch, outer_batch = settled(make)
    inverse = case.make()
    point = Oracle(problem, [inner_batch], outer_batch)
    return inverse, problem, inner_batch, point, learn(inverse, problem, [inner_batch])


# The exam.


@each_pair
def test_it_inverts_its_matrix(case: InverseCase, make: Make) -> None:
    inverse, problem, batch, point, state = at_optimum(case, make)
    u = normal(problem.theta.numel)
    x, stats = inverse.apply(state, u, point)
    assert x.shape == u.shape
    assert x.dtype == u.dtype
    if case.matrix is not None:
        expected = torch.linalg.solve(case.matrix(problem, batch), u)
        assert float((x - expected).norm()) <= case.tol * float(expected.norm())
    assert stats.converged
    if stats.residual is not None:
        true = float((oracles.hessian(problem, batch) @ x - u).norm() / u.norm())
        assert stats.residual == pytest.approx(true, abs=1e-7)
    most = capabilities.products(inverse)
    if most is not None:
        assert stats.hvps <= most


@each_pair
def test_it_is_linear_and_symmetric(case: InverseCase, make: Make) -> None:
    inverse, problem, _, point, state = at_optimum(case, make)
    u, v = normal(problem.theta.numel), normal(problem.theta.numel)
    a, b, c = (inverse.apply(state, w, point)[0] for w in (u, v, 2 * u - 3 * v))
    assert float((c - (2 * a - 3 * b)).norm()) <= 10 * case.tol * sizes(a, b)
    if case.symmetric:
        assert abs(float(u @ b - v @ a)) <= 10 * case.tol * sizes(u, v) * sizes(a, b)


@each_pair
def test_it_has_manners(case: InverseCase, make: Make) -> None:
    problem, inner_batch, outer_batch = settled(make)
    inverse = case.make()
    for tensor in oracles.tensors_of(problem):
        if tensor.is_leaf and tensor.requires_grad:
            tensor.grad = torch.ones_like(tensor)
    u = normal(problem.theta.numel)
    given, calls = u.clone(), OracleCalls()
    with oracles.undisturbed(problem):
        state = learn(inverse, problem, [inner_batch])
        before = {} if state is None else {k: t.clone() for k, t in state.tensors().items()}
        point = Oracle(problem, [inner_batch], outer_batch, calls=calls)
        first, stats = inverse.apply(state, u, point)
        second, _ = inverse.apply(state, u, Oracle(problem, [inner_batch], outer_batch))
    assert torch.equal(first, second)
    assert torch.equal(u, given)
    assert stats.hvps == calls.hvps
    if state is not None:
        assert all(torch.equal(t, before[k]) for k, t in state.tensors().items())


@each_inverse
def test_zero_goes_to_zero(case: InverseCase) -> None:
    inverse, problem, _, point, state = at_optimum(case, case.problems[0])
    x, stats = inverse.apply(state, torch.zeros(problem.theta.numel, dtype=torch.float64), point)
    assert torch.equal(x, torch.zeros_like(x))
    assert stats.converged


@each_inverse
def test_a_start_is_not_written_to(case: InverseCase) -> None:
    inverse, problem, _, point, state = at_optimum(case, case.problems[0])
    u = normal(problem.theta.numel)
    expected, _ = inverse.apply(state, u, point)
    start = normal(problem.theta.numel)
    given = start.clone()
    x, _ = inverse.apply(state, u, point, start)
    assert torch.equal(start, given)
    assert float((x - expected).norm()) <= 10 * case.tol * float(expected.norm())


@each_inverse
def test_one_operator_serves_many_sides(case: InverseCase) -> None:
    inverse, problem, _, point, state = at_optimum(case, case.problems[0])
    if inverse.name == "refined":
        pytest.skip("its operator is that of the inverse inside")
    apply = preconditioner(inverse, state, point)
    for _ in range(2):
        u = normal(problem.theta.numel)
        expected, _ = inverse.apply(state, u, point)
        assert float((apply(u) - expected).norm()) <= 10 * case.tol * float(expected.norm())


@each_inverse
def test_float32_stays_float32(case: InverseCase) -> None:
    double, (x, y, i), _ = of_classifier(nn.Linear(3, 3))
    net, batch = double.theta.given.float(), (x.float(), y, i)
    problem = nhgd.Bilevel(double.inner, double.outer, net, double.v.given.float(), 0.05, "categorical")
    inverse = case.make()
    state = learn(inverse, problem, [batch])
    u = torch.ones(problem.theta.numel)
    found, _ = inverse.apply(state, u, Oracle(problem, [batch]))
    assert found.dtype == torch.float32
    assert bool(torch.isfinite(found).all())


@each_inverse
def test_the_state_survives_storage(case: InverseCase) -> None:
    inverse, problem, _, point, state = at_optimum(case, case.problems[0])
    if state is None:
        pytest.skip("it has no state")
    assert isinstance(state, State)
    u = normal(problem.theta.numel)
    expected, _ = inverse.apply(state, u, point)
    for copy in (stored(state), state.to("cpu"), state.clone()):
        assert torch.equal(inverse.apply(copy, u, point)[0], expected)


@each_inverse
def test_it_describes_itself(case: InverseCase) -> None:
    inverse = case.make()
    assert nhgd.inverse.INVERSES[inverse.name] is type(inverse)
    assert summary(type(inverse)).endswith(".")
    problem, _, _ = case.problems[0]()
    assert inverse.memory(problem.theta) >= 0
    learner = inverse.learner
    assert learner is None or learner.records in ("batch", "raw", "sample", "layer")
    assert all(isinstance(caution, str) for caution in warnings_for(inverse, problem.theta))
    with pytest.raises(dataclasses.FrozenInstanceError):
        inverse.name = "other"  # type: ignore[misc]
    assert nhgd.inverse.resolve(inverse) is inverse
    assert type(nhgd.inverse.resolve(inverse.name)) is type(inverse)


@each_inverse
def test_wrong_numbers_and_words_are_refused(case: InverseCase) -> None:
    inverse = case.make()
    for field in dataclasses.fields(inverse):
        value = getattr(inverse, field.name)
        wrong: tuple[Any, ...] = ()
        if isinstance(value, str):
            wrong = ("nonsense",)
        elif (isinstance(value, (int, float)) and not isinstance(value, bool)) or "float | None" in str(field.type):
            wrong = (-1, float("nan"), float("inf"))
        for bad in wrong:
            with pytest.raises(nhgd.InputError):
                dataclasses.replace(inverse, **{field.name: bad})


def test_an_unknown_name() -> None:
    with pytest.raises(nhgd.InputError, match=r"There is no inverse called 'cgg'. Did you mean 'cg'"):
        nhgd.inverse.resolve("cgg")
    with pytest.raises(
        nhgd.InputError, match=r"An inverse must be a name or an object such as nhgd.inverse.CG\(\), got a int"
    ):
        nhgd.inverse.resolve(3)  # type: ignore[arg-type]


# Iterative methods on a Hessian that is given.


def quadratic(hessian: Tensor) -> Oracle:
    """A point whose inner Hessian is `hessian` and whose inner loss is a scalar."""
    problem = nhgd.Bilevel(
        lambda theta, v, batch: 0.5 * theta @ hessian @ theta - v @ theta,
        lambda theta, v, batch: theta.square().sum(),
        normal(len(hessian)),
        normal(len(hessian)),
    )
    return Oracle(problem, [None])


def positive(size: int, spread: float = 1.0) -> Tensor:
    basis = torch.linalg.qr(normal(size, size))[0]
    return basis @ torch.diag(torch.logspace(0, spread, size, dtype=torch.float64)) @ basis.T


def test_cg_needs_one_step_for_a_multiple_of_the_identity() -> None:
    u = normal(6)
    x, stats = CG(steps=1).solve(u, quadratic(2 * torch.eye(6, dtype=torch.float64)))
    assert torch.equal(x, u / 2)
    assert stats.converged
    assert stats.hvps == 1
    assert stats.residual == 0


def test_cg_returns_its_last_iterate() -> None:
    """After k steps on k distinct eigenvalues it has the solution, and not a step less."""
    hessian, u = torch.diag(torch.tensor([1.0, 1, 2, 2, 5, 5], dtype=torch.float64)), normal(6)
    expected = torch.linalg.solve(hessian, u)
    x, stats = CG(steps=3, tol=0).solve(u, quadratic(hessian))
    torch.testing.assert_close(x, expected, rtol=1e-12, atol=1e-12)
    assert stats.hvps == 3
    x, _ = CG(steps=2, tol=0).solve(u, quadratic(hessian))
    assert float((x - expected).norm()) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_cg_stays_finite_long_after_it_has_converged(dtype: torch.dtype, scale: float) -> None:
    hessian = (scale * positive(20)).to(dtype)
    problem = nhgd.Bilevel(
        lambda theta, v, batch: 0.5 * theta @ hessian @ theta - v @ theta,
        lambda theta, v, batch: theta.sum(),
        torch.zeros(20, dtype=dtype),
        torch.zeros(20, dtype=dtype),
    )
    u = normal(20).to(dtype)
    x, stats = CG(steps=200, tol=0).solve(u, Oracle(problem, [None]))
    assert not stats.notes["negative_curvature"]
    assert stats.converged
    error = (hessian @ x - u).norm() / u.norm()
    assert float(error) < 100 * torch.finfo(dtype).eps


@given(st.integers(1, 8), st.floats(0, 3), st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_cg_is_exact_after_as_many_steps_as_dimensions(size: int, spread: float, seed: int) -> None:
    torch.manual_seed(seed)
    hessian, u = positive(size, spread), normal(size)
    x, _ = CG(steps=3 * size, tol=1e-14).solve(u, quadratic(hessian))
    torch.testing.assert_close(x, torch.linalg.solve(hessian, u), rtol=1e-6, atol=1e-9)


def test_cg_stops_before_negative_curvature() -> None:
    """The second direction would climb: what the first one gave is kept."""
    hessian, u = torch.diag(torch.tensor([3.0, 2, -0.5], dtype=torch.float64)), torch.tensor([1.0, 1, 1]).double()
    x, stats = CG().solve(u, quadratic(hessian))
    assert stats.notes["negative_curvature"]
    assert not stats.converged
    step = float(u @ u / (u @ hessian @ u))
    torch.testing.assert_close(x, step * u, rtol=1e-12, atol=1e-12)
    assert stats.residual == pytest.approx(float((hessian @ x - u).norm() / u.norm()))
    x, stats = CG().solve(u, quadratic(-torch.eye(3, dtype=torch.float64)))
    assert torch.equal(x, torch.zeros_like(x))
    assert stats.notes["negative_curvature"]


def test_negative_curvature_is_warned_of() -> None:
    made = nhgd.Bilevel(
        lambda theta, v, batch: (theta.square() * torch.tensor([3.0, 2, -0.5]).double()).sum() - v @ theta,
        lambda theta, v, batch: theta.sum(),
        torch.ones(3, dtype=torch.float64),
        torch.ones(3, dtype=torch.float64),
    )
    with pytest.warns(nhgd.InverseWarning, match="not positive definite.*cg met negative curvature.*add l2"):
        found = nhgd.hypergradient(made, None, None)
    assert not found.stats.converged
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        damped = nhgd.hypergradient(made, None, None, inverse=CG(damping=2.0))
    torch.testing.assert_close(damped.grad, 1 / (2 * torch.tensor([3.0, 2, -0.5]).double() + 2))


def test_cg_starts_where_it_is_told() -> None:
    hessian, u = positive(10, 2), normal(10)
    point = quadratic(hessian)
    solution = torch.linalg.solve(hessian, u)
    x, stats = CG().solve(u, point, start=solution)
    assert stats.hvps == 1
    torch.testing.assert_close(x, solution, rtol=1e-12, atol=1e-12)
    _, far = CG(steps=3).solve(u, point)
    _, near = CG(steps=3).solve(u, point, start=solution + 1e-3 * normal(10))
    assert near.residual < far.residual


def test_cg_names_what_is_not_finite() -> None:
    with pytest.raises(nhgd.NonFiniteError, match="CG: the curvature along the search direction is nan in product 1"):
        CG().solve(torch.full((3,), float("nan")).double(), quadratic(torch.eye(3, dtype=torch.float64)))


@pytest.mark.parametrize(
    ("inverse", "shift"),
    [
        (CG(damping=0.7), 0.7),
        (Exact(damping=0.7), 0.7),
        (Neumann(terms=2000, tol=1e-13, damping=0.7), 0.7),
        (FixedPoint(steps=2000, tol=1e-13, damping=0.7), 0.7),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_damping_is_added_to_the_diagonal(inverse: AbstractInverse, shift: float) -> None:
    hessian, u = positive(5), normal(5)
    x, _ = inverse.solve(u, quadratic(hessian))
    expected = torch.linalg.solve(hessian + shift * torch.eye(5, dtype=torch.float64), u)
    torch.testing.assert_close(x, expected, rtol=1e-7, atol=1e-9)


# The Neumann series.


@pytest.mark.parametrize("terms", [1, 2, 7])
def test_the_neumann_series_has_one_summand_more_than_products(terms: int) -> None:
    hessian, u, phi = positive(5), normal(5), 0.05
    x, stats = Neumann(terms=terms, phi=phi).solve(u, quadratic(hessian))
    step = torch.eye(5, dtype=torch.float64) - phi * hessian
    expected = phi * sum(torch.linalg.matrix_power(step, k) @ u for k in range(terms + 1))
    torch.testing.assert_close(x, expected, rtol=1e-12, atol=1e-12)
    assert stats.residual == pytest.approx(float((hessian @ x - u).norm() / u.norm()))
    assert stats.hvps == terms + 1


def test_phi_comes_from_a_power_iteration() -> None:
    hessian, u = positive(5, 2), normal(5)
    _, stats = Neumann(terms=5, power_steps=50).solve(u, quadratic(hessian))
    assert stats.notes["phi"] == pytest.approx(1 / 100, rel=1e-6)
    assert stats.hvps == 5 + 1 + 50
    _, stats = FixedPoint(steps=5, power_steps=50).solve(u, quadratic(hessian))
    assert stats.notes["lr"] == pytest.approx(1 / 100, rel=1e-6)


def test_the_largest_eigenvalue() -> None:
    hessian = positive(6, 1)
    assert largest_eigenvalue(quadratic(hessian), normal(6), 200) == pytest.approx(10.0, rel=1e-10)
    assert largest_eigenvalue(quadratic(0 * hessian), normal(6), 3) == 0
    assert largest_eigenvalue(quadratic(hessian), normal(6), 2) < 10


@pytest.mark.parametrize(
    ("inverse", "setting"), [(Neumann(terms=50, phi=0.5), "phi"), (FixedPoint(steps=50, lr=0.5), "lr")]
)
def test_too_large_a_step_is_reported(inverse: AbstractInverse, setting: str) -> None:
    hessian, u = positive(5), normal(5)  # the largest eigenvalue is 10, so the step must be below 0.2
    x, stats = inverse.solve(u, quadratic(hessian))
    assert stats.notes["diverged"]
    assert stats.notes[setting] == 0.5
    assert not stats.converged
    assert stats.residual > 1
    assert bool(torch.isfinite(x).all())
    problem, inner_batch, outer_batch = settled(plain_tensor)
    with pytest.warns(nhgd.InverseWarning, match=f"{inverse.name} diverged"):
        nhgd.hypergradient(problem, inner_batch, outer_batch, inverse=dataclasses.replace(inverse, **{setting: 1e3}))


def test_phi_is_halved_when_the_power_iteration_was_too_short() -> None:
    """One product from a fixed start sees a fraction of the top eigenvalue here."""
    hessian, u = torch.diag(torch.tensor([100.0] + [1.0] * 39, dtype=torch.float64)), normal(40)
    assert largest_eigenvalue(quadratic(hessian), u, 1) < 50
    x, stats = Neumann(terms=5000, power_steps=1, tol=1e-6).solve(u, quadratic(hessian))
    assert stats.converged
    assert not stats.notes["diverged"]
    assert stats.notes["phi"] < 2 / 100
    torch.testing.assert_close(x, torch.linalg.solve(hessian, u), rtol=1e-4, atol=1e-4)


def test_a_fixed_point_stops_by_itself_and_starts_where_it_is_told() -> None:
    hessian, u = positive(5), normal(5)
    solution = torch.linalg.solve(hessian, u)
    inverse = FixedPoint(steps=3, lr=0.1, tol=1e-6)
    x, stats = inverse.solve(u, quadratic(hessian), start=solution)
    assert stats.hvps == 1
    assert stats.converged
    assert torch.equal(x, solution)
    _, stats = inverse.solve(u, quadratic(hessian))
    assert stats.hvps == 3
    assert not stats.converged


def test_a_fixed_point_from_zero_is_the_neumann_series() -> None:
    hessian, u = positive(5), normal(5)
    x, _ = FixedPoint(steps=6, lr=0.05).solve(u, quadratic(hessian))
    y, _ = Neumann(terms=5, phi=0.05).solve(u, quadratic(hessian))
    torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


# The dense solve.


def test_exact_solves_what_is_not_positive_definite() -> None:
    hessian, u = torch.diag(torch.tensor([3.0, -2, 1], dtype=torch.float64)), normal(3)
    x, stats = Exact().solve(u, quadratic(hessian))
    assert not stats.notes["positive_definite"]
    assert stats.converged
    torch.testing.assert_close(x, u / hessian.diagonal())
    assert Exact().solve(u, quadratic(hessian.abs()))[1].notes["positive_definite"]


def test_exact_on_a_singular_hessian_says_that_it_failed() -> None:
    hessian, u = torch.diag(torch.tensor([3.0, 0], dtype=torch.float64)), torch.ones(2, dtype=torch.float64)
    x, stats = Exact().solve(u, quadratic(hessian))
    assert not stats.converged
    torch.testing.assert_close(x, torch.tensor([1 / 3, 0.0], dtype=torch.float64))
    assert stats.residual == pytest.approx(2**-0.5)


def test_exact_refuses_what_is_too_large() -> None:
    problem, batch, _ = mlp_module()
    with pytest.raises(nhgd.InputError, match=r"24 x 24 matrix.*Use cg, or raise max_dim \(now 10\)"):
        Exact(max_dim=10).solve(problem.theta.flat(), Oracle(problem, [batch]))


def test_the_identity_scales() -> None:
    u = normal(4)
    x, stats = Identity(scale=0.25).solve(u, quadratic(torch.eye(4, dtype=torch.float64)))
    assert torch.equal(x, u / 4)
    assert stats.hvps == 0


def test_products_are_counted_in_batches() -> None:
    problem, batch, outer_batch = settled(plain_tensor)
    halves = [tuple(t[:5] for t in batch), tuple(t[5:] for t in batch)]
    u = normal(problem.theta.numel)
    whole, one = Exact().solve(u, Oracle(problem, [batch], outer_batch))
    split, two = Exact().solve(u, Oracle(problem, halves, outer_batch))
    torch.testing.assert_close(split, whole, rtol=1e-10, atol=1e-12)
    assert (one.hvps, two.hvps) == (6, 12)


@pytest.mark.parametrize(("kind", "own"), [(Learned, 4), (Iterative, 1)])
def test_the_seam_of_an_inverse_is_small(kind: type[AbstractInverse], own: int) -> None:
    public = {n for n in dir(kind) if not n.startswith("_")} - {"name", "steps_field"}
    assert len(public) <= 8, public
    assert len(kind.__abstractmethods__) == own  # for a learned one `records`, `init`, `observe` and `solve`


def test_what_an_inverse_does_not_say_holds_nevertheless() -> None:
    @dataclasses.dataclass(frozen=True)
    class Scaled(Learned[float]):
        """The Fisher matrix taken as its mean diagonal."""

        name = "scaled"
        records = "sample"

        def init(self, theta: Any) -> float:
            return 0.0

        def observe(self, state: float, record: Any) -> float:
            return float(record.rows.square().mean())

        def solve(self, state: float, u: Tensor, ridge: Any) -> tuple[Tensor, SolveStats]:
            return u / (state + ridge.value), SolveStats(None, 0, True)

    problem, batch, outer = settled(mlp_module)
    inverse, point = Scaled(), Oracle(problem, [batch], outer)
    state, u = learn(inverse, problem, [batch]), normal(problem.theta.numel)
    x, _ = inverse.apply(state, u, point)
    assert torch.equal(capabilities.preconditioner(inverse, state, point)(u), x)
    assert capabilities.begun(inverse, state) == state
    assert capabilities.needs_record(inverse, 1)
    assert capabilities.couples(inverse)
    assert not capabilities.reduces(inverse)
    assert capabilities.label(inverse) == "scaled"
    assert capabilities.products(inverse) == 0
    assert capabilities.warnings_for(inverse, problem.theta) == []
    refined = nhgd.inverse.Refined(inverse, steps=3)
    assert capabilities.label(refined) == "refined(scaled, 3)"
    assert capabilities.products(refined) == 3
    assert torch.equal(capabilities.preconditioner(refined, state, point)(u), x)
    other = nhgd.inverse.KFAC()
    assert capabilities.with_learner(inverse, other) is other
    assert capabilities.with_learner(refined, other).learner is other
    assert capabilities.with_learner(CG(), other) == CG()


@pytest.mark.parametrize(("dtype", "power"), [(torch.float32, 90), (torch.float64, 560)], ids=["float32", "float64"])
@each_inverse
def test_it_is_linear_where_squares_leave_the_range_of_the_dtype(case: InverseCase, dtype: Any, power: int) -> None:
    double, (x, y, i), _ = of_classifier(nn.Linear(3, 3))
    net, batch = double.theta.given.to(dtype), (x.to(dtype), y, i)
    problem = nhgd.Bilevel(double.inner, double.outer, net, double.v.given.to(dtype), 0.05, "categorical")
    inverse, point = case.make(), Oracle(problem, [batch])
    state, u = learn(inverse, problem, [batch]), torch.ones(problem.theta.numel, dtype=dtype)
    usual, _ = inverse.apply(state, u, point, 0.1 * u)
    for sign in (-1, 1):
        half = 2.0 ** (sign * power / 2)  # a power of two, of which nothing is rounded
        x, _ = inverse.apply(state, u * half * half, point, 0.1 * u * half * half)
        assert torch.equal(x / half / half, usual), sign


@pytest.mark.parametrize("size", [0.0, 2.0**-600, 1.0, 2.0**600, float("inf")])
def test_the_scale_of_a_captured_solve_is_found_without_reading_a_number(size: float, monkeypatch: Any) -> None:
    monkeypatch.setattr(base.tape, "tape", object)
    seen = []

    def doubled(u: Tensor, start: Tensor | None) -> tuple[Tensor, SolveStats]:
        seen.append(u)
        return 2 * u, SolveStats(None, 0, True)

    u = size * torch.ones(3, dtype=torch.float64)
    assert torch.equal(base.at_usual_scale(u, None, doubled)[0], 2 * u)
    assert float(seen[0][0]) in (0.0, 1.0, 2.0, float("inf"))
