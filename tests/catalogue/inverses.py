"""Every inverse, with the dense matrix that it inverts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import nhgd
from nhgd.inverse import AbstractInverse
from nhgd.inverse.capabilities import label
from tests import oracles
from tests.catalogue.problems import LAYERED, PER_SAMPLE, PROBLEMS, WELL_CONDITIONED, Make


@dataclass(frozen=True)
class InverseCase:
    """An inverse and what is expected of it.

    Args:
        make: the inverse with settings that make it exact, or converged, on the problems.
        matrix: (problem, batch) -> the dense matrix (D, D) that it inverts after learning from that one batch; None when it
            is an approximation that no simple matrix describes.
        problems: where `matrix` holds to `tol`; linearity, symmetry and manners are examined there too.
        symmetric: whether u1 . solve(u2) equals u2 . solve(u1).
        tol: relative to the size of the solution.
    """

    make: Callable[[], AbstractInverse]
    matrix: Callable[[nhgd.Bilevel, Any], Tensor] | None = oracles.hessian
    problems: tuple[Make, ...] = tuple(PROBLEMS)
    symmetric: bool = True
    tol: float = 1e-8

    @property
    def name(self) -> str:
        """The name of the inverse."""
        return self.make().name

    @property
    def label(self) -> str:
        """What it is called in the list of tests."""
        return label(self.make())


def _identity(problem: nhgd.Bilevel, batch: Any) -> Tensor:
    return torch.eye(problem.theta.numel, dtype=torch.float64) / 0.5


def _diagonal(problem: nhgd.Bilevel, batch: Any) -> Tensor:
    return torch.diag(oracles.damped_fisher(problem, batch).diagonal())


def _kfac(problem: nhgd.Bilevel, batch: Any) -> Tensor:
    return oracles.kfac(problem, [batch]) + oracles.ridge_hessian(problem)


def _ekfac(problem: nhgd.Bilevel, batch: Any) -> Tensor:
    return oracles.ekfac(problem, batch) + oracles.ridge_hessian(problem)


INVERSES = [
    InverseCase(lambda: nhgd.inverse.Identity(scale=0.5), _identity),
    InverseCase(nhgd.inverse.Exact),
    InverseCase(lambda: nhgd.inverse.CG(steps=300, tol=1e-12)),
    InverseCase(lambda: nhgd.inverse.Neumann(terms=600, tol=1e-10), problems=WELL_CONDITIONED),
    InverseCase(lambda: nhgd.inverse.FixedPoint(steps=600, tol=1e-10), problems=WELL_CONDITIONED),
    InverseCase(lambda: nhgd.inverse.Broyden(steps=200, pairs=60, tol=1e-12)),
    InverseCase(lambda: nhgd.inverse.BFGS(steps=300, pairs=60, tol=1e-12)),
    InverseCase(lambda: nhgd.inverse.Nystrom(rank=60)),
    InverseCase(lambda: nhgd.inverse.QuadraticSGD(steps=300), problems=WELL_CONDITIONED),
    InverseCase(nhgd.inverse.FisherDense, oracles.damped_fisher, problems=tuple(PER_SAMPLE)),
    InverseCase(nhgd.inverse.FisherWindow, oracles.damped_fisher, problems=tuple(PER_SAMPLE)),
    InverseCase(nhgd.inverse.FisherDiagonal, _diagonal, problems=tuple(PER_SAMPLE)),
    InverseCase(nhgd.inverse.KFAC, _kfac, problems=tuple(LAYERED)),
    InverseCase(nhgd.inverse.EKFAC, _ekfac, problems=tuple(LAYERED)),
    InverseCase(lambda: nhgd.inverse.refined("fisher_dense", steps=100, tol=1e-12), problems=tuple(PER_SAMPLE)),
]
