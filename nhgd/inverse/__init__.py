"""Every way to apply the inverse of the inner Hessian, one file each.

A new one is a file here, its import below, and one case in tests/catalogue/inverses.py.
"""

from __future__ import annotations

from typing import Any

from nhgd._registry import Registry
from nhgd.errors import InputError
from nhgd.inverse._learned.state import State
from nhgd.inverse.base import AbstractInverse, Iterative, Learned, SolveStats
from nhgd.inverse.bfgs import BFGS
from nhgd.inverse.broyden import Broyden
from nhgd.inverse.cg import CG
from nhgd.inverse.ekfac import EKFAC
from nhgd.inverse.exact import Exact
from nhgd.inverse.fisher_dense import FisherDense
from nhgd.inverse.fisher_diagonal import FisherDiagonal
from nhgd.inverse.fisher_window import FisherWindow
from nhgd.inverse.fixed_point import FixedPoint
from nhgd.inverse.identity import Identity
from nhgd.inverse.kfac import KFAC
from nhgd.inverse.neumann import Neumann
from nhgd.inverse.nystrom import Nystrom
from nhgd.inverse.refined import Matrix, Refined
from nhgd.inverse.sgd import QuadraticSGD

INVERSES = Registry("inverse", AbstractInverse, list(vars().values()))


def resolve(inverse: str | AbstractInverse) -> AbstractInverse:
    """An inverse from its name, with default settings, or from itself.

    A number after the name sets its steps, or the field that its class names as `steps_field`, and refined is followed
    by the name of the inner inverse.

    >>> resolve("cg-10")
    CG(steps=10, tol=1e-08, damping=0.0)
    >>> resolve("refined-fisher_window-3").label
    'refined(fisher_window, 3)'
    """
    if isinstance(inverse, AbstractInverse):
        return inverse
    if not isinstance(inverse, str):
        raise InputError(
            f"An inverse must be a name or an object such as nhgd.inverse.CG(), got a {type(inverse).__name__}."
        )
    name, _, number = inverse.rpartition("-")
    numbered = name and number.isdecimal()
    if numbered and not INVERSES.owns(name) and inverse in INVERSES:  # another package's name may end in a number
        numbered = False
    if not numbered:
        name, number = inverse, ""
    settings: dict[str, Any] = {}
    if name.startswith("refined-"):
        settings["inverse"] = resolve(name.removeprefix("refined-"))
        name = "refined"
    cls = INVERSES[name]
    if number:
        if cls.steps_field is None:
            raise InputError(f"{name} takes no number of steps, so {inverse!r} is not an inverse. Use {name!r}.")
        settings[cls.steps_field] = int(number)
    return INVERSES.make(name, **settings)


def refined(
    inverse: str | AbstractInverse = "kfac", steps: int = 5, matrix: Matrix = "hessian", tol: float = 1e-10
) -> Refined:
    """Any inverse, refined by a few preconditioned CG steps: see `Refined`.

    >>> refined("identity", steps=3).inverse
    Identity(scale=1.0)
    """
    return Refined(resolve(inverse), steps, matrix, tol)


__all__ = [
    "BFGS",
    "CG",
    "EKFAC",
    "INVERSES",
    "KFAC",
    "AbstractInverse",
    "Broyden",
    "Exact",
    "FisherDense",
    "FisherDiagonal",
    "FisherWindow",
    "FixedPoint",
    "Identity",
    "Iterative",
    "Learned",
    "Neumann",
    "Nystrom",
    "QuadraticSGD",
    "Refined",
    "SolveStats",
    "State",
    "refined",
    "resolve",
]
