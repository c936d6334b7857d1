"""Whether the outer loss falls as the hypergradients along the way of v say, and how far ahead they may look for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MEMORY = 0.8  # of the running means, for each outer step
POOR, GOOD = 0.25, 0.75  # shares of the predicted fall, as Levenberg and Marquardt have them
ROUNDING = 100.0  # units in the last place of the outer loss that a fall must exceed to tell anything


@dataclass
class Gain:
    """The fall of the outer loss beside its prediction, and the caution that follows from it.

    From one outer step to the next, with f and h the outer loss and the hypergradient that were found at v,

        actual = f_{k-1} - f_k,     predicted = -(h_{k-1} + h_k).(v_k - v_{k-1}) / 2

    If h is right, both agree up to third order in the step, even where v swings around its optimum. If h says what
    theta will do in many inner loops while v moves on before, the loss falls by less. So where the mean fall is less
    than a quarter of its prediction the caution is doubled, and above three quarters it is halved, to no less than 1;
    the horizon is divided by it.

    Attributes:
        means: running means of predicted, actual and |f|, on the device.
        value, gradient, place: f, h and v of the last outer step.
        caution: as above.
    """

    means: Tensor
    value: Tensor | None = None
    gradient: Tensor | None = None
    place: Tensor | None = None
    caution: float = 1.0

    def observe(self, value: Tensor, gradient: Tensor, place: Tensor) -> None:
        """Compare f, h and v with those of the last outer step."""
        value = value.detach().double()
        if self.value is not None and self.gradient is not None and self.place is not None:
            predicted = -(self.gradient + gradient).double().dot((place - self.place).double()) / 2
            found = torch.stack([predicted, self.value - value, value.abs()])
            self.means = self.means.lerp(found, 1 - MEMORY)
        self.value, self.gradient, self.place = value, gradient, place

    def read(self, means: Sequence[float], longest: float) -> None:
        """Adapt the caution to the running means; it never does more than shorten the longest horizon to one loop."""
        predicted, actual, size = means
        if self.gradient is not None and predicted > ROUNDING * torch.finfo(self.gradient.dtype).eps * size:
            if actual < POOR * predicted:
                self.caution *= 2
            elif actual > GOOD * predicted:
                self.caution /= 2
        self.caution = max(1.0, min(self.caution, longest))
