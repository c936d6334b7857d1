"""stocBiO: a Neumann series whose batches shrink."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor
from typing_extensions import override

from nhgd._validation import counted, positive
from nhgd.algorithm.base import AbstractAlgorithm
from nhgd.data.batch import Batch, move
from nhgd.data.loader import Data
from nhgd.errors import InputError
from nhgd.inverse._krylov.richardson import safe_step
from nhgd.loop.loop import Loop, StepInfo
from nhgd.loop.neumann_estimate import Sample, check_series, scaled

Rule = Literal["decaying", "constant"]


@dataclass
class StocBiOState:
    """The scale of the series, once it is known."""

    phi: float | None


@final
@dataclass(frozen=True)
class StocBiO(AbstractAlgorithm):
    """Double loop with a Neumann series over batches that shrink as its terms do.

        repeat T times:   theta <- Pi( theta - eta grad_theta l(v, theta, batch) )
        r_0 = grad_theta f;   r_{k+1} = r_k - phi H_k r_k,      H_k on b_k fresh samples,   k = 0 .. K - 1
        x   = phi sum_{k=0}^{K} r_k
        v  <- Pi( v - alpha ( grad_v f - (d2_{theta,v} l)^T x ) ),      the cross derivative on a further batch

        b_k = B K (1 - phi mu)^k, rounded up, at most all samples

    r_k falls like (1 - phi mu)^k, so that later products may be noisier. theta goes on from the last outer step. T is
    the solver's inner_steps, eta its inner_lr and alpha its outer_lr.

    Args:
        K: products of the series; Q in its own paper.
        phi: its scale. None: 1 / lambda_max from a power iteration before the first step, halved whenever the series
            grows.
        mu: the strong convexity that the rule for the batches assumes. phi mu must be below 1.
        B: the rule's factor.
        rule: "decaying" for the batches above, which draws samples by index and needs inner_data=nhgd.Data(...);
            "constant" for the batches of the loader, whatever it is.

    >>> StocBiO(K=4, B=5, mu=0.5).sizes(phi=1.0, samples=15)
    [15, 10, 5, 3]

    References: K. Ji, J. Yang, Y. Liang, Bilevel optimization: convergence analysis and enhanced design, 2021,
    algorithms 2 and 3, with the batch sizes of their analysis; Natural Hypergradient Descent, appendix on experiments.
    Deviations: 1. phi has a default. 2. b_k is capped by the data. 3. a batch has no sample twice.
    """

    name: ClassVar[str] = "stocbio"
    K: int = 10
    phi: float | None = None
    mu: float = 1e-4
    B: int = 100
    rule: Rule = "decaying"

    def __post_init__(self) -> None:
        counted("stocBiO", K=self.K, B=self.B)
        check_series("stocBiO", self.K, self.phi)
        positive("stocBiO", mu=self.mu)
        if self.phi is not None and self.phi * self.mu >= 1:
            raise InputError(
                f"stocBiO: phi mu must be below 1, got {self.phi} * {self.mu}. mu is the smallest eigenvalue of the"
                " inner Hessian and phi at most 1 over the largest, so lower one of the two."
            )

    def sizes(self, phi: float, samples: int) -> list[int]:
        """b_0 .. b_{K-1}."""
        shrink = max(1 - phi * self.mu, 0.0)
        return [min(samples, max(1, math.ceil(self.B * self.K * shrink**k - 1e-9))) for k in range(self.K)]

    @override
    def init(self, loop: Loop) -> StocBiOState:
        """Refuse data that cannot be drawn by index, and find the scale unless it was given."""
        if self.rule == "decaying" and not isinstance(loop.inner.source, Data):
            raise InputError(
                f"stocBiO draws batches of its own sizes, but inner_data is a {type(loop.inner.source).__name__}. Pass"
                " inner_data=nhgd.Data(x, y, batch=1024), or StocBiO(rule='constant') for the batches of the loader."
            )
        return StocBiOState(self.phi)

    @override
    def step(self, loop: Loop, state: StocBiOState) -> tuple[StocBiOState, StepInfo]:
        losses = [loop.inner_step() for _ in range(loop.settings.inner_steps)]
        outer, cross, phi = loop.outer.next(), loop.inner_batch(), state.phi
        if phi is None:
            phi = safe_step(loop.oracle([cross], None), loop.problem.theta.flat(), 10)
        sample = Sample(outer, cross, self._factors(loop, phi), None, loop.seed())
        found, phi = scaled(loop, sample, self.phi, phi)
        norm = loop.move_v(found.leaves)
        info = StepInfo(float(found.value), float(torch.stack(losses).mean()), norm, notes={"phi": phi})
        return StocBiOState(phi), info

    def _factors(self, loop: Loop, phi: float) -> Sequence[Batch] | int:
        if self.rule == "constant":
            return self.K
        data = loop.inner.source
        assert isinstance(data, Data)
        indices = [torch.randperm(data.samples)[:size] for size in self.sizes(phi, data.samples)]
        return Taken(data, indices, loop.problem.theta.device)


@final
@dataclass(frozen=True)
class Taken(Sequence[Batch]):
    """Batches known by their samples and gathered on demand, so that only one is held at a time."""

    data: Data
    indices: list[Tensor]
    device: torch.device

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, place: Any) -> Any:
        return move(self.data.take(self.indices[place]), self.device)
