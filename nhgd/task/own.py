"""A task from a function: a problem of one's own, ready to be compared and searched."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from typing_extensions import override

from nhgd._solver import Solver
from nhgd._validation import shown
from nhgd.data.batch import Batch
from nhgd.data.loader import Data
from nhgd.errors import InputError, unknown
from nhgd.problem import Bilevel
from nhgd.task._inner_solver import lbfgs
from nhgd.task.base import AbstractTask, Instance

NEEDED = ("problem", "inner_data", "outer_data")
_ELSEWHERE = ("self", "method", "execution", "seed", "checkpoint", "checkpoint_every", "overwrite", "on_step")
EXAMPLE = "dict(problem=problem, inner_data=data, outer_data=judge, inner_steps=10, inner_lr=0.1, outer_lr=0.05)"


@final
@dataclass(frozen=True)
class OwnProblem(AbstractTask):
    """A problem by a function of a seed, which returns the arguments of a `Solver` but the method and the seed, as a
    dict.

    Args:
        make: makes data, problem and settings anew; what it draws at random is seeded for it.
        headline: the metric that methods are compared by.
        curve: the metric that is drawn over time.
        selection: the metric that chooses settings; lower is better.

    >>> def make(seed):
    ...     theta, v = torch.zeros(2), torch.full((2,), float(seed))
    ...     inner = lambda theta, v, x: (theta - v).square() + 0 * x
    ...     problem = Bilevel(inner, lambda theta, v, x: (theta - 1).square().sum(), theta, v)
    ...     return {"problem": problem, "inner_data": [torch.ones(2)], "outer_data": [torch.ones(2)], "inner_lr": 0.3}
    >>> OwnProblem(make).build(3, torch.device("cpu")).losses()
    {'outer_loss': 2.0, 'inner_loss': 9.0}
    """

    name: ClassVar[str] = "own"
    make: Callable[[int], Mapping[str, Any]]
    # Of this one, not of all. KW_ONLY is no type to Python 3.10, which then reads none of these annotations.
    headline: str = field(default="outer_loss", kw_only=True)  # type: ignore[misc]
    curve: str = field(default="outer_loss", kw_only=True)  # type: ignore[misc]
    selection: str = field(default="outer_loss", kw_only=True)  # type: ignore[misc]

    @override
    def build(self, seed: int, device: torch.device, data: str | Path | None = None) -> OwnInstance:
        self.refuse_data(data)
        made = self.make(seed)
        name = getattr(self.make, "__name__", "the function")
        if not isinstance(made, Mapping) or any(key not in made for key in NEEDED):
            raise InputError(
                f"{name}({seed}) must return the arguments of a Solver, such as {EXAMPLE}; got {shown(made)}."
            )
        if not isinstance(made["problem"], Bilevel):
            raise InputError(f"{name}({seed})['problem'] must be an nhgd.Bilevel, got {shown(made['problem'])}.")
        rest = {key: value for key, value in made.items() if key not in (*NEEDED, "metrics")}
        known = [
            key for key in inspect.signature(Solver.__init__).parameters if key not in (*_ELSEWHERE, *NEEDED, "metrics")
        ]
        for key in rest:
            if key not in known:
                raise unknown(f"setting in what {name} returns", str(key), known)
        inner, outer = made["inner_data"], made["outer_data"]
        return OwnInstance(
            problem=made["problem"], inner_data=inner, outer_data=outer, full_inner=_whole(inner)[0],
            full_outer=_whole(outer)[0], settings=rest, measure=made.get("metrics"),
        )  # fmt: skip


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class OwnInstance(Instance):
    """What the function made.

    Attributes:
        settings: of the solver.
        measure: the metrics, a function of theta and v.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    measure: Callable[[Any, Any], dict[str, float]] | None = None

    @override
    def solver_settings(self) -> dict[str, Any]:
        return dict(self.settings)

    @override
    def metrics(self, theta: Any, v: Any) -> dict[str, float]:
        return {} if self.measure is None else self.measure(theta, v)

    @override
    def losses(self) -> dict[str, float]:
        """Both losses on all data: the mean over the batches where they are not an `nhgd.Data`."""
        inner, outer = _whole(self.inner_data), _whole(self.outer_data)
        with torch.no_grad():
            return {
                "outer_loss": sum(float(self.problem.outer_value(batch)) for batch in outer) / len(outer),
                "inner_loss": sum(float(self.problem.objective(batch)) for batch in inner) / len(inner),
            }

    @override
    def solve_inner(self) -> float:
        return lbfgs(partial(self.problem.objective, self.full_inner), self.problem.theta.leaves, 1e-6)


def _whole(data: Iterable[Batch]) -> list[Batch]:
    """All samples as one batch, or the batches that there are."""
    found = [data.columns] if isinstance(data, Data) else list(data)
    if not found:
        raise InputError("There are no batches to compare methods on.")
    return found
