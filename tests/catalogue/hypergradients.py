"""Every estimator of grad Phi, with settings that make it converge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nhgd.hypergradients import AbstractHypergradient, Implicit, Unrolled
from tests.catalogue.problems import PROBLEMS, Make, plain_tensor, ridge_scalar, weighted_logistic


@dataclass(frozen=True)
class HypergradientCase:
    """An estimator with settings that make it converge, at theta*(v), to grad Phi(v) within `tol`, relative."""

    make: Callable[[], AbstractHypergradient]
    problems: tuple[Make, ...] = tuple(PROBLEMS)
    tol: float = 1e-8

    @property
    def name(self) -> str:
        """The name of the estimator."""
        return self.make().name


HYPERGRADIENTS = [
    HypergradientCase(Implicit),
    HypergradientCase(lambda: Unrolled(steps=400), problems=(weighted_logistic, ridge_scalar, plain_tensor)),
]
