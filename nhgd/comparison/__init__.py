"""Comparisons of methods: `nhgd.bench` and the table that it gives."""

from nhgd.comparison.comparison import METHODS, Comparison, bench
from nhgd.comparison.table import Table

__all__ = ["METHODS", "Comparison", "Table", "bench"]
