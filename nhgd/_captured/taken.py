"""Steps that were captured, repeated and taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nhgd._captured.script import Script
from nhgd._solution import Row
from nhgd.errors import NhgdError


@dataclass
class Graph:
    """A captured step.

    Attributes:
        script: the step.
        calls: how many derivatives it asks for, by the name of their counter.
        counters: by how much whole numbers of the states grow.
        trials: comparisons that it stood.
        exact: whether they agreed in every bit.
        since: how often it was repeated since the last of them.
    """

    script: Script
    calls: dict[str, int]
    counters: dict[str, int]
    trials: int = 0
    exact: bool = True
    since: int = 0


@dataclass
class Pending:
    """A step that was repeated, whose numbers have not been looked at yet."""

    graph: Graph
    row: int
    step: int
    calls: dict[str, int]
    told: list[Any]
    done: Any = None  # event


@dataclass(frozen=True)
class Taken:
    """An outer step with its row of the history, and how far v went where that is known, 0-dimensional."""

    row: Row
    stride: Tensor | None = None


def strides_of(taken: Sequence[Taken]) -> list[float | None]:
    """How far v went in each step; read at once."""
    known = [step.stride for step in taken if step.stride is not None]
    found = iter(torch.stack(known).tolist() if known else [])
    return [None if step.stride is None else next(found) for step in taken]


class Failed(Exception):
    """A step that was repeated failed; theta and v stand where it began."""

    def __init__(self, error: NhgdError, taken: list[Taken]) -> None:
        super().__init__(str(error))
        self.error, self.taken = error, taken
