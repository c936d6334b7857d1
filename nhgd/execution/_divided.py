"""Curvature divided over the workers that share the inner batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nhgd.data_parallel import Team
from nhgd.errors import InputError
from nhgd.execution.assignment import Assignment
from nhgd.inverse._learned.damping import damped, resolve_damping
from nhgd.inverse._learned.layers import layer_shapes
from nhgd.inverse.base import Learned, SolveStats
from nhgd.inverse.kfac import KFAC
from nhgd.record import InnerRecord, LayerStatistics, batch_samples
from nhgd.ridge import Ridge
from nhgd.variable import Variable


class DividedLayers:
    """The layers of K-FAC divided over workers: each keeps the factors of its own, decomposes them and solves with
    them.

    A parameter outside of layers belongs to the first worker. All workers must make the same calls.

    Args:
        learner: the inverse.
        theta: the parameters.
        team: the workers.
    """

    def __init__(self, learner: Learned[Any], theta: Variable, team: Team) -> None:
        if not isinstance(learner, KFAC):
            raise InputError(
                f"{learner.name} cannot be divided over workers: only the layers of kfac need nothing of each other. Use kfac,"
                " or omit divide=True, and each worker keeps all of the curvature."
            )
        self._learner, self._team = learner, team
        layers = len(layer_shapes(theta)) if theta.root is not None else 1
        self._parts = min(team.size, max(1, layers))  # workers beyond these own no layer
        self._assignment = Assignment(learner, theta, self._parts)

    def observe(self, state: Any, record: InnerRecord) -> Any:
        """Fold a batch in: every worker helps with the statistics of every layer, and keeps those of its own."""
        assert isinstance(record, LayerStatistics)
        samples, found = batch_samples(record), state
        for part in range(self._parts):  # those of one worker at a time: no more is held
            some = self._assignment.part_of(record, part)
            assert isinstance(some, LayerStatistics)
            summed = self._learner.statistics(state, some)
            if part == self._team.rank:
                found = self._learner.observe(state, replace(some, samples=samples, reduction=None), summed)
        return found

    @torch.no_grad()
    def solve(
        self, state: Any, u: Tensor, ridge: Ridge, error: Tensor | None = None
    ) -> tuple[Tensor, SolveStats | None]:
        """x is the sum of what all have found, each zero outside of its own layers.

        With the squared sampling error of u by leaf, what of u exceeds it takes the place of x.
        """
        learner = self._learner
        if error is not None:
            own = learner.significant(state, u, error)[0] if self._team.rank < self._parts else torch.zeros_like(u)
            return self._team.sum([own])[0], None
        if learner.damping in (None, "auto") and not ridge.positive:  # then it follows from the whole model
            mean = torch.tensor(learner.mean_diagonal(state), dtype=torch.float64)
            learner = damped(learner, resolve_damping(None, ridge, float(self._team.sum([mean])[0])))
        if self._team.rank < self._parts:
            x, stats = learner.solve(state, u, ridge)
        else:
            x, stats = torch.zeros_like(u), SolveStats(None, 0, True)
        return self._team.sum([x])[0], replace(stats, converged=not self._team.any(not stats.converged))
