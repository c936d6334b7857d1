"""The Fisher matrix of the last samples, solved in the space of the samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from math import isfinite
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from nhgd import _tape as tape
from nhgd._recording.accounting import held
from nhgd._validation import positive
from nhgd.errors import InputError, NonFiniteError
from nhgd.inverse._learned.damping import Damping, check_damping, refuse_singular, resolve_damping
from nhgd.inverse._learned.effort import Effort
from nhgd.inverse._learned.gram import PIECE
from nhgd.inverse._learned.periods import OVERHEAD, Periodic
from nhgd.inverse._learned.ring import NewRows, WindowState, by_sample, factors_pay, fit, layer_rows, pairs
from nhgd.inverse.base import SolveStats
from nhgd.record import (
    BatchGradient,
    FisherKind,
    InnerRecord,
    LayerStatistics,
    PerSampleGradients,
    Pool,
    pool_of,
)
from nhgd.ridge import Ridge
from nhgd.variable import Variable

MANY_ROWS = 20_000
# On a CPU new rows of the Gram matrix are made some at a time, so that the same memory is used again and again in place
# of asking the system for more: this many numbers, and no fewer rows than make a product worth its beginning.
NUMBERS_AT_A_TIME = 2**20
ROWS_AT_A_TIME = 512


@final
@dataclass(frozen=True)
class FisherWindow(Periodic[WindowState]):
    """The Fisher matrix of the last samples, solved by their Gram matrix; never a D x D array.

    With the rows R of the samples in the window, their weights c and the shift s = 2 l2 + damping, a vector,

        F = R^T diag(c) R,      x = (F + diag(s))^{-1} u
        z = u / s
        y = (I + sqrt(c) R diag(1/s) R^T sqrt(c))^{-1} sqrt(c) R z
        x = z - R^T sqrt(c) y / s

        weights="average":  c_j = 1 / n over the n samples in the window
        weights="ema":      c_j proportional to beta^age / B for a sample of a batch of B, `age` records old, with sum 1

    R R^T is kept and a record adds its own rows to it, against those stored. It serves every constant s; where the
    ridge differs between parameters, R diag(1/s) R^T is formed in the solve. For Linear and Conv2d layers inputs and
    scores are kept in place of gradients wherever that is cheaper, and R R^T comes from their products. Nothing
    decays that should not: the damping is constant, and directions that no gradient visits get u / s.

    Args:
        window: how many samples are kept, at most; for records="batch", how many steps. For fisher="exact" a sample has
            a row for each output.
        weights: "average" or "ema".
        beta: what an EMA keeps at each record, between 0 and 1.
        records: "layer" (layer inputs and scores; the same as "sample" where there are no layers), "sample" (per-sample
            gradients) or "batch" (the gradient of the batch without the ridge, scaled to estimate F near an inner
            optimum; equal weights only).
        fisher: "empirical", "exact" or "sampled"; the last two need records other than "batch". "auto": where the
            problem has a likelihood, "sampled", or in a run "exact" where the overhead pays for its roots, as it does
            for one output a sample; else "empirical".
        damping: added to the diagonal with the ridge. "auto": the horizon's in a run; elsewhere, and for None
            everywhere, nothing under a positive ridge and 1e-3 of the mean diagonal of F otherwise.
        allow_large: admit more than 20,000 rows; memory grows with their square and the solve with their cube.
        overhead: in a run, the share of the inner loop that records and solves may take, of its gradients as of its
            cost by a model of operations from shapes. Records are then of the last inner steps of a loop, and the
            window may hold fewer samples; `effort` says what it came to, and so do the run's stats. None: every step is
            recorded, as everywhere outside of a run.
        effort: which steps are recorded and how many samples are kept, if that is to be set explicitly; see `Effort`.

    >>> from nhgd.variable import Variable
    >>> inverse = FisherWindow(window=2, records="sample")
    >>> state = inverse.init(Variable(torch.zeros(3), "theta"))
    >>> inverse.observe(state, PerSampleGradients(torch.eye(3), samples=3)).gram.tolist()  # the last two of three
    [[1.0, 0.0], [0.0, 1.0]]

    References: Natural Hypergradient Descent, the empirical Fisher matrix along the inner trajectory; M. A. Woodbury,
    Inverting modified matrices, 1950.
    Deviations: 1. a window of samples under a constant damping in place of the running inverse, whose prior decays.
    2. rows sqrt(w_i) s_i of single samples in place of the gradient of the batch. 3. the ridge is added exactly.
    """

    name: ClassVar[str] = "fisher_window"
    window: int = 1024
    weights: Literal["average", "ema"] = "average"
    beta: float = 0.95
    records: Literal["layer", "sample", "batch"] = "layer"
    fisher: FisherKind = "empirical"
    damping: Damping = "auto"
    allow_large: bool = False
    overhead: float | None = OVERHEAD
    effort: Effort | None = None

    def __post_init__(self) -> None:
        if isinstance(self.window, bool) or not isinstance(self.window, int):
            raise InputError(f"FisherWindow: window counts samples, so it must be an integer, got {self.window!r}.")
        positive("FisherWindow", window=self.window)
        if not 0 < self.beta < 1:
            raise InputError(
                f"FisherWindow: beta must lie between 0 and 1, both excluded, got {self.beta}. It is the weight of a step"
                " relative to the next: try 0.95, or use weights='average'."
            )
        check_damping("FisherWindow", self.damping)
        if self.overhead is not None:
            positive("FisherWindow", overhead=self.overhead)
        if self.fisher in ("exact", "sampled") and self.records == "batch":
            raise InputError(
                f"FisherWindow: fisher='{self.fisher}' needs per-sample quantities. Use records='layer' or 'sample'."
            )
        self._refuse_many(1)

    def _refuse_many(self, roots: int) -> None:
        if self.window * roots <= MANY_ROWS or self.allow_large:
            return
        each = f" samples with {roots} rows each" if roots > 1 else " samples"
        raise InputError(
            f"FisherWindow: a window of {self.window}{each} has {self.window * roots} rows, and the solve factorises"
            f" a matrix of that size. Use a smaller window{' or fisher=' + repr('sampled') if roots > 1 else ''}, or"
            " pass allow_large=True if that is intended."
        )

    @property
    def follows_horizon(self) -> bool:
        """Whether its damping is "auto"."""
        return self.damping == "auto"

    @property
    def length(self) -> int:
        """How many samples are kept: the window, or what a budget allows."""
        memory = None if self.effort is None else self.effort.memory
        return self.window if memory is None else min(self.window, memory)

    @override
    def init(self, theta: Variable) -> WindowState:
        """An empty ring; its arrays are made when the first record shows their shapes."""
        places = theta.slices()
        return WindowState(
            {name: place.start for name, place in places.items()},
            {name: place.stop - place.start for name, place in places.items()},
        )

    @override
    def observe(self, state: WindowState, record: InnerRecord) -> WindowState:
        news = self._news(state, record)
        if state.gram is None:
            self._refuse_many(news.roots)
            state = self._allocate(state, news)
        fit(state, news)
        assert state.gram is not None
        assert state.stamps is not None
        assert state.shares is not None
        kept = min(news.samples, self.length)
        new = list(self._runs(state.position, kept))
        for stored, tensor in pairs(state, news):
            for places, samples in new:
                stored[places] = tensor[-kept:][samples]
        # A captured step repeats what the device did, not the number that the host knew then.
        stamp = state.observed if tape.tape() is None else state.stamps[state.position - 1] + 1
        for places, _ in new:
            state.stamps[places] = stamp
            state.shares[places] = 1 / kept
        filled = min(self.length, state.filled + kept)
        position = (state.position + kept) % self.length
        old = list(self._runs(position if filled == self.length else 0, filled - kept))
        gram = state.gram.view(self.length, news.roots, self.length, news.roots)
        if kept == filled and pool_of(record) is None:  # half of the products tell the others
            gram[:filled, :, :filled] = reduce(
                Tensor.add_, (block.take(slice(0, filled)).own_gram() for block in state.blocks())
            )
            return replace(state, observed=state.observed + 1, position=position, filled=filled)
        for places, found in self._products(state, [places for places, _ in new], filled, news.roots, pool_of(record)):
            gram[places, :, :filled] = found
            for others, _ in old:
                gram[others, :, places] = found[:, :, others].permute(2, 3, 0, 1)
        return replace(state, observed=state.observed + 1, position=position, filled=filled)

    def _runs(self, first: int, count: int) -> Iterator[tuple[slice, slice]]:
        """Where `count` samples from place `first` on lie in the ring, which may go round, and which of them these
        are.
        """
        before_end = min(count, self.length - first)
        for start, samples in ((first, slice(0, before_end)), (0, slice(before_end, count))):
            if samples.stop > samples.start:
                yield slice(start, start + samples.stop - samples.start), samples

    def _products(
        self, state: WindowState, new: Sequence[slice], filled: int, roots: int, pool: Pool | None
    ) -> Iterator[tuple[slice, Tensor]]:
        """Products of new samples with all, (n, K, m, K), some at a time; a pool divides each run."""
        assert state.gram is not None
        numbers = NUMBERS_AT_A_TIME if state.gram.device.type == "cpu" else PIECE
        step = max(1, max(ROWS_AT_A_TIME, numbers // (filled * roots)) // roots)
        present = [block.take(slice(0, filled)) for block in state.blocks()]
        nothing = state.gram.new_empty(0, roots, filled, roots)

        def products(first: int, end: int) -> Iterator[tuple[slice, Tensor]]:
            for start in range(first, end, step):
                places = slice(start, min(start + step, end))
                yield places, reduce(Tensor.add_, (block.take(places).gram(block) for block in present))

        for run in new:
            if pool is None:
                yield from products(run.start, run.stop)
                continue

            def some(mine: slice, start: int = run.start) -> Tensor:
                return torch.cat([nothing, *(found for _, found in products(start + mine.start, start + mine.stop))])

            yield run, pool.map_rows(run.stop - run.start, some)

    def _news(self, state: WindowState, record: InnerRecord) -> NewRows:
        if self.records == "layer" and isinstance(record, LayerStatistics):
            return layer_rows(state, record)
        if self.records == "sample" and isinstance(record, PerSampleGradients):
            rows = by_sample(record.rows, record.samples)
            return NewRows(rows.shape[0], rows.shape[1], {"0": rows})
        if self.records == "batch" and isinstance(record, BatchGradient) and record.row is not None:
            return NewRows(1, 1, {"0": record.row[None, None]})
        raise InputError(f"FisherWindow(records='{self.records}') received a {type(record).__name__}.")

    def _allocate(self, state: WindowState, news: NewRows) -> WindowState:
        device = next(iter((news.rows or news.inputs).values())).device
        rows = self.length * news.roots

        def ring(tensor: Tensor) -> Tensor:
            dtype = torch.promote_types(tensor.dtype, torch.float32)
            return torch.zeros(self.length, *tensor.shape[1:], dtype=dtype, device=device)

        return replace(
            state,
            stamps=torch.zeros(self.length, dtype=torch.int64, device=device),
            shares=torch.zeros(self.length, dtype=torch.float64, device=device),
            gram=torch.zeros(rows, rows, dtype=torch.float64, device=device),
            rows={name: ring(t) for name, t in news.rows.items()},
            inputs={name: ring(t) for name, t in news.inputs.items()},
            scores={name: ring(t) for name, t in news.scores.items()},
            biases=dict(news.biases),
        )

    def _coefficients(self, state: WindowState) -> float | Tensor:
        """c: one number if all rows have the same, else (n K,)."""
        if self.weights == "average" or state.gram is None:
            return 1 / max(1, state.filled)
        assert state.stamps is not None
        assert state.shares is not None
        stamps = state.stamps[: state.filled]
        ages = (stamps.amax() - stamps).double()
        weights = self.beta**ages * state.shares[: state.filled]
        weights = weights / weights.sum()
        return weights.repeat_interleave(len(state.gram) // self.length)

    @override
    def solve(self, state: WindowState, u: Tensor, ridge: Ridge) -> tuple[Tensor, SolveStats]:
        """One Cholesky factorisation of a matrix with a row for each row of the window."""
        apply, notes = self._factorised(state, ridge)
        return apply(u), SolveStats(residual=None, hvps=0, converged=True, notes=notes)

    def operator(self, state: WindowState, ridge: Ridge) -> Callable[[Tensor], Tensor]:
        """One factorisation for many right-hand sides."""
        return self._factorised(state, ridge)[0]

    def _factorised(self, state: WindowState, ridge: Ridge) -> tuple[Callable[[Tensor], Tensor], dict[str, Any]]:
        """u -> x, and the notes of the solve. The checks of a captured step are made when their numbers arrive."""
        size = sum(state.sizes.values())
        gram = torch.zeros(0, 0, dtype=torch.float64)
        if state.gram is not None:
            count = state.filled * len(state.gram) // self.length
            gram = state.gram[:count, :count]
        coefficients = self._coefficients(state)
        trace = (gram.diagonal() * coefficients).sum()
        tape.defer(_refuse_trace, tape.reading(trace))
        damping = resolve_damping(self.damping, ridge, lambda: trace / size)
        device = None if state.gram is None else gram.device
        shift = ridge.diagonal(1 if ridge.is_uniform else size, torch.float64, device) + damping
        observed = state.gram is not None
        tape.defer(partial(refuse_singular, "FisherWindow", observed=observed), tape.reading(shift.amin() > 0))
        uniform = ridge.is_uniform or (tape.tape() is None and bool((shift == shift[0]).all()))
        blocks = [block.take(slice(0, state.filled)).for_solve() for block in state.blocks()]
        if uniform:
            system = gram * (coefficients / shift[0]) if isinstance(coefficients, float) else gram / shift[0]
        else:
            system = torch.zeros_like(gram)
            for block in blocks:
                system += block.gram(block, 1 / shift).view(len(gram), len(gram))
            if isinstance(coefficients, float):
                system.mul_(coefficients)
        root: float | Tensor = 1.0
        if isinstance(coefficients, Tensor):
            root = coefficients.sqrt()
            system.mul_(root[:, None]).mul_(root)
        system.diagonal().add_(1.0)
        factor, info = torch.linalg.cholesky_ex(system)
        tape.defer(_refuse_rounding, tape.reading(info))

        def apply(u: Tensor) -> Tensor:
            x = u.double() / shift
            if blocks:
                pushed = reduce(Tensor.add, (block.times(x) for block in blocks))  # (n, K)
                right = pushed.flatten() if isinstance(root, float) else root * pushed.flatten()
                y = torch.cholesky_solve(right[:, None], factor)[:, 0]
                y = coefficients * y if isinstance(coefficients, float) else root * y
                back = torch.zeros_like(x)
                for block in blocks:
                    block.add_adjoint(y.view_as(pushed), back)
                x.addcdiv_(back, shift, value=-1)
            x = x.to(u)
            tape.defer(_refuse_solution, tape.reading(x.abs().amax()))
            return x

        notes = {"damping": tape.reading(damping) if isinstance(damping, Tensor) else damping}
        return apply, notes | {"samples": state.filled, "rows": len(gram)}

    @override
    def memory(self, theta: Variable) -> int:
        """The ring, the Gram matrix three times (kept, scaled, factorised) and the pieces of a product.

        What only the data tell is guessed: Linear layers see one place a sample, convolutions keep gradients, and for
        fisher="exact" the outputs are those of the last Linear layer (one where there is none).
        """
        roots = self._roots(theta)
        numbers = theta.numel * roots
        leaves = {id(leaf) for leaf in theta.leaves}
        for layer in _linear(theta) if self.records == "layer" else ():
            if id(held(layer, "weight")) in leaves:
                width, out = layer.in_features + (id(held(layer, "bias")) in leaves), layer.out_features
                if factors_pay(1, roots, width, out):
                    numbers += width + roots * out - roots * width * out
        itemsize: int = torch.promote_types(theta.dtype, torch.float32).itemsize
        rows = self.window * roots
        largest = min(PIECE, max(rows**2, self.window * numbers))
        return self.window * numbers * itemsize + 8 * (3 * rows**2 + 2 * largest + 4 * theta.numel)

    def _roots(self, theta: Variable) -> int:
        layers = _linear(theta)
        return layers[-1].out_features if layers and self.fisher == "exact" else 1

    def warnings_for(self, theta: Variable) -> list[str]:
        """Whether the window is too large to be used without asking."""
        rows = self.window * self._roots(theta)
        if rows <= MANY_ROWS or self.allow_large:
            return []
        return [f"{rows} rows are refused without allow_large=True"]


def _refuse_trace(trace: float) -> None:
    if not isfinite(trace):
        raise NonFiniteError(
            "FisherWindow: a gradient in the window contains nan or inf. Lower inner_lr, or check the inner losses."
        )


def _refuse_rounding(info: float) -> None:
    if info != 0:
        raise InputError(
            "FisherWindow: the ridge and the damping are lost in rounding against F. Pass a larger damping, or"
            " give the problem a larger l2."
        )


def _refuse_solution(largest: float) -> None:
    if not isfinite(largest):
        raise NonFiniteError(
            "FisherWindow: the solution contains nan or inf. Check the right-hand side, and raise the"
            " damping or the l2."
        )


def _linear(theta: Variable) -> list[nn.Linear]:
    return [] if theta.root is None else [m for m in theta.root.modules() if isinstance(m, nn.Linear)]
