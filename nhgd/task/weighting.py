"""Two ways to give a training sample its weight: a number of its own, or a function of its loss."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor

from nhgd.errors import InputError


@dataclass(frozen=True)
class AbstractWeighting(ABC):
    """The weights of N training samples as a function of v, of their losses and of their indices."""

    samples: int
    box: ClassVar[tuple[float, float] | None] = None

    @abstractmethod
    def first(self, start: float | None) -> Tensor:
        """v before the first outer step."""

    @abstractmethod
    def weights(self, v: Tensor, losses: Tensor, index: Tensor) -> Tensor:
        """The weight of each sample of a batch, (B,). An index from N on is a trusted sample: its weight is 1."""

    @abstractmethod
    def potential(self, v: Tensor, losses: Tensor, index: Tensor) -> Tensor:
        """A function of each loss whose derivative in that loss is the weight, (B,)."""


@final
@dataclass(frozen=True)
class PerSample(AbstractWeighting):
    """w_i = v_i, kept between 0 and 1."""

    box: ClassVar[tuple[float, float] | None] = (0.0, 1.0)

    def first(self, start: float | None) -> Tensor:
        """The same weight for all, 0.5 unless told."""
        return torch.full((self.samples,), 0.5 if start is None else start)

    def weights(self, v: Tensor, losses: Tensor, index: Tensor) -> Tensor:
        """v at the index."""
        return v[index]

    def potential(self, v: Tensor, losses: Tensor, index: Tensor) -> Tensor:
        """The weighted loss."""
        return v[index] * losses


@final
@dataclass(frozen=True)
class ByLoss(AbstractWeighting):
    """w_i = sigmoid( e^a ( e^b - l_i ) ), v = (a, b): a sample is suspect when its loss is above e^b.

    l_i is held constant in theta. So the inner loop follows a direction rather than one objective, and the exact
    hypergradient means: with the weights held constant in theta.

    References: J. Shu et al., Meta-Weight-Net: learning an explicit mapping for sample weighting, 2019, section 2.
    Deviations: 1. a sigmoid of two parameters in place of a small network, because two parameters cannot overfit a
    trusted set of a hundred samples. 2. a threshold above 0, because weights that may all shrink together would only
    trade with the ridge.
    """

    def first(self, start: float | None) -> Tensor:
        """a = 0, and b such that a sample without loss has the weight `start`, above 0.5; 0.8 unless told."""
        start = 0.8 if start is None else start
        if start <= 0.5:
            raise InputError(f"With weights by loss, start must lie between 0.5 and 1, got {start}.")
        return torch.tensor([0.0, math.log(math.log(start / (1 - start)))])

    def weights(self, v: Tensor, losses: Tensor, index: Tensor) -> Tensor:
        """The sigmoid; 1 for trusted samples."""
        learnt = torch.sigmoid(v[0].exp() * (v[1].exp() - losses.detach()))
        return torch.where(index < self.samples, learnt, torch.ones_like(learnt))

    def potential(self, v: Tensor, losses: Tensor, index: Tensor) -> Tensor:
        """- e^-a log( 1 + exp( e^a ( e^b - l ) ) ); the loss itself for trusted samples."""
        learnt = -F.softplus(v[0].exp() * (v[1].exp() - losses)) / v[0].exp()
        return torch.where(index < self.samples, learnt, losses)
