"""Problems whose v is what is learnt from, or where learning begins: distilled samples, a shared initialisation."""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nhgd
from benchmarks.zoo.case import Batch, Case, accuracy, digits, half_stable_step, randomness


def distillation(seed: int, file: Path | None = None) -> Case:
    """Two images a class, from which a linear classifier is to learn what it would from all digits."""
    train, selection, test = digits(seed, file, 900, 300)
    labels = torch.arange(10).repeat(2)
    images = 0.5 + 0.1 * torch.randn(len(labels), 64, generator=randomness(seed + 1))
    model = nn.Linear(64, 10)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)

    def inner(model: nn.Module, v: Tensor, batch: Batch) -> nhgd.Losses:
        y, index = batch
        logits = model(v[index])
        return nhgd.Losses(F.cross_entropy(logits, y, reduction="none"), outputs=logits)

    def outer(model: nn.Module, v: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return Case(
        nhgd.Bilevel(inner, outer, theta=model, v=images, l2=1e-3, likelihood="categorical"),
        nhgd.Data(labels),
        nhgd.Data(*train, batch=300),
        selection,
        test,
        inner_lr=0.1,
        inner_steps=20,
        outer_steps=100,
        score=lambda model, v, batch: accuracy(model(batch[0]), batch[1]),
    )


def sinusoids(seed: int, file: Path | None = None) -> Case:
    """The network v from which those of all tasks are kept near: theta_i minimises its own loss + 0.05 |theta_i - v|^2.

    A task is a sinusoid, seen at ten places; what counts are tasks that v was not chosen on.
    """
    generator = randomness(seed)
    width, near = 16, 0.1
    shapes = [(width, 1), (width,), (width, width), (width,), (1, width), (1,)]
    sizes = [math.prod(shape) for shape in shapes]

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(*shape, generator=generator, dtype=torch.float64)

    def tasks(count: int, shots: int = 10, queries: int = 20) -> Batch:
        """Places and values of the support, then of the queries, (count, shots) and (count, queries) each."""
        height, phase = uniform(0.5, 2, count, 1), uniform(0, math.pi, count, 1)
        near, far = uniform(-3, 3, count, shots), uniform(-3, 3, count, queries)
        return near, height * torch.sin(near + phase), far, height * torch.sin(far + phase)

    def outputs(theta: Tensor, x: Tensor) -> Tensor:
        """A network for each row of theta, (N, P), at the places in the same row of x, (N, S)."""
        parts = [part.reshape(-1, *shape) for part, shape in zip(theta.split(sizes, 1), shapes, strict=True)]
        hidden = x[:, :, None]
        for weight, bias in ((parts[0], parts[1]), (parts[2], parts[3])):
            hidden = torch.tanh(hidden @ weight.mT + bias[:, None])
        return (hidden @ parts[4].mT + parts[5][:, None])[:, :, 0]

    def inner(theta: Tensor, v: Tensor, batch: Batch) -> nhgd.Losses:
        x, y, index = batch
        mine = theta[index]
        losses = (outputs(mine, x) - y).square().mean(1) / 2
        return nhgd.Losses(losses + near / 2 * (mine - v).square().sum(1))

    def outer(theta: Tensor, v: Tensor, batch: Batch) -> Tensor:
        x, y, index = batch
        return (outputs(theta[index], x) - y).square().mean() / 2

    v = torch.cat(
        [
            torch.randn(math.prod(shape), generator=generator, dtype=torch.float64) / max(shape[-1], 1) ** 0.5
            if len(shape) == 2
            else torch.zeros(shape, dtype=torch.float64)
            for shape in shapes
        ]
    )
    train = tasks(25)
    index = torch.arange(25)
    problem = nhgd.Bilevel(inner, outer, theta=v.repeat(25, 1), v=v)

    def adapted(batch: Batch) -> tuple[nhgd.Bilevel, Batch]:
        count = torch.arange(len(batch[0]))
        end = v.detach().clone()
        fresh = nhgd.Bilevel(
            inner,
            lambda theta, v, batch: outer(theta, v, (batch[2], batch[3], torch.arange(len(batch[0])))),
            theta=end.repeat(len(count), 1),
            v=end.clone(),
        )
        return fresh, (batch[0], batch[1], count)

    return Case(
        problem,
        nhgd.Data(train[0], train[1]),
        nhgd.Data(train[2], train[3]),
        tasks(30),
        tasks(60),
        inner_lr=half_stable_step(problem, (train[0], train[1], index)),
        outer_steps=100,
        adapted=adapted,
    )
