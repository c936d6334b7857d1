"""One problem of the zoo: what is solved, on which data, and how its result is judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

import nhgd
from nhgd.data import bundled

Batch: TypeAlias = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A problem with its data, for one seed.

    Attributes:
        problem, inner, outer: what a solver is given.
        selection: the samples on which an outer step size is chosen.
        held_out: the samples that count.
        inner_steps, inner_lr: of every method.
        outer_steps: the budget, as outer steps of a method that takes one gradient and one cross product after its inner
            steps, on one more batch.
        project_v: the box v is kept in.
        score: (theta, v, batch) -> the part of the samples that are classified as they should be, where there are classes.
        adapted: where theta belongs to the samples themselves: batch -> a problem whose theta is theirs, and its inner batch.
    """

    problem: nhgd.Bilevel
    inner: nhgd.Data
    outer: nhgd.Data
    selection: Batch
    held_out: Batch
    inner_lr: float
    inner_steps: int = 10
    outer_steps: int = 60
    project_v: tuple[float, float] | None = None
    score: Callable[[Any, Any, Batch], float] | None = None
    adapted: Callable[[Batch], tuple[nhgd.Bilevel, Batch]] | None = None

    @property
    def budget(self) -> int:
        """Gradient-equivalents of a run."""
        return self.outer_steps * (self.inner_steps + 3)

    @property
    def training_batch(self) -> Batch:
        """All inner samples, in order."""
        return self.inner.take(torch.arange(self.inner.samples))


Builder: TypeAlias = Callable[[int, "Path | None"], Case]


def randomness(seed: int) -> torch.Generator:
    """A generator of its own: building a case leaves the global one alone, but for the weights of networks."""
    return torch.Generator().manual_seed(seed)


def digits(seed: int, file: Path | None, *sizes: int) -> list[tuple[Tensor, Tensor]]:
    """The digits, (N, 64) between 0 and 1, and their labels, shuffled and cut into parts; the last part is the rest.

    Args:
        seed: of the order.
        file: what `export_digits` wrote; None: scikit-learn's own.
        sizes: of all parts but the last.
    """
    if file is None:
        x, y = bundled.digits()
    else:
        with np.load(file) as found:
            x, y = torch.from_numpy(found["x"]), torch.from_numpy(found["y"])
    x = x.to(torch.get_default_dtype())
    order = torch.randperm(len(y), generator=randomness(seed))
    parts = order.split([*sizes, len(y) - sum(sizes)])
    return [(x[part], y[part]) for part in parts]


def export_digits(file: Path) -> None:
    """Write the digits for machines without scikit-learn."""
    x, y = bundled.digits()
    with open(file, "wb") as out:
        np.savez_compressed(out, x=x.numpy(), y=y.numpy())


def accuracy(logits: Tensor, y: Tensor) -> float:
    """The part of the labels that are found."""
    return float((logits.argmax(1) == y).double().mean())


def half_stable_step(problem: nhgd.Bilevel, batch: Batch, products: int = 50) -> float:
    """1 / (2 lambda_max) of the inner Hessian at the start, by power iteration: a step that leaves room for v to move."""
    leaves = [leaf.detach().clone().requires_grad_() for leaf in problem.theta.leaves]
    gradient = torch.autograd.grad(problem.objective(batch, leaves), leaves, create_graph=True)
    generator = randomness(0)
    vector = [torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype) for leaf in leaves]
    norm = torch.ones(())
    for _ in range(products):
        product = torch.autograd.grad(gradient, leaves, grad_outputs=vector, retain_graph=True)
        norm = torch.stack([p.square().sum() for p in product]).sum().sqrt()
        vector = [p / norm for p in product]
    return 0.5 / float(norm)
