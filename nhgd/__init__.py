"""Bilevel optimisation: natural hypergradient descent and the methods it is compared with."""

from nhgd import algorithm, execution, hypergradients, inverse, schedule, task
from nhgd.check import Report, check
from nhgd.data import Data
from nhgd.errors import InputError, InverseWarning, NhgdError, NonFiniteError, RunError
from nhgd.hypergradients import Hypergradient, hypergradient
from nhgd.plan import Plan, plan
from nhgd.problem import Bilevel, Losses
from nhgd.solve import Solution, Solver

__version__ = "0.1.0"

__all__ = [
    "Bilevel",
    "Data",
    "Hypergradient",
    "InputError",
    "InverseWarning",
    "Losses",
    "NhgdError",
    "NonFiniteError",
    "Plan",
    "Report",
    "RunError",
    "Solution",
    "Solver",
    "algorithm",
    "check",
    "execution",
    "hypergradient",
    "hypergradients",
    "inverse",
    "plan",
    "schedule",
    "task",
]
