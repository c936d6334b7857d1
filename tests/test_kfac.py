"""K-FAC and EKFAC against matrices with every Kronecker product formed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nhgd
from nhgd._recording.recorder import Recorder
from nhgd.inverse import EKFAC, KFAC, FisherDiagonal
from nhgd.inverse._learned.eigenbasis import Basis, decomposed
from nhgd.inverse._learned.learning import learn
from nhgd.inverse._learned.statistics import second_moments
from nhgd.inverse.capabilities import preconditioner
from nhgd.inverse.ekfac import _carried
from nhgd.oracle import Oracle
from nhgd.ridge import Ridge
from tests import catalogue, oracles
from tests.storage import stored

BOTH = [KFAC, EKFAC]
L2 = 0.03


class Pooled(nn.Module):
    """A layer on every token, pooled; the same layer twice when `twice`."""

    def __init__(self, twice: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.last = nn.Linear(2, 3)
        self.twice = twice

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        if self.twice:
            h = torch.tanh(self.first(h))
        return self.last(h.mean(1))


class Scaled(nn.Module):
    """A linear model with parameters of no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.tensor([[0.5, 1.0, 2.0]]))
        self.norm = nn.LayerNorm(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x * self.scale))


class Branching(nn.Module):
    """Its second layer is called for batches with four features alone."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3)
        self.two = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x[:, :3])
        return h if x.shape[1] == 3 else self.two(torch.tanh(h))


def frozen() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    net[0].weight.requires_grad_(False)
    return net


def conv(**options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        first = nn.Conv2d(2, 2, 2, **options)
        width = first(torch.zeros(1, 2, 3, 3)).flatten(1).shape[1]
        return nn.Sequential(first, nn.Tanh(), nn.Flatten(), nn.Linear(width, 3))

    return make


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(3, 3), (3,)),
    "no bias": (lambda: nn.Linear(3, 3, bias=False), (3,)),
    "mlp": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3, bias=False)), (3,)),
    "sequence": (Pooled, (3, 2)),
    "called twice": (lambda: Pooled(twice=True), (2, 2)),
    "conv": (conv(), (2, 3, 3)),
    "conv, stride, padding": (conv(stride=2, padding=1, bias=False), (2, 3, 3)),
    "conv, groups": (conv(groups=2), (2, 3, 3)),
    "conv, dilation": (conv(dilation=(1, 2), padding=(0, 1)), (2, 3, 3)),
    "others": (Scaled, (3,)),
    "frozen": (frozen, (3,)),
}
nets = pytest.mark.parametrize("net", list(NETS))


def inner(model: Any, v: Any, batch: Any) -> nhgd.Losses:
    x, y, w = batch
    z = model(x)
    return nhgd.Losses(F.cross_entropy(z, y, reduction="none"), w, z)


def outer(model: Any, v: Any, batch: Any) -> Tensor:
    return model(batch[0]).square().sum() + v.sum()


def made(
    net: str | nn.Module, samples: int = 5, l2: Any = L2, shape: tuple[int, ...] = (3,), classes: int = 3
) -> tuple[nhgd.Bilevel, Any]:
    """A classifier and a batch whose weights differ, one of them 0."""
    if isinstance(net, str):
        make, shape = NETS[net]
        net = make()
    w = torch.rand(samples, dtype=torch.float64) + 0.5
    w[1:2] = 0.0
    batch = (torch.randn(samples, *shape, dtype=torch.float64), torch.arange(samples) % classes, w)
    problem = nhgd.Bilevel(inner, outer, net.double(), torch.zeros(1).double(), l2=l2, likelihood="categorical")
    return problem, batch


def eye(size: int) -> Tensor:
    return torch.eye(size, dtype=torch.float64)


def direction(problem: nhgd.Bilevel) -> Tensor:
    return torch.randn(problem.theta.numel, dtype=torch.float64)


def solved(inverse: Any, problem: nhgd.Bilevel, batches: list[Any], u: Tensor) -> Tensor:
    return inverse.apply(learn(inverse, problem, batches), u, nhgd.oracle.Oracle(problem, batches))[0]


def assert_solves(x: Tensor, matrix: Tensor, u: Tensor, tol: float = 1e-9) -> None:
    torch.testing.assert_close(x, torch.linalg.solve(matrix, u), rtol=tol, atol=tol)


@nets
@pytest.mark.parametrize("fisher", ["empirical", "exact"])
def test_kfac_is_its_dense_definition(net: str, fisher: Any) -> None:
    problem, batch = made(net)
    u = direction(problem)
    matrix = oracles.kfac(problem, [batch], exact=fisher == "exact") + oracles.ridge_hessian(problem)
    assert_solves(solved(KFAC(fisher=fisher), problem, [batch], u), matrix, u)
    damped = matrix + 0.2 * eye(len(u))
    assert_solves(solved(KFAC(fisher=fisher, damping=0.2), problem, [batch], u), damped, u)


@nets
@pytest.mark.parametrize("fisher", ["empirical", "exact"])
def test_ekfac_is_its_dense_definition(net: str, fisher: Any) -> None:
    problem, batch = made(net)
    u = direction(problem)
    matrix = oracles.ekfac(problem, batch, exact=fisher == "exact") + oracles.ridge_hessian(problem)
    assert_solves(solved(EKFAC(fisher=fisher), problem, [batch], u), matrix, u)


def curvlinops(operator: str, problem: nhgd.Bilevel, batch: Any, loss: nn.Module, fisher: str) -> Tensor:
    """The dense matrix of a public implementation."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about deprecated parts of torch that it imports
        import curvlinops as public
    net = problem.theta.given
    kind = {"empirical": "empirical", "exact": "type-2"}[fisher]
    made = getattr(public, operator)(
        net,
        loss,
        [p for p in net.parameters() if p.requires_grad],
        [batch[:2]],
        fisher_type=kind,
        kfac_approx="expand",
        separate_weight_and_bias=False,
        check_deterministic=False,
    )
    return made @ torch.eye(problem.theta.numel, dtype=torch.float64)


@pytest.mark.parametrize(
    "net", ["linear", "no bias", "mlp", "sequence", "conv", "conv, stride, padding", "conv, dilation"]
)
@pytest.mark.parametrize("fisher", ["empirical", "exact"])
@pytest.mark.parametrize(("inverse", "operator"), [(KFAC, "KFACLinearOperator"), (EKFAC, "EKFACLinearOperator")])
def test_agrees_with_curvlinops(net: str, fisher: Any, inverse: Any, operator: str) -> None:
    problem, (x, y, w) = made(net, samples=8)
    batch = (x, y, torch.ones_like(w))
    u = direction(problem)
    matrix = curvlinops(operator, problem, batch, nn.CrossEntropyLoss(), fisher) + oracles.ridge_hessian(problem)
    assert_solves(solved(inverse(fisher=fisher), problem, [batch], u), matrix, u)


def test_squared_errors_agree_with_curvlinops() -> None:
    net = nn.Linear(3, 2).double()
    batch = (torch.randn(6, 3).double(), torch.randn(6, 2).double())

    def squared(model: Any, v: Any, batch: Any) -> nhgd.Losses:
        z = model(batch[0])
        return nhgd.Losses((z - batch[1]).square().mean(1), outputs=z)

    problem = nhgd.Bilevel(squared, outer, net, torch.zeros(1), l2=L2, likelihood="gaussian")
    u = direction(problem)
    matrix = curvlinops("KFACLinearOperator", problem, batch, nn.MSELoss(), "exact") + oracles.ridge_hessian(problem)
    assert_solves(solved(KFAC(fisher="exact"), problem, [batch], u), matrix, u)


def test_outputs_at_every_token_agree_with_curvlinops() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    batch = (torch.randn(5, 4, 2).double(), torch.randn(5, 4, 2).double())

    def squared(model: Any, v: Any, batch: Any) -> nhgd.Losses:
        z = model(batch[0])
        return nhgd.Losses((z - batch[1]).square().mean((1, 2)), outputs=z)

    problem = nhgd.Bilevel(squared, outer, net, torch.zeros(1), l2=L2, likelihood="gaussian")
    u = direction(problem)
    ridge = oracles.ridge_hessian(problem)
    matrix = curvlinops("KFACLinearOperator", problem, batch, nn.MSELoss(), "exact") + ridge
    assert_solves(solved(KFAC(fisher="exact"), problem, [batch], u), matrix, u)
    # The public EKFAC takes one output a sample only.
    matrix = oracles.ekfac(problem, batch, exact=True) + ridge
    assert_solves(solved(EKFAC(fisher="exact"), problem, [batch], u), matrix, u)


@pytest.mark.parametrize("inverse", BOTH)
@pytest.mark.parametrize("weight", [0.0, 0.3, 2.0])
def test_one_sample_is_exact(inverse: Any, weight: float) -> None:
    problem, (x, y, _) = made("linear", samples=1)
    batch = (x, y, torch.tensor([weight], dtype=torch.float64))
    u = direction(problem)
    assert_solves(solved(inverse(), problem, [batch], u), oracles.damped_fisher(problem, batch), u)


def test_one_sample_is_exact_in_each_layer() -> None:
    problem, batch = made("mlp", samples=1)
    u = direction(problem)
    whole = oracles.fisher(problem, batch)
    matrix = torch.block_diag(whole[:16, :16], whole[16:, 16:]) + oracles.ridge_hessian(problem)
    assert_solves(solved(KFAC(), problem, [batch], u), matrix, u)


@pytest.mark.parametrize("inverse", BOTH)
def test_exact_fisher_of_one_sample_is_the_hessian_of_a_linear_softmax_model(inverse: Any) -> None:
    problem, batch = made("linear", samples=1)
    u = direction(problem)
    assert_solves(solved(inverse(fisher="exact"), problem, [batch], u), oracles.hessian(problem, batch), u)


def test_sampled_fisher_of_one_sample_is_that_of_one_label() -> None:
    problem, (x, _, w) = made("linear", samples=1)
    u = direction(problem)
    matrices = [oracles.damped_fisher(problem, (x, torch.tensor([y]), w)) for y in range(3)]
    expected = [torch.linalg.solve(matrix, u) for matrix in matrices]
    batch = (x, torch.tensor([0]), w)
    found = [learn_and_solve(problem, batch, u, seed) for seed in range(12)]
    nearest = [min(range(3), key=lambda y: float((f - expected[y]).norm())) for f in found]
    for f, y in zip(found, nearest, strict=True):
        torch.testing.assert_close(f, expected[y])
    assert len(set(nearest)) > 1


def learn_and_solve(problem: nhgd.Bilevel, batch: Any, u: Tensor, seed: int) -> Tensor:
    inverse = KFAC(fisher="sampled")
    return inverse.apply(learn(inverse, problem, [batch], seed), u, nhgd.oracle.Oracle(problem, [batch]))[0]


@pytest.mark.parametrize("net", ["mlp", "sequence", "conv, groups", "others"])
def test_plain_average_is_one_large_batch(net: str) -> None:
    problem, batch = made(net, samples=7)
    u = direction(problem)
    parts = [tuple(t[:2] for t in batch), tuple(t[2:6] for t in batch), tuple(t[6:] for t in batch)]
    matrix = oracles.kfac(problem, [batch]) + oracles.ridge_hessian(problem)
    assert_solves(solved(KFAC(beta=None), problem, parts, u), matrix, u)


@pytest.mark.parametrize("net", ["mlp", "others"])
def test_moving_average_corrects_its_bias_and_ignores_batches_of_weight_zero_in_g(net: str) -> None:
    problem, batch = made(net, samples=8)
    u = direction(problem)
    parts = [tuple(t[:3] for t in batch), tuple(t[3:5] for t in batch), tuple(t[5:] for t in batch)]
    parts[1] = (*parts[1][:2], torch.zeros(2, dtype=torch.float64))
    shares = [0.25 / 1.75, 0.5 / 1.75, 1.0 / 1.75]
    matrix = oracles.kfac(problem, parts, shares) + oracles.ridge_hessian(problem)
    assert_solves(solved(KFAC(beta=0.5), problem, parts, u), matrix, u)
    last = oracles.kfac(problem, [parts[2]]) + oracles.ridge_hessian(problem)
    assert_solves(solved(KFAC(beta=0.0), problem, parts, u), last, u)


@pytest.mark.parametrize("inverse", BOTH)
def test_weights_that_are_all_zero_leave_the_ridge(inverse: Any) -> None:
    problem, (x, y, w) = made("mlp")
    u = direction(problem)
    torch.testing.assert_close(solved(inverse(), problem, [(x, y, 0 * w)], u), u / (2 * L2))
    bare, _ = made("mlp", l2=0.0)
    with pytest.raises(nhgd.InputError, match="singular"):
        solved(inverse(), bare, [(x, y, 0 * w)], u)


@pytest.mark.parametrize("inverse", BOTH)
def test_damping_is_a_thousandth_of_the_mean_diagonal_where_there_is_no_ridge(inverse: Any) -> None:
    problem, batch = made("others", l2=0.0)
    u = direction(problem)
    matrix = oracles.kfac(problem, [batch]) if inverse is KFAC else oracles.ekfac(problem, batch)
    state = learn(inverse(), problem, [batch])
    x, stats = inverse().apply(state, u, nhgd.oracle.Oracle(problem, [batch]))
    assert stats.notes["damping"] == pytest.approx(1e-3 * float(matrix.trace()) / len(u), rel=1e-12)
    assert (stats.residual, stats.hvps, stats.converged) == (None, 0, True)
    assert_solves(x, matrix + stats.notes["damping"] * eye(len(u)), u, 1e-8)


def matrix_of(inverse: Any, problem: nhgd.Bilevel, batch: Any) -> Tensor:
    """The matrix that is inverted, without the ridge, read off its inverse."""
    solve = preconditioner(inverse, learn(inverse, problem, [batch]), nhgd.oracle.Oracle(problem, [batch]))
    return torch.linalg.inv(torch.stack([solve(row) for row in eye(problem.theta.numel)])) - oracles.ridge_hessian(
        problem
    )


def test_ekfac_has_the_trace_of_the_fisher_matrix_and_is_nearer_to_it_than_kfac() -> None:
    problem, batch = made("mlp")
    true = oracles.fisher(problem, batch)
    true = torch.block_diag(true[:16, :16], true[16:, 16:])
    ekfac, kfac = (matrix_of(inverse(), problem, batch) for inverse in (EKFAC, KFAC))
    torch.testing.assert_close(ekfac.trace(), true.trace())
    assert (ekfac - true).norm() < (kfac - true).norm()


@pytest.mark.parametrize("inverse", BOTH)
def test_ridge_that_differs_between_and_within_parameters(inverse: Any) -> None:
    ridge = {
        "linear.weight": torch.rand(3, 3).double() + 0.1,
        "linear.bias": torch.tensor(0.5).double(),
        "scale": torch.tensor([[0.1, 0.2, 0.3]]).double(),
        "norm.weight": torch.tensor(0.1).double(),
        "norm.bias": torch.tensor(0.2).double(),
    }
    problem, batch = made("others", l2=lambda v: ridge)
    u = direction(problem)
    matrix = oracles.kfac(problem, [batch]) if inverse is KFAC else oracles.ekfac(problem, batch)
    matrix += oracles.ridge_hessian(problem)
    x, stats = inverse().apply(learn(inverse(), problem, [batch]), u, nhgd.oracle.Oracle(problem, [batch]))
    assert float((matrix @ x - u).norm()) <= 1e-6 * float(u.norm())
    assert stats.notes["damping"] == 0.0

    same, batch = made("others", l2=lambda v: dict.fromkeys(ridge, torch.tensor(0.1).double()))
    notes = inverse().apply(learn(inverse(), same, [batch]), u, nhgd.oracle.Oracle(same, [batch]))[1].notes
    assert "ridge_iterations" in stats.notes
    assert "ridge_iterations" not in notes


@pytest.mark.parametrize("inverse", BOTH)
def test_large_parameters_outside_layers_get_a_diagonal(inverse: Any) -> None:
    problem, batch = made("others")
    u = direction(problem)
    x, stats = inverse(dense_limit=0).apply(
        learn(inverse(dense_limit=0), problem, [batch]), u, nhgd.oracle.Oracle(problem, [batch])
    )
    assert stats.notes["others"] == dict.fromkeys(("scale", "norm.weight", "norm.bias"), "diagonal")
    others = [i for name, place in problem.theta.slices().items() if "linear" not in name for i in range(len(u))[place]]
    diagonal = (oracles.fisher(problem, batch) + oracles.ridge_hessian(problem)).diagonal()
    torch.testing.assert_close(x[others], (u / diagonal)[others])
    _, stats = inverse().apply(learn(inverse(), problem, [batch]), u, nhgd.oracle.Oracle(problem, [batch]))
    assert set(stats.notes["others"].values()) == {"dense"}


@pytest.mark.parametrize("net", ["mlp", "conv, groups"])
def test_cholesky_is_factored_damping(net: str) -> None:
    problem, batch = made(net)
    u = direction(problem)
    mean = oracles.losses(problem, batch)[1].mean()
    matrix = torch.zeros(len(u), len(u), dtype=torch.float64)
    extra = 2 * L2 + 0.1
    for a, g, at in oracles.kronecker_factors(problem, batch):
        g, at = g / mean, at.reshape(-1)
        pi = ((a.trace() / len(a)) / (g.trace() / len(g))).sqrt()
        a, g = a + pi * extra**0.5 * eye(len(a)), g + extra**0.5 / pi * eye(len(g))
        matrix[at[:, None], at] = torch.kron(g, a)
    assert_solves(solved(KFAC(solver="cholesky", damping=0.1), problem, [batch], u), matrix, u)
    nothing = (*batch[:2], 0 * batch[2])
    torch.testing.assert_close(solved(KFAC(solver="cholesky"), problem, [nothing], u), u / (2 * L2))
    with pytest.raises(nhgd.InputError, match="singular"):
        solved(KFAC(solver="cholesky", damping=0.0), made(net, l2=0.0)[0], [batch], u)


def test_layer_that_a_batch_does_not_call_keeps_its_scale() -> None:
    problem, (x, y, w) = made(Branching(), samples=4, shape=(4,))
    u = direction(problem)
    parts = [(x[:, :3], y, w), (x, y, w), (x[:, :3], y, w)]
    second = oracles.kfac(problem, parts[1:2])[12:, 12:] / 3  # one batch in three has any score there
    found = solved(KFAC(beta=None), problem, parts, u)
    assert_solves(found[12:], second + 2 * L2 * eye(12), u[12:])


def test_periods() -> None:
    problem, batch = made("mlp", samples=6)
    u = direction(problem)
    at = nhgd.oracle.Oracle(problem, [batch])
    parts = [tuple(t[i : i + 1] for t in batch) for i in range(6)]
    kept = KFAC(beta=None, invert_every=3)
    now = KFAC(beta=None)
    assert [KFAC(factor_every=3).needs_record(step) for step in range(5)] == [True, False, False, True, False]

    def after(inverse: KFAC, count: int) -> Tensor:
        return inverse.apply(learn(inverse, problem, parts[:count]), u, at)[0]

    for count, since in ((1, 1), (2, 1), (3, 3), (5, 3), (6, 6)):
        torch.testing.assert_close(after(kept, count), after(now, since))


@pytest.mark.parametrize(
    ("period", "phase", "due"),
    [(3, 0, [1, 3, 6]), (3, 1, [1, 4, 7]), (3, 2, [1, 2, 5, 8]), (4, 1, [1, 5]), (2, 3, [1, 3, 5, 7])],
)
@pytest.mark.parametrize("kind", [KFAC, EKFAC])
def test_bases_are_made_at_the_first_observation_and_at_the_phase_of_each_period(
    kind: Any, period: int, phase: int, due: list[int]
) -> None:
    problem, batch = made("mlp", samples=8)
    inverse = kind(beta=None, invert_every=period, invert_phase=phase)
    state, before, found = inverse.init(problem.theta), None, []
    recorder = Recorder(problem, "layer")
    for i in range(8):
        state = inverse.observe(state, recorder.step(tuple(t[i : i + 1] for t in batch)).record)
        (vectors, *_) = [basis["input_vectors"] for basis in state.bases.values()]
        if vectors is not before:
            found.append(i + 1)
        before = vectors
    assert found == due


def test_ekfac_is_exact_over_several_batches_in_one_basis() -> None:
    problem, batch = made("mlp", samples=6)
    u = direction(problem)
    parts = [tuple(t[:3] for t in batch), tuple(t[3:] for t in batch)]
    whole = oracles.fisher(problem, batch)
    inverse = EKFAC(beta=None, invert_every=5)
    state = learn(inverse, problem, parts)
    basis = Basis(**state.bases["0.weight"])
    # Where a factor has a null space its eigenvectors are free, so the basis is fixed to the one in use.
    at = oracles.kronecker_factors(problem, parts[0])[0][2].reshape(-1)
    q = torch.kron(basis.score_vectors[0], basis.input_vectors[0])
    diagonal = (q.T @ whole[at[:, None], at] @ q).diagonal()
    torch.testing.assert_close(state.moments["0.weight"].reshape(-1), diagonal)
    x, _ = inverse.apply(state, u, nhgd.oracle.Oracle(problem, [batch]))
    assert_solves(x[at], q @ torch.diag(diagonal) @ q.T + 2 * L2 * eye(len(at)), u[at])


def test_moments_are_carried_over_to_a_new_basis() -> None:
    def basis(*vectors: Tensor) -> Basis:
        return Basis(vectors[0][None], torch.zeros(1, 3), vectors[1][None], torch.zeros(1, 2))

    def covariance(n: int) -> Tensor:
        root = torch.randn(n, n + 2).double()
        return root @ root.T

    q_a, q_g, p_a, p_g = (torch.linalg.qr(torch.randn(n, n).double())[0] for n in (3, 2, 3, 2))
    a, g = covariance(3), covariance(2)
    moments = torch.rand(1, 2, 3).double()

    def carried(moments: Tensor, new: Basis) -> Tensor:
        return _carried(moments, a[None], g[None], basis(q_a, q_g), new)

    torch.testing.assert_close(carried(moments, basis(q_a, q_g)), moments)
    turned = basis(-q_a[:, [2, 0, 1]], q_g[:, [1, 0]])
    torch.testing.assert_close(carried(moments, turned), moments[:, [1, 0]][..., [2, 0, 1]])
    old, new, product = torch.kron(q_g, q_a), torch.kron(p_g, p_a), torch.kron(g, a)
    # Near the product itself nothing is clamped, so the dense matrix has the answer.
    near = (old.T @ product @ old).diagonal() * (1 + 0.1 * torch.rand(6).double())
    whole = product + old @ torch.diag(near - (old.T @ product @ old).diagonal()) @ old.T
    expected = (new.T @ whole @ new).diagonal()
    torch.testing.assert_close(carried(near.reshape(1, 2, 3), basis(p_a, p_g)).reshape(-1), expected)
    far = carried(1e-3 * moments, basis(p_a, p_g))
    assert bool((far >= 0).all())
    torch.testing.assert_close(far.sum(), 1e-3 * moments.sum())
    assert torch.equal(carried(0 * moments, basis(p_a, p_g)), 0 * moments)


def test_ekfac_keeps_the_trace_when_its_basis_moves() -> None:
    problem, batch = made("mlp", samples=6)
    parts = [tuple(t[i : i + 2] for t in batch) for i in (0, 2, 4)]
    state = learn(EKFAC(beta=None, invert_every=1), problem, parts)
    trace = sum(m.sum() for m in state.moments.values())
    torch.testing.assert_close(trace, oracles.fisher(problem, batch).trace())


@pytest.mark.parametrize("limit", [1, 30, 2**24])
def test_second_moments_in_pieces(limit: int) -> None:
    a, g = torch.randn(5, 3, 2, 4).double(), torch.randn(2, 5, 3, 2, 3).double()
    expected = torch.einsum("kbtgo,btgi->kbgoi", g, a).square().sum((0, 1))
    torch.testing.assert_close(second_moments(a, g, limit), expected)
    one = torch.einsum("kbtgo,btgi->kbgoi", g[:, :, :1], a[:, :1]).square().sum((0, 1))
    torch.testing.assert_close(second_moments(a[:, :1], g[:, :, :1], limit), one)


@pytest.mark.parametrize("inverse", [KFAC(), EKFAC(), KFAC(solver="cholesky"), KFAC(invert_every=2)])
def test_solve_is_linear_symmetric_and_pure(inverse: Any) -> None:
    problem, batch = made("others")
    state = learn(inverse, problem, [batch, batch])
    at = nhgd.oracle.Oracle(problem, [batch])
    before = {path: t.clone() for path, t in state.tensors().items()}
    u, w = direction(problem), direction(problem)
    x, y = (inverse.apply(state, b, at)[0] for b in (u, w))
    torch.testing.assert_close(inverse.apply(state, 2 * u - w, at)[0], 2 * x - y)
    torch.testing.assert_close(w @ x, u @ y)
    assert float(u @ x) > 0
    many = preconditioner(inverse, state, at)
    assert torch.equal(many(u), x)
    assert torch.equal(many(w), y)
    assert state.tensors().keys() == before.keys()
    assert all(torch.equal(t, before[path]) for path, t in state.tensors().items())


@pytest.mark.parametrize("inverse", BOTH)
def test_observe_leaves_the_state_it_was_given(inverse: Any) -> None:
    problem, batch = made("others")
    made_inverse = inverse(invert_every=1)
    state = learn(made_inverse, problem, [batch])
    before = {path: t.clone() for path, t in state.tensors().items()}
    record = Recorder(problem, "layer").step(tuple(t[:3] for t in batch)).record
    assert record is not None
    later = made_inverse.observe(state, record)
    assert all(torch.equal(t, before[path]) for path, t in state.tensors().items())
    assert any(not torch.equal(t, before[path]) for path, t in later.tensors().items())


@pytest.mark.parametrize("inverse", [KFAC(), EKFAC(), KFAC(invert_every=2)])
def test_state_moves_and_saves(inverse: Any) -> None:
    problem, batch = made("others")
    state = learn(inverse, problem, [batch, batch])
    at, u = nhgd.oracle.Oracle(problem, [batch]), direction(problem)
    x = inverse.apply(state, u, at)[0]
    restored = stored(state)
    for again in (state.to("cpu"), state.clone(), restored):
        assert torch.equal(inverse.apply(again, u, at)[0], x)
    record = Recorder(problem, "layer").step(batch).record
    assert record is not None
    one, two = (inverse.apply(inverse.observe(s, record), u, at)[0] for s in (state, restored))
    assert torch.equal(one, two)


@pytest.mark.parametrize("inverse", BOTH)
@pytest.mark.parametrize(
    ("theta", "option", "expected"),
    [
        (torch.float32, None, torch.float32),
        (torch.float32, torch.float64, torch.float64),
        (torch.bfloat16, None, torch.float32),
    ],
)
def test_statistics_are_in_float32_or_better(inverse: Any, theta: Any, option: Any, expected: Any) -> None:
    problem, (x, y, w) = made("mlp")
    problem = nhgd.Bilevel(inner, outer, problem.theta.given.to(theta), torch.zeros(1), l2=L2)
    batch = (x.to(theta), y, w.to(theta))
    made_inverse = inverse(dtype=option)
    state = learn(made_inverse, problem, [batch])
    kept = state.tensors().values()
    assert {t.dtype for t in kept} == {expected}
    u = direction(problem).to(theta)
    found = made_inverse.apply(state, u, nhgd.oracle.Oracle(problem, [batch]))[0]
    assert found.dtype == theta
    assert bool(torch.isfinite(found).all())


def test_float32_is_near_float64() -> None:
    problem, batch = made("mlp", samples=30)
    u = direction(problem)
    exact = solved(KFAC(), problem, [batch], u)
    small = nhgd.Bilevel(inner, outer, problem.theta.given.float(), torch.zeros(1), l2=L2)
    found = solved(KFAC(), small, [tuple(t.float() if t.is_floating_point() else t for t in batch)], u.float())
    assert (found.double() - exact).norm() < 1e-4 * exact.norm()


@pytest.mark.parametrize("inverse", BOTH)
def test_memory_covers_the_state(inverse: Any) -> None:
    for net in NETS:
        problem, batch = made(net)
        kept = learn(inverse(), problem, [batch]).tensors()
        held = sum(t.numel() * t.element_size() for path, t in kept.items() if "weights" not in path)
        assert held <= inverse().memory(problem.theta) <= 8 * held
    tensors = nhgd.Bilevel(inner, outer, {"w": torch.zeros(10, 20)}, torch.zeros(1)).theta
    assert inverse().memory(tensors) > 2 * 4 * (10**2 + 20**2)


def test_cautions_name_the_parameters_outside_layers() -> None:
    problem, _ = made("others")
    assert KFAC().warnings_for(problem.theta) == ["dense blocks for scale, norm.weight, norm.bias"]
    assert EKFAC(dense_limit=0).warnings_for(problem.theta) == ["a diagonal for scale, norm.weight, norm.bias"]
    assert KFAC().warnings_for(made("mlp")[0].theta) == []
    assert "none" in KFAC().warnings_for(made(nn.LayerNorm(3))[0].theta)[0]


@pytest.mark.parametrize("inverse", BOTH)
def test_refuses_to_solve_before_it_has_observed(inverse: Any) -> None:
    problem, batch = made("linear")
    with pytest.raises(nhgd.InputError, match="observed no inner step"):
        inverse().apply(inverse().init(problem.theta), direction(problem), nhgd.oracle.Oracle(problem, [batch]))


@pytest.mark.parametrize("inverse", BOTH)
def test_refuses_a_model_without_layers(inverse: Any) -> None:
    problem, batch = made(nn.LayerNorm(3))
    with pytest.raises(nhgd.InputError, match="Use fisher_window"):
        learn(inverse(), problem, [batch])


@pytest.mark.parametrize("inverse", BOTH)
def test_refuses_what_is_not_finite(inverse: Any) -> None:
    problem, batch = made("linear")
    state = learn(inverse(), problem, [batch])
    spoiled = replace(state, inputs={name: a * float("nan") for name, a in state.inputs.items()})
    spoiled.bases.clear()
    with pytest.raises(nhgd.NonFiniteError, match="'weight' hold nan"):
        decomposed(spoiled, "weight")


@pytest.mark.parametrize("inverse", BOTH)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"beta": 1.0}, "beta must be at least 0 and below 1"),
        ({"beta": -0.1}, "beta must be"),
        ({"damping": -1.0}, "damping must be 0 or more"),
        ({"damping": float("nan")}, "damping must be 0 or more"),
        ({"factor_every": 0}, "factor_every must be a whole number"),
        ({"factor_every": 1.5}, "factor_every must be a whole number"),
        ({"invert_every": 0}, "invert_every must be a whole number"),
        ({"overhead": 0.0}, "overhead must be above 0"),
        ({"overhead": -1.0}, "overhead must be above 0"),
        ({"overhead": 0.2, "factor_every": 2}, "Set either the overhead or the periods"),
        ({"fisher": "emprical"}, "Did you mean 'empirical'"),
        ({"dense_limit": -1}, "dense_limit must be 0 or more"),
        ({"dtype": torch.bfloat16}, "dtype must be torch.float32 or torch.float64"),
    ],
)
def test_refuses_bad_settings(inverse: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(nhgd.InputError, match=said):
        inverse(**options)


def test_refuses_bad_settings_of_one_kind() -> None:
    with pytest.raises(nhgd.InputError, match="Did you mean 'eigen'"):
        KFAC(solver="eigne")  # type: ignore[arg-type]
    with pytest.raises(nhgd.InputError, match="cannot be reused"):
        KFAC(solver="cholesky", invert_every=2)
    with pytest.raises(nhgd.InputError, match="eigenbasis has to exist"):
        EKFAC(invert_every=None)
    with pytest.raises(nhgd.InputError, match="Set either the overhead or the period"):
        FisherDiagonal(overhead=0.2, factor_every=2)
    assert KFAC(factor_every=2).overhead is None  # periods that are given take the place of the default


def test_a_ridge_of_one_number_is_not_spread_out(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, batch, _ = catalogue.mlp_module()
    inverse = KFAC()
    state = inverse.observe(inverse.init(problem.theta), Recorder(problem, "layer").step(batch).record)  # type: ignore[arg-type]
    at = Oracle(problem, [batch])
    u = torch.randn_like(problem.theta.flat())
    spread = inverse.solve(state, u, Ridge(problem.ridge_diagonal()))[0]
    monkeypatch.setattr(nhgd.Bilevel, "ridge_diagonal", None)
    monkeypatch.setattr(Ridge, "diagonal", None)
    assert torch.equal(inverse.apply(state, u, at)[0], spread)
