"""The diagonal of the Fisher matrix, learnt online."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, final

import torch
from torch import Tensor
from typing_extensions import override

from nhgd._validation import counted, positive
from nhgd.errors import InputError
from nhgd.inverse._learned.damping import Damping, resolve_damping
from nhgd.inverse._learned.effort import Effort
from nhgd.inverse._learned.periods import OVERHEAD, LayerMeans
from nhgd.inverse._learned.state import State
from nhgd.inverse._learned.statistics import (
    check_invertible,
    check_statistics,
    second_moments,
    statistics_note,
    step_of_mean,
)
from nhgd.inverse.base import SolveStats
from nhgd.record import FisherKind, InnerRecord, LayerRecord, LayerStatistics, batch_mean, batch_samples
from nhgd.ridge import Ridge
from nhgd.variable import Variable


@dataclass
class FisherDiagonalState(State):
    """The running mean of the squared gradients, (D,), its mass, and the slice of each leaf of theta."""

    diagonal: Tensor
    starts: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    mass: float = 0.0
    batch_objective: bool = False  # whether some record was of the batch objective
    observed: int = 0


@final
@dataclass(frozen=True)
class FisherDiagonal(LayerMeans[FisherDiagonalState]):
    """The diagonal of the Fisher matrix, a running mean over the inner steps.

        f <- mean of mean_i w_i s_i^2 over the batches, entry by entry
        x  = u / (f + 2 l2 + damping)

    s_i is the gradient of sample i. It is not formed for layers that see one place: there the mean of the squares is a
    product of squared scores and squared inputs.

    Args:
        damping: added to the diagonal with the ridge 2 l2. "auto": the horizon's in a run; elsewhere, and for
            None everywhere, nothing where the ridge is positive everywhere, else 1e-3 of the mean of f.
            `notes["damping"]` says what was used in addition to the horizon's.
        beta: how slowly batches fade from the running mean, in [0, 1), with bias correction; None: never, and every
            sample observed counts the same.
        fisher: "empirical", "exact" (expectation over the model's own labels) or "sampled".
        dtype: of the statistics; None: theta's, at least float32.
        factor_every: inner steps from one record to the next.
        overhead, effort: as in `KFAC`; there is nothing to decompose.

    >>> FisherDiagonal(beta=None).records
    'layer'

    References: S. Becker, Y. LeCun, Improving the convergence of back-propagation learning with second order methods,
    1988, section 3 (a diagonal in place of the matrix); J. Martens, New insights and perspectives on the natural
    gradient method, 2020, section 13 (the diagonal empirical Fisher matrix).

    Deviations: 1. The mean of squared gradients of samples, not the square of the mean gradient of a batch that Adam
    uses, because the latter is smaller by the batch size.
    """

    name: ClassVar[str] = "fisher_diagonal"
    damping: Damping = "auto"
    beta: float | None = 0.95
    fisher: FisherKind = "empirical"
    dtype: torch.dtype | None = None
    factor_every: int = 1
    overhead: float | None = OVERHEAD
    effort: Effort | None = None

    def __post_init__(self) -> None:
        check_statistics("FisherDiagonal", self.damping, self.beta, self.dtype)
        counted("FisherDiagonal", factor_every=self.factor_every)
        if self.overhead is not None:
            positive("FisherDiagonal", overhead=self.overhead)
            if self.factor_every != 1:
                if self.overhead != OVERHEAD:
                    raise InputError(
                        "FisherDiagonal: overhead chooses factor_every itself. Set either the overhead or the period."
                    )
                object.__setattr__(self, "overhead", None)  # a period that is given takes the place of the default

    @property
    def follows_horizon(self) -> bool:
        """Whether its damping is "auto"."""
        return self.damping == "auto"

    def _precision(self, theta: Variable) -> torch.dtype:
        return self.dtype or torch.promote_types(theta.dtype, torch.float32)

    @override
    def init(self, theta: Variable) -> FisherDiagonalState:
        places = theta.slices()
        return FisherDiagonalState(
            torch.zeros(theta.numel, dtype=self._precision(theta), device=theta.device),
            starts={name: place.start for name, place in places.items()},
            sizes={name: place.stop - place.start for name, place in places.items()},
        )

    @torch.no_grad()
    def fold(
        self, layer: LayerRecord, weights: Tensor | None, samples: int, like: tuple[Tensor, ...] | None = None
    ) -> tuple[Tensor]:
        """What it wants of a layer of a batch: the mean of its squared gradients, (G, out, in)."""
        dtype = self.dtype or layer.dtype
        return (second_moments(layer.inputs.to(dtype), layer.scores.to(dtype)) / (samples or 1),)

    @torch.no_grad()
    @override
    def observe(self, state: FisherDiagonalState, record: InnerRecord) -> FisherDiagonalState:
        """Fold the batch into the running mean; the state that was given stays as it was."""
        assert isinstance(record, LayerStatistics)
        batch = torch.zeros_like(state.diagonal)

        def put(name: str, values: Tensor) -> None:
            batch[state.starts[name] : state.starts[name] + state.sizes[name]] = values.reshape(-1)

        sums = [(layer.weight, layer.bias, self.fold(layer, None, record.samples)) for layer in record.layers]
        for weight, bias, (squares,) in [
            *sums,
            *((folded.weight, folded.bias, folded.sums) for folded in record.folded),
        ]:
            if bias is not None:
                put(bias, squares[..., -1])
            put(weight, squares if bias is None else squares[..., :-1])
        if record.other_rows is not None:
            squares = record.other_rows.to(batch.dtype).square().sum(0) / (record.samples or 1)
            sizes = [state.sizes[name] for name in record.other_names]
            for name, values in zip(record.other_names, squares.split(sizes), strict=True):
                put(name, values)
        batch = batch_mean(record, [batch])[0]
        samples = batch_samples(record)
        beta = self.beta if self.effort is None else self.effort.beta(self.beta, samples, state.observed)
        rate, mass = step_of_mean(state.mass, beta, samples)
        diagonal = state.diagonal.lerp(batch, rate.to(batch.dtype) if isinstance(rate, Tensor) else rate)
        of_batch = state.batch_objective or record.batch_objective
        return FisherDiagonalState(diagonal, state.starts, state.sizes, mass, of_batch, state.observed + 1)

    @torch.no_grad()
    @override
    def solve(self, state: FisherDiagonalState, u: Tensor, ridge: Ridge) -> tuple[Tensor, SolveStats]:
        if state.observed == 0:
            raise InputError(
                "FisherDiagonal has observed no inner step yet, so there is nothing to invert. Run an inner step"
                " first, or pass inner_data."
            )
        damping = resolve_damping(self.damping, ridge, lambda: float(state.diagonal.mean()))
        shift = ridge.diagonal(len(state.diagonal), state.diagonal.dtype, state.diagonal.device)
        entries = state.diagonal + shift + damping
        known = isinstance(ridge.value, float) and ridge.value + damping > 0
        if not (known or bool((shift + damping > 0).all())):
            check_invertible("FisherDiagonal", "theta", entries)
        x = (u.to(entries.dtype) / entries).to(u.dtype)
        return x, SolveStats(None, 0, True, {"damping": damping} | statistics_note(state.batch_objective))

    @override
    def memory(self, theta: Variable) -> int:
        """The mean, the batch's own, the sum with the ridge, and x."""
        return 4 * theta.numel * self._precision(theta).itemsize
