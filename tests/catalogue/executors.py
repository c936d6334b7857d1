"""Every executor that needs no second process."""

from __future__ import annotations

from typing import Any

EXECUTORS: list[Any] = []
