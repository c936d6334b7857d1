"""Outer steps whose work on a device is captured once and then repeated, without their Python."""

from nhgd._captured.captured import Captured

__all__ = ["Captured"]
