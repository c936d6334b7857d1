"""Work of a solve that the workers of a team divide among them."""

from __future__ import annotations

from typing import Protocol, TypeVar, runtime_checkable

from nhgd.data_parallel import Team

S = TypeVar("S")


@runtime_checkable
class SupportsDivision(Protocol[S]):
    """A learned inverse whose solve begins with work on the state alone, in independent parts."""

    def divided(self, state: S, team: Team) -> S:
        """The state with that work done, each worker having done a part; all of them must ask. The state given stays."""
        ...
