"""A classifier trained on samples of which some are believed more than others: the inner problem of label cleaning."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nhgd.algorithm import NHGD
from nhgd.errors import RunError
from nhgd.inverse import KFAC
from nhgd.inverse._learned.automatic import automatic
from nhgd.problem import Bilevel, Losses
from nhgd.task._inner_solver import lbfgs, newton_cg
from nhgd.task._softmax import Split, fit
from nhgd.task._weighting import AbstractWeighting
from nhgd.variable import Given

EVERY = 5  # a record costs as much as a step, and running means over tens of batches lose little by every fifth


@dataclass(frozen=True)
class WeightedTraining:
    """Noisy samples with learnt weights, and trusted ones of weight 1.

        mean_i w_i(v) CE(y_i, theta . x_i) + l2 ||theta||^2,      i over the noisy and the trusted samples

    Attributes:
        model, v, weighting: theta, the outer variable, and what it means.
        noisy, trusted: the samples; there may be no trusted ones.
        l2: the ridge.
    """

    model: nn.Module
    v: Given
    weighting: AbstractWeighting
    noisy: Split
    trusted: Split
    l2: float

    @property
    def samples(self) -> Split:
        """The noisy ones, then the trusted."""
        return Split(torch.cat([self.noisy.x, self.trusted.x]), torch.cat([self.noisy.y, self.trusted.y]))

    def problem(self, outer: Callable[[nn.Module, Any, Any], Tensor]) -> Bilevel:
        """The bilevel problem, inner batches (x, y, index), with a loss that judges the model."""

        def inner(model: nn.Module, v: Any, batch: Any) -> Losses:
            x, y, index = batch
            z = model(x)
            losses = F.cross_entropy(z, y, reduction="none")
            return Losses(losses, weights=self.weighting.weights(v, losses, index), outputs=z)

        return Bilevel(inner, outer, self.model, self.v, l2=self.l2, likelihood="categorical")

    def solve(self, tol: float, steps: int = 2000) -> float:
        """Bring theta by L-BFGS to where the inner gradient is at most `tol`, in place; returns its norm."""
        return lbfgs(self._potential(), self._everything, tol, steps)

    def solve_exactly(self, tol: float) -> float:
        """The same by Newton's method, which a small ridge does not slow down; by L-BFGS where that fails."""
        teacher = self.problem(lambda model, v, batch: self.noisy.x.sum())
        try:
            return newton_cg(self._potential(), self._everything, tol, teacher)
        except RunError:
            return self.solve(tol)

    @property
    def _everything(self) -> tuple[Tensor, Tensor, Tensor]:
        split = self.samples
        return split.x, split.y, torch.arange(len(split.y), device=split.y.device)

    def _potential(self) -> Bilevel:
        """Weights may depend on the losses. Then not the weighted losses but their potential is least at the solution."""

        def potential(model: nn.Module, v: Any, batch: Any) -> Tensor:
            losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
            return self.weighting.potential(v, losses, batch[2])

        return Bilevel(potential, lambda model, v, batch: self.noisy.x.sum(), self.model, self.v, l2=self.l2)

    def start_from_trusted(self) -> None:
        """Bring theta to where it fits the trusted samples, if there are any, with ten times the ridge.

        Far from a good theta all losses are alike, and a weight that depends on them says nothing.
        """
        if len(self.trusted.y):
            _as_far_as_possible(lambda: fit(self.model, self.trusted, 10 * self.l2, 1e-2, steps=200))

    def start_solved(self) -> None:
        """Bring theta by way of the trusted samples to where the inner problem is about solved.

        Far from there the implicit formula does not hold, and a few steps along it lead a function of the loss to believe
        every label.
        """
        self.start_from_trusted()
        _as_far_as_possible(lambda: self.solve(1e-2, steps=200))


def _as_far_as_possible(work: Callable[[], float]) -> None:
    """A start need not be exact, and a model that is not convex may not allow it."""
    with suppress(RunError):
        work()


def momentum(factor: float) -> Callable[..., torch.optim.SGD]:
    """SGD with Nesterov's momentum, as an optimiser of a solver."""
    return partial(torch.optim.SGD, momentum=factor, nesterov=True)


def suited(problem: Bilevel) -> NHGD:
    """NHGD for such a problem: K-FAC learns from every fifth step, where the model has layers for it."""
    inverse = automatic(problem.theta)
    return NHGD(KFAC(factor_every=EVERY) if isinstance(inverse, KFAC) else inverse)
