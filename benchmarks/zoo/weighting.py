"""Problems whose v weighs what theta learns from: classes, samples, sources."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nhgd
from benchmarks.zoo.case import Batch, Case, accuracy, digits, half_stable_step, randomness

SOURCES = 8


def class_weights(seed: int, file: Path | None = None) -> Case:
    """One weight e^v for each class, five of which have a tenth of the samples; a CNN with BatchNorm, balanced validation."""
    torch.manual_seed(seed)
    pool, validation, selection, test = digits(seed, file, 900, 200, 200)
    rows = []
    for label in range(10):
        found = (pool[1] == label).nonzero().reshape(-1)
        rows.append(found[: 60 if label < 5 else 6])
    chosen = torch.cat(rows)
    train, validation, selection, test = (
        (x.reshape(-1, 1, 8, 8), y) for x, y in ((pool[0][chosen], pool[1][chosen]), validation, selection, test)
    )
    net = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(64, 10)),
    )

    def inner(model: nn.Module, v: Tensor, batch: Batch) -> nhgd.Losses:
        model.train()
        logits = model(batch[0])
        losses = F.cross_entropy(logits, batch[1], reduction="none")
        return nhgd.Losses(losses, weights=v.exp()[batch[1]], outputs=logits)

    def outer(model: nn.Module, v: Tensor, batch: Batch) -> Tensor:
        model.eval()
        return F.cross_entropy(model(batch[0]), batch[1])

    return Case(
        nhgd.Bilevel(inner, outer, theta=net, v=torch.zeros(10), l2=1e-3, likelihood="categorical"),
        nhgd.Data(*train, batch=66),
        nhgd.Data(*validation, batch=100),
        selection,
        test,
        inner_lr=0.1,
        score=lambda model, v, batch: accuracy(model.eval()(batch[0]), batch[1]),
    )


def label_cleaning(seed: int, file: Path | None = None) -> Case:
    """One weight sigmoid(v_i) for each of 600 samples, two fifths of whose labels are random; an MLP."""
    torch.manual_seed(seed)
    train, validation, selection, test = digits(seed, file, 600, 200, 200)
    generator = randomness(seed + 1)
    noisy = torch.rand(len(train[1]), generator=generator) < 0.4
    labels = torch.where(noisy, torch.randint(10, train[1].shape, generator=generator), train[1])
    net = nn.Sequential(nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 10))

    def inner(model: nn.Module, v: Tensor, batch: Batch) -> nhgd.Losses:
        x, y, index = batch
        logits = model(x)
        losses = F.cross_entropy(logits, y, reduction="none")
        return nhgd.Losses(losses, weights=v.sigmoid()[index], outputs=logits)

    def outer(model: nn.Module, v: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return Case(
        nhgd.Bilevel(inner, outer, theta=net, v=torch.zeros(600), l2=1e-3, likelihood="categorical"),
        nhgd.Data(train[0], labels, batch=200),
        nhgd.Data(*validation, batch=100),
        selection,
        test,
        inner_lr=0.1,
        outer_steps=100,
        score=lambda model, v, batch: accuracy(model(batch[0]), batch[1]),
    )


def source_weights(seed: int, file: Path | None = None) -> Case:
    """One weight sigmoid(v_s) for each of eight sources of a regression, of which some are noisy and some are of another law."""
    generator = randomness(seed)
    width, size = 20, 30  # features, and samples of a source

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    truth = normal(width) / width**0.5
    noise = torch.tensor([0.1, 0.1, 0.3, 0.3, 1.0, 1.0, 0.1, 0.1], dtype=torch.float64)
    shift = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 2.0], dtype=torch.float64)
    x = normal(SOURCES * size, width)
    source = torch.arange(SOURCES).repeat_interleave(size)
    laws = truth + shift[:, None] * normal(SOURCES, width) / width**0.5  # (SOURCES, width)
    y = (x * laws[source]).sum(1) + noise[source] * normal(len(x))

    def clean(samples: int) -> Batch:
        found = normal(samples, width)
        return found, found @ truth + 0.1 * normal(samples)

    def inner(model: nn.Module, v: Tensor, batch: Batch) -> nhgd.Losses:
        x, y, source, _ = batch
        outputs = model(x)
        losses = (outputs[:, 0] - y).square() / 2
        return nhgd.Losses(losses, weights=v.sigmoid()[source], outputs=outputs)

    def outer(model: nn.Module, v: Tensor, batch: Batch) -> Tensor:
        return (model(batch[0])[:, 0] - batch[1]).square().mean() / 2

    model = nn.Linear(width, 1).double()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    v = torch.zeros(SOURCES, dtype=torch.float64)
    problem = nhgd.Bilevel(inner, outer, theta=model, v=v, l2=1e-4, likelihood="gaussian")
    data = nhgd.Data(x, y, source, batch=80)
    return Case(
        problem,
        data,
        nhgd.Data(*clean(40), batch=20),
        clean(200),
        clean(1000),
        inner_lr=half_stable_step(problem, data.take(torch.arange(len(x)))),
        outer_steps=100,
    )
