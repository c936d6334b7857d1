"""Work of a solve that can be divided over a pool."""

from __future__ import annotations

from typing import Protocol, TypeVar, runtime_checkable

from nhgd.record import Pool

S = TypeVar("S")


@runtime_checkable
class SupportsDivision(Protocol[S]):
    """A learned inverse whose solve begins with independent parts of work on the state alone."""

    def divided(self, state: S, pool: Pool) -> S:
        """The state with that work done, each of the pool having done a part; all must ask. The state given stays."""
        ...
