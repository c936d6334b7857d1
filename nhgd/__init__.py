"""Bilevel optimisation: natural hypergradient descent and the methods it is compared with."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nhgd import algorithm, execution, hypergradients, inverse, schedule, task
from nhgd.check import Report, check
from nhgd.data import Data
from nhgd.errors import InputError, InverseWarning, NhgdError, NonFiniteError, RunError
from nhgd.hypergradients import Hypergradient, hypergradient
from nhgd.plan import Plan, plan
from nhgd.problem import Bilevel, Losses
from nhgd.solve import Solution, Solver

if TYPE_CHECKING:
    from nhgd.estimators.cleaner import LabelCleaner as LabelCleaner
    from nhgd.estimators.distiller import DatasetDistiller as DatasetDistiller

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

# They need scikit-learn, which the core does without; so they are imported when they are asked for.
_ESTIMATORS = {"DatasetDistiller": "nhgd.estimators.distiller", "LabelCleaner": "nhgd.estimators.cleaner"}


def __getattr__(name: str) -> Any:
    if name in _ESTIMATORS:
        return getattr(import_module(_ESTIMATORS[name]), name)
    raise AttributeError(f"module 'nhgd' has no attribute {name!r}")
