"""Bilevel optimisation: natural hypergradient descent and the methods it is compared with.

Names are imported when they are asked for, so that `import nhgd` and the command line's help wait neither for torch
nor, in the core, for what the estimators need.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nhgd import algorithm as algorithm
    from nhgd import data as data
    from nhgd import errors as errors
    from nhgd import execution as execution
    from nhgd import hypergradients as hypergradients
    from nhgd import inverse as inverse
    from nhgd import likelihood as likelihood
    from nhgd import schedule as schedule
    from nhgd import stop as stop
    from nhgd import task as task
    from nhgd import theory as theory
    from nhgd._along import AlongReport as AlongReport
    from nhgd._along import check_along as check_along
    from nhgd._bench import bench as bench
    from nhgd._check import Report as Report
    from nhgd._check import check as check
    from nhgd._influence import Influence as Influence
    from nhgd._influence import influence as influence
    from nhgd._observing import observing as observing
    from nhgd._plan import Plan as Plan
    from nhgd._plan import plan as plan
    from nhgd._solution import Solution as Solution
    from nhgd._solved import solved as solved
    from nhgd._solver import Solver as Solver
    from nhgd._sweep import sweep as sweep
    from nhgd.comparison import Table as Table
    from nhgd.data import Data as Data
    from nhgd.errors import InputError as InputError
    from nhgd.errors import InverseWarning as InverseWarning
    from nhgd.errors import NhgdError as NhgdError
    from nhgd.errors import NonFiniteError as NonFiniteError
    from nhgd.errors import RunError as RunError
    from nhgd.hypergradients import Hypergradient as Hypergradient
    from nhgd.hypergradients import hypergradient as hypergradient
    from nhgd.losses import Losses as Losses
    from nhgd.problem import Bilevel as Bilevel
    from nhgd.sklearn.cleaner import LabelCleaner as LabelCleaner
    from nhgd.sklearn.distiller import DatasetDistiller as DatasetDistiller

__version__ = "0.1.0"

__all__ = [
    "AlongReport",
    "Bilevel",
    "Data",
    "DatasetDistiller",
    "Hypergradient",
    "Influence",
    "InputError",
    "InverseWarning",
    "LabelCleaner",
    "Losses",
    "NhgdError",
    "NonFiniteError",
    "Plan",
    "Report",
    "RunError",
    "Solution",
    "Solver",
    "Table",
    "algorithm",
    "bench",
    "check",
    "check_along",
    "execution",
    "hypergradient",
    "hypergradients",
    "influence",
    "inverse",
    "observing",
    "plan",
    "schedule",
    "solved",
    "stop",
    "sweep",
    "task",
    "theory",
]

# Where the names are that are not modules themselves.
_HOMES = {
    "_along": ("AlongReport", "check_along"),
    "_bench": ("bench",),
    "_check": ("Report", "check"),
    "comparison": ("Table",),
    "data": ("Data",),
    "errors": ("InputError", "InverseWarning", "NhgdError", "NonFiniteError", "RunError"),
    "hypergradients": ("Hypergradient", "hypergradient"),
    "_influence": ("Influence", "influence"),
    "_observing": ("observing",),
    "_plan": ("Plan", "plan"),
    "_solved": ("solved",),
    "losses": ("Losses",),
    "problem": ("Bilevel",),
    "_solution": ("Solution",),
    "_solver": ("Solver",),
    "_sweep": ("sweep",),
    "sklearn.cleaner": ("LabelCleaner",),
    "sklearn.distiller": ("DatasetDistiller",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
_ESTIMATORS = ("DatasetDistiller", "LabelCleaner")

if find_spec("sklearn") is None:  # so that `from nhgd import *` takes what there is
    __all__.remove("DatasetDistiller")
    __all__.remove("LabelCleaner")


class _Package(ModuleType):
    def __dir__(self) -> list[str]:
        return sorted({*__all__, "__version__", *(name for name in super().__dir__() if name.startswith("__"))})


sys.modules[__name__].__class__ = _Package

if not TYPE_CHECKING:  # a type checker is to see the names above, and no others

    def __getattr__(name: str) -> Any:
        if name in _HOME:
            try:
                found = getattr(import_module(f"nhgd.{_HOME[name]}"), name)
            except ModuleNotFoundError as error:
                if name in _ESTIMATORS and (error.name or "").partition(".")[0] == "sklearn":
                    raise ImportError(f"nhgd.{name} needs scikit-learn: pip install 'nhgd[cli]'.") from None
                raise
            globals()[name] = found
            return found
        if not name.startswith("_") and find_spec(f"nhgd.{name}") is not None:
            return import_module(f"nhgd.{name}")
        raise AttributeError(f"module 'nhgd' has no attribute {name!r}")
