"""One inner batch divided among workers: who they are and what they exchange, and what a part of a batch is."""

from nhgd.data_parallel.collectives import AbstractTeam, Alone, Team
from nhgd.data_parallel.shard import Shard, adopted, divided

__all__ = ["AbstractTeam", "Alone", "Shard", "Team", "adopted", "divided"]
