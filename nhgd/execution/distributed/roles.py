"""Who does what in a group of processes."""

from __future__ import annotations

from dataclasses import dataclass

from nhgd._validation import counted
from nhgd.errors import InputError


@dataclass(frozen=True)
class Roles:
    """Ranks 0 to workers - 1 run the inner loop, the rest keep curvature.

    >>> roles = Roles.of(4, workers=None, curvature=1)
    >>> [roles.called(rank) for rank in range(4)]
    ['Rank 0 (inner)', 'Rank 1 (inner)', 'Rank 2 (inner)', 'Rank 3 (curvature)']
    """

    workers: int
    curvature: int

    @classmethod
    def of(cls, world: int, workers: int | None, curvature: int) -> Roles:
        """The roles in a world of this many processes; `workers` None: all that do not keep curvature."""
        check_counts(workers, curvature)
        found = cls(world - curvature if workers is None else workers, curvature)
        if found.workers < 1 or found.world != world:
            wanted = "1" if workers is None else str(workers)
            raise InputError(
                f"There are {world} process(es), and {wanted} for the inner loop with {curvature} for curvature make"
                f" {(workers or 1) + curvature}. Start as many: torchrun --nproc-per-node {(workers or 1) + curvature}, or"
                " change workers and curvature_ranks."
            )
        return found

    @property
    def world(self) -> int:
        """All processes."""
        return self.workers + self.curvature

    @property
    def inner(self) -> range:
        """The ranks of the inner loop."""
        return range(self.workers)

    @property
    def servers(self) -> range:
        """The ranks that keep curvature."""
        return range(self.workers, self.world)

    def called(self, rank: int) -> str:
        """A rank as errors name it."""
        return f"Rank {rank} ({self.role(rank)})"

    def role(self, rank: int) -> str:
        """The role of a rank."""
        return "inner" if rank < self.workers else "curvature"


def check_counts(workers: int | None, curvature: int) -> None:
    """Refuse numbers of processes that cannot be."""
    if workers is not None:
        counted("Distributed", workers=workers)
    if not isinstance(curvature, int) or isinstance(curvature, bool) or curvature < 0:
        raise InputError(f"Distributed: curvature_ranks must be a whole number, 0 or more, got {curvature!r}.")
