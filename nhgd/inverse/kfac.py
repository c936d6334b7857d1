"""K-FAC: the Fisher matrix of a layer as one Kronecker product."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor
from typing_extensions import override

from nhgd import _tape as tape
from nhgd._validation import counted
from nhgd.errors import InputError
from nhgd.inverse._learned import concurrent, shifted, together
from nhgd.inverse._learned.eigenbasis import Basis, Solve, begun, decomposed, decompositions, refreshed
from nhgd.inverse._learned.kronecker import AbstractKronecker
from nhgd.inverse._learned.kronecker_state import KroneckerState
from nhgd.inverse._learned.layer_ridge import LayerRidge, Uneven
from nhgd.inverse._learned.matrix_products import matrix_solver
from nhgd.inverse._learned.resting import polished
from nhgd.inverse._learned.significance import shrunk, shrunk_as_one
from nhgd.inverse._learned.statistics import check_invertible
from nhgd.inverse._learned.together import Stack
from nhgd.record import LayerRecord, LayerStatistics, Pool, pool_of
from nhgd.ridge import Ridge

PRODUCTS = 32  # in captured steps, in place of a decomposition on a GPU
WIDE = 128  # rows: a GPU decomposes smaller factors in about the time of these products
KFACSolver = Literal["eigen", "cholesky", "products"]


@final
@dataclass(frozen=True)
class KFAC(AbstractKronecker[KroneckerState]):
    """K-FAC: one Kronecker product for each Linear or Conv2d layer, learnt from the inner steps.

    For a layer with inputs a (a 1 appended for its bias) and scores g (derivatives of the loss in its output), at T
    places in a sequence or image, over samples i with weights w_i:

        A = mean_i (1/T) sum_t w_i a_it a_it^T
        G = sum_i sum_t w_i g_it g_it^T / sum_i w_i
        F_layer ~ A (x) G

    and running means of mean_i w_i a a^T, mean_i w_i g g^T and mean_i w_i over the batches. The solve is exact for this
    matrix, ridge and damping included, by A = Q_A diag(a) Q_A^T and G = Q_G diag(g) Q_G^T:

        X = Q_G [ (Q_G^T U Q_A) / (g a^T + 2 l2 + damping) ] Q_A^T

    With one sample and one place F_layer is exact. A layer that is called several times counts every call as a place; a
    grouped convolution has a pair of factors for each group. A parameter outside such layers gets a separate block,
    dense up to `dense_limit` entries and diagonal above; `notes["others"]` says which. With BatchNorm in training mode
    g_it is the score of the batch objective, through the statistics of the batch, and `notes["statistics"]` says so.

    If ridge and damping, R, differ within a layer as a product of rows and columns, R_ij = d_i c_j, such as one for
    each input feature and another for the bias, the solve stays exact: it uses C^-1/2 A C^-1/2 and D^-1/2 G D^-1/2 with
    a ridge of 1. Any other R takes at most 50 iterations of conjugate gradients on matrices, X -> G X A + R * X, in
    that basis, without gradients or Hessian products. They stop at a relative residual of 1e-6 (1e-4 in float32);
    without convergence the result is at least as good as the solve with the mean of R. `notes["ridge_iterations"]` and
    `notes["ridge_residual"]` report on it. If eigendecompositions are kept, and those of scaled factors would cost more
    than the allowed iterations, they run in the kept basis. `solver="cholesky"` uses the nearest product for R.

    Args:
        damping: added to the diagonal with the ridge 2 l2. "auto": the horizon's in a run; elsewhere, and for
            None everywhere, nothing where the ridge is positive everywhere, else 1e-3 of the mean diagonal of F.
            `notes["damping"]` says what was used in addition to the horizon's.
        beta: how slowly batches fade from the running means, in [0, 1), with bias correction; None: never, and every
            sample observed counts the same.
        fisher: "empirical", "exact" (expectation over the model's own labels) or "sampled".
        factor_every: inner steps from one record to the next.
        invert_every: None: each solve computes the eigendecompositions of the current factors. A number: they are
            computed at the first and then at every `invert_every`-th observation, and kept in the state for solves.
        invert_phase: at which observation of each period; 0 is its last. With as many inner steps as the period, 1
            makes them while the inner loop runs, if curvature is updated concurrently.
        overhead: in a run, the share of the inner loop's cost that records, decompositions and solves may take,
            estimated from shapes; the decision is in `effort`, and so in the run's stats. None: every step and every
            sample is recorded, as always outside of a run. Explicit periods replace it.
        effort: how much is recorded, if it is to be set explicitly; see `Effort`.
        dense_limit: the largest parameter outside the layers that gets a dense block.
        dtype: of the statistics; None: of the layers' numbers (theta's dtype, outside of autocast), at least float32.
        solver: "eigen" as above, or "cholesky": (A + pi sqrt(d) I) (x) (G + sqrt(d) / pi I) in place of
            A (x) G + d I, with d = 2 l2 + damping and pi^2 = (tr A / dim A) / (tr G / dim G). It needs no
            eigendecomposition, and its ridge is not exact. "products": conjugate gradients on matrices,
            X -> G X A + R * X, with the current factors. It decomposes nothing, so it never makes a GPU wait, and a
            captured step is one piece. Its error falls with `iterations`, the faster the larger the damping is.
            Captured runs on a GPU solve so too, with at least 32 iterations, where "eigen" would decompose a wide
            factor in each solve. Others on a GPU then solve exactly, by a Cholesky factor of A for each score, if these
            are few.
        iterations: of solver="products", at most.

        split: the rows of the largest factor that is kept whole; None: all are. A larger one is replaced by blocks on
            its diagonal, which take less memory, by their number, and less time to decompose, by its square. One of
            scores is kept whole if its rows do not divide evenly.
        kept_dtype: of the eigenvectors that are kept from one solve to the next: torch.float16 or torch.bfloat16 halve
            their memory. Statistics stay in all digits, and each solve takes a few products with the factors, without
            which so few digits would spoil it. As no entry is above 1, float16 has more of them.
        offload: whether factors and eigenvectors are kept in the host's memory, where theta is on a GPU; they are on
            the device while a record is folded in and while a system is solved.

    >>> KFAC().overhead, KFAC(factor_every=10).overhead
    (0.1, None)

    References: J. Martens, R. Grosse, Optimizing neural networks with Kronecker-factored approximate curvature, 2015,
    sections 3 and 6.3; R. Grosse, J. Martens, A Kronecker-factored approximate Fisher matrix for convolution layers,
    2016; R. Eschenhagen et al., Kronecker-factored approximate curvature for modern neural network architectures, 2023,
    section 3.2 (expand).

    Deviations: 1. The damping of the default solver is Tikhonov's and exact, not factored, because a hypergradient
    needs the right scale. 2. A sample is what one loss belongs to, so the empirical Fisher matrix of a sequence model
    sums the scores of its tokens into one gradient, and is not that of the tokens taken as samples. 3. The momentum,
    rescaling and adaptive damping of the optimiser are left out: they are not about the matrix.
    """

    name: ClassVar[str] = "kfac"
    moments: ClassVar[int] = 0
    solver: KFACSolver = "eigen"
    iterations: int = 20
    split: int | None = 1024
    kept_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        counted("KFAC", iterations=self.iterations)
        if self.split is not None:
            counted("KFAC", split=self.split)
        if self.solver != "eigen" and self.invert_every is not None:
            raise InputError(
                f"KFAC: solver='{self.solver}' works with the ridge of each solve, so its work cannot be reused."
                " Leave invert_every at None, or use solver='eigen'."
            )

        if self.kept_dtype is not None:
            if self.kept_dtype not in (torch.float16, torch.bfloat16, torch.float32):
                raise InputError(f"KFAC: kept_dtype must be torch.float16, bfloat16 or float32, got {self.kept_dtype}.")
            if self.solver != "eigen" or (self.invert_every is None and self.overhead is None):
                raise InputError(
                    "KFAC: kept_dtype is about eigenvectors that are kept from one solve to the next, and here none are. Set"
                    " invert_every, or leave overhead and solver at their defaults."
                )

    @property
    @override
    def basis_dtype(self) -> torch.dtype | None:
        return self.kept_dtype

    @property
    @override
    def largest(self) -> int | None:
        return self.split

    def _empty(self, starts: dict[str, int], sizes: dict[str, int]) -> KroneckerState:
        return KroneckerState(starts, sizes)

    @torch.no_grad()
    def fold(
        self, layer: LayerRecord, weights: Tensor | None, samples: int, like: tuple[Tensor, ...] | None = None
    ) -> tuple[Tensor, ...]:
        """What it wants of a layer of a batch: its factors."""
        return self._factors(layer, weights, samples, None if like is None else like[0])

    def _refreshed(
        self, before: KroneckerState, state: KroneckerState, record: LayerStatistics, rate: float
    ) -> KroneckerState:
        effort = self.effort if self.solver == "eigen" else None
        if self.invert_every is None and (effort is None or effort.in_full(state.observed)):
            return replace(state, bases={})  # bases of a state from other settings belong to other factors
        pool = pool_of(record)
        turn = None if effort is None or tape.repeatable() else effort.share(state.observed)
        if turn is not None and effort is not None:
            layers = [
                layer for i, layer in enumerate(state.inputs) if i % turn[1] == turn[0] or layer not in state.bases
            ]
            state = replace(state, bases=refreshed(state, effort.refreshes(state.observed)))
            return self._deferred(state, layers, pool)
        if self.is_due(state.observed):
            return replace(state, bases=tape.eager(lambda: self._bases(state, state.inputs, pool)))
        if effort is None:
            return state
        return replace(state, bases=refreshed(state, effort.refreshes(state.observed)))

    def _deferred(self, state: KroneckerState, layers: list[str], pool: Pool | None) -> KroneckerState:
        """The state with new bases of these layers; or with the old, where the next solve may wait for new ones."""
        later = concurrent.later()
        own = pool is None and all(layer in state.bases for layer in layers)
        own = own and concurrent.pays([state.inputs[layer] for layer in layers])
        if later is None or not own or self.offload or self.kept_dtype is not None:
            return replace(state, bases=state.bases | self._bases(state, layers, pool))
        finished = begun(state, layers)
        later.append(lambda now: replace(now, bases=now.bases | _plain(finished())))
        return state

    @override
    def _prepared(self, state: KroneckerState, ridge: Ridge) -> tuple[Callable[[Tensor], Tensor], dict[str, Any]]:
        saves = self.effort is not None and not self.effort.in_full(state.observed)
        if self.solver == "eigen" and not saves and tape.tape() is None and isinstance(ridge.value, float):
            state = self.awake(state)
            missing = [
                layer
                for layer in state.inputs
                if layer not in state.bases and not (ridge.value > 0 and shifted.pays(*state.blocks_of(layer)))
            ]
            state = replace(state, bases=state.bases | self._bases(state, missing, None))  # together, for this solve
        return super()._prepared(state, ridge)

    @torch.no_grad()
    def significant(self, state: KroneckerState, u: Tensor, error: Tensor) -> tuple[Tensor, KroneckerState]:
        """Entry by entry in the eigenbasis of each layer; a layer without one, and other parameters, by one factor.

        The error of a mean of gradients is spread like the Fisher matrix, so of a layer with the squared error e entry
        (i, j) gets the variance e g_i a_j / sum(g a^T). The state returned has the decompositions that were made.
        """
        state = self.awake(state)
        own = dict(zip(state.starts, error.to(u), strict=True))
        of_bias = {start: name for name, start in state.starts.items()}
        bases, found = dict(state.bases), torch.zeros_like(u)
        if self.solver == "eigen" and tape.tape() is None:
            bases |= self._bases(state, [layer for layer in state.inputs if layer not in bases], None)
        for layer in state.inputs:
            total = own[layer]
            if layer in state.biases:
                total = total + own[of_bias[state.biases[layer]]]
            part = state.gather(layer, u).to(state.inputs[layer].dtype)
            if layer not in bases and self.solver == "eigen" and not self._is_wide_on_a_gpu(state, layer):
                bases[layer] = tape.eager(partial(_decomposed, state, layer))
            if layer in bases and self.kept_dtype is None:
                basis = Basis(**bases[layer])
                values = basis.products()
                variances = values * (total / values.sum().clamp_min(torch.finfo(values.dtype).tiny))
                part = basis.back(shrunk(basis.rotate(part), variances))
            else:
                part = shrunk_as_one(part, total)
            state.scatter(layer, part.to(u.dtype), found)
        for name in state.blocks:
            place = state.place(name)
            found[place] = shrunk_as_one(u[place], own[name])
        return found, replace(state, bases=bases)

    def _bases(self, state: KroneckerState, layers: Iterable[str], pool: Pool | None) -> dict[str, dict[str, Tensor]]:
        return _plain(decompositions(state, layers, pool))

    def divided(self, state: KroneckerState, pool: Pool) -> KroneckerState:
        """The state with the eigendecompositions that a solve would make of it, divided over a pool."""
        if self.invert_every is not None or self.solver != "eigen" or state.bases:
            return state
        state = self.awake(state)
        return replace(state, bases=self._bases(state, state.inputs, pool))

    def _trace(self, state: KroneckerState, layer: str) -> Tensor:
        a, g = (factor.diagonal(dim1=1, dim2=2).sum(1) for factor in state.factors(layer))
        return (a * g).sum()

    @override
    def _stacks(self, state: KroneckerState, extras: Mapping[str, float]) -> list[Stack]:
        saves = self.effort is not None and not self.effort.in_full(state.observed)
        if self.solver != "eigen" or not saves or tape.repeatable() or not state.inputs or self.kept_dtype is not None:
            return []
        if not together.pays(next(iter(state.inputs.values())).device):
            return []
        known = {layer: extra for layer, extra in extras.items() if layer in state.bases and extra > 0}
        return together.stacked(state, known, not self.offload) if known else []

    def _layer_solver(self, state: KroneckerState, layer: str, extra: float) -> Solve:
        if self.solver == "eigen":
            kept = state.bases.get(layer)
            if kept is None and tape.tape() is None and extra > 0 and shifted.pays(*state.blocks_of(layer)):
                solve = shifted.shifted_solver(layer, *state.factors(layer), extra)
                if solve is not None:
                    return solve
            if kept is None and extra > 0 and self._is_wide_on_a_gpu(state, layer):
                return matrix_solver(*state.factors(layer), extra, max(self.iterations, PRODUCTS))
            basis = tape.eager(lambda: decomposed(state, layer)) if kept is None else Basis(**kept)
            saves = self.effort is not None and not self.effort.in_full(state.observed)
            if kept is not None and self.kept_dtype is not None and extra > 0:
                factors = state.factors(layer)
                near = basis.rescaled(*factors)
                return polished(*factors, extra, near.solver("KFAC", layer, near.products(), extra))
            if kept is not None and saves and extra > 0:
                basis = basis.rescaled(*state.factors(layer))
                if not tape.repeatable() and basis.is_within_digits(extra):
                    return basis.dominant_solver(extra)
            return basis.solver("KFAC", layer, basis.products(), extra)
        if self.solver == "products":
            return self._product_solver(state, layer, extra, extra > 0)
        return self._factored_solver(layer, *state.factors(layer), extra)

    def _is_wide_on_a_gpu(self, state: KroneckerState, layer: str) -> bool:
        """Whether a decomposition in each solve would keep a captured step waiting for longer than products do."""
        a, g = state.blocks_of(layer)
        return tape.repeatable() and a.is_cuda and max(a.shape[1], g.shape[1]) >= WIDE

    def _uneven_solver(self, state: KroneckerState, layer: str, ridge: LayerRidge, notes: dict[str, Any]) -> Solve:
        if self.solver == "products":
            return self._product_solver(state, layer, ridge.entries, bool((ridge.entries > 0).all()))
        a, g = state.factors(layer)
        if self.solver == "cholesky":
            inside = self._factored_solver(layer, *ridge.scaled(a, g), 1.0)
            return lambda b: ridge.scale * inside(ridge.scale * b)
        saves = self.effort is not None and not self.effort.in_full(state.observed)
        kept = None
        if (self.invert_every is not None or saves) and layer in state.bases and self.kept_dtype is None:
            kept = Basis(**state.bases[layer])
            kept = kept.rescaled(a, g) if saves else kept
            a, g = kept.factors()
        if kept is None or ridge.pays(self._iterations):
            basis, scale = ridge.basis(layer, a, g, kept), ridge.scale
            if ridge.separable:
                return ridge.solver(basis, basis.products())
            system = Uneven(basis, basis.products(), ridge.entries * scale.square(), scale)
        else:
            system = Uneven(kept, kept.products(), ridge.entries)

        def averaged() -> Solve:
            plain = decomposed(state, layer) if kept is None else kept
            return plain.solver("KFAC", layer, plain.products(), ridge.mean)

        return system.solver(averaged, self._iterations, notes)

    def _product_solver(self, state: KroneckerState, layer: str, extra: float | Tensor, positive: bool) -> Solve:
        """Conjugate gradients on matrices, with the current factors."""
        if not positive:
            raise InputError(
                f"KFAC: solver='products' needs a ridge or a damping above 0 everywhere, which {layer!r} has not. Give the"
                " problem an l2 above 0, set damping, or use solver='eigen'."
            )
        return matrix_solver(*state.factors(layer), extra, self.iterations)

    @override
    def is_due(self, observed: int) -> bool:
        return self.solver == "eigen" and super().is_due(observed)

    def _factored_solver(self, layer: str, a: Tensor, g: Tensor, extra: float) -> Solve:
        """b -> ((A + pi sqrt(extra) I) (x) (G + sqrt(extra) / pi I))^{-1} b for matrices b, (G, out, in)."""
        mean_a, mean_g = (factor.diagonal(dim1=1, dim2=2).mean(1) for factor in (a, g))
        both = (mean_a > 0) & (mean_g > 0)
        pi = torch.where(both, (mean_a / torch.where(both, mean_g, 1.0)).sqrt(), 1.0)
        root_a = self._cholesky(layer, a, extra**0.5 * pi)
        root_g = self._cholesky(layer, g, extra**0.5 / pi)
        return lambda b: torch.cholesky_solve(torch.cholesky_solve(b, root_g).mT, root_a).mT

    def _cholesky(self, layer: str, factor: Tensor, shift: Tensor) -> Tensor:
        """The Cholesky factor of a Kronecker factor, (G, n, n), with a number for each group, (G,), on its diagonal."""
        damped = factor + shift[:, None, None] * torch.eye(factor.shape[1], dtype=factor.dtype, device=factor.device)
        if not bool((shift > 0).all()):
            check_invertible("KFAC", layer, torch.linalg.eigvalsh(damped))
        lower: Tensor
        lower, info = torch.linalg.cholesky_ex(damped)
        if bool((info != 0).any()):
            raise InputError(
                f"KFAC: a factor of {layer!r} is not positive definite to working precision. Use solver='eigen', more"
                " damping, or dtype=torch.float64."
            )
        return lower


def _plain(bases: Mapping[str, Basis]) -> dict[str, dict[str, Tensor]]:
    return {layer: basis._asdict() for layer, basis in bases.items()}


def _decomposed(state: KroneckerState, layer: str) -> dict[str, Tensor]:
    return decomposed(state, layer)._asdict()
