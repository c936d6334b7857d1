"""A ridge that differs within a layer: K-FAC and EKFAC solve with it, and not with its mean."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nhgd
from nhgd._budget import FEW_ITERATIONS, Budget
from nhgd._cost import work
from nhgd._prices import PRICES
from nhgd._shape import Layer, Shape, unevenness
from nhgd._tree import map_tensors
from nhgd.inverse import EKFAC, KFAC
from nhgd.inverse._learned import layer_ridge
from nhgd.inverse._learned.effort import Effort
from nhgd.inverse._learned.eigenbasis import Basis, decomposed
from nhgd.inverse._learned.layer_ridge import ITERATIONS, LayerRidge, pays
from nhgd.inverse._learned.learning import learn
from nhgd.inverse.capabilities import preconditioner
from nhgd.inverse.ekfac import EKFACState
from nhgd.oracle import Oracle
from nhgd.ridge import Ridge
from tests import oracles
from tests.test_kfac import NETS, assert_solves, direction, eye, inner, outer
from tests.test_plan import Done, planned

KINDS = ["columns", "columns, bias", "rows", "rows and columns", "entries", "entries, zeros"]
BOTH = [KFAC(), EKFAC(), KFAC(invert_every=2)]
SMALL = ["linear", "mlp", "sequence", "conv", "conv, groups", "frozen", "others"]


def spread(*shape: int, decades: float = 4.0) -> Tensor:
    """Numbers between 1 and 10^-decades, both among them."""
    logs = torch.rand(shape, dtype=torch.float64)
    logs.view(-1)[0] = 0.0
    logs.view(-1)[-1] = 1.0
    return 10 ** (-decades * logs)


def coefficients(net: nn.Module, kind: str) -> dict[str, Tensor]:
    """The ridge of every parameter, as the kind says; rows of a layer have it in their biases, too."""
    found: dict[str, Tensor] = {}
    for name, leaf in net.named_parameters():
        width = [1] * (leaf.ndim - 1)
        weight = found.get(name.replace("bias", "weight"))
        if not leaf.requires_grad:
            continue
        if leaf.ndim > 1:
            rows, columns = spread(len(leaf), *width, decades=2), spread(*leaf.shape[1:], decades=2)
            found[name] = {"rows": rows**2, "rows and columns": rows * columns, "columns": columns**2}.get(
                kind.removesuffix(", bias"), spread(*leaf.shape)
            )
        elif kind == "columns" or weight is None or weight.ndim < 2:
            found[name] = torch.ones((), dtype=torch.float64)
        elif kind == "columns, bias":
            found[name] = torch.tensor(3e-3, dtype=torch.float64)
        else:
            found[name] = weight.flatten(1)[:, 0] if "rows" in kind else spread(len(leaf))
        if kind == "entries, zeros":
            found[name] = torch.where(torch.rand(found[name].shape) < 0.3, 0.0, found[name])
    return found


def made(net: str, kind: str, samples: int = 6) -> tuple[nhgd.Bilevel, Any]:
    make, shape = NETS[net]
    module = make().double()
    ridge = coefficients(module, kind)
    x = torch.randn(samples, *shape, dtype=torch.float64)
    batch = (x, torch.arange(samples) % 3, torch.rand(samples, dtype=torch.float64) + 0.5)
    v = torch.zeros(1).double()
    return nhgd.Bilevel(inner, outer, module, v, l2=lambda v: ridge, likelihood="categorical"), batch


def matrix_of(inverse: Any, problem: nhgd.Bilevel, batch: Any, damping: float = 0.0) -> Tensor:
    """What is to be inverted, from its definition."""
    found = oracles.kfac(problem, [batch]) if isinstance(inverse, KFAC) else oracles.ekfac(problem, batch)
    return found + oracles.ridge_hessian(problem) + damping * eye(len(found))


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conjugate gradients go on to the end."""
    monkeypatch.setattr(layer_ridge, "tolerance", lambda dtype: 1e-14)
    monkeypatch.setattr("nhgd.inverse._learned.kronecker.ITERATIONS", 2000)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("net", SMALL)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inverse", BOTH, ids=["kfac", "ekfac", "kept"])
def test_solves_its_own_matrix_with_the_true_ridge(inverse: Any, net: str, kind: str) -> None:
    problem, batch = made(net, kind)
    u = direction(problem)
    damping = 1e-3 if "zeros" in kind else 0.0
    inverse = type(inverse)(**{**vars(inverse), "damping": damping})
    x, stats = inverse.apply(learn(inverse, problem, [batch]), u, Oracle(problem, [batch]))
    assert_solves(x, matrix_of(inverse, problem, batch, damping), u, 1e-8)
    assert stats.notes["damping"] == damping


@pytest.mark.parametrize("net", ["mlp", "conv, groups"])
@pytest.mark.parametrize("kind", KINDS[:-1])
@pytest.mark.parametrize("inverse", BOTH, ids=["kfac", "ekfac", "kept"])
def test_the_residual_that_is_noted_is_the_true_one(inverse: Any, net: str, kind: str) -> None:
    problem, batch = made(net, kind)
    u = direction(problem)
    state = learn(inverse, problem, [batch])
    x, stats = inverse.apply(state, u, Oracle(problem, [batch]))
    matrix = matrix_of(inverse, problem, batch)
    if isinstance(inverse, KFAC) and "entries" not in kind:
        assert "ridge_iterations" not in stats.notes  # directly
        assert_solves(x, matrix, u, 1e-8)
        return
    assert 0 < stats.notes["ridge_iterations"] <= ITERATIONS
    assert stats.notes["ridge_residual"] <= 1e-6
    of_layers = []
    for layer in state.inputs:
        left, own = (state.gather(layer, t) for t in (matrix @ x - u, u))
        of_layers.append(float(left.norm() / own.norm()))
    assert max(of_layers) == pytest.approx(stats.notes["ridge_residual"], rel=1e-5, abs=1e-12)


def state_of(groups: int, out: int, into: int) -> EKFACState:
    """One layer whose factors have eigenvalues over four decades, and moments that differ from their products."""
    factors = []
    for n in (into, out):
        q = torch.linalg.qr(torch.randn(groups, n, n, dtype=torch.float64))[0]
        factors.append(q * torch.logspace(0, -4, n, dtype=torch.float64) @ q.mT)
    state = EKFACState({"w": 0}, {"w": groups * out * into}, 1.0, 1, {"w": factors[0]}, {"w": factors[1]})
    state.weights["w"] = torch.ones((), dtype=torch.float64)
    basis = decomposed(state, "w")
    state.bases["w"] = basis._asdict()
    state.moments["w"] = basis.products() * torch.rand(groups, out, into, dtype=torch.float64)
    return state


def whole(state: EKFACState, moments: bool, ridge: Tensor) -> Tensor:
    """The matrix of that layer with a ridge."""
    basis = Basis(**state.bases["w"])
    values = state.moments["w"] if moments else basis.products()
    turns = [torch.kron(q_g, q_a) for q_g, q_a in zip(basis.score_vectors, basis.input_vectors, strict=True)]
    return torch.block_diag(*[q * d.flatten() @ q.T for q, d in zip(turns, values, strict=True)]) + torch.diag(ridge)


MODES = {
    "fresh": lambda k: KFAC(effort=Effort(iterations=k, build_up=10)),
    "kept": lambda k: KFAC(effort=Effort(iterations=k)),
    "ekfac": lambda k: EKFAC(effort=Effort(iterations=k)),
}


@pytest.mark.parametrize("decades", [0.5, 2.0, 4.0, 6.0, 8.0])
@pytest.mark.parametrize("iterations", [1, 3, 10])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("affordable", [True, False])
def test_too_few_iterations_are_never_worse_than_the_mean_of_the_ridge(
    mode: str, iterations: int, decades: float, affordable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_ridge, "pays", lambda *given: affordable)
    state, inverse = state_of(2, 4, 7), MODES[mode](iterations)
    for ridge in (spread(56, decades=decades), spread(7, decades=decades).repeat(8)):
        b, matrix = torch.randn(56, dtype=torch.float64), whole(state, mode == "ekfac", ridge)
        mean = matrix - torch.diag(ridge) + ridge.mean() * eye(56)
        exact, averaged = torch.linalg.solve(matrix, b), torch.linalg.solve(mean, b)
        x, stats = inverse.solve(state, b, Ridge(ridge))
        assert stats.notes.get("ridge_iterations", 0) <= iterations

        def energy(x: Tensor, matrix: Tensor = matrix, exact: Tensor = exact) -> float:
            return float((x - exact) @ matrix @ (x - exact))

        assert energy(x) <= energy(averaged) + 1e-9 * float(b @ exact)


@pytest.mark.parametrize("inverse", [KFAC(), KFAC(invert_every=2), EKFAC()])
@pytest.mark.parametrize("ridge", [spread(7).repeat(4), spread(28)], ids=["columns", "entries"])
def test_what_is_not_a_number_is_not_hidden(inverse: Any, ridge: Tensor) -> None:
    b = torch.randn(28, dtype=torch.float64)
    b[3] = float("nan")
    assert not bool(torch.isfinite(inverse.solve(state_of(1, 4, 7), b, Ridge(ridge))[0]).any())


def test_a_group_of_zeros_stays_zero() -> None:
    state, ridge = state_of(2, 3, 4), spread(24)
    b = torch.randn(24, dtype=torch.float64)
    b[12:] = 0.0
    for inverse in (KFAC(), EKFAC()):
        x, _ = inverse.solve(state, b, Ridge(ridge))
        assert torch.equal(x[12:], b[12:])
        assert torch.equal(inverse.solve(state, 0 * b, Ridge(ridge))[0], 0 * b)


@pytest.mark.parametrize("inverse", [KFAC(), KFAC(invert_every=2), EKFAC()])
@pytest.mark.parametrize(
    "ridge", [spread(9, decades=6.0).repeat(5), spread(45, decades=2.0)], ids=["columns", "entries"]
)
def test_float32_is_near_float64(inverse: Any, ridge: Tensor) -> None:
    state = state_of(1, 5, 9)
    b = torch.randn(45, dtype=torch.float64)
    exact = inverse.solve(state, b, Ridge(ridge))[0]
    single = map_tensors(torch.Tensor.float, state)
    found = inverse.solve(single, b.float(), Ridge(ridge.float()))[0]
    assert found.dtype == torch.float32
    matrix, off = whole(state, isinstance(inverse, EKFAC), ridge), found.double() - exact
    assert float(off @ matrix @ off) <= 1e-3**2 * float(b @ exact)


def test_a_ridge_of_rows_and_columns_is_told_from_others() -> None:
    rows, columns = spread(2, 3, 1), spread(2, 1, 5)
    found = {name: LayerRidge.of(r.expand(2, 3, 5).clone()) for name, r in (("rows", rows), ("columns", columns))}
    found["both"] = LayerRidge.of(rows * columns)
    expected = {"rows": (False, True), "columns": (True, False), "both": (False, False)}
    for name, ridge in found.items():
        assert isinstance(ridge, LayerRidge)
        assert ridge.separable
        assert (ridge.even_rows, ridge.even_columns) == expected[name]
        torch.testing.assert_close(ridge.level * ridge.rows * ridge.columns, ridge.entries, rtol=1e-14, atol=0.0)
        torch.testing.assert_close(ridge.scale.square() * ridge.entries, torch.ones(2, 3, 5).double())
    other = LayerRidge.of(rows * columns * (1 + 1e-9 * torch.rand(2, 3, 5, dtype=torch.float64)))
    assert isinstance(other, LayerRidge)
    assert not other.separable
    torch.testing.assert_close(other.level * other.rows * other.columns, rows * columns, rtol=1e-8, atol=0.0)
    assert LayerRidge.of(torch.full((2, 3, 5), 0.25)) == 0.25
    groups = LayerRidge.of(torch.tensor([1.0, 2.0])[:, None, None].expand(2, 3, 5).clone())
    assert isinstance(groups, LayerRidge)
    assert (groups.separable, groups.even_rows, groups.even_columns) == (True, True, True)


def test_a_ridge_for_each_group_needs_no_decomposition_where_they_are_kept() -> None:
    state, ridge = state_of(2, 3, 4), torch.tensor([1.0, 2.0], dtype=torch.float64).repeat_interleave(12)
    b = torch.randn(24, dtype=torch.float64)
    with Done() as done:
        x = KFAC(invert_every=2).solve(state, b, Ridge(ridge))[0]
    assert not done.factorised
    assert_solves(x, whole(state, False, ridge), b, 1e-8)


@pytest.mark.parametrize("affordable", [True, False])
@pytest.mark.parametrize("kind", ["columns", "rows", "entries"])
def test_where_bases_are_kept_only_what_the_ridge_scales_is_decomposed(
    kind: str, affordable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_ridge, "pays", lambda *given: affordable)
    ridge = {"columns": spread(7).repeat(4), "rows": spread(4).repeat_interleave(7), "entries": spread(28)}[kind]
    state, b = state_of(1, 4, 7), torch.randn(28, dtype=torch.float64)
    with Done() as done:
        KFAC(invert_every=2).solve(state, b, Ridge(ridge))
    sizes = {"columns": [7], "rows": [4], "entries": [4, 7]}[kind]
    assert done.factorised == {("eigh", n): 1 for n in sizes if affordable}


def test_wide_factors_are_not_decomposed_in_a_solve() -> None:
    assert pays([31], 16, 31, 1)
    assert pays([512], 512, 512, 50)
    assert not pays([5000], 10, 5000, ITERATIONS)
    assert all(pays([300], 10, 300, k) <= pays([300], 10, 300, k + 1) for k in range(1, 50))


def test_the_matrix_of_a_kept_basis_is_the_same_for_every_ridge() -> None:
    """A ridge that hardly differs within a layer gives hardly another x: both are of what was decomposed last."""
    problem, batch = made("mlp", "columns")
    parts = [tuple(t[:3] for t in batch), batch, batch]
    inverse = KFAC(invert_every=5, beta=None)
    state, u = learn(inverse, problem, parts), direction(problem)
    even = torch.full_like(u, 0.1)
    nearly = torch.cat([even[:1] * (1 + 1e-9), even[1:]])
    columns = even.clone()
    columns[12:28] = 0.1 * (1 + 1e-9)
    x = inverse.solve(state, u, Ridge(even))[0]
    for other in (nearly, columns):
        torch.testing.assert_close(inverse.solve(state, u, Ridge(other))[0], x, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(KFAC(beta=None).solve(replace(state, bases={}), u, Ridge(even))[0], x, rtol=1e-3)


@pytest.mark.parametrize("inverse", [KFAC(), EKFAC(), KFAC(solver="cholesky"), KFAC(invert_every=2)])
def test_solve_is_linear_symmetric_and_pure(inverse: Any) -> None:
    problem, batch = made("conv, groups", "entries")
    state = learn(inverse, problem, [batch, batch])
    at = Oracle(problem, [batch])
    before = {path: t.clone() for path, t in state.tensors().items()}
    u, w = direction(problem), direction(problem)
    x, y = (inverse.apply(state, b, at)[0] for b in (u, w))
    size = float(x.norm() + y.norm())
    torch.testing.assert_close(inverse.apply(state, 2 * u - w, at)[0], 2 * x - y, rtol=0.0, atol=1e-4 * size)
    torch.testing.assert_close(w @ x, u @ y, rtol=0.0, atol=1e-4 * size)
    assert float(u @ x) > 0
    many = preconditioner(inverse, state, at)
    assert torch.equal(many(u), x)
    assert torch.equal(many(w), y)
    assert all(torch.equal(t, before[path]) for path, t in state.tensors().items())


@pytest.mark.parametrize("ridge", ["columns", "entries"])
def test_factored_damping_has_the_ridge_as_rows_and_columns(ridge: str) -> None:
    state = state_of(2, 3, 4)
    entries = {"columns": spread(4).repeat(6), "entries": spread(24)}[ridge]
    found = LayerRidge.of(entries.view(2, 3, 4))
    assert isinstance(found, LayerRidge)
    blocks = []
    for n in range(2):
        rows = (found.level[n] * found.rows[n]).flatten()
        root_d, root_c = torch.diag(rows.sqrt()), torch.diag(found.columns[n].flatten().sqrt())
        a, g = (t[n] for t in state.factors("w"))
        a, g = (torch.linalg.inv(root) @ f @ torch.linalg.inv(root) for root, f in ((root_c, a), (root_d, g)))
        pi = ((a.trace() / 4) / (g.trace() / 3)).sqrt()
        left, right = root_d @ (g + eye(3) / pi) @ root_d, root_c @ (a + pi * eye(4)) @ root_c
        blocks.append(torch.kron(left, right))
    b = torch.randn(24, dtype=torch.float64)
    x = KFAC(solver="cholesky").solve(state, b, Ridge(entries))[0]
    assert_solves(x, torch.block_diag(*blocks), b, 1e-8)


@pytest.mark.parametrize(
    ("rank", "weight", "bias", "expected"),
    [
        (2, 0.1, 0.1, "even"),
        (2, (), None, "even"),
        (2, (), (), "columns"),
        (2, (), (5,), "uneven"),
        (2, (30,), (), "columns"),
        (2, (1, 30), None, "columns"),
        (2, (5, 1), None, "rows"),
        (2, (5, 1), (5,), "uneven"),
        (2, (5, 30), None, "uneven"),
        (4, (3, 3), None, "columns"),
        (4, (8, 1, 1, 1), None, "rows"),
        (4, (2, 1, 1), (), "columns"),
    ],
)
def test_unevenness_is_seen_in_the_shapes_of_coefficients(rank: int, weight: Any, bias: Any, expected: str) -> None:
    w, b = (torch.ones(shape) if isinstance(shape, tuple) else shape for shape in (weight, bias))
    assert unevenness(rank, w, b) == expected


def test_one_coefficient_for_all_parameters_is_even() -> None:
    net = nn.Linear(3, 2).double()
    for l2 in (0.1, lambda v: v.exp()):
        problem = nhgd.Bilevel(inner, outer, net, torch.zeros(1).double(), l2=l2)
        shape = Shape.of(problem.theta, 5, None, problem.ridge_coefficients())
        assert shape == Shape.of(problem.theta, 5)
        assert shape.layers[0].ridge == "even"


@pytest.mark.parametrize("kind", ["columns", "rows", "entries"])
@pytest.mark.parametrize("inverse", [KFAC(), EKFAC(), KFAC(invert_every=2)], ids=["kfac", "ekfac", "kept"])
def test_what_is_counted_is_what_is_done(inverse: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Factorisations are those that are made, and multiplications are right to a factor of three."""
    monkeypatch.setattr(layer_ridge, "tolerance", lambda dtype: 0.0)  # all iterations are taken
    state, ridge = state_of(1, 30, 40), None
    ridge = {"columns": spread(40).repeat(30), "rows": spread(30).repeat_interleave(40), "entries": spread(1200)}[kind]
    layer = Layer(1, 30, 40, 1, {"entries": "uneven"}.get(kind, kind))  # type: ignore[arg-type]
    counted = work(inverse, Shape(1200, 5, (layer,)))
    with Done() as done:
        inverse.solve(state, torch.randn(1200, dtype=torch.float64), Ridge(ridge))
    multiplications, factorised = planned(counted.solve)
    # What is not there in the end is compared with the mean, whose factors are decomposed where none are kept.
    assert factorised == done.factorised or (kind == "entries" and inverse == KFAC())
    assert multiplications / 3 <= done.multiplications <= 3 * multiplications


def test_the_budget_pays_for_solves() -> None:
    def shape(ridge: Any) -> Shape:
        return Shape(7850, 1000, (Layer(1, 10, 785, 1, ridge),))

    for inverse in (KFAC(), EKFAC()):
        found = {}
        for ridge in ("even", "columns", "uneven"):
            budget = Budget(shape(ridge), 2.5e-3, 2.5e-3, 10, PRICES["cpu"])
            effort = budget.effort(inverse)
            assert effort is not None
            found[ridge] = effort.iterations
            if ridge == "even":
                continue
            assert effort.iterations is not None
            assert FEW_ITERATIONS <= effort.iterations < ITERATIONS
            allowed = inverse.overhead * 10 * 2.5e-3
            assert budget.solve(inverse, effort.iterations) <= allowed / 2 or effort.iterations == FEW_ITERATIONS
            assert budget.solve(inverse, effort.iterations + 1) > allowed / 2
            assert budget.solve(inverse) > Budget(shape("even"), 2.5e-3, 2.5e-3, 10, PRICES["cpu"]).solve(inverse)
        assert found["even"] is None
    rich = Budget(Shape(90, 100_000, (Layer(1, 9, 10, 1, "columns"),)), 1.0, 1.0, 10, PRICES["cpu"])
    effort = rich.effort(KFAC(overhead=3e-3))
    assert effort is not None
    assert effort.iterations is None  # a solve is direct, and within what is allowed


def test_a_run_decides_on_the_ridge_that_its_problem_has() -> None:
    """The ridges are all alike at the start, and differ as soon as v has moved."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    v = torch.full((3,), -3.0, dtype=torch.float64)
    names = [name for name, _ in net.named_parameters()]

    def l2(v: Tensor) -> dict[str, Tensor]:
        return dict.fromkeys(names, torch.tensor(0.1).double()) | {"0.weight": v.exp()}

    def inner(model: Any, v: Any, batch: Any) -> nhgd.Losses:
        z = model(batch[0])
        return nhgd.Losses((z - batch[1]).square().mean(1), outputs=z)

    def outer(model: Any, v: Any, batch: Any) -> Tensor:
        return (model(batch[0]) - batch[1]).square().mean()

    problem = nhgd.Bilevel(inner, outer, net, v, l2=l2, likelihood="gaussian")
    x = torch.randn(20, 3, dtype=torch.float64)
    data = nhgd.Data(x, x.sin(), batch=10)
    solver = nhgd.Solver(problem, data, data, method="nhgd", inner_steps=3, inner_lr=0.1, outer_lr=0.3)
    solver.run(steps=12)
    shape = Shape.of(problem.theta, 10, None, problem.ridge_coefficients())
    assert [layer.ridge for layer in shape.layers] == ["columns", "even"]  # both of the second have one ridge
    assert float(problem.v.flat().std()) > 0
    learner = solver.loop.inverse.learner
    found = solver.executor.curvature()
    x, stats = learner.solve(found.state, torch.ones(problem.theta.numel).double(), Ridge(problem.ridge_diagonal()))
    matrix = torch.stack([learner.solve(found.state, row, Ridge(problem.ridge_diagonal()))[0] for row in eye(31)])
    torch.testing.assert_close(matrix, matrix.T, rtol=1e-8, atol=1e-8)
    assert "ridge_iterations" not in stats.notes
