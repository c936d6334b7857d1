"""The processes of a run, as its solver sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from nhgd.data_parallel import AbstractTeam, Alone, Team
from nhgd.errors import InputError, NhgdError
from nhgd.record import Pool
from nhgd.variable import Variable


class Outcome(NamedTuple):
    """The outcome of a run, from the leading process for those that served: plain values, and tensors."""

    text: dict[str, Any]
    tensors: list[Tensor]


class Group:
    """This process and those that share its inner batches. Only this class knows of other processes.

    Args:
        team: the workers that share the inner batches.

    >>> Group().leads, Group().serves
    (True, False)
    """

    def __init__(self, team: AbstractTeam | None = None) -> None:
        self.team: AbstractTeam = Alone() if team is None else team

    @property
    def pool(self) -> Pool | None:
        """The pool that divides work on data all of its members hold; None for one worker."""
        return self.team if isinstance(self.team, Team) else None

    def join(self, theta: Variable) -> None:
        """Meet the other processes, if any, before anything else."""

    @property
    def leads(self) -> bool:
        """Whether this process speaks for all, and writes files."""
        return self.team.rank == 0

    @property
    def serves(self) -> bool:
        """Whether this process keeps curvature for others and runs no inner loop; then only `serve` is called."""
        return False

    def serve(self) -> Outcome:
        """Keep curvature for others until they have finished; returns their outcome."""
        raise InputError("This process keeps no curvature for others.")

    def agreed(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The settings of the process that leads, on all of them: some are chosen by a clock."""
        return settings

    def finish(self, outcome: Callable[[], Outcome]) -> None:
        """The run has ended well: those who served may go."""

    def fail(self, error: BaseException) -> None:
        """After a failure here: inform the others, and leave."""

    def root_cause(self, error: NhgdError) -> NhgdError:
        """The error, or the one of another process that caused it."""
        return error

    def close(self) -> None:
        """Leave the group."""
