"""The processes of a run, as its solver sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from nhgd.data_parallel import AbstractTeam, Alone, Team
from nhgd.errors import InputError, NhgdError
from nhgd.record import Pool
from nhgd.variable import Variable


class Report(NamedTuple):
    """What the process that leads tells those that only served, at the end: plain values, and tensors."""

    text: dict[str, Any]
    tensors: list[Tensor]


class Group:
    """This process, and perhaps others that share its inner batches. Nothing of it is anywhere else.

    Args:
        team: the workers that share the inner batches.

    >>> Group().leads, Group().serves
    (True, False)
    """

    def __init__(self, team: AbstractTeam | None = None) -> None:
        self.team: AbstractTeam = Alone() if team is None else team

    @property
    def pool(self) -> Pool | None:
        """Whoever divides the work on what all of them hold; None where there is one worker."""
        return self.team if isinstance(self.team, Team) else None

    def join(self, theta: Variable) -> None:
        """Meet the other processes, if there are any, before anything else is done."""

    @property
    def leads(self) -> bool:
        """Whether this process speaks for all, and writes files."""
        return self.team.rank == 0

    @property
    def serves(self) -> bool:
        """Whether this process keeps curvature for others and runs no inner loop; then only `serve` is called."""
        return False

    def serve(self) -> Report:
        """Keep curvature for others until they have finished; what they report."""
        raise InputError("This process keeps no curvature for others.")

    def agreed(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The settings of the process that leads, on all of them: some are chosen by a clock."""
        return settings

    def finish(self, report: Callable[[], Report]) -> None:
        """The run has ended well: those who served may go."""

    def fail(self, error: BaseException) -> None:
        """The run has failed here: leave the others, who learn why."""

    def root_cause(self, error: NhgdError) -> NhgdError:
        """The error, or that of another process which is behind it."""
        return error

    def close(self) -> None:
        """Leave the others."""
