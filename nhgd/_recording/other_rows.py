"""Rows of the parameters that no Linear or Conv2d layer accounts for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nhgd._recording.accounting import Scores
from nhgd._recording.leaf_call import rows_of, summed
from nhgd._recording.normalisation import summed_rows
from nhgd._recording.per_sample import OneSampleGradients
from nhgd._recording.taps import TappedPass, Taps
from nhgd.data.batch import Batch
from nhgd.problem import Bilevel


class OtherRows:
    """Takes rows from the scores of a pass where these give them, and otherwise from passes of their own.

    Args:
        problem: the problem.
        taps: those of the passes.
        couples: whether all rows must come from the same pass, with the same dropout.

    Attributes:
        alone: evaluates the loss of one sample at a time.
    """

    def __init__(self, problem: Bilevel, taps: Taps, couples: bool) -> None:
        self.theta = problem.theta
        self.taps = taps
        self.couples = couples
        self.alone = OneSampleGradients(problem)

    def rows(
        self,
        batch: Batch,
        found: TappedPass,
        names: tuple[str, ...],
        seeds: Tensor | None,
        columns: Sequence[Scores],
        scale: Tensor,
    ) -> Tensor:
        """The rows of these parameters side by side, (K B, numel)."""
        known = self._native(found, names, columns, scale)
        rest = tuple(name for name in names if name not in known)
        if rest:
            if found.batch_objective:
                general = self._coupled(found, rest, seeds, columns, scale)
            else:
                general = self._general(batch, found, rest, seeds)
            sizes = [self.taps.shapes[name].numel() for name in rest]
            known |= dict(zip(rest, general.split(sizes, dim=1), strict=True))
        return torch.cat([known[name] for name in names], dim=1)

    def _native(
        self, found: TappedPass, names: Sequence[str], columns: Sequence[Scores], scale: Tensor
    ) -> dict[str, Tensor]:
        """Rows of parameters outside of layers that the scores of this pass give."""
        wanted, samples = found.native & set(names), len(scale)
        parts: dict[str, list[Tensor]] = {name: [] for name in wanted}
        for i, call in enumerate(found.leaf_calls, start=found.of_leaves.start):
            if wanted.isdisjoint(call.names.values()):
                continue
            scores = [column[i] for column in columns]
            rows = rows_of(call, scores, scale) if all(call.fits(score, samples) for score in scores) else None
            if rows is None:
                wanted -= set(call.names.values())
                continue
            for name in wanted & rows.keys():
                parts[name].append(rows[name])
        for name, of_layer in self.taps.rows_of_layers(found, columns, scale, wanted):
            parts[name].append(of_layer)
        wide = torch.promote_types(self.theta.dtype, torch.float32)
        return {name: summed(parts[name]).to(wide) for name in wanted if parts[name]}

    def _coupled(
        self, found: TappedPass, names: tuple[str, ...], seeds: Tensor | None, columns: Sequence[Scores], scale: Tensor
    ) -> Tensor:
        """Rows of parameters that no layer accounts for, where BatchNorm couples the samples.

        Those of BatchNorm itself come from its scores; others are gradients of the loss of each sample in its batch.
        """
        positions = enumerate(found.norms, start=found.of_norms.start)
        known = [(norm, [column[i] for column in columns]) for i, norm in positions if norm.names & found.normalised]
        rows = summed_rows(known, scale)
        rest = tuple(name for name in names if name not in found.normalised)
        if rest:
            found.passes += len(columns) * len(scale)
            split = self.alone.from_graph(found.losses, rest, seeds)
            rows |= dict(zip(rest, split.split([self.taps.shapes[name].numel() for name in rest], dim=1), strict=True))
        return torch.cat([rows[name] for name in names], dim=1)

    def _general(self, batch: Batch, found: TappedPass, names: tuple[str, ...], seeds: Tensor | None) -> Tensor:
        """The same from a pass for each sample alone, or from the graph of this pass where dropout was drawn in it."""
        losses, columns = found.losses, 1 if seeds is None else len(seeds)
        if batch is not None and not (self.couples and found.drawn):
            self.alone.look(batch)
            if not (self.couples and self.alone.noisy):
                found.passes += columns
                return self.alone.rows(batch, losses, names, seeds)
        found.passes += columns * losses.values.shape[0]
        return self.alone.from_graph(losses, names, seeds)
