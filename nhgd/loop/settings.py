"""What all algorithms share: steps, step sizes, optimisers and projections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from nhgd._validation import fitted, number, positive, shown
from nhgd.errors import InputError
from nhgd.schedule import Learnt, Rate, as_schedule

OptimizerFactory: TypeAlias = Callable[[list[Tensor]], Optimizer] | type[Optimizer] | Optimizer
Projection: TypeAlias = float | tuple[float, float] | Callable[[Any], Any] | None


@dataclass(frozen=True)
class LoopSettings:
    """How both variables move, for any algorithm; the arguments of `Solver` with the same names."""

    inner_steps: int = 10
    inner_lr: Rate | Learnt | None = None
    outer_lr: Rate | None = None
    inner_optimizer: OptimizerFactory | None = None
    outer_optimizer: OptimizerFactory | None = None
    project: Projection = None
    project_v: Projection = None
    outer_clip: float | None = None
    accumulate: int = 1
    scaler: GradScaler | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "project", _radius(self.project))
        object.__setattr__(self, "project_v", _box(self.project_v))
        if not isinstance(self.inner_steps, int) or self.inner_steps < 1:
            raise InputError(f"inner_steps must be a whole number of at least 1, got {self.inner_steps}.")
        if self.accumulate < 1:
            raise InputError(f"accumulate must be a whole number of at least 1, got {self.accumulate}.")
        for name in ("inner_lr", "outer_lr"):
            rate = getattr(self, name)
            if rate is not None and not (name == "inner_lr" and isinstance(rate, Learnt)):
                as_schedule(rate, name)
        if self.outer_clip is not None:
            positive("Solver", outer_clip=self.outer_clip)


def _radius(project: Any) -> Any:
    """The radius of a ball as a Python number; a function as it is."""
    if project is None or callable(project):
        return project
    radius = number(project)
    if not (_is_number(radius) and radius > 0):
        raise InputError(f"project must be a radius above 0 or a function of theta, got {shown(project)}.")
    return radius


def _box(project_v: Any) -> Any:
    """The bounds of a box as Python numbers; a function as it is."""
    if project_v is None or callable(project_v):
        return project_v
    is_row = isinstance(project_v, (tuple, list)) or getattr(project_v, "ndim", 0) == 1
    bounds = [number(bound) for bound in project_v] if is_row else []
    are_numbers = len(bounds) == 2 and all(_is_number(bound) for bound in bounds)
    if not (are_numbers and bounds[0] < bounds[1]):
        got = repr(tuple(bounds)) if are_numbers else shown(project_v)
        raise InputError(f"project_v must be a box (low, high) with low < high or a function of v, got {got}.")
    return bounds[0], bounds[1]


def _is_number(value: Any) -> bool:
    return fitted(value, float) is value
