"""Which Fisher matrix is recorded: the empirical one, or that of a likelihood, by roots in output space."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nhgd import _tape as tape
from nhgd.errors import InputError
from nhgd.likelihood import AbstractLikelihood
from nhgd.record import FisherKind, RecordKind, Reduction


class FisherRoots:
    """The roots of a likelihood's Fisher matrix, or none for the empirical one.

    Args:
        fisher: "empirical", "exact", "sampled", or "auto": sampled where possible, else empirical.
        likelihood: what the outputs of the model parametrise.
        kind: of the record, of which "batch" and "raw" allow the empirical matrix alone.

    Attributes:
        fisher: the kind in use.
        likelihood: None for the empirical matrix.
    """

    def __init__(self, fisher: FisherKind, likelihood: AbstractLikelihood | None, kind: RecordKind) -> None:
        self._optional = fisher == "auto"
        of_batch = kind in ("batch", "raw")
        self.fisher: FisherKind = fisher
        if fisher == "auto":
            self.fisher = "empirical" if likelihood is None or of_batch else "sampled"
        self.likelihood = None if self.fisher == "empirical" else likelihood
        self._drawn = 0  # records that signs were drawn for
        if self.fisher == "empirical":
            return
        if of_batch:
            raise InputError(f"The {fisher} Fisher matrix needs per-sample records, not the gradient of a batch.")
        if likelihood is None:
            raise InputError(
                f"fisher='{fisher}' needs a likelihood: pass likelihood='categorical', 'bernoulli' or 'gaussian' to"
                " Bilevel, and return nhgd.Losses(values, outputs=...) from inner()."
            )

    def fall_back(self) -> bool:
        """Use the empirical matrix from now on, if that is allowed; whether it is in use."""
        if self._optional:
            self.fisher, self.likelihood = "empirical", None
        return self.likelihood is None

    def of(self, outputs: Tensor, losses: Tensor, reduction: Reduction | None) -> Tensor:
        """The roots, or random ones with their second moment, (K, B, ...). With "auto" they draw nothing from the
        run.
        """
        likelihood = self.likelihood
        assert likelihood is not None
        if not self._optional:
            return (likelihood.sample if self.fisher == "sampled" else likelihood.roots)(outputs, losses)
        here = len(losses)
        total = here if reduction is None else reduction.total(here)
        generator = torch.Generator()

        def draw(roots: int) -> Tensor:
            generator.manual_seed(self._drawn)
            self._drawn += 1
            return 2 * torch.randint(2, (total, roots), generator=generator) - 1

        def signs(roots: int) -> Tensor:
            drawn = tape.index(lambda: draw(roots))
            before = 0 if reduction is None else reduction.chosen(torch.arange(total))[1]
            return drawn[before : before + here].T

        return likelihood.signed(outputs, losses, signs)

    def memory(self) -> dict[str, Any]:
        """What later records depend on, as plain values."""
        return {"empirical": self.likelihood is None, "drawn": self._drawn}

    def recall(self, memory: Mapping[str, Any]) -> None:
        """Restore what `memory` returned."""
        self._drawn = int(memory["drawn"])
        if memory["empirical"]:
            self.fall_back()
