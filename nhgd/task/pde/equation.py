"""A differential equation as an inner problem: one squared residual for each point.

    mean over the points of each condition of  residual^2,  the means added up

Subclass `AbstractResidual` for an equation of your own: where its points are, what each condition demands there, and
what the outer problem wants. `examples/pde_poisson.py` does so in a few dozen lines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from nhgd._validation import counted
from nhgd.losses import Losses
from nhgd.problem import Bilevel
from nhgd.task.pde.jet import Jet, JetNet
from nhgd.variable import Given

Control: TypeAlias = Any  # v, of the kind that was given: a module, a tensor or a dict of tensors


class AbstractResidual(ABC):
    """An equation with its conditions, for a state that is a `JetNet` and a control v of any kind.

    The inner loss is a Gaussian log-likelihood of the residuals, so the exact Fisher matrix is the Gauss-Newton matrix,
    and `FisherWindow(fisher="exact", records="sample", window=number of points)` solves with it in residual space. The
    empirical one is of no use: it fades with the residuals.

    Attributes:
        dimension: how many coordinates a point has.
        space: how many of the first coordinates are space; the Laplacian is over these.
    """

    dimension: ClassVar[int]
    space: ClassVar[int]

    @abstractmethod
    def sample(self, seed: tuple[int, ...]) -> Sequence[Tensor]:
        """Points (n, d) for each condition, in float64. `box` and `sides` draw them, each set from (*seed, its
        number).
        """

    @abstractmethod
    def residuals(self, u: Jet, control: Control, x: Tensor) -> Sequence[Tensor]:
        """What should be zero, for each condition in the order of `sample`, each at all points: (N,).

        Only those at a condition's own points are used.
        """

    @abstractmethod
    def outer(self, net: JetNet, control: Control, batch: Any) -> Tensor:
        """The outer objective of a control: a scalar."""

    def net(self, hidden: Sequence[int], seed: int) -> JetNet:
        """A network for the state with these hidden widths."""
        return JetNet((self.dimension, *hidden, 1), self.space, seed)

    def collocation(
        self, seed: tuple[int, ...], device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor, Tensor]:
        """An inner batch: points (N, d), the condition of each (N,), and weights (N,) that make every condition
        count 1.
        """
        sets = self.sample(seed)
        total = sum(len(x) for x in sets)
        kinds = torch.cat([torch.full((len(x),), i) for i, x in enumerate(sets)])
        weights = torch.cat([torch.full((len(x),), total / len(x), dtype=torch.float64) for x in sets])
        return torch.cat(list(sets)).to(device, dtype), kinds.to(device), weights.to(device, dtype)

    def inner(self, net: JetNet, control: Control, batch: Any) -> Losses:
        """The squared residual of every point."""
        x, kinds, weights = batch[:3]
        found = torch.stack(list(self.residuals(net.jet(x), control, x)), 1)  # (N, conditions)
        residual = found.gather(1, kinds[:, None])[:, 0]
        return Losses(residual.square(), weights=weights, outputs=residual)

    def problem(self, net: JetNet, control: Given) -> Bilevel:
        """The bilevel problem: the state net is theta, the control is v."""
        return Bilevel(self.inner, self.outer, net, control, likelihood="gaussian")


def box(count: int, low: Tensor, high: Tensor, seed: tuple[int, ...]) -> Tensor:
    """Scrambled Sobol points in a box, (count, d); a coordinate whose ends are equal stays there.

    Sets of different seeds are independent; a seed is a few numbers, so that a run's own can be followed by the set's.
    """
    counted("A set of points", count=count)
    free = high > low
    drawn = low.expand(count, len(low)).clone()
    if bool(free.any()):
        scramble = int(np.random.SeedSequence(seed).generate_state(1)[0])
        engine = SobolEngine(int(free.sum()), scramble=True, seed=scramble)
        drawn[:, free] += engine.draw(count, dtype=torch.float64) * (high - low)[free]
    return drawn


def sides(
    count: int, low: Tensor, high: Tensor, seed: tuple[int, ...], coordinates: Sequence[int] | None = None
) -> Tensor:
    """`count` points on each of a box's sides across some coordinates (default: all), from independent Sobol sets.

    One sequence dealt out to the sides in turn would cover a part of each only.
    """
    found: list[Tensor] = []
    for which in range(len(low)) if coordinates is None else coordinates:
        for end in (low, high):
            from_here, to_there = low.clone(), high.clone()
            from_here[which] = to_there[which] = end[which]
            found.append(box(count, from_here, to_there, (*seed, len(found))))
    return torch.cat(found)
