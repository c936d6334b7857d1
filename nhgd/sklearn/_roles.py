"""Which samples guide the model, judge the weights and choose the outer step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nhgd.errors import InputError

Array = np.ndarray[Any, Any]


class NoTrustedSetWarning(UserWarning):
    """Part of the noisy data was held out because no trusted set was given.

    Attributes:
        finding: which part, as a sentence; the message continues with the remedy.
    """

    def __init__(self, held_out: int, samples: int) -> None:
        self.finding = (
            f"No trusted set was given, so {held_out} of the {samples} samples were held out to judge the rest,"
            " although their labels may be wrong."
        )
        super().__init__(
            f"{self.finding} A few samples with correct labels, given as X_trusted and y_trusted, would"
            " give better results."
        )


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
    def held_out(
        cls, codes: Array, classes: Sequence[Any], part: float, random: Any, times: Array | None = None
    ) -> Roles:
        """Hold out about this part of each class of noisily labelled samples, at least one sample each, to judge the
        rest; `times`: how often each counts. A class of one sample that counts several times is not held out.
        """
        chosen = []
        for c, name in enumerate(classes):
            members = random.permutation(np.flatnonzero(codes == c))
            if len(members) < 2 and (times is None or times[members].sum() < 2):
                raise InputError(f"Class {name!r} has only one sample, so none can be held out. Give a trusted set.")
            if len(members) < 2:
                continue
            chosen.append(members[: max(1, round(part * len(members)))])
        if not chosen:
            raise InputError("All samples of a class are equal, in every class, so none can be held out.")
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
