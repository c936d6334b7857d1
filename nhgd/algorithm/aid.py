"""Approximate implicit differentiation: the double loop with any inverse."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, final

import torch
from torch import Tensor
from typing_extensions import override

from nhgd import _tape as tape
from nhgd.algorithm.base import AbstractAlgorithm
from nhgd.errors import InputError
from nhgd.inverse import CG, AbstractInverse, Identity
from nhgd.loop.calibration import calibrate
from nhgd.loop.horizon import Horizon
from nhgd.loop.hypergradient import hypergradient
from nhgd.loop.loop import Loop, StepInfo


@dataclass
class AIDState:
    """theta at the start, the last adjoint, and the horizon."""

    theta: Tensor
    adjoint: Tensor | None = None
    horizon: Horizon | None = None


@final
@dataclass(frozen=True)
class AID(AbstractAlgorithm):
    """Double loop: train theta, then apply the implicit formula with any inverse.

        repeat K times:
            repeat T times:   theta <- Pi( theta - eta grad_theta l(v, theta, batch) )
            x = H^{-1} grad_theta f
            v <- Pi( v - alpha ( grad_v f - (d2_{theta,v} l)^T x ) )

    Args:
        inverse: how x is found. One that learns online is fed by the inner steps.
        batches: inner batches that H and the cross derivative are averaged over, or "all" for one pass over the data.
        warm_start: theta continues from the last outer step; otherwise each inner loop starts where the first one did.
        warm_solve: iterative inverses start from the last outer step's x.

    >>> AID(inverse=CG(steps=10)).name
    'aid'

    References: F. Pedregosa, Hyperparameter optimization with approximate gradient, 2016, algorithm 1; K. Ji, J. Yang,
    Y. Liang, Bilevel optimization: convergence analysis and enhanced design, 2021, algorithm 1 (AID-BiO).
    """

    name: ClassVar[str] = "aid"
    accumulates: ClassVar[bool] = True
    inverse: AbstractInverse = field(default_factory=CG)
    batches: int | str = 1
    warm_start: bool = True
    warm_solve: bool = True

    def __post_init__(self) -> None:
        check_batches("AID", self.batches)

    @classmethod
    @override
    def presets(cls) -> dict[str, AbstractAlgorithm]:
        return {"t1t2": cls(inverse=Identity())}

    @property
    @override
    def online(self) -> AbstractInverse | None:
        return self.inverse

    @property
    @override
    def not_repeatable(self) -> str | None:
        return None

    @override
    def init(self, loop: Loop) -> AIDState:
        """Note the start of theta, and decide how much of the inner steps the curvature records."""
        calibrate(loop)
        return AIDState(loop.problem.theta.flat(), horizon=loop.horizon(self.warm_start))

    @override
    def step(self, loop: Loop, state: AIDState) -> tuple[AIDState, StepInfo]:
        if not self.warm_start:
            loop.problem.theta.assign(state.theta)
        losses = [loop.inner_step() for _ in range(loop.settings.inner_steps)]
        start = state.adjoint if self.warm_solve else None
        found, lag, notes = hypergradient(loop, loop.inner_batches(self.batches), start, horizon=state.horizon)
        norm = loop.move_v(found.leaves)
        info = StepInfo(found.value, tape.reading(torch.stack(losses).mean()), norm, lag, notes)
        return AIDState(state.theta, found.adjoint, state.horizon), info


def check_batches(owner: str, batches: int | str, name: str = "batches") -> None:
    """Refuse a number of batches that is neither a positive whole number nor "all"."""
    if batches != "all" and (not isinstance(batches, int) or batches < 1):
        raise InputError(f"{owner}: {name} must be a whole number of at least 1 or 'all', got {batches!r}.")
