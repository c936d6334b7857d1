"""Which samples guide the model, judge the weights and choose the outer step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nhgd.errors import InputError

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Roles:
    """Indices of samples.

    Attributes:
        guide: samples that train the model with weight 1.
        judge: samples whose loss the weights are to lower.
        evaluation: samples that choose the outer step; the judges, where there are too few for both.
    """

    guide: Array
    judge: Array
    evaluation: Array

    @classmethod
    def of_trusted(cls, codes: Array, random: Any) -> Roles:
        """Of trusted samples with these classes: half of them guide, and half of the rest judges."""
        guide, others = halves(codes, random)
        evaluation, judge = halves(codes[others], random)
        return cls(guide, others[judge], others[evaluation] if len(evaluation) else others[judge])

    @classmethod
    def held_out(cls, codes: Array, classes: Sequence[Any], part: float, random: Any) -> Roles:
        """Hold out about this part of each class of noisily labelled samples, at least one sample each, to judge the
        rest.
        """
        chosen = []
        for c, name in enumerate(classes):
            members = random.permutation(np.flatnonzero(codes == c))
            if len(members) < 2:
                raise InputError(f"Class {name!r} has only one sample, so none can be held out. Give a trusted set.")
            chosen.append(members[: max(1, round(part * len(members)))])
        found = np.sort(np.concatenate(chosen))
        evaluation, judge = halves(codes[found], random)  # the second half is never empty
        nobody = np.zeros(0, dtype=np.int64)
        return cls(nobody, found[judge], found[evaluation] if len(evaluation) else found[judge])

    @property
    def count(self) -> int:
        """How many samples judge or choose."""
        return len(np.union1d(self.judge, self.evaluation))

    def others(self, samples: int) -> Array:
        """The indices of all samples that neither judge nor choose."""
        return np.setdiff1d(np.arange(samples), np.concatenate([self.judge, self.evaluation]))


def halves(codes: Array, random: Any) -> tuple[Array, Array]:
    """Two index sets, each with samples of every class if there are two of it; the second is never the smaller."""
    first, second = [], []
    for c in np.unique(codes):
        members = random.permutation(np.flatnonzero(codes == c))
        first.append(members[: len(members) // 2])
        second.append(members[len(members) // 2 :])
    return np.concatenate(first), np.concatenate(second)
