"""Curvature within a share of the inner loop's cost: what is taken, and what that leaves of the curvature."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nhgd
from nhgd._budget import BRIEF_RECORD, BUILD_UP_SHARE, Budget
from nhgd._cost import Operation
from nhgd._prices import PRICES, Priced, Prices
from nhgd._recording.recorder import Recorder
from nhgd._recording.sampling import Sampling
from nhgd._shape import Layer, Shape
from nhgd.algorithm import NHGD
from nhgd.data_parallel.shard import Shard
from nhgd.inverse import EKFAC, KFAC, FisherDiagonal
from nhgd.inverse._learned import eigenbasis
from nhgd.inverse._learned.effort import Effort
from nhgd.inverse._learned.eigenbasis import Basis, staircase
from nhgd.objective import Objective
from nhgd.record import LayerStatistics
from tests import catalogue, oracles

SAMPLES = 24


class Tokens(nn.Module):
    """A Linear layer on sequences, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(self.layer(x).tanh()).sum(1))


def pooled(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers, nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2))


NETS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(3, 2), (3,)),
    "sequences": (Tokens, (5, 3)),
    "convolution": (lambda: pooled(nn.Conv2d(1, 2, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2))), (1, 6, 5)),
    "border": (lambda: pooled(nn.Conv2d(1, 2, 3, padding="same", padding_mode="reflect", bias=False)), (1, 4, 4)),
    "groups": (lambda: pooled(nn.Conv2d(2, 2, 2, groups=2)), (2, 3, 3)),
    "others": (lambda: nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)), (3,)),
}


def made(net: str) -> tuple[nhgd.Bilevel, Any]:
    torch.manual_seed(0)
    make, shape = NETS[net]
    x = torch.randn(SAMPLES, *shape, dtype=torch.float64)
    batch = (x, torch.arange(SAMPLES) % 2, torch.rand(SAMPLES, dtype=torch.float64) + 0.1)

    def inner(model: nn.Module, v: Tensor, batch: Any) -> Any:
        z = model(batch[0])
        return nhgd.Losses(F.cross_entropy(z, batch[1], reduction="none"), weights=batch[2], outputs=z)

    problem = nhgd.Bilevel(
        inner, lambda model, v, batch: model(batch[0]).sum(), make().double(), torch.zeros(1).double(), l2=0.1
    )
    return problem, batch


def recorded(problem: nhgd.Bilevel, batch: Any, sampling: Sampling | None = None) -> LayerStatistics:
    recorder = Recorder(problem, "layer", couples=False)
    recorder.sampling = sampling
    record = recorder.step(batch).record
    assert isinstance(record, LayerStatistics)
    return record


def factors(problem: nhgd.Bilevel, record: LayerStatistics) -> list[Tensor]:
    """All that K-FAC keeps of a batch."""
    inverse = KFAC()
    found = inverse.statistics(inverse.init(problem.theta), record)
    return [*(t for three in found.layers.values() for t in three), *found.blocks.values()]


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize(("samples", "places"), [(6, None), (None, 2), (6, 2)])
def test_a_part_of_a_record_estimates_all_of_it_without_bias(net: str, samples: int | None, places: int | None) -> None:
    """Means over 2,000 seeds stay within 6 of their own standard errors: a failure has a probability below 1e-6."""
    problem, batch = made(net)
    whole = recorded(problem, batch)
    expected = torch.cat([t.flatten() for t in factors(problem, whole)])
    draws = torch.stack(
        [
            torch.cat([t.flatten() for t in factors(problem, Sampling(samples, places, seed).of(whole))])
            for seed in range(2000)
        ]
    )
    error = (draws.mean(0) - expected).abs()
    assert bool((error <= 6 * draws.std(0) / len(draws) ** 0.5 + 1e-12).all())
    if samples is not None:
        assert float(draws.std(0).max()) > 0


@pytest.mark.parametrize("net", ["convolution", "border"])
def test_patches_at_a_few_places_are_those_of_all_places(net: str) -> None:
    problem, batch = made(net)
    layer = recorded(problem, batch).layers[0]
    few = recorded(problem, batch, Sampling(None, 3, 5)).layers[0]
    count = layer.inputs.shape[1]
    assert few.inputs.shape[1] == 3 < count
    places = torch.randint(count, (SAMPLES, 3), generator=torch.Generator().manual_seed(5))
    sample = torch.arange(SAMPLES)[:, None]
    assert torch.equal(few.inputs, layer.inputs[sample, places])
    torch.testing.assert_close(few.scores, layer.scores[:, sample, places] * (count / 3) ** 0.5)


def test_all_samples_and_places_are_the_record_itself() -> None:
    problem, batch = made("convolution")
    for one, other in zip(
        factors(problem, recorded(problem, batch)),
        factors(problem, recorded(problem, batch, Sampling(SAMPLES, 1000, 3))),
        strict=True,
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("net", NETS)
def test_workers_take_their_parts_of_one_draw(net: str) -> None:
    problem, batch = made(net)
    sampling = Sampling(7, 2, 4)
    expected = factors(problem, recorded(problem, batch, sampling))
    parts = (10, 2, 12)  # of the two samples of the second worker perhaps none is drawn
    total = [torch.zeros_like(t) for t in expected]
    counts = set()
    for rank, (start, size) in enumerate(zip((0, 10, 12), parts, strict=True)):
        own = recorded(problem, tuple(t[start : start + size] for t in batch))
        team: Any = SimpleNamespace(rank=rank, size=3)
        few = sampling.of(replace(own, reduction=Shard(parts, team)))
        assert isinstance(few.reduction, Shard)
        assert few.reduction.parts is not None
        assert few.samples == few.reduction.parts[rank]
        counts.add(few.reduction.parts)
        for t, found in zip(total, factors(problem, replace(few, reduction=None)), strict=True):
            t += found * few.samples / 7
    assert [sum(parts) for parts in counts] == [7]
    for one, other in zip(total, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_the_gradient_is_that_of_the_plain_step() -> None:
    problem, batch = made("convolution")
    recorder = Recorder(problem, "layer", couples=False)
    recorder.sampling = Sampling(3, 2, 0)
    before = torch.get_rng_state()
    found = recorder.step(batch)
    assert torch.equal(before, torch.get_rng_state())
    for one, other in zip(found.gradient, Objective(problem, batch).step().gradient, strict=True):
        assert torch.equal(one, other)


SHAPES = {
    "softmax": (Shape(7850, 1000, (Layer(1, 10, 785),)), 2.5e-3),
    "mlp": (Shape(669_706, 256, (Layer(1, 512, 785), Layer(1, 512, 513), Layer(1, 10, 513))), 15e-3),
    "convolutional": (
        Shape(20_490, 128, (Layer(1, 16, 10, 784), Layer(1, 32, 145, 196), Layer(1, 10, 1569))),
        25e-3,
    ),
    "with other parameters": (Shape(5000, 64, (Layer(1, 10, 65),), (300, 20)), 1e-3),
    "wide": (Shape(50_000, 8, (Layer(1, 10, 5000),)), 1e-3),
}


@pytest.mark.parametrize(
    "inverse",
    [KFAC(), EKFAC(), FisherDiagonal(), KFAC(overhead=0.01), KFAC(solver="cholesky"), KFAC(solver="products")],
)
@pytest.mark.parametrize("name", SHAPES)
def test_after_the_build_up_the_price_is_within_the_budget(name: str, inverse: Any) -> None:
    shape, inner = SHAPES[name]
    budget = Budget(shape, inner, inner, 10, PRICES["cpu"])
    effort = budget.effort(inverse)
    assert effort is not None
    assert effort == budget.effort(inverse)
    allowed = inverse.overhead * 10 * inner
    records = budget.record(inverse, effort.samples, effort.places) * 10 / effort.every
    inversions = budget.invert(inverse) * 10 / (effort.every * effort.invert_every)
    if effort.last == 1:  # the last inner step of each loop, which nobody waits for
        assert (effort.every, effort.samples) == (10, None)
        assert records + inversions <= BRIEF_RECORD
        return
    assert records + inversions <= max(allowed - budget.solve(inverse), allowed / 2) * (1 + 1e-9)
    # At the beginning: enough samples, or as many as there are, and no more than a few decompositions.
    assert steps_of(effort, 100) >= steps_of(replace(effort, build_up=0), 100)
    if effort.invert_at is not None:
        assert 1 <= len(effort.invert_at) <= 3
        assert effort.invert_at[0] <= 10  # a basis is there when the first inner loop ends


def priced(budget: Budget, most: int) -> float:
    """Seconds of decomposing all factors with at most this many rows."""
    sizes = [(n, layer.groups) for layer in budget.shape.layers for n in (layer.columns, layer.out) if n <= most]
    return budget.prices.of([Operation("eigh", n, groups) for n, groups in sizes], budget.gradient)


@pytest.mark.parametrize("device", PRICES)
def test_factors_of_one_size_are_decomposed_at_every_record_all_or_none(device: str) -> None:
    """Twenty layers with equal factors: that one of them is cheap does not make all of them so."""
    shape = Shape(20 * 64 * 65, 32, (Layer(1, 64, 65, 128),) * 20)
    gradient = 20e-3
    budget = Budget(shape, gradient, gradient, 10, PRICES[device])
    one = priced(budget, 64) / 20
    assert budget._small(KFAC(), 20 * one * 1.01) == 64
    assert budget._small(KFAC(), 19 * one) == 0
    assert budget._small(KFAC(), priced(budget, 65) * 1.01) == 65


@pytest.mark.parametrize("device", PRICES)
def test_decompositions_of_the_build_up_cost_no_more_than_its_share(device: str) -> None:
    """A large model, whose build-up records every inner step: its factors are not decomposed at each of them."""
    layers = (Layer(1, 2304, 769, 512), Layer(1, 768, 769, 512), Layer(1, 3072, 769, 512), Layer(1, 768, 3073, 512)) * 4
    shape = Shape(sum(layer.numel for layer in layers), 32, layers)
    gradient = 40e-3 if device == "cuda" else 4.0
    budget = Budget(shape, gradient, gradient, 10, PRICES[device])
    effort = budget.effort(KFAC())
    assert effort is not None
    assert effort.invert_at is not None
    refreshed = sum(priced(budget, effort.refreshes(seen)) for seen in range(1, effort.observed_in_build_up + 1))
    allowed = 10 * BUILD_UP_SHARE * KFAC().overhead * 10 * gradient
    assert refreshed <= allowed / 4 * (1 + 1e-9)
    later = priced(budget, effort.refreshes(effort.observed_in_build_up + 1)) * 10 / effort.every
    assert later <= KFAC().overhead * 10 * gradient


def steps_of(effort: Effort, steps: int) -> int:
    return sum(effort.records(step) for step in range(steps))


def test_everything_is_taken_where_the_budget_pays_for_it() -> None:
    shape, inner = SHAPES["softmax"]
    assert Budget(shape, inner, inner, 10, PRICES["cpu"]).effort(KFAC(overhead=100.0)) is None


@pytest.mark.parametrize("beta", [0.95, None])
def test_a_memory_in_samples_keeps_the_mean_of_all_where_it_is_not_full(beta: float | None) -> None:
    effort = Effort(samples=4, memory=40)
    assert effort.beta(None, 4, 3) is None
    assert effort.beta(0.95, 4, 3) == 0.9
    assert Effort(build_up=5, memory=40).beta(beta, 4, 3) == beta  # taken in full


def run(method: Any, steps: int, net: str = "linear", **settings: Any) -> nhgd.Solver:
    problem, _, _ = catalogue.frozen_layer()
    problem, (x, y, _), outer = catalogue.frozen_layer()
    solver = nhgd.Solver(
        problem, nhgd.Data(x, y, batch=4), [outer], method=method, inner_steps=3, inner_lr=0.2, outer_lr=0.1, **settings
    )
    solver.run(steps=steps)
    return solver


@pytest.mark.parametrize("inverse", [KFAC, EKFAC, FisherDiagonal])
def test_a_small_problem_takes_everything_in_its_first_ten_outer_steps(inverse: Any) -> None:
    within, full = run(NHGD(inverse()), 12), run(NHGD(inverse(overhead=None)), 12)
    assert within.loop.inverse.learner.effort.build_up == 30
    rows = [[row["hypergradient_norm"] for row in solver.history] for solver in (within, full)]
    assert rows[0][:10] == rows[1][:10]
    assert rows[0][10:] != rows[1][10:]
    assert within.executor.measured().records < full.executor.measured().records == 36


@pytest.mark.parametrize("overhead", [0.1, None])
def test_outside_of_a_run_everything_is_taken(overhead: float | None) -> None:
    problem, inner, outer = catalogue.frozen_layer()
    found = nhgd.hypergradient(problem, inner, outer, inverse=KFAC(overhead=overhead))
    expected = nhgd.hypergradient(problem, inner, outer, inverse=KFAC(factor_every=2))
    assert torch.equal(oracles.flat(found.grad), oracles.flat(expected.grad))


def a_basis(groups: int, out: int, into: int) -> tuple[Basis, Tensor]:
    """A basis whose eigenvalues fall over eight orders of magnitude, and the matrices A (x) G, by group."""
    generator = torch.Generator().manual_seed(1)
    vectors = [torch.linalg.qr(torch.randn(groups, n, n, generator=generator).double())[0] for n in (into, out)]
    values = [torch.logspace(-4, 2, n, dtype=torch.float64).expand(groups, n) for n in (into, out)]
    a, g = (q @ torch.diag_embed(d) @ q.mT for q, d in zip(vectors, values, strict=True))
    whole = torch.stack([torch.kron(g[i], a[i]) for i in range(groups)])
    return Basis(vectors[0], values[0], vectors[1], values[1]), whole


@pytest.mark.parametrize("shape", [(1, 4, 9), (2, 7, 3), (1, 1, 5)])
@pytest.mark.parametrize("extra", [1e-5, 1e-3, 1.0, 1e6])
def test_a_solve_by_what_dominates_is_as_near_as_it_says(
    shape: tuple[int, int, int], extra: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    basis, whole = a_basis(*shape)
    b = torch.randn(*shape, generator=torch.Generator().manual_seed(2)).double()
    system = whole + extra * torch.eye(whole.shape[1], dtype=torch.float64)
    exact = torch.linalg.solve(system, b.flatten(1)[..., None]).view(shape)
    found = basis.dominant_solver(extra)(b)
    off = (basis.rotate(found) - basis.rotate(exact)).abs() / basis.rotate(exact).abs()
    assert float(off.max()) <= eigenbasis.NEGLIGIBLE * (1 + 1e-6)
    monkeypatch.setattr(eigenbasis, "NEGLIGIBLE", 0.0)
    torch.testing.assert_close(basis.dominant_solver(extra)(b), exact, rtol=1e-6, atol=1e-9 * float(exact.abs().max()))


@pytest.mark.parametrize("rows", [[5, 5, 4, 4, 4, 1, 1, 1, 0], [3] * 6, [0, 0], [7, 1, 1, 1, 1, 1, 1, 1, 1]])
def test_a_staircase_is_covered(rows: list[int]) -> None:
    blocks = staircase(rows, out=8)
    assert [start for start, _, _ in blocks] == [0, *(stop for _, stop, _ in blocks)][: len(blocks)]
    covered = [count for start, stop, count in blocks for _ in range(start, stop)]
    assert len(covered) == sum(r > 0 for r in rows)
    assert all(have >= need for have, need in zip(covered, rows, strict=False))


def test_eigenvalues_follow_the_scale_of_the_factors() -> None:
    basis, _ = a_basis(1, 3, 4)
    a = basis.input_vectors @ torch.diag_embed(5 * basis.input_values) @ basis.input_vectors.mT
    g = basis.score_vectors @ torch.diag_embed(basis.score_values) @ basis.score_vectors.mT
    found = basis.rescaled(a, g)
    torch.testing.assert_close(found.input_values, 5 * basis.input_values)
    torch.testing.assert_close(found.score_values, basis.score_values)


def test_small_factors_are_decomposed_at_every_observation() -> None:
    problem, batch = made("convolution")
    effort = Effort(samples=8, every=1, invert_every=100, small=2, build_up=1, build_up_samples=8, invert_at=(1,))
    inverse = KFAC(effort=effort)
    state = inverse.observe(inverse.init(problem.theta), recorded(problem, batch, Sampling(8, None, 0)))
    first = state.bases
    state = inverse.observe(state, recorded(problem, batch, Sampling(8, None, 1)))
    for layer, basis in state.bases.items():
        (_, q_a), (_, q_g) = (eigenbasis.eigenvalues(layer, factor) for factor in state.factors(layer))
        for side, now in (("input", q_a), ("score", q_g)):
            kept = basis[f"{side}_vectors"]
            small = kept.shape[1] <= 2
            assert torch.equal(kept, now if small else first[layer][f"{side}_vectors"])


def test_operations_are_priced_by_their_shapes() -> None:
    prices = PRICES["cpu"]
    with Priced(prices) as thick:
        torch.ones(64, 64) @ torch.ones(64, 64)
    with Priced(prices) as thin:
        torch.ones(64, 4096) @ torch.ones(4096, 1)
    assert thin.seconds > thick.seconds  # as many multiplications


def test_attention_is_priced_by_its_queries_and_keys() -> None:
    """Its backward pass is also given a sum for each row, which is no factor of a product."""
    q = torch.randn(1, 2, 32, 16, requires_grad=True)

    def seconds(thin: float) -> float:
        with Priced(Prices(1.0, thin, 0.0, 0.0, 0.0, 0.0, 0.0)) as priced:
            torch.nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()
        return priced.seconds

    assert seconds(16.0) == pytest.approx(2 * seconds(0.0))


def test_calls_that_are_made_ahead_cost_nothing_beside_longer_work() -> None:
    x = torch.ones(100)
    for ahead, call, number, seconds in ((False, 5.0, 0.1, 35.0), (True, 5.0, 0.1, 30.0), (True, 50.0, 0.1, 50.0)):
        with Priced(Prices(0.0, 0.0, number, call, 0.0, 0.0, 0.0, ahead=ahead)) as priced:
            _ = x + x
        assert priced.seconds == pytest.approx(seconds)
    with Priced(Prices(0.0, 0.0, 0.1, 0.0, 0.0, 0.0, 0.0)) as priced:
        _ = x.bfloat16() + x.bfloat16()
    assert priced.seconds == pytest.approx(15.0)  # numbers of half the bytes


def test_layers_that_take_turns_are_decomposed_again_as_late_as_the_period_allows():
    effort = Effort(every=13, invert_every=6, build_up=20, build_up_every=10, build_up_last=2, invert_at=(2, 5))
    for layers in (1, 2, 6, 8):
        made: dict[int, list[int]] = {i: [2, 5] for i in range(layers)}
        for seen in range(6, 40):
            turn, every = effort.share(seen) or (-1, 6)
            for i in range(layers):
                if i % every == turn:
                    made[i].append(seen)
        for i, times in made.items():
            assert times[2] - 5 == 6 - i % 6
            assert {later - one for one, later in pairwise(times[2:])} == {6}


def test_one_wide_layer_is_decomposed_in_the_build_up_and_then_once_a_period(monkeypatch):
    effort = Effort(every=5, invert_every=4, build_up=2, build_up_samples=3, invert_at=(1, 2))
    seen: list[int] = []
    original = eigenbasis.eigenvalues

    def counted(name: str, matrix: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(state.observed + 1)
        return original(name, matrix)

    monkeypatch.setattr(eigenbasis, "eigenvalues", counted)
    problem, (x, y, index), _ = catalogue.of_classifier(nn.Linear(5, 3), features=5, shape=(5,), samples=SAMPLES)
    inverse, recorder = KFAC(effort=effort, fisher="empirical"), Recorder(problem, "layer", "empirical")
    state = inverse.init(problem.theta)
    for _ in range(14):
        record = Objective(problem, (x, y, index)).step(recorder).record
        assert record is not None
        state = inverse.observe(state, record)
    assert sorted(set(seen)) == [1, 2, 6, 10, 14]
