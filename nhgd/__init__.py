"""Bilevel optimisation: natural hypergradient descent and the methods it is compared with."""

from nhgd import hypergradients, inverse
from nhgd.data import Data
from nhgd.errors import InputError, InverseWarning, NhgdError, NonFiniteError, RunError
from nhgd.hypergradients import Hypergradient, hypergradient
from nhgd.problem import Bilevel, Losses

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
    "RunError",
    "hypergradient",
    "hypergradients",
    "inverse",
]
