"""Every order of moves, one file for each algorithm.

The numbers of algorithms and equations under References are as they are commonly cited. They were compared with the
printed text for Natural Hypergradient Descent alone.
"""

from __future__ import annotations

import warnings

from nhgd._registry import PluginWarning, Registry, described
from nhgd.algorithm.aid import AID
from nhgd.algorithm.alset import ALSET
from nhgd.algorithm.amigo import AmIGO
from nhgd.algorithm.base import AbstractAlgorithm
from nhgd.algorithm.bome import BOME
from nhgd.algorithm.bsa import BSA
from nhgd.algorithm.f2sa import F2SA
from nhgd.algorithm.fsla import FSLA
from nhgd.algorithm.hoag import HOAG
from nhgd.algorithm.itd import ITD
from nhgd.algorithm.ma_soba import MASOBA
from nhgd.algorithm.mrbo import MRBO
from nhgd.algorithm.nhgd import NHGD
from nhgd.algorithm.nhgd_momentum import NHGDMomentum
from nhgd.algorithm.nhgd_single import NHGDSingle
from nhgd.algorithm.pzobo import PZOBO
from nhgd.algorithm.saba import SABA
from nhgd.algorithm.sama import SAMA
from nhgd.algorithm.soba import SOBA
from nhgd.algorithm.srba import SRBA
from nhgd.algorithm.stocbio import StocBiO
from nhgd.algorithm.sustain import SUSTAIN
from nhgd.algorithm.ttsa import TTSA
from nhgd.algorithm.vrbo import VRBO
from nhgd.errors import InputError, unknown
from nhgd.inverse import INVERSES
from nhgd.inverse import resolve as resolve_inverse
from nhgd.loop.loop import Loop, StepInfo
from nhgd.loop.settings import LoopSettings
from nhgd.problem import Bilevel

ALGORITHMS = Registry("method", AbstractAlgorithm, list(vars().values()))


def presets() -> dict[str, AbstractAlgorithm]:
    """Names of algorithms with particular settings."""
    found: dict[str, AbstractAlgorithm] = {}
    for algorithm in ALGORITHMS.values():
        assert issubclass(algorithm, AbstractAlgorithm)
        try:
            found |= algorithm.presets()
        except Exception as error:
            warnings.warn(
                f"The presets of {algorithm.__module__}.{algorithm.__name__} could not be made"
                f" ({described(error)}). They are left out.",
                PluginWarning,
                stacklevel=2,
            )
    return found


def names() -> list[str]:
    """Everything `resolve` understands, aid with each inverse included."""
    return [*ALGORITHMS, *presets(), *(f"aid-{name}" for name in INVERSES)]


def prepared(method: str | AbstractAlgorithm, problem: Bilevel) -> AbstractAlgorithm:
    """An algorithm as `resolve` gives it, with every choice made that depends on the problem."""
    return resolve(method).prepared(problem)


def resolve(method: str | AbstractAlgorithm) -> AbstractAlgorithm:
    """An algorithm from its name, from a preset's name, from aid-INVERSE (also aid-cg-40), or from itself.

    >>> resolve("aid-identity").inverse
    Identity(scale=1.0)
    """
    if isinstance(method, AbstractAlgorithm):
        return method
    if not isinstance(method, str):
        raise InputError(
            f"A method must be a name or an object such as nhgd.algorithm.AID(), got a {type(method).__name__}."
        )
    if method in ALGORITHMS:
        return ALGORITHMS.make(method)
    known = presets()
    if method in known:
        return known[method]
    if method.startswith("aid-"):
        try:
            return AID(inverse=resolve_inverse(method.removeprefix("aid-")))
        except InputError as error:
            known_names = names()
            if method in known_names:  # but it cannot be made
                raise
            raise unknown("method", method, known_names) from error
    raise unknown("method", method, names())


__all__ = [
    "AID",
    "ALGORITHMS",
    "ALSET",
    "BOME",
    "BSA",
    "F2SA",
    "FSLA",
    "HOAG",
    "ITD",
    "MASOBA",
    "MRBO",
    "NHGD",
    "PZOBO",
    "SABA",
    "SAMA",
    "SOBA",
    "SRBA",
    "SUSTAIN",
    "TTSA",
    "VRBO",
    "AbstractAlgorithm",
    "AmIGO",
    "Loop",
    "LoopSettings",
    "NHGDMomentum",
    "NHGDSingle",
    "StepInfo",
    "StocBiO",
    "names",
    "prepared",
    "presets",
    "resolve",
]
