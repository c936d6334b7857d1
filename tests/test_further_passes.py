"""Curvature within its share of a run's gradients: which inner steps are recorded where a record takes passes of its own."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nhgd
from nhgd._budget import BRIEF, Budget, affordable_passes
from nhgd._cost import windowed
from nhgd._prices import PRICES
from nhgd._recording.recorder import Recorder
from nhgd._shape import Layer, Shape
from nhgd.algorithm import AID, NHGD
from nhgd.inverse import EKFAC, KFAC, FisherDiagonal, FisherWindow
from nhgd.inverse._learned.effort import Effort
from nhgd.inverse._learned.learning import learn
from nhgd.objective import OracleCalls
from nhgd.oracle import Oracle
from tests import catalogue, oracles

pytestmark = pytest.mark.filterwarnings("ignore::nhgd.InverseWarning")  # how good x is does not matter here


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def least_squares(outputs: int = 1, likelihood: str | None = "gaussian", dropout: float = 0.0) -> tuple[Any, Any, Any]:
    """theta is a plain tensor, v moves the targets of 24 samples in batches of six."""
    x, target = normal(24, 4), normal(24, outputs, seed=1)

    def inner(theta: Tensor, v: Tensor, batch: Any) -> nhgd.Losses:
        x, target = batch[:2]
        z = F.dropout(x, dropout, training=dropout > 0) @ theta
        return nhgd.Losses((z - target - v).square().sum(1) / 2, outputs=z)

    theta, v = torch.zeros(4, outputs).double(), torch.zeros(outputs).double()
    problem = nhgd.Bilevel(
        inner,
        lambda theta, v, batch: (batch[0] @ theta - 1).square().mean(),
        theta,
        v,
        l2=0.01,
        likelihood=likelihood,
    )
    return problem, nhgd.Data(x, target, batch=6), nhgd.Data(x[:8], batch=8)


def batchnorm_cnn(likelihood: str | None = "categorical") -> tuple[Any, Any, Any]:
    """One weight for each class, of a convolutional net with BatchNorm in training mode."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)).double()
    x, y = normal(24, 1, 3, 3), torch.arange(24) % 3

    def inner(net: nn.Module, v: Tensor, batch: Any) -> nhgd.Losses:
        z = net.train()(batch[0])
        return nhgd.Losses(F.cross_entropy(z, batch[1], reduction="none"), weights=v.exp()[batch[1]], outputs=z)

    problem = nhgd.Bilevel(
        inner,
        lambda net, v, batch: F.cross_entropy(net.eval()(batch[0]), batch[1]),
        net,
        torch.zeros(3).double(),
        l2=0.01,
        likelihood=likelihood,
    )
    return problem, nhgd.Data(x, y, batch=12), nhgd.Data(x[:8], y[:8], batch=8)


def run(made: tuple[Any, Any, Any], method: Any, steps: int, inner_steps: int = 10) -> nhgd.Solver:
    solver = nhgd.Solver(*made, method=method, inner_steps=inner_steps, inner_lr=0.05, outer_lr=0.01)
    solver.run(steps=steps)
    return solver


def further(solver: nhgd.Solver, inner_steps: int) -> list[int]:
    """The inner gradients of each outer step beside those of its inner steps, of the cross derivative and of products.

    The graph of a product serves the cross derivative too, unless that comes from a plain pass, because v weighs samples.
    """
    rows = [{"inner_gradients": 0, "hvps": 0}, *solver.history]
    weighs = solver.loop.remarks.get("cross", {}).get("role") == "weights"
    found = []
    for before, row in pairwise(rows):
        graphs = weighs and row["hvps"] > before["hvps"]
        found.append(row["inner_gradients"] - before["inner_gradients"] - inner_steps - 1 - graphs)
    return found


@pytest.mark.parametrize("inner_steps", [1, 10, 20, 30])
def test_a_problem_without_layers_takes_one_further_pass_an_outer_step(inner_steps: int) -> None:
    solver = run(least_squares(), "nhgd", 14, inner_steps)
    assert solver.loop.inverse.name == "fisher_window"
    assert further(solver, inner_steps) == [1] * 14
    assert solver.executor.measured().records == 14


@pytest.mark.parametrize("method", ["nhgd", "nhgd-window", "aid-fisher_window"])
def test_every_method_keeps_the_window_to_its_share(method: str) -> None:
    solver = run(least_squares(), method, 12)
    assert solver.executor.measured().records == 12


def test_the_freshest_steps_are_recorded() -> None:
    solver = run(least_squares(), "nhgd", 3)
    effort = solver.loop.inverse.learner.effort
    assert [step for step in range(40) if effort.records(step)] == [9, 19, 29, 39]


@pytest.mark.parametrize("inverse", [KFAC, EKFAC, FisherDiagonal])
@pytest.mark.parametrize("fisher", ["empirical", "sampled", "exact"])
def test_batchnorm_with_weights_keeps_to_its_share(inverse: Any, fisher: Any) -> None:
    """One pass for the scores of weighted samples, or for each of the roots in their place."""
    solver = run(batchnorm_cnn(), NHGD(inverse(fisher=fisher, damping=None)), 16)
    found, roots = further(solver, 10), 3 if fisher == "exact" else 1
    assert set(found) <= {0, roots, 2 * roots}
    assert found[0] >= 1
    assert max(found[:10]) <= max(2, roots)
    assert max(found[10:]) <= roots
    assert sum(found) <= 10 * 2 + 6 + roots


@pytest.mark.parametrize("likelihood", ["categorical", None])
def test_the_default_keeps_to_its_share_with_batchnorm(likelihood: str | None) -> None:
    found = further(run(batchnorm_cnn(likelihood), "nhgd", 14), 10)
    assert max(found[:10]) <= 2
    assert max(found[10:]) <= 1


def test_roots_spare_the_pass_of_weighted_scores() -> None:
    problem, data, _ = batchnorm_cnn()
    batch = data.take(torch.arange(12))
    calls = OracleCalls()
    recorder = Recorder(problem, "layer", "sampled", calls, couples=False)
    for step in (1, 2, 3):
        torch.manual_seed(0)
        record = recorder.step(batch).record
        assert calls.inner_gradients == 2 * step
        if step == 1:
            first = record
    for a, b in zip(first.layers, record.layers, strict=True):
        assert torch.equal(a.scores, b.scores)
    assert torch.equal(first.other_rows, record.other_rows)


SHAPES = {
    "tensor": (Shape(40, 100, (), (40,)), 3e-4),
    "many": (Shape(8025, 25, (), (8025,)), 2e-3),
    "large batches": (Shape(3000, 5000, (), (3000,)), 5e-2),
    "layers": (Shape(7850, 256, (Layer(1, 10, 785),)), 2e-3),
}


@pytest.mark.parametrize("passes", [0, 1, 2, 7, 300])
@pytest.mark.parametrize("steps", [1, 10, 25, 200])
@pytest.mark.parametrize("name", SHAPES)
def test_a_window_is_within_its_budget(name: str, steps: int, passes: int) -> None:
    shape, inner = SHAPES[name]
    inverse = FisherWindow()
    budget = Budget(shape, inner, inner, steps, PRICES["cpu"], passes)
    effort = budget.effort(inverse)
    assert effort is not None
    assert effort == budget.effort(inverse)
    most, recorded = affordable_passes(0.1, steps), [effort.records(step) for step in range(600 * steps)]
    length = effort.memory
    loops = [sum(recorded[k * steps : (k + 1) * steps]) for k in range(600)]
    assert loops[0] >= 1  # something is there to solve with
    # Of its share of the gradients, over any number of outer steps after the build-up.
    later = loops[effort.build_up // steps :]
    assert sum(later) * passes <= most * len(later) + passes
    assert passes > most or max(later) * passes <= most
    # At the beginning no more than fill the window, or twice the parameters, and at most as much again.
    begun = loops[: effort.build_up // steps]
    assert len(begun) <= 10
    assert sum(begun) <= -(-min(length, 2 * shape.numel) // shape.samples)
    assert passes == 0 or sum(begun) <= max(1, 20 * most / passes)
    # Of its share of the cost, but for a moment that nobody notices.
    prices = PRICES["cpu"]
    found = windowed(inverse, shape, length)
    record, solve = prices.of(found.step, inner), prices.of(found.solve, inner)
    allowed = 0.1 * inner * steps
    assert sum(later) / len(later) * record <= max(allowed, BRIEF) + record / len(later)
    assert solve <= max(allowed, BRIEF) / 2 or length <= 32
    # The last steps of a loop, and no sample much older than ten outer steps.
    for k, count in enumerate(loops):
        assert all(recorded[(k + 1) * steps - count : (k + 1) * steps])
    assert length <= shape.samples * max(1, sum(later[:10]))


@pytest.mark.parametrize("passes", [1, 2, 10])
@pytest.mark.parametrize("steps", [1, 10, 25, 100])
@pytest.mark.parametrize("inverse", [KFAC(), EKFAC(), FisherDiagonal(), KFAC(overhead=0.5)])
def test_layer_means_are_within_their_share_of_the_gradients(inverse: Any, steps: int, passes: int) -> None:
    most = affordable_passes(inverse.overhead, steps)
    for shape, inner in (
        (Shape(669_706, 256, (Layer(1, 512, 785), Layer(1, 512, 513), Layer(1, 10, 513))), 15e-3),
        (Shape(110, 66, (Layer(1, 10, 11),)), 1e-3),
    ):
        effort = Budget(shape, inner, inner, steps, PRICES["cpu"], passes).effort(inverse)
        if effort is None:
            assert steps * passes <= most
            continue
        loops = [sum(map(effort.records, range(k * steps, (k + 1) * steps))) for k in range(300)]
        assert loops[0] >= 1
        end = -(-effort.build_up // steps)
        begun, later = loops[:end], loops[end:]
        assert end <= 10
        assert max(begun, default=0) <= max(1, 2 * most // passes)
        assert effort.observed_in_build_up * passes <= max(20 * most, passes)
        assert sum(later) * passes <= most * len(later) + passes
        assert passes > most or max(later) * passes <= most


def test_without_an_overhead_every_step_is_taken() -> None:
    """By the default of no effort at all, and by one that says the same: with the same numbers in every place."""
    runs = [
        run(least_squares(), NHGD(FisherWindow(window=16, overhead=overhead, effort=effort)), 5)
        for overhead, effort in ((None, None), (0.1, Effort()))
    ]
    assert runs[0].executor.measured().records == 50
    assert further(runs[0], 10) == [10] * 5
    rows = [[row["hypergradient_norm"] for row in solver.history] for solver in runs]
    assert rows[0] == rows[1]
    # The window of the last 16 samples, which only a run of every step has.
    state = runs[0].executor.state(wait=True)[0]
    assert state.observed == 50
    assert len(state.gram) == state.filled == 16


def test_a_run_can_afford_everything() -> None:
    solver = run(least_squares(), NHGD(FisherWindow(overhead=100.0)), 3)
    assert solver.loop.inverse.effort is None
    assert solver.executor.measured().records == 30


def test_the_window_chooses_the_exact_matrix_which_is_the_hessian_of_least_squares() -> None:
    """Of the samples that the window holds in a run, and of the very batch outside of one."""
    problem, data, outer = least_squares()
    solver = run((problem, data, outer), NHGD(FisherWindow(fisher="auto", damping=None)), 8)
    inverse = solver.loop.inverse
    assert inverse.fisher == "exact"
    state = solver.executor.state(wait=True)[0]
    everything = data.take(torch.arange(24))
    at = Oracle(problem, [everything])
    u = normal(4, seed=3)
    hessian = oracles.hessian(problem, everything)
    rows = state.rows["0"][: state.filled, 0]
    known = {tuple(row) for row in everything[0].tolist()}
    assert all(tuple(row) in known for row in rows.tolist())
    hessian_there = rows.T @ rows / len(rows) + 0.02 * torch.eye(4).double()
    torch.testing.assert_close(inverse.apply(state, u, at)[0], torch.linalg.solve(hessian_there, u))
    alone = learn(FisherWindow(fisher="auto"), problem, [everything])
    torch.testing.assert_close(
        FisherWindow(fisher="auto").apply(alone, u, at)[0], torch.linalg.solve(hessian, u), rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize(("outputs", "inner_steps", "fisher"), [(1, 10, "exact"), (2, 10, "auto"), (2, 20, "exact")])
def test_the_exact_matrix_is_taken_where_its_roots_are_paid_for(outputs: int, inner_steps: int, fisher: str) -> None:
    solver = run(least_squares(outputs), "nhgd", 11, inner_steps)
    assert solver.loop.inverse.fisher == fisher
    assert max(further(solver, inner_steps)) <= affordable_passes(0.1, inner_steps)


def test_what_has_no_likelihood_is_learnt_from_its_gradients() -> None:
    found = [
        run(least_squares(likelihood=None), NHGD(FisherWindow(fisher=fisher)), 4).history[-1]["hypergradient_norm"]
        for fisher in ("auto", "empirical")
    ]
    assert found[0] == found[1]


def test_dropout_takes_as_many_passes_as_samples_and_so_few_records() -> None:
    """Rows are then of the graph of the inner step, at a backward pass for each of six samples and its own root."""
    solver = run(least_squares(dropout=0.3), "nhgd", 26)
    found = further(solver, 10)
    assert set(found) == {0, 6}
    assert found[0] == 6
    assert sum(found) <= 26 + 6


@pytest.mark.parametrize("made", [least_squares, batchnorm_cnn])
def test_a_single_loop_records_its_first_step_and_few_others(made: Any) -> None:
    """Ten steps count as an inner loop, and the first solve comes after the first of them."""
    solver = run(made(), "nhgd_single", 121)
    counts = further(solver, 1)
    assert counts[0] >= 1
    assert set(counts) <= {0, 1}
    assert sum(counts[:100]) <= 20
    assert sum(counts[100:]) <= 3


def test_a_run_of_cg_is_left_alone() -> None:
    assert run(least_squares(), AID(nhgd.inverse.CG(steps=3)), 2).loop.inverse == nhgd.inverse.CG(steps=3)


@pytest.mark.parametrize("overhead", [0.1, None])
def test_outside_of_a_run_everything_is_taken(overhead: float | None) -> None:
    problem, inner, outer = catalogue.weighted_logistic()
    found = nhgd.hypergradient(problem, inner, outer, inverse=FisherWindow(overhead=overhead))
    expected = oracles.hypergradient(problem, inner, outer, oracles.damped_fisher(problem, inner))
    torch.testing.assert_close(oracles.flat(found.grad), expected)
