"""The same numbers on a CUDA device, and the caller's generators left alone there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nhgd
from nhgd._recording.recorder import Recorder
from nhgd.data.batch import move
from nhgd.hypergradients import Unrolled
from nhgd.inverse import CG
from nhgd.oracle import Oracle
from tests import oracles
from tests.catalogue import PER_SAMPLE, PROBLEMS, Make, normal, of_classifier, settled

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")


def on_device(given: Any) -> Any:
    if isinstance(given, dict):
        return {name: tensor.to(CUDA) for name, tensor in given.items()}
    return given.to(CUDA)


def moved(problem: nhgd.Bilevel) -> nhgd.Bilevel:
    theta, v = on_device(problem.theta.given), on_device(problem.v.given)
    return nhgd.Bilevel(problem.inner, problem.outer, theta, v, problem.l2, problem.likelihood)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("make", PROBLEMS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("estimator", ["implicit", Unrolled(steps=3, lr=0.1)], ids=["implicit", "unrolled"])
def test_the_hypergradient_is_the_same(make: Make, estimator: Any) -> None:
    problem, inner_batch, outer_batch = settled(make)
    inverse = CG(300, 1e-12) if estimator == "implicit" else None
    expected = nhgd.hypergradient(problem, inner_batch, outer_batch, inverse, estimator)
    found = nhgd.hypergradient(moved(problem), inner_batch, outer_batch, inverse, estimator)
    assert found.leaves[0].device.type == "cuda"
    close(oracles.join(found.leaves), oracles.join(expected.leaves))


@pytest.mark.parametrize("make", PER_SAMPLE, ids=lambda make: make.__name__)
@pytest.mark.parametrize("fisher", ["empirical", "exact"])
def test_records_are_the_same(make: Make, fisher: Any) -> None:
    problem, batch, _ = make()
    expected = Recorder(problem, "sample", fisher).step(batch).record.rows
    found = Recorder(moved(problem), "sample", fisher).step(move(batch, CUDA)).record.rows
    close(found, expected)


def test_recurrent_layers_are_differentiated_twice() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(3, 2, batch_first=True)
            self.head = nn.Linear(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x)[0][:, -1])

    problem, batch, _ = of_classifier(Recurrent(), features=6, shape=(2, 3))
    x = normal(problem.theta.numel)
    expected = Oracle(problem, [batch]).hvp(x)
    close(Oracle(moved(problem), [move(batch, CUDA)]).hvp(x.to(CUDA)), expected)
    assert torch.backends.cudnn.enabled


def test_dropout_is_replayed_and_no_generator_is_touched() -> None:
    problem, batch, outer_batch = of_classifier(nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.Linear(5, 3)))
    problem = moved(problem)
    point = Oracle(problem, [move(batch, CUDA)], move(outer_batch, CUDA), seed=7)
    x = normal(problem.theta.numel).to(CUDA)
    before = torch.cuda.get_rng_state_all()
    with oracles.undisturbed(problem):
        first = point.hvp(x)
        again = Oracle(problem, [move(batch, CUDA)], move(outer_batch, CUDA), seed=7).hvp(x)
        assert torch.equal(point.outer().theta, point.outer().theta)
    torch.testing.assert_close(first, again, rtol=1e-10, atol=1e-12)
    assert all(torch.equal(a, b) for a, b in zip(torch.cuda.get_rng_state_all(), before, strict=True))


def test_a_problem_on_the_cpu_leaves_the_device_alone() -> None:
    problem, batch, outer_batch = settled(PROBLEMS[0])
    before = torch.cuda.get_rng_state_all()
    nhgd.hypergradient(problem, batch, outer_batch)
    assert all(torch.equal(a, b) for a, b in zip(torch.cuda.get_rng_state_all(), before, strict=True))


def test_data_lives_where_it_is_told() -> None:
    data = nhgd.Data(normal(7, 2), torch.arange(7), batch=3, device="cuda")
    for x, y, i in data:
        assert x.device.type == y.device.type == i.device.type == "cuda"
        assert torch.equal(y, i)
