"""Kronecker factors of every layer, learnt online: what K-FAC and EKFAC have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from nhgd import _tape as tape
from nhgd._validation import not_negative, positive
from nhgd.errors import InputError
from nhgd.inverse._learned import together
from nhgd.inverse._learned.damping import Damping, resolve_damping
from nhgd.inverse._learned.effort import Effort
from nhgd.inverse._learned.eigenbasis import Solve, block_solver
from nhgd.inverse._learned.graph import Graphable
from nhgd.inverse._learned.kronecker_state import KroneckerState
from nhgd.inverse._learned.layer_ridge import ITERATIONS, LayerRidge
from nhgd.inverse._learned.layers import layer_shapes
from nhgd.inverse._learned.periods import OVERHEAD, LayerMeans
from nhgd.inverse._learned.resting import at_rest, awake
from nhgd.inverse._learned.splitting import blocks, gram, split
from nhgd.inverse._learned.statistics import check_statistics, merge, statistics_note, step_of_mean
from nhgd.inverse._learned.together import Stack
from nhgd.inverse.base import POOR, SolveStats
from nhgd.record import (
    FisherKind,
    FoldedLayer,
    InnerRecord,
    LayerRecord,
    LayerStatistics,
    batch_mean,
    batch_samples,
)
from nhgd.ridge import Ridge
from nhgd.variable import Variable

T = TypeVar("T", bound=KroneckerState)


class BatchStatistics(NamedTuple):
    """The contribution of one batch: A, G times the mean weight, and that weight, by layer; and the blocks of other
    parameters.
    """

    layers: dict[str, tuple[Tensor, ...]]
    blocks: dict[str, Tensor]


@dataclass(frozen=True)
class AbstractKronecker(LayerMeans[T]):
    """An inverse of the Fisher matrix, layer by layer, in or near the eigenbasis of two Kronecker factors."""

    moments: ClassVar[int]  # vectors as long as theta in the state, twice while a batch is folded in
    damping: Damping = "auto"
    beta: float | None = 0.95
    fisher: FisherKind = "empirical"
    factor_every: int = 1
    invert_every: int | None = None
    overhead: float | None = OVERHEAD
    dense_limit: int = 256
    dtype: torch.dtype | None = None
    invert_phase: int = 0
    effort: Effort | None = None
    offload: bool = False

    def __post_init__(self) -> None:
        owner = type(self).__name__
        check_statistics(owner, self.damping, self.beta, self.dtype)
        not_negative(owner, dense_limit=self.dense_limit, invert_phase=self.invert_phase)
        for name in ("factor_every", "invert_every"):
            period = getattr(self, name)
            if period is not None and (not isinstance(period, int) or period < 1):
                raise InputError(f"{owner}: {name} must be a whole number of at least 1, got {period}.")
        if self.overhead is not None:
            positive(owner, overhead=self.overhead)
            own = {f.name: f.default for f in fields(self)}
            if (self.factor_every, self.invert_every) != (own["factor_every"], own["invert_every"]):
                if self.overhead != OVERHEAD:
                    raise InputError(
                        f"{owner}: overhead chooses factor_every and invert_every itself. Set either the overhead or"
                        " the periods."
                    )
                object.__setattr__(self, "overhead", None)  # periods that are given take the place of the default

    @property
    def basis_dtype(self) -> torch.dtype | None:
        """Of the eigenvectors that are kept; None: of the statistics."""
        return None

    def awake(self, state: T, bases: bool = True) -> T:
        """The state as it is worked with; with `bases` or without."""
        return awake(state, self.offload, self.basis_dtype, bases)

    @property
    def largest(self) -> int | None:
        """The rows of the largest factor that is not split; None: none is."""
        return None

    @property
    def follows_horizon(self) -> bool:
        """Whether its damping is "auto"."""
        return self.damping == "auto"

    @override
    def init(self, theta: Variable) -> T:
        places = theta.slices()
        return self._empty(
            starts={name: place.start for name, place in places.items()},
            sizes={name: place.stop - place.start for name, place in places.items()},
        )

    @abstractmethod
    def _empty(self, starts: dict[str, int], sizes: dict[str, int]) -> T:
        """The state before any inner step."""

    @torch.no_grad()
    @override
    def observe(self, state: T, record: InnerRecord, ready: BatchStatistics | None = None) -> T:
        """Fold the batch, or its statistics if they are ready, into the running means; the given state is unchanged."""
        assert isinstance(record, LayerStatistics)
        known: list[LayerRecord | FoldedLayer] = [*record.layers, *record.folded]
        if not known and not state.inputs:
            raise InputError(
                f"{type(self).__name__} works on the inputs and scores of Linear and Conv2d layers, and no such layer"
                " holds a parameter of theta that is used nowhere else. Use fisher_window, which supports any model, or"
                " fisher_diagonal; a penalty on a layer's weights can be given as l2."
            )
        state = self.awake(state, bases=self.moments > 0)
        samples = batch_samples(record)
        beta = self.beta if self.effort is None else self.effort.beta(self.beta, samples, state.observed)
        rate, mass = step_of_mean(state.mass, beta, samples)
        batch, own_blocks = ready or self.statistics(state, record)
        inputs, scores, weights = ({name: three[i] for name, three in batch.items()} for i in range(3))
        new = replace(
            state,
            mass=mass,
            observed=state.observed + 1,
            batch_objective=state.batch_objective or record.batch_objective,
            inputs=merge(state.inputs, inputs, rate),
            scores=merge(state.scores, scores, rate),
            weights=merge(state.weights, weights, rate),
            biases=state.biases | {l.weight: state.starts[l.bias] for l in known if l.bias is not None},
        )
        # A layer that a batch does not call is among its other parameters, with gradients of zero.
        covered = {*new.inputs, *(name for name, at in new.starts.items() if at in new.biases.values())}
        blocks, others = ({n: b for n, b in bs.items() if n not in covered} for bs in (state.blocks, own_blocks))
        new.blocks = merge(blocks, others, rate)
        return at_rest(self._refreshed(state, new, record, rate), self.offload, self.basis_dtype)

    def graphable(self, state: T, record: InnerRecord) -> Graphable | None:
        """The statistics of a batch, unless they must be summed over workers."""
        if not isinstance(record, LayerStatistics) or record.reduction is not None or not record.layers:
            return None

        def work(given: InnerRecord) -> BatchStatistics:
            assert isinstance(given, LayerStatistics)
            return self.statistics(state, given)

        return Graphable((), work)

    @torch.no_grad()
    def statistics(self, state: KroneckerState, record: LayerStatistics) -> BatchStatistics:
        """The contribution of the batch to the running means, of layers and of the other parameters.

        Of the state only the sizes of theta's leaves are used, so that this can be captured once and replayed.
        """
        layers: dict[str, tuple[Tensor, ...]] = {folded.weight: folded.sums for folded in record.folded}
        of_inputs: dict[Hashable, Tensor] = {}  # layers with the same inputs have one factor of them
        for layer in record.layers:
            layers[layer.weight] = self._factors(layer, record.weights, record.samples, of_inputs.get(layer.origin))
            of_inputs[layer.origin] = layers[layer.weight][0]
        blocks = self._blocks(state, record)
        if record.reduction is None:
            return BatchStatistics(layers, blocks)
        own = {id(t): t for t in (*(t for three in layers.values() for t in three), *blocks.values())}
        summed = dict(zip(own, batch_mean(record, list(own.values())), strict=True))
        return BatchStatistics(
            {name: tuple(summed[id(t)] for t in three) for name, three in layers.items()},
            {name: summed[id(block)] for name, block in blocks.items()},
        )

    @abstractmethod
    def _refreshed(self, before: T, state: T, record: LayerStatistics, rate: float) -> T:
        """The state, whose factors hold the batch already, with all else brought up to date where due."""

    @override
    def is_due(self, observed: int) -> bool:
        """Whether eigendecompositions are made at this observation: the first, and one in each period, at its phase.

        Within a budget the effort says when, but for observations that are taken in full.
        """
        if self.effort is not None and not self.effort.in_full(observed):
            return self.effort.inverts(observed)
        period = self.invert_every
        return period is not None and (observed == 1 or (observed - self.invert_phase) % period == 0)

    def _precision(self, tensor: Tensor) -> torch.dtype:
        return self.dtype or torch.promote_types(tensor.dtype, torch.float32)

    def _factors(
        self, layer: LayerRecord, weights: Tensor | None, samples: int, of_inputs: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """This batch's A, unless it is known of another layer; its G times the mean weight; and the mean weight."""
        g = layer.scores.to(self._precision(layer.scores))  # (K, B, T, G, out)
        kept, places, samples = self._precision(layer.scores), g.shape[2], samples or 1  # a worker may hold no sample
        weight = torch.ones((), dtype=kept, device=g.device)
        w = None if weights is None else weights.to(kept)
        if w is not None:
            weight = w.mean() if len(w) else w.sum()
        if of_inputs is None:
            a = layer.inputs.to(self._precision(layer.inputs))  # (B, T, G, in)
            a = a if w is None else a * w.sqrt()[:, None, None, None]
            of_inputs = self._gram(a.flatten(0, 1).transpose(0, 1), even=False).div_(samples * places)
        return of_inputs, self._gram(g.flatten(0, 2).transpose(0, 1), even=True).div_(samples), weight

    def _gram(self, rows: Tensor, even: bool) -> Tensor:
        """X^T X of rows (G, N, n), or the blocks on its diagonal where it is too large."""
        if self.largest is not None and len(rows) == 1 and rows.shape[2] > self.largest:
            return gram(rows[0], *blocks(rows.shape[2], self.largest, even))
        return rows.mT @ rows

    def _blocks(self, state: KroneckerState, record: LayerStatistics) -> dict[str, Tensor]:
        """This batch's Fisher matrix of each parameter outside the layers, dense or as a diagonal."""
        if record.other_rows is None:
            return {}
        found = {}
        parts = record.other_rows.split([state.sizes[name] for name in record.other_names], dim=1)
        for name, part in zip(record.other_names, parts, strict=True):
            rows = part.to(self._precision(part))
            dense = rows.shape[1] <= self.dense_limit
            found[name] = (rows.T @ rows if dense else rows.square().sum(0)) / (record.samples or 1)
        return found

    @override
    def solve(self, state: T, u: Tensor, ridge: Ridge) -> tuple[Tensor, SolveStats]:
        """Layer by layer, then the parameters outside."""
        apply, notes = self._prepared(state, ridge)
        x = apply(u)  # which may add to the notes
        return x, SolveStats(None, 0, notes.get("ridge_residual", 0.0) <= POOR, notes, again=apply)

    def operator(self, state: T, ridge: Ridge) -> Callable[[Tensor], Tensor]:
        """u -> x, with the eigendecompositions made once."""
        return self._prepared(state, ridge)[0]

    @torch.no_grad()
    def _prepared(self, state: T, ridge: Ridge) -> tuple[Callable[[Tensor], Tensor], dict[str, Any]]:
        """All of a solve that does not need its right-hand side, and the notes on it."""
        if state.observed == 0:
            raise InputError(
                f"{type(self).__name__} has observed no inner step yet, so there is nothing to invert. Run an inner"
                " step first, or pass inner_data."
            )
        state = self.awake(state)
        shift = ridge.value
        if tape.tape() is not None and not isinstance(shift, float):
            raise tape.NotRepeatable("the ridge is not a single number")
        low, high = (shift, shift) if isinstance(shift, float) else (float(r) for r in shift.aminmax())
        damping = resolve_damping(self.damping, ridge, lambda: self.mean_diagonal(state))
        notes: dict[str, Any] = {"damping": damping} | statistics_note(state.batch_objective)
        layers: dict[str, Solve] = {}
        even: dict[str, float] = {}
        for layer in state.inputs:
            own = low if isinstance(shift, float) or low == high else self._own_ridge(state, layer, shift, damping)
            if isinstance(own, LayerRidge):
                layers[layer] = self._uneven_solver(state, layer, own, notes)
            else:
                even[layer] = own + damping
        stacks = self._stacks(state, even)
        covered = {layer for stack in stacks for layer in stack.layers}
        layers |= {layer: self._layer_solver(state, layer, own) for layer, own in even.items() if layer not in covered}
        others: Callable[[list[Tensor]], list[Tensor]] | None = None
        at_once = state.blocks and together.pays(next(iter(state.blocks.values())).device)
        if at_once and isinstance(shift, float) and shift + damping > 0:
            others = together.block_solvers(state.blocks, shift + damping)
        blocks: dict[str, Solve] = {}
        for name, block in state.blocks.items():
            notes.setdefault("others", {})[name] = "dense" if block.ndim == 2 else "diagonal"
            if others is not None:
                continue
            if isinstance(shift, float):
                extra = Ridge(shift).diagonal(len(block), block.dtype, block.device) + damping
            else:
                extra = shift[state.place(name)].to(block.dtype) + damping
            blocks[name] = block_solver(type(self).__name__, name, block, extra)

        @torch.no_grad()
        def apply(u: Tensor) -> Tensor:
            x = torch.zeros_like(u)
            for stack in stacks:
                parts = [state.gather(layer, u).to(state.inputs[layer].dtype) for layer in stack.layers]
                solved = stack.solve(torch.cat(parts)).split([len(part) for part in parts])
                for layer, part in zip(stack.layers, solved, strict=True):
                    state.scatter(layer, part.to(u.dtype), x)
            for layer, solver in layers.items():
                b = state.gather(layer, u).to(state.inputs[layer].dtype)
                state.scatter(layer, solver(b).to(u.dtype), x)
            for name, solver in blocks.items():
                place = state.place(name)
                x[place] = solver(u[place].to(state.blocks[name].dtype)).to(u.dtype)
            if others is not None:
                found = others([u[state.place(name)].to(block.dtype) for name, block in state.blocks.items()])
                torch._foreach_copy_([x[state.place(name)] for name in state.blocks], found)
            return x

        return apply, notes

    def _own_ridge(self, state: T, layer: str, shift: Tensor, damping: float) -> LayerRidge | float:
        """The ridge of a layer: with damping if it differs within the layer, or one number without."""
        own = state.gather(layer, shift).to(state.inputs[layer].dtype)
        found = LayerRidge.of(own)
        return LayerRidge.of(own + damping) if damping and isinstance(found, LayerRidge) else found

    @property
    def _iterations(self) -> int:
        """The limit of conjugate-gradient iterations for an uneven ridge."""
        allowed = None if self.effort is None else self.effort.iterations
        return ITERATIONS if allowed is None else allowed

    def mean_diagonal(self, state: T) -> float:
        """The mean diagonal entry of F over the whole model."""
        layers = sum(float(self._trace(state, layer)) for layer in state.inputs)
        blocks = sum(float(b.trace() if b.ndim == 2 else b.sum()) for b in state.blocks.values())
        return (layers + blocks) / sum(state.sizes.values())

    @abstractmethod
    def _trace(self, state: T, layer: str) -> Tensor:
        """The trace of a layer's block of the Fisher matrix."""

    def _stacks(self, state: T, extras: Mapping[str, float]) -> list[Stack]:
        """Layers that are solved together, with what is added to the diagonal of each; the others one by one."""
        return []

    @abstractmethod
    def _layer_solver(self, state: T, layer: str, extra: float) -> Solve:
        """b -> (F_layer + extra I)^{-1} b for matrices b, (G, out, in)."""

    @abstractmethod
    def _uneven_solver(self, state: T, layer: str, ridge: LayerRidge, notes: dict[str, Any]) -> Solve:
        """b -> (F_layer + R)^{-1} b where ridge and damping R differ within the layer; how it went is noted at each
        solve.
        """

    @override
    def memory(self, theta: Variable) -> int:
        """Factors, twice while a batch is folded in, eigenvectors and what finding them takes, blocks, moments,
        three vectors.

        A solve with an uneven ridge holds a dozen more vectors, and separate bases.
        """
        size, factors, bases, blocks = self._numbers(theta)
        vectors = (3 + 2 * self.moments) * theta.numel
        kept = 0 if self.basis_dtype is None else self.basis_dtype.itemsize * sum(bases)  # beside those in all digits
        return kept + size * (2 * sum(factors) + sum(bases) + max(factors, default=0) + 3 * blocks + vectors)

    def kept(self, theta: Variable) -> int:
        """What stays while inner steps are taken: factors, eigenvectors, blocks, moments and the last x."""
        size, factors, bases, blocks = self._numbers(theta)
        if self.offload and theta.device.type != "cpu":
            return size * (blocks + theta.numel)
        digits = size if self.basis_dtype is None else self.basis_dtype.itemsize
        return size * (sum(factors) + blocks + (1 + self.moments) * theta.numel) + digits * sum(bases)

    def saved(self, theta: Variable, layers: Collection[str]) -> tuple[int, int]:
        """The bytes of input factors, and of what `kept` counts of them, of layers whose inputs are those of others."""
        size = (self.dtype or torch.promote_types(theta.dtype, torch.float32)).itemsize
        factors = bases = 0
        for names, layer in layer_shapes(theta).items():
            if names[0] in layers:
                wide, width = blocks(layer[2], self.largest, even=False) if layer[0] == 1 else (layer[0], layer[2])
                factors += wide * width**2
                bases += wide * width**2 if split(layer, self.largest) == layer else 0  # those of blocks are repeated
        if self.offload and theta.device.type != "cpu":
            return size * (2 * factors + bases), 0
        digits = size if self.basis_dtype is None else self.basis_dtype.itemsize
        beside = 0 if self.basis_dtype is None else digits * bases
        return size * (2 * factors + bases) + beside, size * factors + digits * bases

    def _numbers(self, theta: Variable) -> tuple[int, list[int], list[int], int]:
        """The bytes of a number, and the numbers in the factors and eigenvectors of each layer and in all blocks."""
        size = (self.dtype or torch.promote_types(theta.dtype, torch.float32)).itemsize
        layers = layer_shapes(theta)
        covered = {name for names in layers for name in names}
        factors, bases = [], []
        for layer in layers.values():
            groups, height, width = split(layer, self.largest)
            rows, wide = layer[1] // height, -(-layer[2] // width)
            factors.append(layer[0] * (wide * width**2 + rows * height**2))
            bases.append(groups * (width**2 + height**2))
        others = [n for name, n in zip(theta.names, theta.sizes, strict=True) if name not in covered]
        return size, factors, bases, sum(n**2 if n <= self.dense_limit else n for n in others)

    def warnings_for(self, theta: Variable) -> list[str]:
        """Which parameters are outside the layers, and what they get."""
        layers = layer_shapes(theta)
        if theta.root is None:
            return ["needs Linear or Conv2d modules, and theta is not a module"]
        if not layers:
            return ["needs a Linear or Conv2d layer, and there is none"]
        covered = {name for names in layers for name in names}
        others = {n: k for n, k in zip(theta.names, theta.sizes, strict=True) if n not in covered}
        kinds = {
            "dense blocks": [n for n, size in others.items() if size <= self.dense_limit],
            "a diagonal": [n for n, size in others.items() if size > self.dense_limit],
        }
        return [f"{kind} for {', '.join(names)}" for kind, names in kinds.items() if names]
