"""Histories of runs, without what clocks decide."""

from __future__ import annotations

# Entries of a row that differ between two runs with the same seed.
CLOCKED = ("seconds", "inner_seconds", "curvature_seconds", "waited_seconds", "overlap", "largest_lag")
