"""What every algorithm is: an order of moves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from nhgd._registry import summary
from nhgd._validation import Validated
from nhgd.inverse.base import AbstractInverse
from nhgd.loop.loop import Loop, StepInfo
from nhgd.problem import Bilevel


@dataclass(frozen=True)
class AbstractAlgorithm(Validated, ABC):
    """Who moves when. A subclass is a frozen dataclass of hyper-parameters; what evolves is a state of its own."""

    name: ClassVar[str]
    plain: ClassVar[bool] = False  # whether tasks give it plain gradient steps on theta in place of their own optimiser
    accumulates: ClassVar[bool] = False  # whether its inner steps may be divided into micro-batches
    unrolls: ClassVar[bool] = False  # whether it differentiates the inner steps, and with them a learnt size of theirs

    @property
    def not_repeatable(self) -> str | None:
        """Why its outer steps cannot be captured, as a clause; None if they can."""
        return f"{self.name} reads values during its steps"

    @property
    def uses_inner_optimizer(self) -> bool:
        """Whether theta moves by steps of the inner optimiser, rather than of the method's own."""
        return True

    def prepared(self, problem: Bilevel) -> AbstractAlgorithm:
        """The same algorithm with every choice made that depends on the problem."""
        return self

    @property
    def online(self) -> AbstractInverse | None:
        """The inverse whose state the executor keeps, if any."""
        return None

    @abstractmethod
    def init(self, loop: Loop) -> Any:
        """The state before the first outer step."""

    @abstractmethod
    def step(self, loop: Loop, state: Any) -> tuple[Any, StepInfo]:
        """One outer step."""

    @classmethod
    def presets(cls) -> dict[str, AbstractAlgorithm]:
        """Further names for this algorithm with other settings."""
        return {}

    @classmethod
    def summary(cls) -> str:
        """The first line of the docstring."""
        return summary(cls)
