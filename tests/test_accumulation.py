"""Micro-batches: the run is that of whole batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nhgd
from nhgd.algorithm import AID, NHGD
from nhgd.inverse import CG, EKFAC, KFAC, FisherDense, FisherDiagonal, FisherWindow
from nhgd.loop.accumulation import micro_batches

pytestmark = pytest.mark.filterwarnings("ignore::nhgd.InverseWarning")


def made(l2: Any = 0.02, v: Any = None) -> tuple[nhgd.Bilevel, Any, Any]:
    torch.manual_seed(0)
    x, y = torch.randn(22, 3).double(), torch.arange(22) % 3
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3)).double()

    def inner(net: Any, v: Any, batch: Any) -> nhgd.Losses:
        z = net(batch[0])
        weights = v["w"] if isinstance(v, dict) else v
        return nhgd.Losses(F.cross_entropy(z, batch[1], reduction="none"), weights[batch[2]].sigmoid(), z)

    def outer(net: Any, v: Any, batch: Any) -> Tensor:
        return F.cross_entropy(net(batch[0]), batch[1])

    v = torch.zeros(22).double() if v is None else v
    problem = nhgd.Bilevel(inner, outer, net, v, l2, "categorical")
    batches = [(x[:11], y[:11], torch.arange(11)), (x[11:], y[11:], torch.arange(11, 22))]
    return problem, batches, [(x[:7], y[:7])]


def run(method: Any, accumulate: int, **settings: Any) -> tuple[list[Tensor], list[Any]]:
    problem, inner, outer = made(**settings)
    optimizer = lambda p: torch.optim.Adam(p, lr=0.03)  # noqa: E731
    solver = nhgd.Solver(
        problem, inner, outer, method, inner_steps=3, inner_optimizer=optimizer, outer_lr=1.0, accumulate=accumulate
    )
    solver.run(steps=3)
    return [problem.theta.flat(), problem.v.flat()], [row["inner_loss"] for row in solver.history]


INVERSES = [
    KFAC(overhead=None),
    EKFAC(overhead=None),
    FisherDiagonal(overhead=None),
    KFAC(overhead=None, fisher="exact"),
    FisherWindow(overhead=None, window=40),
    FisherDense(),
]


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("inverse", INVERSES, ids=repr)
@pytest.mark.parametrize("cross", ["lagged", "final", "trajectory"])
def test_accumulated_statistics_are_those_of_one_batch(count: int, inverse: Any, cross: Any) -> None:
    method = NHGD(inverse, cross=cross)
    (whole, losses), (parts, same) = run(method, 1), run(method, count)
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-8, atol=1e-10)
    assert same == pytest.approx(losses, rel=1e-10)


@pytest.mark.parametrize("method", [AID(CG(steps=30)), "aid-identity", AID(KFAC(overhead=None))], ids=str)
def test_aid_too(method: Any) -> None:
    for a, b in zip(run(method, 1)[0], run(method, 4)[0], strict=True):
        torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-9)


def test_a_ridge_that_follows_v() -> None:
    def settings() -> dict[str, Any]:
        return {
            "l2": lambda v: v["r"].exp(),
            "v": {"w": torch.zeros(22).double(), "r": torch.tensor(-3.0).double()},
        }

    method = NHGD(KFAC(overhead=None))
    for a, b in zip(run(method, 1, **settings())[0], run(method, 2, **settings())[0], strict=True):
        torch.testing.assert_close(b, a, rtol=1e-8, atol=1e-10)


def test_parts_are_as_equal_as_they_can_be() -> None:
    parts = micro_batches((torch.arange(11), {"y": torch.arange(11)}), 4)
    assert [part[0].tolist() for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10]]
    assert len(micro_batches(torch.arange(2), 4)) == 2
    with pytest.raises(nhgd.InputError, match="samples as first dimension"):
        micro_batches((torch.arange(3), torch.arange(4)), 2)


@pytest.mark.parametrize(
    ("method", "settings", "why"),
    [
        ("soba", {}, "takes whole batches"),
        ("nhgd-paper", {}, "gradient of whole batches"),
        ("nhgd", {"accumulate": 0}, "at least 1"),
    ],
)
def test_what_would_be_ignored_is_refused(method: str, settings: dict[str, Any], why: str) -> None:
    problem, inner, outer = made()
    with pytest.raises(nhgd.InputError, match=why):
        nhgd.Solver(problem, inner, outer, method, **{"accumulate": 2} | settings)
