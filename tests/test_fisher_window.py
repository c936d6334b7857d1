"""The window: equal to dense algebra on the samples it holds, from gradients and from layer inputs and scores alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nhgd
from nhgd._recording.recorder import Recorder
from nhgd.errors import InputError, NonFiniteError
from nhgd.inverse import fisher_window
from nhgd.inverse._learned import gram, ring
from nhgd.inverse._learned.learning import learn
from nhgd.inverse._learned.ring import WindowState
from nhgd.inverse.capabilities import preconditioner
from nhgd.inverse.fisher_window import FisherWindow
from nhgd.oracle import Oracle
from nhgd.record import BatchGradient, PerSampleGradients
from tests import catalogue, oracles
from tests.storage import stored

D = 12


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def oracle(size: int = D, l2: Any = 0.0) -> Oracle:
    """A point whose only use is its ridge."""
    problem = nhgd.Bilevel(
        lambda theta, v, batch: (batch @ theta - v).square(),
        lambda theta, v, batch: theta.sum(),
        torch.zeros(size, dtype=torch.float64),
        torch.linspace(0.1, 1, size, dtype=torch.float64),
        l2=l2,
    )
    return Oracle(problem, [torch.zeros(1, size, dtype=torch.float64)])


def taught(inverse: FisherWindow, batches: list[Tensor], roots: int = 1) -> WindowState:
    """A state after batches of rows (K B, D)."""
    state = inverse.init(oracle(batches[0].shape[1]).problem.theta)
    for rows in batches:
        state = inverse.observe(state, PerSampleGradients(rows, len(rows) // roots))
    return state


def definition(inverse: FisherWindow, batches: list[Tensor], roots: int = 1) -> Tensor:
    """F from a list of samples, newest last, each with its weight."""
    samples, weights = [], []
    for age, rows in zip(range(len(batches) - 1, -1, -1), batches, strict=True):
        count = len(rows) // roots
        for i in range(count):
            samples.append(rows[i::count])  # (K, D)
            weights.append(inverse.beta**age / min(count, inverse.window) if inverse.weights == "ema" else 1.0)
    samples, weights = samples[-inverse.window :], weights[-inverse.window :]
    return sum(w * s.T @ s for w, s in zip(weights, samples, strict=True)) / sum(weights)


def solved(matrix: Tensor, at: Oracle, damping: float, u: Tensor) -> Tensor:
    shifted = matrix + oracles.ridge_hessian(at.problem) + damping * torch.eye(len(u), dtype=u.dtype)
    return torch.linalg.solve(shifted, u)


def error(found: Tensor, true: Tensor) -> float:
    return float((found - true).norm() / true.norm())


# Batch sizes against a window of 8: partly filled, one at a time, not a multiple, just full, larger than the window.
BATCHES = [[3, 2], [1] * 11, [3] * 7, [8], [4, 4], [20], [3, 20, 5], [5, 9, 2, 1]]
RIDGES = [0.05, lambda v: v.sum() / 50, lambda v: 0.05 * v]
WEIGHTS = ["average", "ema"]


@pytest.mark.parametrize("sizes", BATCHES)
@pytest.mark.parametrize("roots", [1, 3])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_window_equals_dense_algebra(weights: Any, roots: int, sizes: list[int]) -> None:
    inverse = FisherWindow(window=8, weights=weights, beta=0.6, records="sample")
    batches = [normal(roots * b, D, seed=b) for b in sizes]
    f, u = definition(inverse, batches, roots), normal(D, seed=99)
    state = taught(inverse, batches, roots)
    for l2 in RIDGES:
        for damping in (None, 0.3):
            at = oracle(l2=l2)
            x, stats = FisherWindow(8, weights, 0.6, "sample", damping=damping).apply(state, u, at)
            assert error(x, solved(f, at, damping or 0.0, u)) < 1e-10
            assert stats.notes["damping"] == (damping or 0.0)
            assert (stats.residual, stats.hvps, stats.converged) == (None, 0, True)
    assert stats.notes["samples"] == min(8, sum(sizes))
    assert stats.notes["rows"] == roots * min(8, sum(sizes))


@pytest.mark.parametrize("weights", WEIGHTS)
def test_without_a_ridge_the_damping_is_a_share_of_the_mean_diagonal(weights: Any) -> None:
    inverse = FisherWindow(window=8, weights=weights, beta=0.6, records="sample")
    batches, u = [normal(3, D, seed=b) for b in range(4)], normal(D, seed=99)
    f = definition(inverse, batches)
    damping = 1e-3 * float(f.diagonal().mean())
    x, stats = inverse.apply(taught(inverse, batches), u, oracle())
    assert stats.notes["damping"] == pytest.approx(damping, rel=1e-12)
    assert error(x, solved(f, oracle(), damping, u)) < 1e-10
    # A ridge that leaves out one parameter is no ridge for the default.
    partial = oracle(l2=lambda v: v * (torch.arange(D) > 0))
    assert inverse.apply(taught(inverse, batches), u, partial)[1].notes["damping"] == pytest.approx(damping)


def test_one_row_a_step_from_batch_gradients() -> None:
    inverse = FisherWindow(window=4, records="batch")
    rows = normal(6, D)
    state = inverse.init(oracle().problem.theta)
    for row in rows:
        state = inverse.observe(state, BatchGradient(row, 5 * row, samples=32))
    u, at = normal(D, seed=1), oracle(l2=0.05)
    assert error(inverse.apply(state, u, at)[0], solved(rows[2:].T @ rows[2:] / 4, at, 0.0, u)) < 1e-10


@pytest.mark.parametrize("make", catalogue.PER_SAMPLE, ids=lambda make: make.__name__)
@pytest.mark.parametrize("records", ["layer", "sample"])
def test_it_inverts_the_empirical_fisher_matrix_and_the_ridge(make: Any, records: Any) -> None:
    problem, inner_batch, _ = make()
    u = normal(problem.theta.numel)
    inverse = FisherWindow(records=records)
    x, _ = inverse.apply(learn(inverse, problem, [inner_batch]), u, Oracle(problem, [inner_batch]))
    assert error(x, torch.linalg.solve(oracles.damped_fisher(problem, inner_batch), u)) < 1e-9


# Layers.


class Sequence(nn.Module):
    """One layer on every place of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(3, 4), nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(x.reshape(len(x), -1, 3))).mean(1))


class Twice(nn.Module):
    """One layer called two times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(torch.tanh(self.layer(x))))


class Mixed(nn.Module):
    """Layers among parameters of other kinds, so that neither is contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 4, bias=False), nn.LayerNorm(4), nn.Linear(4, 3)
        self.scale, self.shift = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.second(torch.tanh(self.norm(self.first(x)))) + self.shift


NETS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(6, 3),
    "without bias": lambda: nn.Sequential(nn.Linear(6, 4, bias=False), nn.Tanh(), nn.Linear(4, 3, bias=False)),
    "mlp": lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)),
    "sequence": Sequence,
    "twice": Twice,
    "mixed": Mixed,
    "conv": lambda: nn.Sequential(nn.Unflatten(1, (2, 3, 1)), nn.Conv2d(2, 3, (2, 1)), nn.Flatten(), nn.Linear(6, 3)),
    "grouped": lambda: nn.Sequential(nn.Unflatten(1, (2, 3, 1)), nn.Conv2d(2, 4, (2, 1), groups=2), nn.Flatten(), nn.Linear(8, 3)),
    "frozen bias": lambda: _frozen(nn.Linear(6, 3)),
}  # fmt: skip


def _frozen(layer: nn.Linear) -> nn.Linear:
    layer.bias.requires_grad_(False)
    return layer


def of_net(name: str, l2: Any = 0.05) -> tuple[nhgd.Bilevel, list[Any]]:
    """A weighted classification problem and three batches of it."""
    net = NETS[name]().double()
    problem = nhgd.Bilevel(
        catalogue.cross_entropy, catalogue.mean_cross_entropy, net, normal(12, seed=5), l2=l2, likelihood="categorical"
    )
    x, y, index = normal(12, 6), torch.arange(12) % 3, torch.arange(12)
    return problem, [(x[s], y[s], index[s]) for s in (slice(0, 4), slice(4, 5), slice(5, 12))]


def trees(problem: nhgd.Bilevel) -> dict[str, Any]:
    """Ridges that are one number, one number a parameter, one a column, one an entry."""
    shapes = {n: leaf.shape for n, leaf in zip(problem.theta.names, problem.theta.leaves, strict=True)}

    def tree(shape: Callable[[torch.Size], Any], seed: int) -> Any:
        made = {n: 0.05 + 0.1 * normal(*shape(s), seed=seed + i).square() for i, (n, s) in enumerate(shapes.items())}
        return lambda v: made

    return {
        "constant": 0.05,
        "parameter": tree(lambda s: (), 10),
        "column": tree(lambda s: s[1:] if len(s) > 1 else (), 20),
        "entry": tree(lambda s: s, 30),
    }


@pytest.mark.parametrize("fisher", ["empirical", "exact"])
@pytest.mark.parametrize("keep", ["factors", "gradients", "what is cheaper"])
@pytest.mark.parametrize("name", NETS)
def test_layers_give_the_same_as_gradients(name: str, keep: str, fisher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if keep != "what is cheaper":
        monkeypatch.setattr(ring, "factors_pay", lambda *_: keep == "factors")
    problem, batches = of_net(name)
    layer = FisherWindow(window=7, weights="ema", beta=0.8, records="layer", fisher=fisher)
    sample = FisherWindow(window=7, weights="ema", beta=0.8, records="sample", fisher=fisher)
    one, two = learn(layer, problem, batches), learn(sample, problem, batches)
    assert bool(one.inputs) == (keep == "factors") or keep == "what is cheaper"
    assert one.gram.shape == two.gram.shape
    torch.testing.assert_close(one.gram, two.gram, rtol=1e-10, atol=1e-10)
    u = normal(problem.theta.numel, seed=9)
    for l2 in trees(problem).values():
        ridged = nhgd.Bilevel(problem.inner, problem.outer, problem.theta.given, problem.v.given, l2=l2)
        at = Oracle(ridged, [batches[0]])
        assert error(layer.apply(one, u, at)[0], sample.apply(two, u, at)[0]) < 1e-10


def test_small_pieces_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, batches = of_net("mlp", l2=lambda v: dict.fromkeys(problem.theta.names, v.square().mean()))
    u, at = normal(problem.theta.numel, seed=9), Oracle(problem, [batches[0]])
    ridged = nhgd.Bilevel(
        problem.inner, problem.outer, problem.theta.given, problem.v.given, l2=trees(problem)["entry"]
    )
    for records in ("layer", "sample"):
        inverse = FisherWindow(window=9, records=records)
        for where in (at, Oracle(ridged, [batches[0]])):
            whole = inverse.apply(learn(inverse, problem, batches), u, where)[0]
            monkeypatch.setattr(gram, "PIECE", 20)
            monkeypatch.setattr(fisher_window, "NUMBERS_AT_A_TIME", 20)
            monkeypatch.setattr(fisher_window, "ROWS_AT_A_TIME", 2)
            assert error(inverse.apply(learn(inverse, problem, batches), u, where)[0], whole) < 1e-12
            monkeypatch.undo()


@pytest.mark.parametrize("lengths", [(6, 3, 9, 6), (9, 6)])
def test_sequences_may_differ_in_length(lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "factors_pay", lambda *_: True)
    problem, _ = of_net("sequence")
    batches = [(normal(3, n, seed=n), torch.arange(3), torch.arange(3)) for n in lengths]
    layer, sample = FisherWindow(window=5), FisherWindow(window=5, records="sample")
    one, two = learn(layer, problem, batches), learn(sample, problem, batches)
    assert one.inputs["layer.weight"].shape[1] == max(lengths) // 3
    torch.testing.assert_close(one.gram, two.gram, rtol=1e-10, atol=1e-10)


class Sometimes(Twice):
    """A layer that can be left out."""

    left_out = False

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x if self.left_out else self.layer(x))


def test_a_layer_that_comes_and_goes_needs_gradients() -> None:
    net = Sometimes().double()
    problem = nhgd.Bilevel(catalogue.cross_entropy, catalogue.mean_cross_entropy, net, normal(4), l2=0.05)
    batch = normal(4, 6), torch.arange(4) % 3, torch.arange(4)
    states, rows = {}, []
    for left_out in (False, True):
        net.left_out = left_out
        theta = oracles.theta_of(problem).requires_grad_()
        values, weights, _ = oracles.losses(problem, batch, theta)
        jacobian = [torch.autograd.grad(l, theta, retain_graph=True)[0] for l in values]
        rows.append(weights.detach().sqrt()[:, None] * torch.stack(jacobian))
        for records in ("sample", "layer"):
            inverse = FisherWindow(records=records)
            record = Recorder(problem, records).step(batch).record
            if left_out and records == "layer":
                with pytest.raises(InputError, match=r"layers that inner\(\) calls.*records='sample'"):
                    inverse.observe(states[records], record)
            else:
                states[records] = inverse.observe(states.get(records) or inverse.init(problem.theta), record)
    both = torch.cat(rows)
    torch.testing.assert_close(states["sample"].gram[:8, :8], both @ both.T, rtol=1e-10, atol=1e-12)


# Where the Fisher matrix is the Hessian or the GGN.


@pytest.mark.parametrize("records", ["layer", "sample"])
def test_exact_on_a_linear_softmax_model_is_the_hessian(records: Any) -> None:
    problem, batches = of_net("linear")
    inverse = FisherWindow(records=records, fisher="exact")
    everything = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
    u, at = normal(problem.theta.numel, seed=9), Oracle(problem, [everything])
    x, stats = inverse.apply(learn(inverse, problem, batches), u, at)
    assert stats.notes["rows"] == 36
    assert error(x, torch.linalg.solve(oracles.hessian(problem, everything), u)) < 1e-8
    assert error(x, nhgd.inverse.Exact().solve(u, at)[0]) < 1e-8


@pytest.mark.parametrize("records", ["layer", "sample"])
def test_exact_on_a_network_with_a_squared_error_is_the_ggn(records: Any) -> None:
    x, y = normal(9, 4), normal(9, 2, seed=1)

    def inner(model: Any, v: Any, batch: Any) -> nhgd.Losses:
        z = model(batch[0])
        return nhgd.Losses((z - batch[1]).square().mean(1), v.exp().expand(len(z)), z)

    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    v = torch.tensor(0.3, dtype=torch.float64)
    problem = nhgd.Bilevel(inner, lambda m, v, b: m(b[0]).sum(), net, v, l2=0.05, likelihood="gaussian")
    inverse = FisherWindow(records=records, fisher="exact")
    u, at = normal(problem.theta.numel, seed=9), Oracle(problem, [(x, y)])
    found, _ = inverse.apply(learn(inverse, problem, [(x[:5], y[:5]), (x[5:], y[5:])]), u, at)
    assert error(at.ggn(found), u) < 1e-8
    assert error(found, torch.linalg.solve(oracles.ggn(problem, (x, y)) + oracles.ridge_hessian(problem), u)) < 1e-8


def test_sampled_has_one_row_a_sample_and_the_exact_mean() -> None:
    problem, batches = of_net("linear")
    inverse = FisherWindow(window=1600, records="sample", fisher="sampled")
    state, recorder = inverse.init(problem.theta), Recorder(problem, "sample", "sampled")
    torch.manual_seed(0)
    for _ in range(400):
        state = inverse.observe(state, recorder.step(batches[0]).record)
    assert state.gram.shape == (1600, 1600)
    rows = state.rows["0"].reshape(400, 4, -1)
    draws = torch.einsum("tbd,tbe->tde", rows, rows) / 4
    # 231 different entries, each a mean of 400 draws: one beyond five deviations has a chance below 1e-3.
    deviation = draws.std(0) / 20
    assert bool(((draws.mean(0) - oracles.ggn(problem, batches[0])).abs() <= 5 * deviation + 1e-12).all())


# Traps.


def test_weights_enter_once_not_squared_and_batch_gradients_refuse_them() -> None:
    problem, batches = of_net("linear")
    weights, s = oracles.losses(problem, batches[2])[1], oracles.scores(problem, batches[2])
    state = learn(FisherWindow(), problem, batches[2:])
    rows = weights.sqrt()[:, None] * s
    torch.testing.assert_close(state.gram[:7, :7], (rows @ rows.T).detach(), rtol=1e-10, atol=1e-12)
    with pytest.raises(InputError, match="square them"):
        learn(FisherWindow(records="batch"), problem, batches)


def test_the_ridge_is_not_in_the_fisher_matrix() -> None:
    problem, batches = of_net("mlp", l2=0.05)
    other = nhgd.Bilevel(problem.inner, problem.outer, problem.theta.given, problem.v.given, l2=7.0)
    assert torch.equal(learn(FisherWindow(), problem, batches).gram, learn(FisherWindow(), other, batches).gram)


def test_directions_without_visits_keep_the_damping_for_ever() -> None:
    # The running inverse grows by 1 / beta each step there.
    inverse = FisherWindow(window=64, weights="ema", beta=0.8, records="sample", damping=0.1)
    state = inverse.init(oracle().problem.theta)
    rows = F.pad(normal(4, 2), (0, D - 2))
    for _ in range(500):
        state = inverse.observe(state, PerSampleGradients(rows, 4))
    u = F.pad(normal(D - 2, seed=1), (2, 0))
    torch.testing.assert_close(inverse.apply(state, u, oracle())[0], u / 0.1)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_float32_gradients_of_low_rank_are_right_where_they_lie(weights: Any) -> None:
    basis = torch.linalg.qr(normal(50, 10))[0]
    batches = list((normal(2000, 1, 10, seed=1) @ basis.T).float())
    inverse = FisherWindow(window=256, weights=weights, beta=0.99, records="sample")
    state, u = taught(inverse, batches), basis @ normal(10, seed=2)
    assert state.rows["0"].dtype == torch.float32
    for l2, damping in ((5e-4, 0.0), (0.0, None)):
        at = oracle(50, l2)
        x, stats = inverse.apply(state, u.float(), at)
        true = solved(definition(inverse, [b.double() for b in batches]), at, stats.notes["damping"], u)
        assert x.dtype == torch.float32
        assert bool(torch.isfinite(x).all())
        assert error(basis.T @ x.double(), basis.T @ true) < 1e-4
        assert damping is None or stats.notes["damping"] == damping


# Cost and manners.


def test_a_step_multiplies_its_own_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    product, own_product = gram.Rows.gram, gram.Rows.own_gram

    def spied(self: gram.Rows, other: gram.Rows, metric: Tensor | None = None) -> Tensor:
        seen.append((len(self.rows), len(other.rows)))
        return product(self, other, metric)

    def spied_own(self: gram.Rows) -> Tensor:
        seen.append((len(self.rows), "own"))
        return own_product(self)

    monkeypatch.setattr(gram.Rows, "gram", spied)
    monkeypatch.setattr(gram.Rows, "own_gram", spied_own)
    inverse = FisherWindow(window=8, records="sample")
    state = taught(inverse, [normal(3, D, seed=i) for i in range(4)])
    assert seen == [(3, "own"), (3, 6), (2, 8), (1, 8), (3, 8)]  # the third goes round the end of the ring
    for l2 in (0.1, lambda v: v.sum()):
        inverse.apply(state, normal(D), oracle(l2=l2))
    assert len(seen) == 5  # a constant ridge needs no new product, whatever its value
    inverse.apply(state, normal(D), oracle(l2=lambda v: v))
    assert seen[5:] == [(8, 8)]


@pytest.mark.parametrize(("samples", "roots"), [(7, 1), (2, 4), (5, 2)])
def test_half_of_a_symmetric_product_tells_the_other(samples: int, roots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gram, "STRIP", 3)
    monkeypatch.setattr(gram, "PIECE", 40)
    block = gram.Rows(2, normal(samples, roots, 11))
    found = block.own_gram()
    rows = block.rows.reshape(-1, 11)
    torch.testing.assert_close(found.reshape(len(rows), -1), rows @ rows.T)
    full = found.reshape(len(rows), -1)
    assert torch.equal(full[:3, 3:], full[3:, :3].T)  # above the blocks of the diagonal: copied


def test_no_array_of_the_state_is_as_large_as_d_by_d() -> None:
    problem, batches = of_net("mlp")
    state = learn(FisherWindow(window=10), problem, batches)
    assert max(t.numel() for t in state.tensors().values()) < problem.theta.numel**2 / 4
    assert set(state.inputs) == {"0.weight", "2.weight"}
    assert not state.rows


@pytest.mark.parametrize("records", ["layer", "sample"])
@pytest.mark.parametrize("fisher", ["empirical", "exact"])
@pytest.mark.parametrize("name", ["linear", "mlp", "mixed", "conv"])
def test_memory_is_at_least_the_state(name: str, fisher: Any, records: Any) -> None:
    problem, batches = of_net(name)
    inverse = FisherWindow(window=200, records=records, fisher=fisher)
    held = sum(t.numel() * t.element_size() for t in learn(inverse, problem, batches).tensors().values())
    said = inverse.memory(problem.theta)
    assert held <= said
    if name != "conv":  # the rest is two more Gram matrices and temporary pieces
        rows = 200 * (3 if fisher == "exact" else 1)
        assert said < 1.1 * held + 8 * (4 * rows**2 + 2 * max(rows**2, held)) + 1e4


def test_before_any_observation_there_is_the_ridge_or_the_damping() -> None:
    u = normal(D)
    for inverse, l2, true in (
        (FisherWindow(), 0.1, u / 0.2),
        (FisherWindow(damping=0.5), 0.0, u / 0.5),
        (FisherWindow(damping=0.5), lambda v: v, u / (0.5 + 2 * torch.linspace(0.1, 1, D, dtype=torch.float64))),
    ):
        x, stats = inverse.apply(inverse.init(oracle().problem.theta), u, oracle(l2=l2))
        torch.testing.assert_close(x, true)
        assert stats.notes["samples"] == 0
    with pytest.raises(InputError, match=r"observed no inner step yet.*l2 above 0, or pass damping"):
        FisherWindow().apply(FisherWindow().init(oracle().problem.theta), u, oracle())


def test_no_ridge_and_no_damping_is_refused() -> None:
    inverse = FisherWindow(window=20, records="sample", damping=0.0)
    with pytest.raises(InputError, match="both 0 for some parameters"):
        inverse.apply(taught(inverse, [normal(20, D)]), normal(D), oracle())


def test_what_is_not_finite_is_named_and_leaves_with_its_sample() -> None:
    inverse = FisherWindow(window=4, records="sample")
    bad = normal(2, D)
    bad[1, 3] = torch.nan
    good = normal(4, D, seed=1)
    state = taught(inverse, [bad])
    with pytest.raises(NonFiniteError, match=r"gradient in the window.*inner_lr"):
        inverse.apply(state, normal(D), oracle(l2=0.1))
    state = inverse.observe(state, PerSampleGradients(good, 4))
    at, u = oracle(l2=0.1), normal(D, seed=2)
    assert error(inverse.apply(state, u, at)[0], solved(good.T @ good / 4, at, 0.0, u)) < 1e-10
    with pytest.raises(NonFiniteError, match="solution"):
        inverse.apply(state, torch.full((D,), torch.inf, dtype=torch.float64), at)


@pytest.mark.parametrize("l2", RIDGES)
def test_solve_is_linear_symmetric_and_pure(l2: Any) -> None:
    inverse, at = FisherWindow(window=8, records="sample"), oracle(l2=l2)
    state = taught(inverse, [normal(3, D, seed=i) for i in range(4)])
    before = state.clone()
    a, b = normal(D, seed=1), normal(D, seed=2)
    xa, xb = inverse.apply(state, a, at)[0], inverse.apply(state, b, at)[0]
    torch.testing.assert_close(inverse.apply(state, 2 * a - b, at)[0], 2 * xa - xb)
    torch.testing.assert_close(a.dot(xb), b.dot(xa))
    assert torch.equal(preconditioner(inverse, state, at)(a), xa)
    for path, tensor in state.tensors().items():
        assert torch.equal(tensor, before.tensors()[path])
    assert at.calls.hvps == 0


@pytest.mark.parametrize("name", ["mixed", "twice"])
def test_the_state_moves_and_saves(name: str) -> None:
    problem, batches = of_net(name)
    inverse = FisherWindow(window=6, weights="ema")
    state = learn(inverse, problem, batches[:2])
    loaded = stored(state.to("cpu"))
    record = Recorder(problem, "layer").step(batches[2]).record
    copy = state.clone()
    one, two = inverse.observe(state, record), inverse.observe(loaded, record)
    for path, tensor in one.tensors().items():
        assert torch.equal(tensor, two.tensors()[path])
    assert not torch.equal(copy.gram, one.gram)
    u, at = normal(problem.theta.numel), Oracle(problem, [batches[0]])
    assert torch.equal(inverse.apply(one, u, at)[0], inverse.apply(two, u, at)[0])


def test_an_empty_state_with_odd_names_saves_too() -> None:
    theta = {"a/b": torch.zeros(2), "c#int": torch.zeros(3), "50%": torch.zeros(1)}
    problem = nhgd.Bilevel(lambda t, v, x: x @ t["a/b"] * v, lambda t, v, x: v, theta, torch.ones(()))
    state = FisherWindow().init(problem.theta)
    assert state.starts == {"a/b": 0, "c#int": 2, "50%": 5}
    assert stored(state) == state


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"window": 0}, "window must be above 0"),
        ({"window": 2.5}, "window counts samples.*integer"),
        ({"window": 20_001}, "20001 rows.*smaller window, or pass allow_large=True"),
        ({"beta": 0.0}, "beta must lie between 0 and 1.*weights='average'"),
        ({"beta": 1.0}, "beta must lie between 0 and 1"),
        ({"damping": -0.1}, "damping must be 0 or more"),
        ({"weights": "mean"}, "Known: average, ema"),
        ({"records": "layers"}, "Did you mean 'layer'"),
        ({"fisher": "true"}, "Known: auto, empirical, exact, sampled"),
        ({"fisher": "exact", "records": "batch"}, "per-sample quantities.*records='layer'"),
    ],
)
def test_bad_settings_are_refused_with_the_remedy(options: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        FisherWindow(**options)


def test_many_rows_must_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fisher_window, "MANY_ROWS", 20)
    problem, batches = of_net("linear")
    inverse = FisherWindow(window=7, fisher="exact")
    with pytest.raises(InputError, match=r"7 samples with 3 rows each has 21 rows.*fisher='sampled'.*allow_large"):
        learn(inverse, problem, batches)
    assert inverse.warnings_for(problem.theta) == ["21 rows are refused without allow_large=True"]
    allowed = FisherWindow(window=7, fisher="exact", allow_large=True)
    assert learn(allowed, problem, batches).gram.shape == (21, 21)
    assert allowed.warnings_for(problem.theta) == []


def test_a_record_of_another_kind_is_refused() -> None:
    with pytest.raises(InputError, match="received a PerSampleGradients"):
        taught(FisherWindow(), [normal(2, D)])


def test_a_parameter_without_entries_is_no_hindrance() -> None:
    batch, u, found = normal(5, 4), normal(4, seed=1), []
    for more in ({}, {"none": torch.zeros(0, dtype=torch.float64)}):
        problem = nhgd.Bilevel(
            lambda theta, v, x: (x @ theta["a"] - v).square(),
            lambda theta, v, x: theta["a"].sum(),
            {"a": normal(4, seed=2)} | more,
            torch.zeros((), dtype=torch.float64),
        )
        inverse = FisherWindow(damping=0.1)
        found.append(inverse.apply(learn(inverse, problem, [batch]), u, Oracle(problem, [batch]))[0])
    assert torch.equal(*found)
