"""How far a long piece of work is, in steps of about the same length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nhgd._progress import Tick


@dataclass
class Stages:
    """Steps of a progress bar.

    Args:
        tick: the bar.
        total: how many steps there are.
        share: where the bar stands after all of them.
    """

    tick: Tick
    total: int
    share: float = 1.0
    done: int = 0

    def advance(self, words: str) -> None:
        """One more step is done."""
        self.done += 1
        self.tick(self.share * self.done / self.total, words)

    def within(self, stage: str) -> Callable[[str], None]:
        """The same for the steps of a stage."""
        return lambda words: self.advance(f"{stage}, {words}")
