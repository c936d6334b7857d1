"""Who proposes the next values: one of Optuna's samplers, seeded for each trial by its number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nhgd.tuning.storage import optuna

SAMPLERS = ("tpe", "random", "grid")
START = 10  # random trials before TPE has something to learn from


def sampler_of(name: str, seed: int, grid: Mapping[str, Sequence[Any]]) -> Any:
    """A sampler that is as random for a trial of another worker, and the same for the same trial again.

    One generator for each worker would either repeat itself in all of them or, after a resumption, not repeat at all.
    """
    samplers = optuna().samplers

    def made(number: int) -> Any:
        own = (seed * 1_000_003 + number) % 2**32
        if name == "tpe":
            return samplers.TPESampler(seed=own, n_startup_trials=START)
        if name == "random":
            return samplers.RandomSampler(seed=own)
        return samplers.GridSampler(dict(grid), seed=seed % 2**32)  # which also decides how it numbers its points

    class Numbered(samplers.BaseSampler):  # type: ignore[misc, name-defined]  # Optuna comes when it is asked for
        """The sampler of the trial at hand."""

        def __init__(self) -> None:
            self._own = made(0)

        def before_trial(self, study: Any, trial: Any) -> None:
            self._own = made(trial.number)
            self._own.before_trial(study, trial)

        def infer_relative_search_space(self, study: Any, trial: Any) -> Any:
            return self._own.infer_relative_search_space(study, trial)

        def sample_relative(self, study: Any, trial: Any, search_space: Any) -> Any:
            return self._own.sample_relative(study, trial, search_space)

        def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
            return self._own.sample_independent(study, trial, param_name, param_distribution)

        def after_trial(self, study: Any, trial: Any, state: Any, values: Any) -> None:
            self._own.after_trial(study, trial, state, values)

    return Numbered()
