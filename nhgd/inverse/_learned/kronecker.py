"""Kronecker factors of every layer, learnt online: what K-FAC and EKFAC have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from math import ceil, sqrt
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from nhgd._recording.accounting import held
from nhgd.data_parallel import Team
from nhgd.errors import InputError, NonFiniteError, not_negative, positive
from nhgd.inverse._learned.damping import resolve_damping
from nhgd.inverse._learned.state import State
from nhgd.inverse._learned.statistics import check_invertible, check_statistics, merge, step_of_mean
from nhgd.inverse.base import AbstractInverse, Graphable, SolveStats
from nhgd.oracle import Oracle
from nhgd.record import (
    FisherKind,
    InnerRecord,
    LayerRecord,
    LayerStatistics,
    RecordKind,
    mean_over_team,
    observed_samples,
)
from nhgd.variable import Variable

K = TypeVar("K", bound="AbstractKronecker")
Solver: TypeAlias = Callable[[Tensor], Tensor]


class Basis(NamedTuple):
    """Eigenvectors, in columns, and eigenvalues of the two factors of one layer, for each of its G groups."""

    input_vectors: Tensor  # (G, in, in)
    input_values: Tensor  # (G, in)
    score_vectors: Tensor  # (G, out, out)
    score_values: Tensor  # (G, out)

    def rotate(self, matrix: Tensor) -> Tensor:
        """A gradient of the layer, (G, out, in), in the eigenbasis."""
        return self.score_vectors.mT @ matrix @ self.input_vectors

    def back(self, matrix: Tensor) -> Tensor:
        """The way back from the eigenbasis."""
        return self.score_vectors @ matrix @ self.input_vectors.mT


class BatchStatistics(NamedTuple):
    """What one batch adds: A, G times the mean weight, and that weight, by layer; and the blocks of other parameters."""

    layers: dict[str, tuple[Tensor, ...]]
    blocks: dict[str, Tensor]


@dataclass
class KroneckerState(State):
    """Running means over what was observed. A layer goes by the name of its weight.

    Attributes:
        starts, sizes: where each leaf of theta lies in the flat vector.
        mass: the total weight of the batches in the running means.
        observed: how many records were taken.
        inputs: A, (G, in, in): the mean over samples and places of w_i a a^T.
        scores: (G, out, out): the mean over samples of w_i g g^T, summed over places. G is this over `weights`.
        weights: the mean of w_i, 0-dimensional.
        biases: where the bias of a layer starts in the flat vector; a layer without bias has no entry.
        blocks: the Fisher matrix of each parameter outside the layers, (n, n), or its diagonal, (n,).
        bases: eigendecompositions, by layer and by field of `Basis`.
    """

    starts: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    mass: float = 0.0
    observed: int = 0
    inputs: dict[str, Tensor] = field(default_factory=dict)
    scores: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    biases: dict[str, int] = field(default_factory=dict)
    blocks: dict[str, Tensor] = field(default_factory=dict)
    bases: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def factors(self, layer: str) -> tuple[Tensor, Tensor]:
        """A, (G, in, in), and G, (G, out, out), which is 0 where all weights were 0."""
        weight = self.weights[layer]
        return self.inputs[layer], self.scores[layer] * torch.where(weight > 0, 1 / weight, 0.0)

    def gather(self, layer: str, vector: Tensor) -> Tensor:
        """The part of a flat vector (D,) that belongs to a layer, (G, out, in), the bias in its last column."""
        groups, out = self.scores[layer].shape[:2]
        bias = self.biases.get(layer)
        found = vector[self.place(layer)].reshape(groups, out, -1)
        if bias is None:
            return found
        return torch.cat([found, vector[bias : bias + groups * out].reshape(groups, out, 1)], dim=2)

    def place(self, name: str) -> slice:
        """Where a leaf lies in the flat vector."""
        return slice(self.starts[name], self.starts[name] + self.sizes[name])

    def scatter(self, layer: str, matrix: Tensor, vector: Tensor) -> None:
        """Write what `gather` gave back into a flat vector (D,)."""
        groups, out = self.scores[layer].shape[:2]
        bias = self.biases.get(layer)
        if bias is not None:
            vector[bias : bias + groups * out] = matrix[..., -1].reshape(-1)
            matrix = matrix[..., :-1]
        vector[self.place(layer)] = matrix.reshape(-1)


@dataclass(frozen=True)
class AbstractKronecker(AbstractInverse):
    """An inverse of the Fisher matrix, layer by layer, in or near the eigenbasis of two Kronecker factors."""

    damping: float | None = None
    beta: float | None = 0.95
    fisher: FisherKind = "empirical"
    factor_every: int = 1
    invert_every: int | None = None
    overhead: float | None = None
    dense_limit: int = 256
    dtype: torch.dtype | None = None
    invert_phase: int = 0

    def __post_init__(self) -> None:
        owner = type(self).__name__
        check_statistics(owner, self.damping, self.beta, self.fisher, self.dtype)
        not_negative(owner, dense_limit=self.dense_limit, invert_phase=self.invert_phase)
        for name in ("factor_every", "invert_every"):
            period = getattr(self, name)
            if period is not None and (not isinstance(period, int) or period < 1):
                raise InputError(f"{owner}: {name} must be a whole number of at least 1, got {period}.")
        if self.overhead is not None:
            positive(owner, overhead=self.overhead)
            own = {f.name: f.default for f in fields(self)}
            if (self.factor_every, self.invert_every) != (own["factor_every"], own["invert_every"]):
                raise InputError(
                    f"{owner}: overhead chooses factor_every and invert_every itself. Give either the overhead or the"
                    " periods."
                )

    @property
    def records(self) -> RecordKind | None:
        """Inputs and scores of the layers."""
        return "layer"

    @property
    def reduces(self) -> bool:
        """Factors are sums over samples."""
        return True

    @property
    def couples(self) -> bool:
        """Each layer and each parameter outside has a block of its own."""
        return False

    def needs_record(self, step: int) -> bool:
        """Every `factor_every`-th step."""
        return step % self.factor_every == 0

    def with_periods(self: K, inner_seconds: float, factor_seconds: float, invert_seconds: float) -> K:
        """A copy whose periods keep within `overhead`, which is then None, so that the copy can be given again.

        factor_seconds / factor_every + invert_seconds / invert_every <= overhead * inner_seconds

        Of all such pairs the one with the least factor_every + invert_every is taken, up to rounding. `invert_every`
        counts observations, of which there is one in `factor_every` steps, so the true overhead is at most this.

        Args:
            inner_seconds: what an inner step takes without a record.
            factor_seconds: what a record and its `observe` add to it, eigendecompositions left out.
            invert_seconds: what the eigendecompositions of all layers take.
        """
        owner = type(self).__name__
        if self.overhead is None:
            raise InputError(f"{owner}: with_periods needs overhead, the share of an inner step that may be spent.")
        positive(owner, inner_seconds=inner_seconds)
        not_negative(owner, factor_seconds=factor_seconds, invert_seconds=invert_seconds)
        allowed = self.overhead * inner_seconds
        both = sqrt(factor_seconds * invert_seconds)
        factor_every = max(1, ceil((factor_seconds + both) / allowed))
        while factor_seconds / factor_every >= allowed and factor_seconds > 0 and invert_seconds > 0:
            factor_every += 1  # rounding left nothing for the decompositions
        left = allowed - factor_seconds / factor_every
        invert_every = max(1, ceil(invert_seconds / left)) if invert_seconds > 0 else 1
        while invert_seconds > 0 and factor_seconds / factor_every + invert_seconds / invert_every > allowed:
            invert_every += 1
        return replace(self, factor_every=factor_every, invert_every=invert_every, overhead=None)

    def init(self, theta: Variable) -> KroneckerState:
        """Nothing observed."""
        places = theta.slices()
        return self._empty(
            starts={name: place.start for name, place in places.items()},
            sizes={name: place.stop - place.start for name, place in places.items()},
        )

    @abstractmethod
    def _empty(self, starts: dict[str, int], sizes: dict[str, int]) -> KroneckerState: ...

    @torch.no_grad()
    def observe(self, state: Any, record: InnerRecord, ready: BatchStatistics | None = None) -> Any:
        """Fold the batch, or its statistics where they are ready, into the running means; the given state stays as it was."""
        assert isinstance(record, LayerStatistics)
        if not record.layers and not state.inputs:
            raise InputError(
                f"{type(self).__name__} works on the inputs and scores of Linear and Conv2d layers, and no such layer holds"
                " a parameter of theta. Use fisher_window, which takes any model, or fisher_diagonal."
            )
        rate, mass = step_of_mean(state.mass, self.beta, observed_samples(record))
        batch, own_blocks = ready or self.statistics(state, record)
        inputs, scores, weights = ({name: three[i] for name, three in batch.items()} for i in range(3))
        new = replace(
            state,
            mass=mass,
            observed=state.observed + 1,
            inputs=merge(state.inputs, inputs, rate),
            scores=merge(state.scores, scores, rate),
            weights=merge(state.weights, weights, rate),
            biases=state.biases | {l.weight: state.starts[l.bias] for l in record.layers if l.bias is not None},
        )
        # A layer that a batch does not call is among its other parameters, with gradients of zero.
        covered = {*new.inputs, *(name for name, at in new.starts.items() if at in new.biases.values())}
        blocks, others = ({n: b for n, b in bs.items() if n not in covered} for bs in (state.blocks, own_blocks))
        new.blocks = merge(blocks, others, rate)
        return self._refreshed(state, new, record, rate)

    def graphable(self, state: Any, record: InnerRecord) -> Graphable | None:
        """The statistics of a batch, where no team has to sum them."""
        if not isinstance(record, LayerStatistics) or record.team is not None or not record.layers:
            return None

        def work(given: InnerRecord) -> BatchStatistics:
            assert isinstance(given, LayerStatistics)
            return self.statistics(state, given)

        return Graphable((), work)

    @torch.no_grad()
    def statistics(self, state: KroneckerState, record: LayerStatistics) -> BatchStatistics:
        """What the batch adds to the running means, of layers and of the parameters outside, over all workers.

        Of the state only the sizes of theta's leaves are used, so that this can be captured once and replayed.
        """
        layers: dict[str, tuple[Tensor, ...]] = {layer.weight: self._factors(layer, record) for layer in record.layers}
        blocks = self._blocks(state, record)
        if record.team is None:
            return BatchStatistics(layers, blocks)
        summed = iter(mean_over_team(record, [*(t for three in layers.values() for t in three), *blocks.values()]))
        return BatchStatistics(
            {name: tuple(next(summed) for _ in three) for name, three in layers.items()},
            {name: next(summed) for name in blocks},
        )

    @abstractmethod
    def _refreshed(self, before: Any, state: Any, record: LayerStatistics, rate: float) -> Any:
        """The state, whose factors hold the batch already, with all else brought up to date where due."""

    def _due(self, state: KroneckerState) -> bool:
        """Whether eigendecompositions are made at this observation: the first, and one in each period, at its phase."""
        period = self.invert_every
        return period is not None and (state.observed == 1 or (state.observed - self.invert_phase) % period == 0)

    def _precision(self, tensor: Tensor) -> torch.dtype:
        return self.dtype or torch.promote_types(tensor.dtype, torch.float32)

    def _factors(self, layer: LayerRecord, record: LayerStatistics) -> tuple[Tensor, Tensor, Tensor]:
        """This batch's A, its G times the mean weight, and the mean weight."""
        a = layer.inputs.to(self._precision(layer.inputs))  # (B, T, G, in)
        g = layer.scores.to(self._precision(layer.scores))  # (K, B, T, G, out)
        weight = torch.ones((), dtype=a.dtype, device=a.device)
        places = a.shape[1]
        if record.weights is not None:
            w = record.weights.to(a.dtype)
            a, weight = a * w.sqrt()[:, None, None, None], w.mean()
        a, g = a.flatten(0, 1).transpose(0, 1), g.flatten(0, 2).transpose(0, 1)  # (G, BT, in), (G, KBT, out)
        return a.mT @ a / (record.samples * places), g.mT @ g / record.samples, weight

    def _blocks(self, state: KroneckerState, record: LayerStatistics) -> dict[str, Tensor]:
        """This batch's Fisher matrix of each parameter outside the layers, dense or as a diagonal."""
        if record.other_rows is None:
            return {}
        found = {}
        parts = record.other_rows.split([state.sizes[name] for name in record.other_names], dim=1)
        for name, part in zip(record.other_names, parts, strict=True):
            rows = part.to(self._precision(part))
            dense = rows.shape[1] <= self.dense_limit
            found[name] = (rows.T @ rows if dense else rows.square().sum(0)) / record.samples
        return found

    @torch.no_grad()
    def decomposed(self, state: KroneckerState, layer: str) -> Basis:
        """The eigendecompositions of a layer's current factors."""
        (a, q_a), (g, q_g) = (eigenvalues(layer, factor) for factor in state.factors(layer))
        return Basis(q_a, a.clamp_min(0), q_g, g.clamp_min(0))  # below zero is rounding

    def decompositions(self, state: KroneckerState, layers: Iterable[str], team: Team | None) -> dict[str, Basis]:
        """`decomposed` for several layers. The workers of a team divide the factors among them, by the cube of their size."""
        names = list(layers)
        if team is None:
            return {layer: self.decomposed(state, layer) for layer in names}
        named = [(layer, factor) for layer in names for factor in state.factors(layer)]
        for layer, factor in named:
            check_finite(layer, factor)  # here, where all workers see it

        def packed(i: int) -> Tensor:
            values, vectors = eigenvalues(*named[i])
            return torch.cat([values.clamp_min(0)[:, None], vectors], dim=1)  # (G, 1 + n, n)

        likes = [factor.new_empty(len(factor), 1 + factor.shape[1], factor.shape[2]) for _, factor in named]
        owners = team.divide([len(factor) * float(factor.shape[1]) ** 3 for _, factor in named])
        found = [(t[:, 1:].contiguous(), t[:, 0].contiguous()) for t in team.exchange(likes, owners, packed)]
        return {name: Basis(*found[2 * i], *found[2 * i + 1]) for i, name in enumerate(names)}

    def solve(self, state: Any, u: Tensor, at: Oracle, start: Tensor | None = None) -> tuple[Tensor, SolveStats]:
        """Layer by layer, then the parameters outside."""
        apply, notes = self._prepared(state, at)
        return apply(u), SolveStats(None, 0, True, notes)

    def operator(self, state: Any, at: Oracle) -> Callable[[Tensor], Tensor]:
        """u -> x, with the eigendecompositions made once."""
        return self._prepared(state, at)[0]

    @torch.no_grad()
    def _prepared(self, state: Any, at: Oracle) -> tuple[Callable[[Tensor], Tensor], dict[str, Any]]:
        """All of a solve that does not need its right-hand side, and the notes on it."""
        if state.observed == 0:
            raise InputError(
                f"{type(self).__name__} has observed no inner step yet, so there is nothing to invert. Run an inner step"
                " first, or give inner_data."
            )
        number = at.problem.ridge_number()  # then nothing is asked of a device, which may be busy for long
        ridge = at.problem.ridge_diagonal() if number is None else number
        low, high = (ridge, ridge) if isinstance(ridge, float) else (float(r) for r in ridge.aminmax())
        damping = resolve_damping(self.damping, ridge, lambda: self.mean_diagonal(state))
        notes: dict[str, Any] = {"damping": damping}
        layers: dict[str, Solver] = {}
        for layer in state.inputs:
            mean = low
            if isinstance(ridge, Tensor) and low != high:
                own = state.gather(layer, ridge)
                mean = float(own.mean())
                if bool((own != own.flatten()[0]).any()):
                    notes["ridge"] = "averaged over layers"
            layers[layer] = self._layer_solver(state, layer, mean + damping)
        blocks: dict[str, Solver] = {}
        for name, block in state.blocks.items():
            notes.setdefault("others", {})[name] = "dense" if block.ndim == 2 else "diagonal"
            if isinstance(ridge, float):
                extra = block.new_full((len(block),), ridge) + damping
            else:
                extra = ridge[state.place(name)].to(block.dtype) + damping
            blocks[name] = _block_solver(type(self).__name__, name, block, extra)

        @torch.no_grad()
        def apply(u: Tensor) -> Tensor:
            x = torch.zeros_like(u)
            for layer, solver in layers.items():
                b = state.gather(layer, u).to(state.inputs[layer].dtype)
                state.scatter(layer, solver(b).to(u.dtype), x)
            for name, solver in blocks.items():
                place = state.place(name)
                x[place] = solver(u[place].to(state.blocks[name].dtype)).to(u.dtype)
            return x

        return apply, notes

    def mean_diagonal(self, state: KroneckerState) -> float:
        """The mean diagonal entry of F over the whole model."""
        layers = sum(float(self._trace(state, layer)) for layer in state.inputs)
        blocks = sum(float(b.trace() if b.ndim == 2 else b.sum()) for b in state.blocks.values())
        return (layers + blocks) / sum(state.sizes.values())

    @abstractmethod
    def _trace(self, state: Any, layer: str) -> Tensor:
        """The trace of a layer's block of the Fisher matrix."""

    @abstractmethod
    def _spectrum(self, state: Any, layer: str) -> tuple[Basis, Tensor]:
        """The eigenbasis of a layer's block, and its eigenvalues, (G, out, in)."""

    def _layer_solver(self, state: Any, layer: str, extra: float) -> Solver:
        """b -> (F_layer + extra I)^{-1} b for matrices b, (G, out, in)."""
        basis, values = self._spectrum(state, layer)
        values = values + extra
        if not extra > 0:
            check_invertible(type(self).__name__, layer, values)
        return lambda b: basis.back(basis.rotate(b) / values)

    def memory(self, theta: Variable) -> int:
        """Factors, twice while a batch is folded in, eigenvectors and what finding them takes, blocks, three vectors."""
        size = (self.dtype or torch.promote_types(theta.dtype, torch.float32)).itemsize
        layers = layer_shapes(theta)
        covered = {name for names in layers for name in names}
        factors = [groups * (columns**2 + out**2) for groups, out, columns in layers.values()]
        others = [n for name, n in zip(theta.names, theta.sizes, strict=True) if name not in covered]
        blocks = sum(n**2 if n <= self.dense_limit else n for n in others)
        return size * (3 * sum(factors) + max(factors, default=0) + 3 * blocks + 3 * theta.numel)

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


def _block_solver(owner: str, name: str, block: Tensor, extra: Tensor) -> Solver:
    """b -> (F + diag(extra))^{-1} b for a parameter outside the layers, F dense, (n, n), or diagonal, (n,)."""
    lowest = extra.min()
    if block.ndim == 1:
        entries = block + extra
        if not lowest > 0:
            check_invertible(owner, name, entries)
        return lambda b: b / entries
    values, vectors = eigenvalues(name, block + torch.diag(extra))
    if not lowest > 0:
        check_invertible(owner, name, values)
    values = values.clamp_min(lowest)  # below it is rounding
    return lambda b: vectors @ ((vectors.T @ b) / values)


def check_finite(name: str, matrix: Tensor) -> None:
    """Refuse to decompose what holds nan or inf."""
    if not bool(torch.isfinite(matrix).all()):
        raise NonFiniteError(f"The statistics of {name!r} hold nan or inf, so an inner step did. Lower its step size.")


def eigenvalues(name: str, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of symmetric statistics."""
    check_finite(name, matrix)
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except RuntimeError:
        # A GPU's solver can fail on many equal eigenvalues, such as those of pixels that are always the same.
        values, vectors = (t.to(matrix) for t in torch.linalg.eigh(matrix.double().cpu()))
    return values, vectors.contiguous()  # column by column as LAPACK leaves them, they could not be saved


def layer_shapes(theta: Variable) -> dict[tuple[str, ...], tuple[int, int, int]]:
    """(groups, out, in), the column of a bias included, of each layer by the names of its weight and bias.

    Without a module, every tensor of two or more dimensions is taken for the weight of a layer without bias.
    """
    if theta.root is None:
        return {
            (name,): (1, leaf.shape[0], leaf.numel() // max(1, leaf.shape[0]))
            for name, leaf in zip(theta.names, theta.leaves, strict=True)
            if leaf.ndim in (2, 4)
        }
    names = {id(leaf): name for name, leaf in zip(theta.names, theta.leaves, strict=True)}
    found: dict[tuple[str, ...], tuple[int, int, int]] = {}
    for module in theta.root.modules():
        weight = held(module, "weight") if isinstance(module, (nn.Linear, nn.Conv2d)) else None
        if weight is not None and id(weight) in names:
            pair = tuple(names[id(t)] for t in (weight, held(module, "bias")) if id(t) in names)
            groups = module.groups if isinstance(module, nn.Conv2d) else 1
            out, columns = weight.shape[0], weight[0].numel()
            found[pair] = (groups, out // groups, columns + len(pair) - 1)
    return found
