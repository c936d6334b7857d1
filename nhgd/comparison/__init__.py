"""Comparisons of methods: what `nhgd.bench` asks, and the table that it gives."""

from nhgd.comparison.comparison import METHODS, Comparison
from nhgd.comparison.table import Table

__all__ = ["METHODS", "Comparison", "Table"]
