"""How a training sample gets its weight: a number of its own, or a function of its loss."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from nhgd.errors import InputError
from nhgd.variable import Given

HIDDEN = 16
NODES = 24


@dataclass(frozen=True)
class AbstractWeighting(ABC):
    """The weights of N training samples as a function of v, of their losses and of their indices.

    An index from N on is that of a trusted sample, whose weight is 1.
    """

    samples: int
    box: ClassVar[tuple[float, float] | None] = None  # what v is kept in
    by_loss: ClassVar[bool] = True  # whether one function weighs all samples

    @abstractmethod
    def first(self, start: float | None, like: Tensor) -> Given:
        """v before the first outer step, with the dtype and on the device of a tensor."""

    def weights(self, v: Any, losses: Tensor, index: Tensor) -> Tensor:
        """The weight of each sample of a batch, (B,); constant in theta."""
        return self._with_trusted(self._learnt(v, losses.detach(), index), torch.ones_like(losses), index)

    def potential(self, v: Any, losses: Tensor, index: Tensor) -> Tensor:
        """A function of each loss whose derivative in that loss is the weight, (B,); the loss of a trusted sample."""
        return self._with_trusted(self._integral(v, losses, index), losses, index)

    @abstractmethod
    def _learnt(self, v: Any, losses: Tensor, index: Tensor) -> Tensor: ...

    @abstractmethod
    def _integral(self, v: Any, losses: Tensor, index: Tensor) -> Tensor: ...

    def _with_trusted(self, learnt: Tensor, trusted: Tensor, index: Tensor) -> Tensor:
        return torch.where(index < self.samples, learnt, trusted)

    def _own(self, v: Tensor, index: Tensor) -> Tensor:
        """The number of each sample; for trusted ones any, since it will not be used."""
        return v[index.clamp_max(self.samples - 1)]


@final
@dataclass(frozen=True)
class Clip(AbstractWeighting):
    """w_i = v_i, kept between 0 and 1 by projection: the paper's."""

    box: ClassVar[tuple[float, float] | None] = (0.0, 1.0)
    by_loss: ClassVar[bool] = False

    @override
    def first(self, start: float | None, like: Tensor) -> Tensor:
        return like.new_full((self.samples,), 0.5 if start is None else start)

    def _learnt(self, v: Tensor, losses: Tensor, index: Tensor) -> Tensor:
        return self._own(v, index)

    def _integral(self, v: Tensor, losses: Tensor, index: Tensor) -> Tensor:
        return self._own(v, index) * losses


@final
@dataclass(frozen=True)
class Sigmoid(AbstractWeighting):
    """w_i = sigmoid(v_i), v free."""

    by_loss: ClassVar[bool] = False

    @override
    def first(self, start: float | None, like: Tensor) -> Tensor:
        return like.new_full((self.samples,), _logit(0.5 if start is None else start))

    def _learnt(self, v: Tensor, losses: Tensor, index: Tensor) -> Tensor:
        return self._own(v, index).sigmoid()

    def _integral(self, v: Tensor, losses: Tensor, index: Tensor) -> Tensor:
        return self._own(v, index).sigmoid() * losses


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

    @override
    def first(self, start: float | None, like: Tensor) -> Tensor:
        """a = 0, and b such that a sample with zero loss has the weight `start`, above 0.5; 0.8 by default."""
        return like.new_tensor([0.0, math.log(_threshold(start))])

    def _learnt(self, v: Tensor, losses: Tensor, index: Tensor) -> Tensor:
        return torch.sigmoid(v[0].exp() * (v[1].exp() - losses))

    def _integral(self, v: Tensor, losses: Tensor, index: Tensor) -> Tensor:
        return -F.softplus(v[0].exp() * (v[1].exp() - losses)) / v[0].exp()


class LossNet(nn.Module):
    """A net with one hidden layer from a loss to a weight between 0 and 1.

        w(l) = sigmoid( offset - sum_j height_j tanh( slope_j l - shift_j ) )

    It starts as a falling step at `threshold`, with the weight sigmoid(threshold) where the loss is 0.
    """

    def __init__(self, threshold: float, hidden: int = HIDDEN) -> None:
        super().__init__()
        shift = torch.linspace(0.0, 2 * threshold, hidden, dtype=torch.float64)
        self.slope = nn.Parameter(torch.ones(hidden, dtype=torch.float64))
        self.shift = nn.Parameter(shift)
        self.height = nn.Parameter(torch.full_like(shift, threshold / float(shift.tanh().sum())))
        self.offset = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, losses: Tensor) -> Tensor:
        """The weights of losses, of the same shape."""
        steps = torch.tanh(losses[..., None] * self.slope - self.shift)
        return torch.sigmoid(self.offset - steps @ self.height)


@final
@dataclass(frozen=True)
class ByNet(AbstractWeighting):
    """w_i = net( l_i ), v the parameters of a small net: Meta-Weight-Net. The remarks of `ByLoss` on l_i apply.

    References: J. Shu et al., Meta-Weight-Net: learning an explicit mapping for sample weighting, 2019, section 2.
    Deviations: 1. 16 hidden units with tanh in place of 100 with ReLU, and a start that falls with the loss, because
    trusted sets are small and the first steps should not believe what fits least.
    """

    @override
    def first(self, start: float | None, like: Tensor) -> LossNet:
        """The net; a sample with zero loss has the weight `start`, above 0.5; 0.8 by default."""
        return LossNet(_threshold(start)).to(like.device, like.dtype)

    def _learnt(self, v: nn.Module, losses: Tensor, index: Tensor) -> Tensor:
        found: Tensor = v(losses)
        return found

    def _integral(self, v: nn.Module, losses: Tensor, index: Tensor) -> Tensor:
        # Gauss-Legendre from 0 to the loss. The slope is the weight itself, not that of the quadrature.
        nodes, shares = (losses.new_tensor(a) / 2 for a in np.polynomial.legendre.leggauss(NODES))
        with torch.no_grad():
            value: Tensor = losses * (v(losses[:, None] * (nodes + 0.5)) @ shares)
            slope: Tensor = v(losses)
        return value + slope * (losses - losses.detach())


WEIGHTINGS: Mapping[str, type[AbstractWeighting]] = {"clip": Clip, "sigmoid": Sigmoid, "loss": ByLoss, "net": ByNet}


def _logit(weight: float) -> float:
    return math.log(weight / (1 - weight))


def _threshold(start: float | None) -> float:
    """The loss at which a sigmoid of slope 1 that has the weight `start` without loss has the weight 0.5."""
    start = 0.8 if start is None else start
    if start <= 0.5:
        raise InputError(f"With weights by loss, start must lie between 0.5 and 1, got {start}.")
    return _logit(start)
