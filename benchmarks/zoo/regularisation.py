"""Problems whose v keeps theta simple: ridges, augmentation, the shape of a kernel."""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nhgd
from benchmarks.zoo.case import Batch, Case, accuracy, digits, half_stable_step, randomness

DRAWS = 8  # augmented copies of a sample


def ridges(seed: int, file: Path | None = None) -> Case:
    """One ridge e^v for each of 30 features, of which five matter, and one for each further parameter of an MLP."""
    generator = randomness(seed)
    torch.manual_seed(seed)
    width = 30

    def samples(count: int) -> Batch:
        x = torch.randn(count, width, generator=generator, dtype=torch.float64)
        y = 2 * torch.tanh(x[:, 0] - x[:, 1]) + torch.sin(x[:, 2]) + 0.5 * x[:, 3] * x[:, 4]
        return x, y + 0.2 * torch.randn(count, generator=generator, dtype=torch.float64)

    net = nn.Sequential(nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, 1)).double()

    def l2(v: dict[str, Tensor]) -> dict[str, Tensor]:
        bias, weight, last = v["layers"].exp()
        return {"0.weight": v["features"].exp(), "0.bias": bias, "2.weight": weight, "2.bias": last}

    def inner(model: nn.Module, v: dict[str, Tensor], batch: Batch) -> nhgd.Losses:
        outputs = model(batch[0])
        return nhgd.Losses((outputs[:, 0] - batch[1]).square() / 2, outputs=outputs)

    def outer(model: nn.Module, v: dict[str, Tensor], batch: Batch) -> Tensor:
        return (model(batch[0])[:, 0] - batch[1]).square().mean() / 2

    start = math.log(1e-3)
    v = {name: torch.full((size,), start, dtype=torch.float64) for name, size in (("features", width), ("layers", 3))}
    problem = nhgd.Bilevel(inner, outer, theta=net, v=v, l2=l2, likelihood="gaussian")
    train = samples(200)
    return Case(
        problem,
        nhgd.Data(*train, batch=100),
        nhgd.Data(*samples(200), batch=100),
        samples(300),
        samples(1000),
        inner_lr=half_stable_step(problem, train),
        inner_steps=20,
        outer_steps=100,
        project_v=(math.log(1e-6), 0.0),  # a ridge of more than 1 / inner_lr would make inner steps diverge
    )


def augmentation(seed: int, file: Path | None = None) -> Case:
    """The strengths e^v of noise and of contrast with which few clean digits are trained on, for many that have both."""
    torch.manual_seed(seed)
    parts = digits(seed, file, 150, 300, 300)
    generator = randomness(seed + 1)

    def disturbed(x: Tensor, noise: float | Tensor, contrast: float | Tensor, draws: Batch) -> Tensor:
        return x * (1 + contrast * draws[1][:, None]) + noise * draws[0]

    def drawn(count: int) -> Batch:
        return torch.randn(count, 64, generator=generator), torch.randn(count, generator=generator)

    x, y = (part.repeat_interleave(DRAWS, 0) for part in parts[0])
    validation, selection, test = ((disturbed(x, 0.3, 0.3, drawn(len(x))), y) for x, y in parts[1:])
    net = nn.Sequential(nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 10))

    def inner(model: nn.Module, v: Tensor, batch: Batch) -> nhgd.Losses:
        x, y, noise, contrast, _ = batch
        logits = model(disturbed(x, *v.exp(), (noise, contrast)))
        return nhgd.Losses(F.cross_entropy(logits, y, reduction="none"), outputs=logits)

    def outer(model: nn.Module, v: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    start = torch.full((2,), math.log(0.05))
    return Case(
        nhgd.Bilevel(inner, outer, theta=net, v=start, l2=1e-4, likelihood="categorical"),
        nhgd.Data(x, y, *drawn(len(x)), batch=150),
        nhgd.Data(*validation, batch=150),
        selection,
        test,
        inner_lr=0.1,
        outer_steps=100,
        score=lambda model, v, batch: accuracy(model(batch[0]), batch[1]),
    )


def kernel(seed: int, file: Path | None = None) -> Case:
    """The inverse length e^v of a Gaussian kernel along each of eight features, of which three matter, and its ridge."""
    generator = randomness(seed)
    width, centres = 8, 40

    def samples(count: int) -> Batch:
        x = torch.randn(count, width, generator=generator, dtype=torch.float64)
        y = torch.sin(2 * x[:, 0]) + x[:, 1] * torch.cos(x[:, 2])
        return x, y + 0.1 * torch.randn(count, generator=generator, dtype=torch.float64)

    train = samples(200)
    places = train[0][:centres]

    def outputs(model: nn.Module, v: dict[str, Tensor], x: Tensor) -> Tensor:
        distance = (x[:, None] - places).mul(v["scales"].exp()).square().sum(-1)  # (B, centres)
        found: Tensor = model((-distance / 2).exp())
        return found

    def inner(model: nn.Module, v: dict[str, Tensor], batch: Batch) -> nhgd.Losses:
        found = outputs(model, v, batch[0])
        return nhgd.Losses((found[:, 0] - batch[1]).square() / 2, outputs=found)

    def outer(model: nn.Module, v: dict[str, Tensor], batch: Batch) -> Tensor:
        return (outputs(model, v, batch[0])[:, 0] - batch[1]).square().mean() / 2

    model = nn.Linear(centres, 1).double()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    v = {
        "scales": torch.full((width,), -0.5 * math.log(width), dtype=torch.float64),
        "ridge": torch.tensor(math.log(1e-3), dtype=torch.float64),
    }
    problem = nhgd.Bilevel(inner, outer, theta=model, v=v, l2=lambda v: v["ridge"].exp(), likelihood="gaussian")
    return Case(
        problem,
        nhgd.Data(*train, batch=100),
        nhgd.Data(*samples(200), batch=100),
        samples(300),
        samples(1000),
        inner_lr=half_stable_step(problem, train),
        inner_steps=20,
        outer_steps=100,
    )
