"""A classifier trained on weighted samples: the inner problem of label cleaning."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nhgd.data.loader import Data
from nhgd.errors import RunError
from nhgd.losses import Losses
from nhgd.problem import Bilevel
from nhgd.schedule import Decay
from nhgd.task._classifier import Split, fit, largest_curvature, ridge
from nhgd.task._inner_solver import lbfgs, newton_cg
from nhgd.task._weighting import AbstractWeighting
from nhgd.variable import Given

NESTEROV = 0.9


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

    def data(self, batch: int) -> Data:
        """Inner batches of (x, y, index)."""
        samples = self.samples
        return Data(samples.x, samples.y, batch=batch)

    @property
    def everything(self) -> tuple[Tensor, Tensor, Tensor]:
        """All of them as one inner batch."""
        samples = self.samples
        return samples.x, samples.y, torch.arange(len(samples.y), device=samples.y.device)

    def step_size(self, times: Tensor | None = None) -> float:
        """The inverse of the largest curvature that a linear model can have; `times`: the largest weight of each
        sample.
        """
        x = self.samples.x if times is None else self.samples.x * times.to(self.samples.x.dtype).sqrt()[:, None]
        return 1.0 / max(largest_curvature(x, steps=20), 1e-6)

    def problem(self, outer: Callable[[nn.Module, Any, Any], Tensor]) -> Bilevel:
        """The bilevel problem, inner batches (x, y, index), with a loss that judges the model."""

        def inner(model: nn.Module, v: Any, batch: Any) -> Losses:
            x, y, index = batch
            z = model(x)
            losses = F.cross_entropy(z, y, reduction="none")
            return Losses(losses, weights=self.weighting.weights(v, losses, index), outputs=z)

        return Bilevel(inner, outer, self.model, self.v, l2=self.l2, likelihood="categorical")

    def solve(self, tol: float, steps: int = 2000) -> float:
        """Train theta by L-BFGS, in place, until the inner gradient is at most `tol`; returns its norm."""
        everything = self.everything

        def value() -> Tensor:
            return self._potential(self.model, self.v, everything).mean() + ridge(self.model, self.l2)

        return lbfgs(value, list(self.model.parameters()), tol, steps)

    def solve_exactly(self, problem: Bilevel, tol: float) -> float:
        """The same by Newton's method, which a small ridge does not slow down; by L-BFGS if that fails.

        Args:
            problem: the one that is solved, as `problem` made it; curvature is learnt from its inner losses.
        """
        potential = Bilevel(self._potential, problem.outer, self.model, self.v, l2=self.l2)
        try:
            return newton_cg(potential, self.everything, tol, teacher=problem)
        except RunError:
            return self.solve(tol)

    def _potential(self, model: nn.Module, v: Any, batch: Any) -> Tensor:
        """Weights may depend on the losses. Then not the weighted losses but their potential is least at the
        solution.
        """
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return self.weighting.potential(v, losses, batch[2])

    def start_from_trusted(self) -> None:
        """Fit theta to the trusted samples, if there are any, with ten times the ridge.

        Far from a good theta all losses are similar, and weights that depend on them mean nothing.
        """
        if len(self.trusted.y):
            _as_far_as_possible(lambda: fit(self.model, self.trusted, 10 * self.l2, 1e-2, steps=200))

    def start_solved(self) -> None:
        """Fit theta to the trusted samples, then approximately to the inner problem.

        Far from there the implicit formula does not hold, and a few steps along it lead a function of the loss to
        believe every label.
        """
        self.start_from_trusted()
        _as_far_as_possible(lambda: self.solve(1e-2, steps=200))


def _as_far_as_possible(work: Callable[[], float]) -> None:
    """A start need not be exact, and a model that is not convex may not allow it."""
    with suppress(RunError):
        work()


def inner_settings(lr: float, momentum: float = NESTEROV) -> dict[str, Any]:
    """Inner steps of a solver, with Nesterov's momentum and then a size that falls to a tenth; 0: plain steps of one
    size.
    """
    if not momentum:
        return {"inner_lr": lr, "inner_optimizer": None}
    nesterov = partial(torch.optim.SGD, momentum=momentum, nesterov=True)
    return {"inner_lr": Decay(lr, final=0.1, hold=0.3), "inner_optimizer": nesterov}


def outer_settings(lr: float = 0.05) -> dict[str, Any]:
    """Outer steps of a solver: Adam's, with a size that falls to a twentieth."""
    return {"outer_lr": Decay(lr, final=0.05, hold=0.3), "outer_optimizer": torch.optim.Adam}
