"""Many runs of one inner loop at once: projected SGD, and what is averaged along it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nhgd.inverse import FisherDense
from nhgd.record import BatchGradient, InnerRecord, PerSampleGradients
from nhgd.reproduce.theory.models import Draws, WellSpecified
from nhgd.schedule import Clock, Strong
from nhgd.variable import Variable


@dataclass(frozen=True)
class Estimator:
    """An inverse that is followed: a `FisherDense`, and what an inner step hands over to it.

    Attributes:
        inverse: with form="inverse", which keeps its matrix A.
    """

    inverse: FisherDense

    def rows(self, gradients: Tensor) -> Tensor:
        """Rows R of each run, (R, n, D), with F_batch = R^T R, from the gradients of its samples (R, B, D)."""
        samples = gradients.shape[1]
        mean = gradients.mean(1, keepdim=True)
        if self.inverse.records == "sample":
            return gradients / math.sqrt(samples)
        return mean * math.sqrt(samples) if self.inverse.records == "batch" else mean

    def record(self, gradients: Tensor) -> InnerRecord:
        """What the library hands over for one run, from the gradients of its samples (B, D)."""
        samples = len(gradients)
        if self.inverse.records == "sample":
            return PerSampleGradients(gradients, samples)
        mean = gradients.mean(0)
        if self.inverse.records == "raw":
            return BatchGradient(None, mean, samples)
        return BatchGradient(mean * math.sqrt(samples), None, samples)


@dataclass
class Followed:
    """The matrices that an estimator inverts, in every run at once, and the library's own A of the first run beside
    them.

    A run's A is the inverse of M <- (1 - g) M + g F_batch from M = prior I, with the gains g of `FisherDense`;
    inverting M where A is looked at is the same, and can be done for all runs in a few kernels. `difference` says how
    true that is.
    """

    estimator: Estimator
    runs: int
    size: int
    checked: bool = True
    M: Tensor = field(init=False)
    count: float = field(init=False)

    def __post_init__(self) -> None:
        inverse = self.estimator.inverse
        self.M = torch.eye(self.size, dtype=torch.float64).mul(inverse.prior).repeat(self.runs, 1, 1)
        self.count = float(inverse.t0)
        self.state = inverse.init(Variable(torch.zeros(self.size, dtype=torch.float64), "theta"))

    def observe(self, gradients: Tensor) -> None:
        """Fold in one inner step of every run, from the gradients of its samples (R, B, D)."""
        inverse = self.estimator.inverse
        gain = 1 / (self.count + 1) if inverse.update == "average" else 1 - inverse.beta
        rows = self.estimator.rows(gradients)
        self.M.baddbmm_(rows.mT, rows, beta=1 - gain, alpha=gain)
        self.count += 1
        if self.checked:
            self.state = inverse.observe(self.state, self.estimator.record(gradients[0]))

    @property
    def A(self) -> Tensor:
        """Of every run, (R, D, D)."""
        found: Tensor = torch.linalg.inv(self.M)
        return found

    @property
    def difference(self) -> float:
        """Between the A of the first run and that of the library, relative to its size."""
        A = self.A[0]
        return float((A - self.state.matrix).norm() / A.norm())


@dataclass
class InnerLoop:
    """Runs of one inner loop: where they are, and the mean cross derivative along their way.

    Attributes:
        model: whose data they draw.
        v: of every run, (R, d_1).
        theta: (R, D), in place of which the next one comes.
        batch: samples of an inner step, B.
        generator: of the samples.
        followed: estimators of the inverse Hessian, by a name.
        steps: taken so far.
    """

    model: WellSpecified
    v: Tensor
    theta: Tensor
    batch: int
    generator: torch.Generator
    followed: Mapping[str, Followed] = field(default_factory=dict)
    steps: int = 0

    def __post_init__(self) -> None:
        mu, L = self.model.curvatures
        self.schedule = Strong(mu=mu, smoothness=L)
        self.cross = torch.zeros(*self.theta.shape, self.v.shape[1], dtype=torch.float64)

    def step(self) -> None:
        """theta <- Pi( theta - eta_t g_t ), with what was averaged taken at theta before it."""
        gradients, cross = self.model.derivatives(self.v, self.theta, self.drawn(self.batch))
        for one in self.followed.values():
            one.observe(gradients)
        self.cross.lerp_(cross.mean(1), 1 / (self.steps + 1))
        eta = self.schedule.rate(Clock(t=self.steps))
        scale = self.model.scale(self.v)
        self.theta = self.model.kept(scale * (self.theta - eta * gradients.mean(1))) / scale
        self.steps += 1

    def drawn(self, batch: int) -> Draws:
        """Fresh samples of every run."""
        return self.model.draw((len(self.theta), batch), self.generator)

    def fresh_cross(self, samples: int, most: int = 4096) -> Tensor:
        """The mean cross derivative of fresh samples at the current theta, (R, D, d_1): the M-batch estimator."""
        total = torch.zeros_like(self.cross)
        left = samples
        while left:
            part = min(left, max(1, most // len(self.theta)))
            total += self.model.derivatives(self.v, self.theta, self.drawn(part))[1].sum(1)
            left -= part
        return total / samples

    def run(self, until: int) -> None:
        """Take steps up to a number of them."""
        while self.steps < until:
            self.step()


def distances(found: Tensor, true: Tensor) -> Tensor:
    """The spectral norms of the differences of matrices (R, a, b), (R,)."""
    norms: Tensor = torch.linalg.matrix_norm(found - true, 2)
    return norms
