"""The diagonal of the Fisher matrix against the diagonal of the dense one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nhgd
from nhgd._recording.recorder import Recorder
from nhgd.inverse import FisherDiagonal
from nhgd.inverse._learned.learning import learn
from tests import oracles
from tests.catalogue import (
    PER_SAMPLE,
    Made,
    Make,
    cross_entropy,
    mean_cross_entropy,
    mlp_module,
    normal,
    ridge_tree,
)
from tests.storage import stored


def diagonal(problem: nhgd.Bilevel, batches: list[Any], **options: Any) -> Tensor:
    return learn(FisherDiagonal(**options), problem, batches).diagonal


def sequence() -> Made:
    """A layer on every token, called twice, with a normalisation that is no layer."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.norm, self.last = nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.norm(self.token(self.token(x).tanh())).mean(1))

    batch = (normal(6, 3, 2), torch.arange(6) % 3, torch.arange(6))
    problem = nhgd.Bilevel(
        cross_entropy, mean_cross_entropy, Net().double(), normal(6), l2=0.1, likelihood="categorical"
    )
    return problem, batch, batch[:2]


def grouped() -> Made:
    """A convolution in two groups with stride and padding."""
    net = nn.Sequential(nn.Conv2d(2, 4, 2, groups=2, stride=2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3))
    batch = (normal(5, 2, 3, 3), torch.arange(5) % 3, torch.arange(5))
    problem = nhgd.Bilevel(cross_entropy, mean_cross_entropy, net.double(), normal(5), l2=0.1, likelihood="categorical")
    return problem, batch, batch[:2]


@pytest.mark.parametrize("make", [*PER_SAMPLE, sequence, grouped], ids=lambda make: make.__name__)
def test_is_the_diagonal_of_the_dense_matrix(make: Make) -> None:
    problem, batch, _ = make()
    torch.testing.assert_close(diagonal(problem, [batch]), oracles.fisher(problem, batch).diagonal())
    found = diagonal(problem, [batch], fisher="exact")
    torch.testing.assert_close(found, oracles.ggn(problem, batch).diagonal())


@pytest.mark.parametrize("make", PER_SAMPLE, ids=lambda make: make.__name__)
@pytest.mark.parametrize("damping", [None, 0.7])
def test_solves_with_the_ridge_of_every_coordinate_and_the_damping(make: Make, damping: float | None) -> None:
    problem, batch, _ = make()
    u = normal(problem.theta.numel)
    inverse = FisherDiagonal(damping=damping)
    x, stats = inverse.apply(learn(inverse, problem, [batch]), u, nhgd.oracle.Oracle(problem, [batch]))
    torch.testing.assert_close(x, u / (oracles.damped_fisher(problem, batch).diagonal() + (damping or 0.0)))
    assert stats == nhgd.inverse.SolveStats(None, 0, True, {"damping": damping or 0.0})


def test_damping_is_a_thousandth_of_the_mean_where_there_is_no_ridge() -> None:
    problem, batch, _ = mlp_module()
    bare = nhgd.Bilevel(problem.inner, problem.outer, problem.theta.given, problem.v.given)
    _, stats = FisherDiagonal().apply(
        learn(FisherDiagonal(), bare, [batch]), normal(bare.theta.numel), nhgd.oracle.Oracle(bare, [batch])
    )
    mean = float(oracles.fisher(problem, batch).diagonal().mean())
    assert stats.notes["damping"] == pytest.approx(1e-3 * mean, rel=1e-12)


def test_averages_over_batches() -> None:
    problem, batch, _ = mlp_module()
    parts = [tuple(t[:2] for t in batch), tuple(t[2:7] for t in batch), tuple(t[7:] for t in batch)]
    torch.testing.assert_close(diagonal(problem, parts, beta=None), oracles.fisher(problem, batch).diagonal())
    one, two, three = (oracles.fisher(problem, part).diagonal() for part in parts)
    torch.testing.assert_close(diagonal(problem, parts, beta=0.5), (0.25 * one + 0.5 * two + three) / 1.75)
    torch.testing.assert_close(diagonal(problem, parts, beta=0.0), three)


def test_weights_of_zero_leave_the_ridge() -> None:
    problem, batch, _ = mlp_module()
    with torch.no_grad():
        problem.v.leaves[0].fill_(-2000.0)  # sigmoid gives 0 exactly
    u = normal(problem.theta.numel)
    state = learn(FisherDiagonal(), problem, [batch])
    at = nhgd.oracle.Oracle(problem, [batch])
    torch.testing.assert_close(FisherDiagonal().apply(state, u, at)[0], u / (2 * 0.02))
    bare = nhgd.Bilevel(problem.inner, problem.outer, problem.theta.given, problem.v.given)
    with pytest.raises(nhgd.InputError, match="singular"):
        FisherDiagonal().apply(state, u, nhgd.oracle.Oracle(bare, [batch]))


def test_state_is_left_alone_moves_and_saves() -> None:
    problem, batch, _ = ridge_tree()
    inverse = FisherDiagonal()
    state = learn(inverse, problem, [batch])
    before = state.diagonal.clone()
    u, at = normal(problem.theta.numel), nhgd.oracle.Oracle(problem, [batch])
    x = inverse.apply(state, u, at)[0]
    record = Recorder(problem, "layer").step(tuple(t[:3] for t in batch)).record
    assert record is not None
    later = inverse.observe(state, record)
    assert torch.equal(state.diagonal, before)
    restored = stored(state)
    assert torch.equal(inverse.apply(state.to("cpu"), u, at)[0], x)
    assert torch.equal(inverse.apply(restored, u, at)[0], x)
    assert torch.equal(inverse.observe(restored, record).diagonal, later.diagonal)


@pytest.mark.parametrize(("option", "expected"), [(None, torch.float32), (torch.float64, torch.float64)])
def test_statistics_are_in_float32_or_better(option: Any, expected: torch.dtype) -> None:
    problem, (x, y, i), _ = mlp_module()
    small = nhgd.Bilevel(
        problem.inner, problem.outer, problem.theta.given.bfloat16(), problem.v.given.detach().bfloat16(), l2=0.1
    )
    batch = (x.bfloat16(), y, i)
    inverse = FisherDiagonal(dtype=option)
    state = learn(inverse, small, [batch])
    assert state.diagonal.dtype == expected
    found = inverse.apply(state, normal(small.theta.numel).bfloat16(), nhgd.oracle.Oracle(small, [batch]))[0]
    assert found.dtype == torch.bfloat16
    assert inverse.memory(small.theta) == 4 * small.theta.numel * expected.itemsize


def test_refuses_to_solve_before_it_has_observed() -> None:
    problem, batch, _ = mlp_module()
    inverse = FisherDiagonal()
    with pytest.raises(nhgd.InputError, match="observed no inner step"):
        inverse.apply(inverse.init(problem.theta), normal(problem.theta.numel), nhgd.oracle.Oracle(problem, [batch]))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"beta": 1.0}, "beta must be at least 0 and below 1"),
        ({"beta": -0.5}, "beta must be at least 0 and below 1"),
        ({"damping": -1.0}, "damping must be 0 or more"),
        ({"fisher": "exakt"}, "Did you mean 'exact'"),
        ({"dtype": torch.float16}, "dtype must be torch.float32 or torch.float64"),
    ],
)
def test_refuses_bad_settings(options: dict[str, Any], said: str) -> None:
    with pytest.raises(nhgd.InputError, match=said):
        FisherDiagonal(**options)
