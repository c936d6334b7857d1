"""What plan says of the peak of memory, beside what a run takes: storages are counted on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nhgd
from nhgd._memory import PeakMemory
from nhgd._recording.recorder import Recorder
from nhgd.algorithm import AID, NHGD
from nhgd.inverse import resolve
from nhgd.problem import LARGE


class Transformer(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(64, width), nn.Embedding(32, width)
        block = nn.TransformerEncoderLayer(width, 2, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.table(x) + self.places(torch.arange(x.shape[1])))).mean(1)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


def resnet(width: int) -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    return nn.Sequential(
        stem, Residual(width), Residual(width), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 64)
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "transformer": (lambda: Transformer(48, 3), lambda n: torch.randint(64, (n, 16))),
    "resnet": (lambda: resnet(12), lambda n: torch.randn(n, 3, 12, 12)),
}


def made(name: str, samples: int = 64) -> tuple[nhgd.Bilevel, Any, Any]:
    torch.manual_seed(0)
    make, data = MODELS[name]

    def inner(net: Any, v: Tensor, batch: Any) -> nhgd.Losses:
        return nhgd.Losses(F.cross_entropy(net(batch[0]), batch[1], reduction="none"), v[batch[2]].sigmoid())

    def outer(net: Any, v: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(net(batch[0]), batch[1])

    y = torch.arange(samples) % 64
    problem = nhgd.Bilevel(inner, outer, make(), torch.zeros(samples), 1e-3)
    return problem, (data(samples), y, torch.arange(samples)), (data(16), y[:16])


def both(name: str, inverse: str) -> tuple[float, float]:
    """The peak in MB that plan says, and the one of a run."""
    problem, inner, _ = made(name)
    planned = nhgd.plan(problem, inner, inverses=[inverse]).rows[0]["peak_bytes"]
    chosen = resolve(inverse)
    with PeakMemory() as alive:
        problem, inner, outer = made(name)
        method: Any = NHGD(chosen) if chosen.learner is chosen else AID(chosen)
        solver = nhgd.Solver(problem, [inner], [outer], method, inner_steps=3, inner_lr=0.01, compile=False)
        solver.run(steps=3)
    return planned / 1e6, alive.bytes / 1e6


@pytest.mark.filterwarnings("ignore::nhgd.InverseWarning")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("inverse", ["kfac", "fisher_diagonal", "cg", "identity"])
def test_plan_tells_the_peak(name: str, inverse: str) -> None:
    planned, taken = both(name, inverse)
    assert planned == pytest.approx(taken, rel=0.15)


def test_without_a_batch_the_peak_is_unknown() -> None:
    problem, _, _ = made("transformer")
    assert nhgd.plan(problem, inverses=["kfac"]).rows[0]["peak_bytes"] is None


def test_verifying_a_large_model_with_batchnorm_takes_no_more_memory_than_a_record():
    torch.manual_seed(0)
    width, body = 192, list[nn.Module]()
    for before in (3, *[width] * 4):
        body += [nn.Conv2d(before, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    net = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 5))
    assert sum(p.numel() for p in net.parameters()) > LARGE

    def inner(net: Any, v: Tensor, batch: Any) -> nhgd.Losses:
        return nhgd.Losses(F.cross_entropy(net(batch[0]), batch[1], reduction="none"), v[batch[2]].sigmoid())

    problem = nhgd.Bilevel(inner, lambda net, v, batch: net(batch[0]).sum(), net, torch.zeros(64), 1e-3)
    batch = torch.randn(64, 3, 6, 6), torch.arange(64) % 5, torch.arange(64)
    recorder, peaks = Recorder(problem, "layer", couples=False), []
    for _ in range(2):
        with PeakMemory() as alive:
            recorder.step(batch)
        peaks.append(alive.bytes)
    assert recorder.verification.memory() != Recorder(problem, "layer", couples=False).verification.memory()
    assert peaks[0] <= 1.01 * peaks[1]  # the first is verified before
