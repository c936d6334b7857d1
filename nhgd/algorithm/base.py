"""What every algorithm is: an order of moves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

from nhgd.algorithm.stage import Stage
from nhgd.inverse.base import AbstractInverse
from nhgd.problem import Bilevel
from nhgd.registry import summary
from nhgd.validation import Validated


@dataclass(frozen=True)
class StepInfo:
    """What one outer step tells: the losses, how far the curvature lagged, and anything else by name."""

    outer_loss: float
    inner_loss: float
    hypergradient_norm: float
    lag: int = 0
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class AbstractAlgorithm(Validated, ABC):
    """Who moves when. A subclass is a frozen dataclass of hyper-parameters; what evolves is a state of its own."""

    name: ClassVar[str]
    plain: ClassVar[bool] = False  # whether it takes plain gradient steps on theta, whatever optimiser suits a task

    def prepared(self, problem: Bilevel) -> AbstractAlgorithm:
        """The same algorithm with every choice made that depends on the problem."""
        return self

    @property
    def online(self) -> AbstractInverse | None:
        """The inverse whose state the executor keeps, if any."""
        return None

    @abstractmethod
    def init(self, stage: Stage) -> Any:
        """The state before the first outer step."""

    @abstractmethod
    def step(self, stage: Stage, state: Any) -> tuple[Any, StepInfo]:
        """One outer step."""

    @classmethod
    def presets(cls) -> dict[str, AbstractAlgorithm]:
        """Further names for this algorithm with other settings."""
        return {}

    @classmethod
    def summary(cls) -> str:
        """The first line of the docstring."""
        return summary(cls)
