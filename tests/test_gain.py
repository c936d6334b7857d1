"""The fall of the outer loss beside its prediction, and the outer batches over which it is averaged."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nhgd
from nhgd.algorithm import NHGD
from nhgd.inverse import KFAC
from nhgd.loop.gain import Gain
from nhgd.loop.horizon import ARRIVES, EARLY, Horizon

A = torch.diag(torch.tensor([1.0, 0.3, 0.01], dtype=torch.float64))


def followed(length: float, claimed: float, steps: int = 12, longest: float = 64.0) -> Gain:
    """Descent on v.A v / 2 with steps of this length, for whose gradient `claimed` times the true one is given."""
    gain = Gain(torch.zeros(3, dtype=torch.float64))
    v = torch.tensor([3.0, -2.0, 5.0], dtype=torch.float64)
    for k in range(steps):
        gradient = A @ v
        gain.observe(v @ A @ v / 2, claimed * gradient, v)
        if k % 4 == 3:
            gain.read(gain.means.tolist(), longest)
        v = v - length * gradient
    return gain


@pytest.mark.parametrize("length", [0.1, 1.0, 1.9])  # the last swings across the optimum
def test_of_a_right_hypergradient_the_prediction_is_exact_on_a_quadratic(length):
    gain = followed(length, 1.0)
    assert float(gain.means[0]) == pytest.approx(float(gain.means[1]), rel=1e-12)
    assert gain.caution == 1.0


def test_the_loss_that_falls_by_less_than_a_quarter_doubles_the_caution():
    assert followed(0.5, 5.0).caution == 8.0  # three readings
    assert followed(0.5, 3.0).caution == 1.0  # between a quarter and three quarters
    assert followed(0.5, 5.0, longest=5.0).caution == 5.0


def test_a_loss_that_follows_again_takes_the_caution_back():
    gain = Gain(torch.zeros(3, dtype=torch.float64), caution=8.0)
    gain.gradient = torch.ones(1, dtype=torch.float64)
    for left in (4.0, 2.0, 1.0, 1.0):
        gain.read([1.0, 0.9, 1.0], 64.0)
        assert gain.caution == left


def test_rounding_says_nothing():
    gain = Gain(torch.zeros(3, dtype=torch.float64), caution=2.0)
    gain.gradient = torch.ones(1)  # of float32
    for predicted, actual in ((1e-6, -1e-6), (1e-6, 1e-6), (-1.0, -2.0)):
        gain.read([predicted, actual, 1.0], 64.0)
        assert gain.caution == 2.0


def test_the_horizon_is_divided_by_the_caution_down_to_one_loop():
    horizon = Horizon.start(torch.device("cpu"))
    horizon.rho = 0.99
    whole = horizon.horizon_loops
    horizon.gain.caution = 4.0
    assert horizon.horizon_loops == pytest.approx(whole / 4)
    horizon.gain.caution = 1e6
    assert horizon.horizon_loops == 1.0
    horizon.rho = -0.5  # turning x are not looked further ahead for than before
    assert horizon.horizon_loops < 1.0


def inner(net: nn.Module, v: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> nhgd.Losses:
    z = net(batch[0] * v.exp())
    return nhgd.Losses(F.cross_entropy(z, batch[1], reduction="none"), outputs=z)


def outer(net: nn.Module, v: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return F.cross_entropy(net(batch[0] * v.exp()), batch[1])


def solver(
    inner_steps: int,
    batch: int | None,
    method: object = None,
    outer_data: object = None,
    samples: int = 42,
    inner_lr: float = 0.1,
) -> nhgd.Solver:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    x = torch.randn(42, 3, generator=generator, dtype=torch.float64)
    y = torch.randint(2, (42,), generator=generator)
    problem = nhgd.Bilevel(inner, outer, nn.Linear(3, 2).double(), torch.zeros(3, dtype=torch.float64), l2=1e-2)
    x_outer, y_outer = x[12:samples], y[12:samples]
    data = nhgd.Data(x_outer, y_outer, batch=batch) if outer_data is None else outer_data(x_outer, y_outer)
    chosen = NHGD(KFAC(overhead=None)) if method is None else method
    return nhgd.Solver(problem, nhgd.Data(x[:12], y[:12]), data, chosen, inner_steps=inner_steps, inner_lr=inner_lr)


def test_a_whole_pass_of_outer_batches_is_the_whole_data():
    """Twenty inner steps pay for three batches of ten; both outer derivatives are those of all thirty samples."""
    parts, whole = solver(20, 10), solver(20, None)
    for _ in range(6):
        parts.step()
        whole.step()
    torch.testing.assert_close(parts.problem.v.flat(), whole.problem.v.flat())
    assert parts.solution().stats["oracle_calls"]["outer_gradients"] == 18
    assert whole.solution().stats["oracle_calls"]["outer_gradients"] == 6


@pytest.mark.parametrize(
    ("inner_steps", "batch", "method", "count"),
    [
        (9, 10, None, 1),
        (10, 10, None, 2),
        (60, 10, None, 3),  # a pass
        (20, 10, NHGD(KFAC(overhead=None, damping=0.1)), 1),  # no horizon
        (20, 10, "aid-identity", 1),
    ],
)
def test_outer_batches_are_worth_a_tenth_of_the_inner_loop(inner_steps, batch, method, count):
    made = solver(inner_steps, batch, method)
    made.step()
    assert made.solution().stats["oracle_calls"]["outer_gradients"] == count


def test_a_source_of_unknown_length_gives_a_tenth_too():
    class Endless:
        def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
            self.x, self.y = x, y

        def __iter__(self):
            while True:
                yield self.x, self.y

    made = solver(20, None, outer_data=Endless)
    made.step()
    assert made.solution().stats["oracle_calls"]["outer_gradients"] == 3


@pytest.mark.parametrize(("samples", "inner_lr", "count"), [(14, 0.01, 1), (14, 1.0, 2), (15, 0.01, 3)])
def test_outer_batches_that_do_not_determine_v_are_averaged_where_theta_arrives(samples, inner_lr, count):
    """Three outer variables. An inner loop of twenty steps takes theta all the way, or hardly anywhere."""
    made = solver(20, 1, samples=samples, inner_lr=inner_lr)
    taken = []
    for _ in range(8):
        made.step()
        taken.append(made.solution().stats["oracle_calls"]["outer_gradients"])
    early = min(3, samples - 12)  # in the first steps as if it arrived
    assert [b - a for a, b in pairwise([0, *taken])] == [early] * 5 + [count] * 3
    assert (made.state.horizon.left <= ARRIVES) == (inner_lr == 1.0)


@pytest.mark.parametrize(("factor", "left"), [(0.5, 1.0), (0.75, 3.0), (0.9, 9.0), (1.1, math.inf), (-0.4, 0.0)])
def test_what_theta_has_still_to_go_is_a_geometric_series(factor, left):
    horizon = Horizon.start(torch.device("cpu"), determined=False)
    step = torch.full((2,), 0.5, dtype=torch.float64)
    horizon.ahead(step, factor * step)
    horizon.read(EARLY - 2)
    assert horizon.left == pytest.approx(left)
    assert horizon.averages  # too early to say
    horizon.read(EARLY - 1)
    assert horizon.averages == (factor < 0.8)
    horizon.determined = True
    assert horizon.averages


def test_a_theta_that_is_not_watched_is_not_taken_to_arrive():
    horizon = Horizon.start(torch.device("cpu"), determined=False)
    for step in range(EARLY):
        horizon.read(step)  # of no halves
    assert not horizon.averages


def test_products_along_a_running_mean_of_x_take_one_outer_batch():
    def weighed(net: nn.Module, v: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> nhgd.Losses:
        z = net(batch[0])
        losses = F.cross_entropy(z, batch[1], reduction="none")
        return nhgd.Losses(losses, weights=v.sigmoid()[batch[2]], outputs=z)

    made = solver(20, 1, samples=14, inner_lr=1.0)
    judge = lambda net, v, batch: F.cross_entropy(net(batch[0]), batch[1])  # noqa: E731
    problem = nhgd.Bilevel(weighed, judge, nn.Linear(3, 2).double(), torch.zeros(12, dtype=torch.float64), l2=1e-2)
    other = nhgd.Solver(
        problem, made.loop.inner.source, made.loop.outer.source, NHGD(KFAC(overhead=None)), inner_steps=20, inner_lr=1.0
    )
    for _ in range(4):
        other.step()
    assert other.solution().stats["cross"]["way"] == "lagged"
    assert other.state.horizon.averages
    assert other.solution().stats["oracle_calls"]["outer_gradients"] == 4
