"""Which part of a batch is evaluated here: all of it, unless it is divided among workers (`data_parallel.Shard`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, final

import torch
from torch import Tensor

from nhgd.data_parallel import Team


class Part(Protocol):
    """Which samples of a batch are evaluated here, and how the terms found here become those of the whole batch."""

    @property
    def share(self) -> float:
        """The factor of a mean over the samples here in the mean over the whole batch."""

    @property
    def parts(self) -> tuple[int, ...] | None:
        """How many samples each process has; None where this one has all of them."""

    @property
    def team(self) -> Team | None:
        """Whose workers have the other parts."""

    def total(self, samples: int | None) -> int | None:
        """The samples of the whole batch, from those here."""

    def term(self, mean: Tensor, ridge: Tensor) -> Tensor:
        """What is added here to the objective of the whole batch."""

    def drawing(self, seed: int, device: torch.device) -> AbstractContextManager[int | None]:
        """The random numbers of a pass that can be replayed; yields the seed that is left to be set inside."""

    def stepping(self, seed: int | None, device: torch.device) -> AbstractContextManager[None]:
        """The random numbers of an inner step."""

    def sum(self, terms: Sequence[Tensor], in_v: Sequence[Tensor] = ()) -> list[Tensor]:
        """The terms of the whole batch. Few entries of those in v may differ from zero."""

    def any(self, flag: bool) -> bool:
        """Whether it holds for some part of the batch."""

    def whole_step(
        self, value: Tensor, gradient: Sequence[Tensor], layers: Sequence[str], news: bool
    ) -> tuple[Tensor, list[Tensor], bool]:
        """A mean loss and its gradient on the whole batch, refused where its parts met other layers; news of any part."""

    def union(self, names: set[str], known: Sequence[str]) -> set[str]:
        """Every name that some part has, out of those known."""

    def extremes(self, low: float, high: float) -> tuple[float, float]:
        """The least and the largest of a number over the whole batch."""


@final
class Whole:
    """All of the batch: nothing is divided, and nothing is exchanged."""

    share = 1.0
    parts = None
    team = None

    def total(self, samples: int | None) -> int | None:
        """Those here."""
        return samples

    def term(self, mean: Tensor, ridge: Tensor) -> Tensor:
        """All of the objective."""
        return mean + ridge

    def drawing(self, seed: int, device: torch.device) -> AbstractContextManager[int | None]:
        """The seed itself."""
        return nullcontext(seed)

    @contextmanager
    def stepping(self, seed: int | None, device: torch.device) -> Iterator[None]:
        """As the generators stand, or from the seed on."""
        if seed is not None:
            torch.manual_seed(seed)
        yield

    def sum(self, terms: Sequence[Tensor], in_v: Sequence[Tensor] = ()) -> list[Tensor]:
        """The terms themselves."""
        return [*terms, *in_v]

    def any(self, flag: bool) -> bool:
        """The flag itself."""
        return flag

    def whole_step(
        self, value: Tensor, gradient: Sequence[Tensor], layers: Sequence[str], news: bool
    ) -> tuple[Tensor, list[Tensor], bool]:
        """There is nobody to tell."""
        return value, list(gradient), False

    def union(self, names: set[str], known: Sequence[str]) -> set[str]:
        """The names themselves."""
        return names

    def extremes(self, low: float, high: float) -> tuple[float, float]:
        """The numbers themselves."""
        return low, high


WHOLE = Whole()
