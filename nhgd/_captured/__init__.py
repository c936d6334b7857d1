"""Outer steps whose device work is captured once and then replayed without their Python."""

from nhgd._captured.captured import Captured

__all__ = ["Captured"]
