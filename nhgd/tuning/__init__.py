"""Searches for good settings of a method: what `nhgd.sweep` asks and finds."""

from nhgd.tuning.found import Found
from nhgd.tuning.sampler import SAMPLERS
from nhgd.tuning.search import PRUNERS, Sweep

__all__ = ["PRUNERS", "SAMPLERS", "Found", "Sweep"]
