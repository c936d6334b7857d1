"""Choices of the host in the middle of a captured step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

TRUSTED_AFTER = 4  # choices in a row that were as expected


class Decision:
    """A choice of the host by numbers of the device, of which one outcome is to be expected.

    The last choice of a step does not keep the device waiting, once several were as expected: what follows is launched
    as if this one were too, before its numbers have arrived, and again if it was not, from a copy of the states.

    Args:
        numbers: what the choice follows from, (n,) in float64.
        expected: the result that is to be expected.
        place: where the result is read.
        accepts: the choice, given the numbers.
        otherwise: makes the result where it is not the one expected.
        first: the segment that follows.

    Attributes:
        waits: whether something that follows may need the choice.
        repeated: how often work that followed was launched again.
    """

    def __init__(
        self,
        numbers: Tensor,
        expected: Tensor,
        place: Tensor,
        accepts: Callable[[list[float]], bool],
        otherwise: Callable[[], Tensor],
        first: int,
    ) -> None:
        self.waits = False
        self.first = first
        self.repeated = 0
        self._numbers, self._expected, self._place = numbers, expected, place
        self._accepts, self._otherwise = accepts, otherwise
        cuda = numbers.device.type == "cuda"
        self._host = torch.zeros(numbers.shape, dtype=torch.float64, pin_memory=cuda)
        self._arrived = torch.cuda.Event() if cuda else None
        self._as_expected = 0  # choices in a row
        self._open = False
        self._kept: list[Tensor] = []

    def begin(self, states: Sequence[Tensor]) -> None:
        """Ask for the numbers, and wait for them unless what follows may begin. `states`: everything it changes."""
        self._host.copy_(self._numbers, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()
        self._place.copy_(self._expected)
        self._open = not self.waits and self._as_expected >= TRUSTED_AFTER
        if not self._open:
            if not self._is_as_expected():
                self._place.copy_(self._otherwise())
            return
        if len(self._kept) != len(states):
            self._kept = [torch.empty_like(t) for t in states]
        torch._foreach_copy_(self._kept, list(states))

    def is_repeatable(self, follow: Callable[[], object], states: Sequence[Tensor]) -> bool:
        """Whether what follows leaves the same states when it is done again from where it began. It is done."""
        before = [t.clone() for t in states]
        follow()
        after = [t.clone() for t in states]
        torch._foreach_copy_(list(states), before)
        follow()
        same = all(torch.equal(a, b) for a, b in zip(states, after, strict=True))
        torch._foreach_copy_(list(states), after)
        return same

    def stands(self, states: Sequence[Tensor]) -> bool:
        """Whether what was launched since was right. If not, the states and the result are so that it can be
        again.
        """
        if not self._open:
            return True
        self._open = False
        if self._is_as_expected():
            return True
        torch._foreach_copy_(list(states), self._kept)
        self._place.copy_(self._otherwise())
        self.repeated += 1
        return False

    def _is_as_expected(self) -> bool:
        if self._arrived is not None:
            self._arrived.synchronize()
        found = self._accepts(self._host.tolist())
        self._as_expected = self._as_expected + 1 if found else 0
        return found
