"""The problems by name."""

from __future__ import annotations

from benchmarks.zoo import representation
from benchmarks.zoo.case import Builder

CASES: dict[str, Builder] = {
    "representation-conv": representation.conv,
    "representation-mlp": representation.mlp,
}
