"""The Fisher matrix, or its inverse, as one dense array."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor
from typing_extensions import override

from nhgd._validation import counted, positive
from nhgd.errors import InputError, NonFiniteError
from nhgd.inverse._learned.damping import Damping, check_damping, refuse_singular, resolve_damping
from nhgd.inverse._learned.graph import Graphable
from nhgd.inverse._learned.state import State
from nhgd.inverse._learned.woodbury import fold_row, fold_rows, fold_steps
from nhgd.inverse.base import Learned, SolveStats
from nhgd.record import (
    BatchGradient,
    FisherKind,
    InnerRecord,
    PerSampleGradients,
    batch_mean,
    batch_samples,
    gathered,
)
from nhgd.ridge import Ridge
from nhgd.variable import Variable


@dataclass
class DenseState(State):
    """The estimate of `FisherDense`.

    `matrix` (D, D) is F or A; `count` is the number of observations it is worth; `curvature` is the mean diagonal of
    the matrix that A inverts; `observed` counts the steps and `restarts` the times the guard began again. `waiting` are
    rows of later steps, which are not in any of these yet.
    """

    matrix: Tensor
    count: float
    curvature: float
    observed: int = 0
    restarts: int = 0
    waiting: list[Tensor] = field(default_factory=list)


@final
@dataclass(frozen=True)
class FisherDense(Learned[DenseState]):
    """The Fisher matrix as one D x D array, averaged over the inner steps; for small D.

    An inner step hands over F_batch = (1/B) sum_i w_i s_i s_i^T, one observation whatever B is. With its gain g,

        form="matrix":    F <- (1 - g) F + g F_batch,             x = (F + diag(2 l2) + damping I)^{-1} u
        form="inverse":   A <- ((1 - g) A^{-1} + g F_batch)^{-1},   x = A u,    A^0 = I / prior

        update="average":  g = 1 / (t + 1)        after t observations; the prior of the inverse is worth t0 of them
        update="ema":      g = 1 - beta           for the inverse, the paper's smoothed update
                           g = (1 - beta) / (1 - beta^(t + 1))      for the matrix, which corrects the bias of its start

    The inverse is updated without inverting: with R the rows of F_batch = R^T R and q = g / (1 - g),

        A <- (A - q A R^T (I + q R A R^T)^{-1} R A) / (1 - g)

    which for one row is the rank-one update of the paper. The matrix form costs one Cholesky factorisation a solve and
    holds the ridge and the damping exactly. In the inverse form the prior decays, so no constant ridge or damping can
    be held: they are in the prior alone, and without visits A grows by 1 / (1 - g) each step. A guard watches that
    growth.

    Args:
        form: "matrix" or "inverse": which of the two is kept.
        update: "average" or "ema": how observations are weighted.
        beta: what an EMA keeps each step, between 0 and 1.
        records: "sample" (per-sample gradients, folded as one block); "batch" (the gradient of the batch without the
            ridge, scaled to estimate F near an inner optimum; equal weights only); or "raw" (the gradient as the
            optimiser saw it, ridge included, as the paper prints it: it estimates F / B near an inner optimum, and
            nothing useful for full batches).
        fisher: "empirical", "exact" or "sampled"; the last two need records="sample".
        damping: added to the diagonal with the ridge, in the matrix form only. "auto": the horizon's in a run;
            elsewhere, and for None everywhere, nothing under a positive ridge and 1e-3 of the mean diagonal of F
            otherwise.
        warm: what a new outer step begins from. "prior": the last estimate, worth t0 observations at most;
            "accumulate": the last estimate and its count; "reset": nothing learnt before.
        prior: A^0 = I / prior in the inverse form.
        t0: how many observations a prior is worth, at least 1.
        guard: "stop" or "restart" (from the prior) when the inverse winds up.
        limit: the largest entry of A, in units of the inverse mean curvature, before the guard acts. None: 1e11 in
            float64 and the same number of lost digits in other dtypes (2e2 in float32).
        fold: rank-one updates of the inverse made together, in one pass over the array; those that wait are made before
            a solve. The result is the same to rounding, and the guard acts later.
        dtype: of the array; float64 whatever theta's.
        max_dim: D above which `init` refuses.

    >>> from nhgd.variable import Variable
    >>> inverse = FisherDense()
    >>> state = inverse.init(Variable(torch.zeros(2), "theta"))
    >>> inverse.observe(state, PerSampleGradients(torch.eye(2).repeat(2, 1), samples=4)).matrix.tolist()
    [[0.5, 0.0], [0.0, 0.5]]

    References: Natural Hypergradient Descent, equation (inv_efim_update) for update="average" and its smoothed rank-one
    update, in the implementation details, for "ema"; M. A. Woodbury, Inverting modified matrices, 1950.
    Deviations: 1. A^0 counts as t0 observations, because the printed weights divide by t = 0. 2. per-sample gradients,
    rows sqrt(w_i) s_i, instead of the gradient of the batch, whose outer product estimates F / B (records="raw": as
    printed).
    3. the ridge is left out of F and added exactly, in the matrix form. 4. the inverse form stops or restarts before it
    overflows. 5. beta outside (0, 1) is refused.
    """

    name: ClassVar[str] = "fisher_dense"
    form: Literal["matrix", "inverse"] = "matrix"
    update: Literal["average", "ema"] = "average"
    beta: float = 0.95
    records: Literal["sample", "batch", "raw"] = "sample"
    fisher: FisherKind = "empirical"
    damping: Damping = "auto"
    warm: Literal["prior", "accumulate", "reset"] = "prior"
    prior: float = 1.0
    t0: float = 1.0
    guard: Literal["stop", "restart"] = "stop"
    limit: float | None = None
    fold: int = 1
    dtype: torch.dtype = torch.float64
    max_dim: int = 15_000

    def __post_init__(self) -> None:
        if not 0 < self.beta < 1:
            raise InputError(
                f"FisherDense: beta must lie between 0 and 1, both excluded, got {self.beta}. It is the weight of the"
                " last estimate in an update, which divides by it: try 0.95, or use update='average'."
            )
        if not 1 <= self.t0 < float("inf"):
            raise InputError(
                f"FisherDense: t0, the weight of the prior in observations, must be at least 1, got {self.t0}."
            )
        positive("FisherDense", prior=self.prior, max_dim=self.max_dim)
        if self.limit is not None:
            positive("FisherDense", limit=self.limit)
        counted("FisherDense", fold=self.fold)
        if self.fold > 1 and (self.form != "inverse" or self.records == "sample" or self.guard != "stop"):
            raise InputError(
                f"FisherDense: fold = {self.fold} makes rank-one updates of the inverse together. It needs form='inverse',"
                " records='batch' or 'raw', and guard='stop', which need not act at once."
            )
        check_damping("FisherDense", self.damping)
        if self.form == "inverse" and isinstance(self.damping, (int, float)):
            raise InputError(
                "FisherDense: form='inverse' cannot hold a constant damping, because its prior decays. Use"
                " form='matrix', or set the prior instead."
            )
        if self.dtype not in (torch.float32, torch.float64):
            raise InputError(f"FisherDense: dtype must be torch.float64 or torch.float32, got {self.dtype}.")
        if self.fisher != "empirical" and self.records != "sample":
            raise InputError(f"FisherDense: fisher='{self.fisher}' needs per-sample gradients. Use records='sample'.")

    @property
    def follows_horizon(self) -> bool:
        """Whether its damping is "auto", in the matrix form."""
        return self.damping == "auto" and self.form == "matrix"

    @override
    def init(self, theta: Variable) -> DenseState:
        if theta.numel > self.max_dim:
            raise InputError(
                f"FisherDense would keep a {theta.numel} x {theta.numel} array"
                f" ({theta.numel**2 * self.dtype.itemsize / 2**30:.1f} GiB). Use fisher_window or kfac, or raise"
                f" max_dim (now {self.max_dim}) if that is intended."
            )
        return self._fresh(theta.numel, theta.device)

    def _fresh(self, size: int, device: torch.device) -> DenseState:
        if self.form == "matrix":
            return DenseState(torch.zeros(size, size, dtype=self.dtype, device=device), 0.0, 0.0)
        matrix = torch.eye(size, dtype=self.dtype, device=device).div_(self.prior)
        return DenseState(matrix, float(self.t0), self.prior)

    def begin(self, state: DenseState) -> DenseState:
        """Carry the last estimate over as `warm` says."""
        state = self._folded(state)
        if self.warm == "accumulate":
            return state
        if self.warm == "prior":
            return replace(state, count=min(state.count, float(self.t0)))
        matrix = state.matrix.zero_()  # in place: the array may be half of the memory
        if self.form == "inverse":
            matrix.diagonal().fill_(1 / self.prior)
        begun = (0.0, 0.0) if self.form == "matrix" else (float(self.t0), self.prior)
        return DenseState(matrix, *begun, observed=state.observed, restarts=state.restarts)

    def graphable(self, state: DenseState, record: InnerRecord) -> Graphable | None:
        """The rank-one update of A in place, whose gain is often the same."""
        if self.form != "inverse" or self.fold > 1 or not isinstance(record, BatchGradient):
            return None
        gain, matrix = self._gain(state.count), state.matrix
        key = matrix.data_ptr(), gain

        def work(given: InnerRecord) -> Tensor:
            return fold_row(matrix, self._rows(given)[0].to(matrix), gain)

        if self.guard != "stop":
            # A restart is another array and another gain, so the next record must wait for the guard.
            return Graphable(key, work)
        ahead = DenseState(matrix, state.count + 1, state.curvature, state.observed + 1, state.restarts)
        return Graphable(key, work, ahead, self._judged)

    @torch.no_grad()
    @override
    def observe(self, state: DenseState, record: InnerRecord, ready: Tensor | None = None) -> DenseState:
        """Fold in one inner step. The array of the given state is updated in place, or holds the update already if
        it is `ready`.
        """
        gain = self._gain(state.count)
        observed = state.observed + 1
        if self._sums_matrices(record):
            local = self._rows(record).to(state.matrix)
            matrix = batch_mean(record, [local.T @ local])[0]  # (D, D)
            trace = float(matrix.trace())
            if not math.isfinite(trace):  # a sum of squares
                self._refuse_gradient(observed)
            curvature = (1 - gain) * state.curvature + gain * trace / len(matrix)
            state.matrix.mul_(1 - gain).add_(matrix, alpha=gain)
            return replace(state, count=state.count + 1, curvature=curvature, observed=observed)
        if ready is None:
            rows = self._rows(gathered(record)).to(state.matrix)  # (n, D)
            if self.fold > 1:
                waiting = replace(state, waiting=[*state.waiting, rows[0].clone()])
                return self._folded(waiting) if len(waiting.waiting) >= self.fold else waiting
            if self.form == "inverse" and len(rows) == 1:
                ready = fold_row(state.matrix, rows[0], gain)
        if ready is not None:
            return self._judged(state, ready.tolist())
        total = float(rows.square().sum())
        if self.form == "inverse" and math.isfinite(total):
            return self._judged(state, [total, *fold_rows(state.matrix, rows, gain)])
        moved = self._moved(state, total)
        state.matrix.addmm_(rows.T, rows, beta=1 - gain, alpha=gain)
        return moved

    def _folded(self, state: DenseState) -> DenseState:
        """The state with the rows that waited; its array is updated in place."""
        if not state.waiting:
            return state
        gains = [self._gain(state.count + k) for k in range(len(state.waiting))]
        numbers = fold_steps(state.matrix, torch.stack(state.waiting), gains).tolist()
        state = replace(state, waiting=[])
        for found in numbers:
            state = self._judged(state, found)
        return state

    def _moved(self, state: DenseState, total: float) -> DenseState:
        """The state after one more observation whose rows have this sum of squares, but for its array."""
        energy = total / state.matrix.shape[0]
        if not math.isfinite(energy):
            self._refuse_gradient(state.observed + 1)
        gain = self._gain(state.count)
        curvature = (1 - gain) * state.curvature + gain * energy
        return DenseState(state.matrix, state.count + 1, curvature, state.observed + 1, state.restarts)

    def _judged(self, state: DenseState, numbers: list[float]) -> DenseState:
        """The state after an update of A, given the sum of squares and the numbers of the guard."""
        total, *folded = numbers
        moved = self._moved(state, total)
        problem = self._problem(folded, moved.curvature)
        if problem is None:
            return moved
        if self.guard == "stop":
            said = self._exploded(state, moved, total, folded[-1]) or (
                f"{problem}. Each step multiplies the inverse by {1 / (1 - self._gain(state.count)):.4g} in the directions that"
                " no gradient visits. Use form='matrix' or fisher_window, which hold a constant damping, or guard='restart'."
            )
            raise NonFiniteError(f"FisherDense: at observation {moved.observed} {said}")
        fresh = self._fresh(len(state.matrix), state.matrix.device)
        return replace(fresh, observed=moved.observed, restarts=state.restarts + 1)

    def _exploded(self, before: DenseState, moved: DenseState, total: float, largest: float) -> str | None:
        """A sentence if the gradients have grown since the prior, rather than the inverse; None otherwise."""
        if not moved.curvature / self.prior > abs(largest) * self.prior:
            return None
        energy = total / len(moved.matrix)
        shown = f"the gradients show a mean curvature of {moved.curvature:.2g}, so the inverse,"
        shown += f" {largest:.2g} at most, is lost in rounding"
        if before.count > self.t0 and energy > before.curvature:
            times = math.sqrt(energy / before.curvature) if before.curvature > 0 else math.inf
            return (
                f"{shown}: the gradient of this inner step is {times:.2g} times as long as those before it, so the"
                " inner loop diverges. Lower inner_lr, or keep v where the inner problem is better conditioned"
                " (project_v)."
            )
        return (
            f"{shown}. Either the inner loop has diverged, and inner_lr is too large, or gradients are of this size here, and"
            f" so should the prior be (now {self.prior:.2g})."
        )

    @property
    def reduces(self) -> bool:
        """The matrix is a sum over samples; for the inverse, rows are gathered here."""
        return True

    def _sums_matrices(self, record: InnerRecord) -> bool:
        """Whether F_batch is summed over workers; otherwise rows are gathered, as the inverse form needs."""
        if self.form == "inverse" or not isinstance(record, PerSampleGradients) or record.reduction is None:
            return False
        rows, size = record.rows.shape
        return rows // record.samples * batch_samples(record) >= size

    def _refuse_gradient(self, observed: int) -> None:
        raise NonFiniteError(
            f"FisherDense: the gradient at observation {observed} contains nan or inf. Lower inner_lr, or check the"
            " inner losses."
        )

    def _rows(self, record: InnerRecord) -> Tensor:
        """Rows R, (n, D), with F_batch = R^T R."""
        if self.records == "sample" and isinstance(record, PerSampleGradients):
            return record.rows.to(self.dtype) / math.sqrt(record.samples)
        if isinstance(record, BatchGradient):
            row = record.raw if self.records == "raw" else record.row
            if self.records != "sample" and row is not None:
                return row[None]
        raise InputError(f"FisherDense(records='{self.records}') received a {type(record).__name__} of another kind.")

    def _gain(self, count: float) -> float:
        if self.update == "average":
            return 1 / (count + 1)
        return 1 - self.beta if self.form == "inverse" else (1 - self.beta) / (1 - self.beta ** (count + 1))

    def _problem(self, folded: list[float], curvature: float) -> str | None:
        """What went wrong with an update, as a clause, if something did."""
        small, least, largest = folded
        # The largest entry of a positive definite array is on its diagonal, which is positive.
        if not (small > 0 and least > 0):
            return "the inverse has lost its positive definiteness"
        limit = self.limit if self.limit is not None else _LIMITS[self.dtype]
        if largest * curvature <= limit:
            return None
        return (
            f"the inverse has wound up: its largest entry, {largest:.2g}, is {largest * curvature:.2g} times the inverse"
            f" mean curvature (limit {limit:.2g}), so rounding spoils the others"
        )

    @override
    def solve(self, state: DenseState, u: Tensor, ridge: Ridge) -> tuple[Tensor, SolveStats]:
        """One Cholesky factorisation, or one product with A."""
        apply, notes = self._factorised(state, ridge)
        return apply(u), SolveStats(residual=None, hvps=0, converged=True, notes=notes)

    def operator(self, state: DenseState, ridge: Ridge) -> Callable[[Tensor], Tensor]:
        """One factorisation for many right-hand sides."""
        return self._factorised(state, ridge)[0]

    def _factorised(self, state: DenseState, ridge: Ridge) -> tuple[Callable[[Tensor], Tensor], dict[str, Any]]:
        """u -> x, and the notes of the solve."""
        if state.waiting:
            vars(state).update(vars(self._folded(state)))  # the array is shared with the caller's state
        matrix = state.matrix
        notes: dict[str, Any] = {"observed": state.observed}
        factor: Tensor | None = None
        if self.form == "inverse":
            notes |= {"damping": 0.0, "ridge": "in the prior alone, which decays", "restarts": state.restarts}
        else:
            notes["damping"] = damping = resolve_damping(self.damping, ridge, state.curvature)
            shift = ridge.diagonal(len(matrix), matrix.dtype, matrix.device) + damping
            if state.count == 0:
                refuse_singular("FisherDense", bool((shift > 0).all()), observed=False)
            shifted = matrix.clone()
            shifted.diagonal().add_(shift)
            factor, info = torch.linalg.cholesky_ex(shifted)
            if int(info) != 0:
                raise InputError(
                    f"FisherDense: F with the ridge and a damping of {damping:.2g} is not positive definite. Pass a larger"
                    " damping, or give the problem an l2 above 0."
                )

        def apply(u: Tensor) -> Tensor:
            b = u.to(matrix)
            x = (matrix @ b if factor is None else torch.cholesky_solve(b[:, None], factor)[:, 0]).to(u)
            # On a GPU this would wait for all pending work; the hypergradient is checked later anyway.
            if not x.is_cuda and not bool(torch.isfinite(x).all()):
                raise NonFiniteError(
                    "FisherDense: the solution contains nan or inf. Check the right-hand side, and raise the damping"
                    " or the l2."
                )
            return x

        return apply, notes

    @override
    def memory(self, theta: Variable) -> int:
        """The array, and its copy when A is made symmetric, or the shifted array and its factor."""
        waiting = 2 * self.fold * theta.numel if self.fold > 1 else 0
        return (theta.numel**2 * (2 if self.form == "inverse" else 3) + waiting) * self.dtype.itemsize

    def warnings_for(self, theta: Variable) -> list[str]:
        """Whether theta is too large, and that the inverse form cannot hold the ridge."""
        refused = [f"refused above max_dim = {self.max_dim}"] if theta.numel > self.max_dim else []
        return refused + (["the ridge is in the prior alone, which decays"] if self.form == "inverse" else [])


_LIMITS = {
    dtype: 1e11 * torch.finfo(torch.float64).eps / torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64)
}
