"""Searches for good settings of a method: `nhgd.sweep` and what it finds."""

from nhgd.tuning.found import Found
from nhgd.tuning.sampler import SAMPLERS
from nhgd.tuning.search import PRUNERS, Sweep, sweep

__all__ = ["PRUNERS", "SAMPLERS", "Found", "Sweep", "sweep"]
