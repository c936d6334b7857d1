"""How a record is made: an inner step watched while it computes its gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from nhgd import _tape as tape
from nhgd._recording.accounting import Call, LayerCall, Scores, shared_inputs
from nhgd._recording.fisher_roots import FisherRoots
from nhgd._recording.leaf_call import LeafCall
from nhgd._recording.normalisation import NormCall, signs, summed_rows
from nhgd._recording.other_rows import OtherRows
from nhgd._recording.sampling import Sampling, counts_of
from nhgd._recording.streaming import Arrivals, Fold, LayerParts, Products, Taker
from nhgd._recording.taps import TappedPass, Taps, scale_of
from nhgd._recording.verification import Verification
from nhgd.data.batch import Batch
from nhgd.errors import InputError
from nhgd.losses import Losses
from nhgd.objective import Objective, OracleCalls, Pass, Tap, repeated
from nhgd.problem import Bilevel
from nhgd.record import (
    BatchGradient,
    Convolution,
    FisherKind,
    FoldedLayer,
    InnerRecord,
    InnerStep,
    LayerRecord,
    LayerStatistics,
    PerSampleGradients,
    RecordKind,
    Reduction,
)

SeedRule: TypeAlias = Callable[[Losses], tuple[Losses, Tensor | None]]


class Recorder(Tap):
    """Makes the record that an inverse needs of an inner step, from the passes that give its gradient.

    Args:
        problem: the problem.
        kind: of record: "batch", "raw", "sample" or "layer".
        fisher: of Fisher matrix: "empirical", "exact", "sampled" or "auto"; see `FisherRoots`. "exact" and "sampled"
            need `Losses.outputs` and a likelihood, and are not defined for "batch" and "raw".
        calls: counts the passes of `step`.
        couples: whether products of the rows of different layers matter. If so, all rows come from the same pass, with
            the same dropout, and BatchNorm in training mode is refused. Otherwise rows of parameters outside Linear and
            Conv2d may come from a separate pass, and BatchNorm is learnt from the scores of the batch objective.

    Attributes:
        batch_objective: whether the last record contained BatchNorm in training mode.

    Rows are sqrt(w_i) s_i with s_i the gradient of l_i alone: weights that depend on theta are constant in them, but
    not in the gradient of the inner step.

    At each record the graph shows which parameters the layers account for; the others, and weights that are also used
    outside of their layer, get separate rows. `Verification` decides when that is checked numerically.
    """

    def __init__(
        self,
        problem: Bilevel,
        kind: RecordKind,
        fisher: FisherKind = "empirical",
        calls: OracleCalls | None = None,
        couples: bool = True,
    ) -> None:
        self.problem = problem
        self.kind = kind
        self.roots = FisherRoots(fisher, problem.likelihood, kind)
        self.couples = couples or kind == "sample"
        self.calls = OracleCalls() if calls is None else calls
        per_sample = kind in ("layer", "sample")
        self.batch_objective = False
        self.taps = Taps(
            problem,
            per_sample,
            self.roots.likelihood is not None,
            per_sample and self.couples,
            per_sample and not self.couples,
        )
        self.verification = Verification(self.taps)
        self.others = OtherRows(problem, self.taps, self.couples)
        self.sampling: Sampling | None = None  # how much the next record of layers takes; None: everything
        self.streams = False  # whether records take what they want of layers where the scores arrive
        self.fold: Fold | None = None  # what the next record keeps of each layer that is taken in full; None: all of it

    def memory(self) -> dict[str, Any]:
        """What later records depend on, as plain values."""
        alone = self.others.alone
        found = {"slow": alone.slow, "noisy": alone.noisy, "batch_objective": self.batch_objective}
        return self.verification.memory() | found | self.roots.memory()

    def recall(self, memory: Mapping[str, Any]) -> None:
        """Go on as the recorder that had this memory."""
        self.verification.recall(memory)
        self.others.alone.slow, self.others.alone.noisy = bool(memory["slow"]), bool(memory["noisy"])
        self.batch_objective = bool(memory["batch_objective"])
        self.roots.recall(memory)

    def step(self, batch: Batch) -> InnerStep:
        """The inner gradient on a batch, at the problem's current theta and v, with its record."""
        return Objective(self.problem, batch).step(self, self.calls)

    @override
    def passed(self, problem: Bilevel, batch: Batch) -> TappedPass:
        """One forward and one backward pass over a batch, with verification of new layers."""
        return self.watched(batch)

    def watched(
        self,
        batch: Batch,
        weighing: SeedRule | None = None,
        gradient: bool = True,
        along: Sequence[Tensor] | None = None,
        recording: bool = True,
    ) -> TappedPass:
        """The same with seeds: `weighing` turns losses with a graph in v into seeds of the backward pass.

        A loss whose seed is not zero has scores that show its gradient, even if its weight is 0. Without `gradient`,
        only the scores are computed, if they suffice.

        Args:
            along: a vector whose products with the scores are taken where these arrive, if they can be.
            recording: whether a record will be made of the pass.
        """
        if self.taps.layers:
            self.verification.before_record()
        found = repeated(
            self.problem, lambda: self._watched(batch, weighing, gradient, along, recording), TappedPass.arrived
        )
        if found.due:
            self.verification.verify(found, batch)
        self.verification.note(found, found.data if found.own is None else found.own)
        return found

    def _watched(
        self,
        batch: Batch,
        weighing: SeedRule | None,
        gradient: bool,
        along: Sequence[Tensor] | None,
        recording: bool,
    ) -> TappedPass:
        """The pass, before its layers are verified if that is still due."""
        found = self.taps.forward(batch, in_v=weighing is not None)
        self.problem.note_weights(found.losses)
        if weighing is not None and not found.batch_objective:
            found.losses, found.seeds = weighing(found.losses)
        # Of a large model, layers are verified before, on a few samples; else afterwards, when the graph is gone.
        due = self.verification.is_due(found)
        before = due and self.problem.few(batch) is not None
        if before:
            self.verification.verify(found, batch)
        needed = gradient or not found.is_plain
        keep = gradient and self._needs_graph(found)
        found.due = due and not before
        arrivals = None if found.due else self._arrivals(found, needed, along, recording)
        self._differentiate(found, keep, needed, arrivals)
        return found

    def _arrivals(
        self, found: TappedPass, gradient: bool, along: Sequence[Tensor] | None, recording: bool
    ) -> Arrivals | None:
        """The calls whose scores are used where they arrive in the pass that gives the gradient; None: all are held.

        They are held in steps that are captured, if the code of some module is unknown, if one layer is called several
        times, and if a record takes whole inputs and scores.
        """
        if tape.tape() is not None or not found.is_plain or self._constant(found) is not None:
            return None
        samples = len(found.losses.values)
        if not all(call.fits_samples(samples) for call in found.calls):
            return None
        in_calls, takers = list(range(len(found.calls))), list[Taker]()
        roots = recording and self.roots.likelihood is not None and found.losses.outputs is not None
        if along is not None:
            covered = {n for call in found.calls for n in (call.weight, call.bias)} | found.native
            if found.seeds is None or not covered.issuperset(self.problem.theta.names) or found.batch_objective:
                return None  # scores do not suffice, or are not those of single losses
            found.products = Products(found, dict(zip(self.problem.theta.names, along, strict=True)))
            takers.append(found.products.take)
        if recording and not roots:
            scale = scale_of(found.losses, batch_objective=found.batch_objective)
            parts = self._parts(found, scale)
            if parts is None:
                found.products = None
                return None
            takers.append(parts.take)
        if not takers:
            return None
        of_leaves = [] if recording else list(range(found.of_leaves.start, len(found.edges)))
        return Arrivals(found, [*in_calls, *of_leaves], takers, gradient, not roots, self.problem.scaling)

    def _parts(self, found: TappedPass, scale: Tensor) -> LayerParts | None:
        """What a record takes of each layer where its score arrives; None if that is the whole."""
        if not self.streams or self.kind != "layer" or (self.sampling is None and self.fold is None):
            return None
        names = [call.weight for call in found.calls]
        if len(set(names)) < len(names):
            return None
        apart = self.verification.unaccounted | found.outside_layers
        accounted = [not apart & {call.weight, call.bias} for call in found.calls]
        if not all(accounted) and found.native & {n for call in found.calls for n in (call.weight, call.bias)}:
            return None  # rows of a weight that an embedding shares come from the layer's whole score
        drawn = None
        if self.sampling is not None:
            calls = [call for call, good in zip(found.calls, accounted, strict=True) if good]
            counts = [counts_of(Convolution.of(call.module), [call.output_shape]) for call in calls]
            drawn = self.sampling.drawn(len(scale), None, counts, shared_inputs(calls))
        weights = None if found.losses.weights is None else found.losses.weights.detach()
        found.parts = LayerParts(self.taps, found.calls, accounted, scale, weights, drawn, self.fold)
        return found.parts

    def passed_already(self, losses: Losses, calls: Sequence[Call | NormCall | LeafCall]) -> TappedPass:
        """The same for losses that were computed before, from the calls of layers noted then. Their graph is kept.

        It is verified in place, because it cannot be computed again; rows that layers do not provide come from a
        backward pass for each sample.
        """
        if self.taps.layers:
            self.verification.before_record()
        found = self.taps.seen(losses, calls, drawn=True)
        self.problem.note_weights(losses)
        self.verification.verify(found, None)
        scaling = self.problem.scaling
        scaling.taken(lambda: self._differentiate(found, keep=True), lambda _: [*found.data, *found.arrived()])
        self.verification.note(found, found.data if found.own is None else found.own)
        return found

    def _differentiate(
        self, found: TappedPass, keep: bool, gradient: bool = True, arrivals: Arrivals | None = None
    ) -> None:
        """The gradient of the mean loss and the scores of the layers, from a single backward pass if possible."""
        value = found.losses.mean()
        leaves, constant = self.problem.theta.leaves, self._constant(found)
        only_scores = found.seeds is not None and not gradient
        if only_scores or constant is None:
            source = value if found.seeds is None else found.losses.values
            wrt: Sequence[Any] = () if only_scores else leaves
            found.data = [None] * len(leaves)
            edges = found.edges if arrivals is None else arrivals.edges
            given: Sequence[Tensor | None] = ()
            if wrt or edges:
                with nullcontext() if arrivals is None else arrivals.awaited():
                    given = self.problem.scaling.grad_once(
                        source, (*wrt, *edges), found.seeds, allow_unused=True, retain_graph=keep or None
                    )
            if wrt:
                found.data = list(given[: len(leaves)])
            found.scores = given[len(wrt) :] if arrivals is None else arrivals.kept(given[len(wrt) :])
        else:
            scaling = self.problem.scaling
            found.data = list(scaling.grad_once(value, leaves, allow_unused=True, retain_graph=True))
            self._hold_constant(found, constant, keep)
        found.value = value.detach()

    def _needs_graph(self, found: TappedPass) -> bool:
        """Whether the graph is needed after the gradient: for the roots of a likelihood, or for rows of this very
        pass.
        """
        if self.roots.likelihood is not None or not (self.taps.layers and (self.couples or found.batch_objective)):
            return self.roots.likelihood is not None
        others, unaccounted = self.others.alone, found.outside_layers | self.verification.unaccounted
        plain = {name for call in found.calls if call.is_plain for name in (call.weight, call.bias)} - unaccounted
        plain |= found.normalised | found.native
        covered = plain.issuperset(self.problem.theta.names) and not self.verification.is_due(found)
        return not covered and (found.batch_objective or found.drawn or others.noisy or not others.compared)

    def _constant(self, found: TappedPass) -> Tensor | None:
        """What to take scores of if not the mean loss: the mean with constant weights, if they depend on theta.

        In the batch objective a sample's score is not its weight times something, so the roots of the weights are put
        in.
        """
        losses, weights = found.losses, found.losses.weights
        if self._takes_roots(found) and self.verification.likely:
            return None
        if found.batch_objective and weights is not None:
            return replace(losses, weights=weights.detach().sqrt()).mean()
        if self.kind == "raw" or weights is None or not weights.requires_grad or not self.taps.uses_theta(weights):
            return None
        return replace(losses, weights=weights.detach()).mean()

    def _takes_roots(self, found: TappedPass) -> bool:
        """Whether only the scores of the likelihood's roots are needed, provided the likelihood fits the losses."""
        return self.roots.likelihood is not None and all(call.is_plain for call in found.calls)

    def _hold_constant(self, found: TappedPass, constant: Tensor, keep: bool) -> None:
        """Scores, and the gradient they are a part of, of the mean loss with constant weights."""
        leaves = self.problem.theta.leaves
        given: Sequence[Tensor | None] = [None] * (len(leaves) + len(found.edges))
        if constant.requires_grad:
            wrt: Any = (*leaves, *found.edges)
            keep = keep or self.problem.scaling.active
            given = self.problem.scaling.grad_once(constant, wrt, allow_unused=True, retain_graph=keep or None)
        found.own, found.scores = list(given[: len(leaves)]), given[len(leaves) :]
        found.passes += not self._takes_roots(found)  # otherwise only the first record takes them, as a fallback

    @override
    def agree(self, reduction: Reduction) -> None:
        """Adopt the parameters that other workers saw outside of layers."""
        verification, names = self.verification, self.problem.theta.names
        verification.unaccounted = reduction.union(verification.unaccounted, names)

    @override
    def record(
        self, batch: Batch, found: Pass, gradient: Sequence[Tensor], reduction: Reduction | None = None
    ) -> InnerRecord:
        """The record of a pass; without a batch, from its graph alone."""
        assert isinstance(found, TappedPass)
        theta, losses = self.problem.theta, found.losses
        here = losses.values.shape[0]
        samples = (here if reduction is None else reduction.total(here)) or 1
        if self.kind == "raw":
            return BatchGradient(None, _kept(theta.flatten(gradient), gradient), samples)
        if self.kind == "batch":
            weight = _common_weight(losses, reduction)
            row = theta.flatten(self._constant_gradient(found, reduction))
            return BatchGradient(row * (0.0 if weight == 0 else (samples / weight) ** 0.5), None, samples)
        seeds, columns = self._columns(found, reduction)
        self.batch_objective = found.batch_objective
        scale = self._scale_of(found, seeds)
        folded: list[FoldedLayer] = []
        if found.parts is None:
            layers = self.verification.accounted(self.taps.layer_records(found.calls, columns, scale))
        else:
            layers, folded = found.parts.layers()
        known_layers: Sequence[LayerRecord | FoldedLayer] = [*layers, *folded]
        covered = {name for layer in known_layers for name in (layer.weight, layer.bias)}
        others = tuple(name for name in theta.names if name not in covered)
        rows = self.others.rows(batch, found, others, seeds, columns, scale) if others else None
        weights = None if losses.weights is None else losses.weights.detach()
        if self.kind == "layer":
            self.verification.check_recorded(known_layers)
            whole = LayerStatistics(
                tuple(layers), others, rows, weights, here, reduction, found.batch_objective, tuple(folded)
            )
            if found.parts is not None and found.parts.drawn is not None:
                return found.parts.drawn.rest(whole)
            return whole if self.sampling is None or folded else self.sampling.of(whole)
        return PerSampleGradients(self._joined(layers, others, rows), here, reduction)

    def of_layers(self, seen: Sequence[tuple[LayerCall | NormCall, Tensor]]) -> InnerRecord:
        """The record of a loss of which only the layers are known; it is taken to be a mean over samples."""
        self.roots.fall_back()
        if self.roots.likelihood is not None:
            raise InputError(
                f"fisher='{self.roots.fisher}' needs the model's outputs, which backward() alone does not provide."
                " Take the loss from inner(batch), or pass observe() the losses of the samples with their outputs."
            )
        self.verification.before_record()
        pairs = [(call, score) for call, score in seen if isinstance(call, LayerCall)]
        norms = [(call, [score]) for call, score in seen if isinstance(call, NormCall)]
        first = pairs[0][0] if pairs else seen[0][0]
        samples = first.input.shape[0]
        scale = scale_of(Losses(first.input.new_zeros(samples, dtype=self.problem.theta.dtype)))
        layers = self.taps.layer_records([call for call, _ in pairs], [[score for _, score in pairs]], scale)
        covered = {name for layer in layers for name in (layer.weight, layer.bias)}
        others = tuple(name for name in self.problem.theta.names if name not in covered)
        known = summed_rows([(norm, score) for norm, score in norms if norm.gives_rows(samples)], scale)
        untold = [name for name in others if name not in known]
        if untold:
            raise InputError(
                f"{untold[0]!r} belongs to no Linear or Conv2d layer that was called, so backward() alone does not"
                " show its curvature. Take the loss from inner(batch), or pass observe() the losses of the samples."
            )
        if self.kind == "layer":
            rows = torch.cat([known[name] for name in others], dim=1) if others else None
            return LayerStatistics(tuple(layers), others, rows, None, samples, batch_objective=bool(norms))
        return PerSampleGradients(self._joined(layers, (), None), samples)

    def _constant_gradient(self, found: TappedPass, reduction: Reduction | None) -> Sequence[Tensor | None]:
        """The gradient with constant weights on the whole batch."""
        if found.own is None or reduction is None:
            return found.data if found.own is None else found.own
        pairs = zip(found.own, self.problem.theta.leaves, strict=True)
        return reduction.mean([torch.zeros_like(p) if g is None else g for g, p in pairs])

    def _columns(self, found: TappedPass, reduction: Reduction | None) -> tuple[Tensor | None, list[Scores]]:
        """The roots of the likelihood in output space, (K, B, ...), or None; and the scores of each, or of the
        losses.
        """
        losses, scaling = found.losses, self.problem.scaling
        if losses.outputs is None:
            self.roots.fall_back()
        likelihood = self.roots.likelihood
        if likelihood is None:
            return None, [found.scores]
        with torch.enable_grad():
            outputs = losses.outputs_for(f"fisher='{self.roots.fisher}'")
            try:
                self.verification.check_likelihood(likelihood, outputs, losses)
            except InputError:
                if not self.roots.fall_back():
                    raise
                return None, [found.scores]
            seeds = self.roots.of(outputs, losses.values, reduction).detach().to(outputs.dtype)
            if not found.edges:
                return seeds, [found.scores]
            found.passes += len(seeds)
            along = seeds
            if found.batch_objective:
                factors = signs(*seeds.shape[:2], seeds.device).to(seeds.dtype)
                if losses.weights is not None:
                    factors = factors * losses.weights.detach().sqrt().to(seeds.dtype)
                along = seeds * factors.reshape(*factors.shape, *[1] * (seeds.ndim - 2))
            arrivals = None
            if reduction is None and len(along) == 1 and found.is_plain and tape.tape() is None:
                parts = self._parts(found, self._scale_of(found, seeds))
                if parts is not None:
                    arrivals = Arrivals(
                        found, range(len(found.calls)), [parts.take], False, not scaling.active, scaling
                    )
            if arrivals is not None:
                return seeds, [self._awaited(arrivals, outputs, along[0], parts)]
            part, edges = self._part(seeds), found.edges
            return seeds, [
                scaling.grad(outputs, edges, seed, retain_graph=True, part=part, allow_unused=True) for seed in along
            ]

    def _part(self, seeds: Tensor | None) -> int:
        """What roots are divided by in their pass: a scale suits the mean loss, of which a sample is but a part."""
        return 1 if seeds is None or not self.problem.scaling.active else seeds.shape[1]

    def _scale_of(self, found: TappedPass, seeds: Tensor | None) -> Tensor:
        scale, part = scale_of(found.losses, seeds is not None, found.batch_objective), self._part(seeds)
        return scale if part == 1 else scale * part

    def _awaited(self, arrivals: Arrivals, outputs: Tensor, seed: Tensor, parts: LayerParts | None) -> Scores:
        """The scores of a root, used where they arrive."""

        def once() -> list[Tensor | None]:
            with arrivals.awaited():
                given = self.problem.scaling.grad_once(
                    outputs, arrivals.edges, seed, True, part=self._part(seed[None]), allow_unused=True
                )
            return arrivals.kept(given)

        taken = self.problem.scaling.taken
        return taken(once, lambda found: [*found, *(() if parts is None else parts.tensors())])

    def _joined(self, layers: Sequence[LayerRecord], others: tuple[str, ...], rows: Tensor | None) -> Tensor:
        """The rows of all parameters, (K B, D)."""
        theta, shapes = self.problem.theta, self.taps.shapes
        pieces: dict[str, Tensor] = {}
        for layer in layers:
            pieces[layer.weight], bias = layer.rows()
            if layer.bias is not None and bias is not None:
                pieces[layer.bias] = bias
        if rows is not None:
            pieces |= dict(zip(others, rows.split([shapes[name].numel() for name in others], dim=1), strict=True))
        ordered = [pieces[name].to(torch.promote_types(theta.dtype, torch.float32)) for name in theta.names]
        return ordered[0] if len(ordered) == 1 else torch.cat(ordered, dim=1)


def _common_weight(losses: Losses, reduction: Reduction | None) -> float:
    """The weight that all samples of a batch have."""
    if losses.weights is None:
        return 1.0
    low, high = float(losses.weights.min()), float(losses.weights.max())
    if reduction is not None:
        low, high = reduction.extremes(low, high)
    if low < 0:
        raise InputError(f"A weight is {low:.3g}. Weights must be at least 0.")
    if high - low > 1e-6 * max(abs(high), 1e-12):
        raise InputError(
            f"The weights of a batch differ (from {low:.3g} to {high:.3g}), and the batch gradient alone would square"
            " them. Use per-sample records (records='sample'), or an inverse such as kfac."
        )
    return high


def _kept(flat: Tensor, gradient: Sequence[Tensor]) -> Tensor:
    """A flat gradient in memory of its own: an optimiser may use the one it is given as scratch."""
    return flat.clone() if len(gradient) == 1 else flat
