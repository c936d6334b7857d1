"""One inner batch divided among workers: who they are and what they exchange, and the objective as a sum over them."""

from nhgd.data_parallel.collectives import AbstractTeam, Alone, Team
from nhgd.data_parallel.division import Division
from nhgd.data_parallel.objective import DividedObjective, DividedOuterObjective
from nhgd.data_parallel.shard import Shard, adopted, divided

__all__ = [
    "AbstractTeam",
    "Alone",
    "DividedObjective",
    "DividedOuterObjective",
    "Division",
    "Shard",
    "Team",
    "adopted",
    "divided",
]
