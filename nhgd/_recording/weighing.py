"""The cross derivative if v only weighs samples or moves the ridge.

    (d2_{theta,v} l)^T x  =  (1/B) sum_i (dw_i/dv) <s_i, x>  +  sum( (dl2/dv) 2 theta x ),      s_i the gradient of l_i

No gradient is differentiated: the numbers <s_i, x> are constants, and the graph from v to the weights is small. In an
inner step they come from the inputs and scores of its layers, by one more product for each layer,

    <s_i, x> = sum_t <score_it, X a_it + x_b>        over all Linear and Conv2d layers, X and x_b their parts of x

and otherwise from a pass in forward mode, which supports any parameters, and samples that influence each other. Every
batch is checked for other uses of v; if there are any, the gradient is differentiated in the general way.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from typing_extensions import override

from nhgd import _tape as tape
from nhgd._randomness import set_states, states
from nhgd._recording.accounting import walked
from nhgd._recording.normalisation import normalises_by_batch
from nhgd._recording.recorder import Recorder
from nhgd._recording.streaming import Products
from nhgd._recording.taps import TappedPass
from nhgd.data.batch import Batch
from nhgd.errors import InputError
from nhgd.losses import Losses
from nhgd.objective import Objective, OracleCalls, Pass, Tap, twice_differentiable
from nhgd.problem import Bilevel
from nhgd.record import InnerRecord, Reduction

FAINT = 1e-20  # of the largest weight: a seed too small to change a sum, from which the gradient of its sample can still be recovered
FAINTEST = 1e-30  # the least seed whose scores are ordinary numbers of float32 and bfloat16
Source: TypeAlias = Literal["scores", "forward", "graph"]
Terms: TypeAlias = "list[Tensor | None]"


class Weighing:
    """Takes cross derivatives from plain passes over a problem's batches.

    Args:
        problem: the problem.
        recorder: that of the run's inner steps, whose passes also serve; None where nothing is recorded.
    """

    def __init__(self, problem: Bilevel, recorder: Recorder | None = None) -> None:
        self.problem = problem
        self.recorder = Recorder(problem, "layer") if recorder is None else recorder
        root = problem.theta.root
        # As far as was seen; otherwise a row of scores is not of one loss alone.
        self.independent = root is None or not any(normalises_by_batch(module) for module in root.modules())
        self._forward: Literal["untried", "loaded", "fails"] = "untried"
        self._names = {id(leaf): name for name, leaf in zip(problem.v.names, problem.v.leaves, strict=True)}

    def holds(self, losses: Losses) -> bool:
        """Whether v enters these losses through their weights alone, and the weights are constant in theta."""
        weights = losses.weights
        if self.reaches_v(losses.values):
            return False
        return weights is None or not weights.requires_grad or not self.recorder.taps.uses_theta(weights)

    def reaches_v(self, tensor: Tensor) -> bool:
        """Whether v has a part in how it was computed."""
        return id(tensor) in self._names or bool(walked((tensor,), (), self._names).uses)

    def cross(
        self, objective: Objective, calls: OracleCalls | None = None, at_once: bool = True
    ) -> Callable[[Tensor], tuple[list[Tensor], Source]]:
        """The pass over a batch, for the cross derivative, transposed, times any x: one tensor for each leaf of v.

        What is returned, ridge included, is of the theta where the pass was taken; with it, where <s_i, x> came from. A
        pass that is not taken `at_once`, but when x is known, holds no scores.
        """
        problem = self.problem
        tap = CrossTap(self, None, recording=False)
        theta = [leaf.detach().clone() for leaf in problem.theta.leaves] if callable(problem.l2) else []
        if at_once:
            with objective.drawing(twice=False), torch.enable_grad():
                tap.look(problem, objective.batch)
            objective.count(calls)

        def times(x: Tensor) -> tuple[list[Tensor], Source]:
            along = problem.theta.unflatten(x)
            with objective.drawing(twice=False), torch.enable_grad():
                if not at_once:
                    tap.look(problem, objective.batch, along)
                    objective.count(calls)
                tap.multiply(problem, objective.batch, along)
                terms = self.from_graph(objective, along) if tap.terms is None else tap.terms
            found = objective.summed([], [t * objective.share for t in self.filled(terms)])
            ridge = self.ridge(theta, along)
            return [f if r is None else f + r for f, r in zip(found, ridge, strict=True)], tap.source

        return times

    def from_graph(self, objective: Objective, along: Sequence[Tensor]) -> Terms:
        """The mean over the samples here, without the ridge, by differentiating the gradient; in the setting of a
        pass.
        """
        with torch.enable_grad(), self.problem.kernels(), twice_differentiable():
            value, leaves = objective.losses().mean(), self.problem.theta.leaves
            gradient = self.problem.scaling.grad(value, leaves, create_graph=True, materialize_grads=True)
        return list(objective.pull_back(gradient, along, self.problem.v.leaves))

    def in_forward_mode(self, batch: Batch, along: Sequence[Tensor]) -> Terms | None:
        """The mean over the samples here, without the ridge, by one pass in forward mode; None if that is impossible.

        Only v has a graph in this pass, so that losses which have one show that v enters them, and weights which have a
        tangent that they depend on theta.
        """
        if self._forward == "fails":
            return None
        try:
            return self._in_forward_mode(batch, along)
        except (RuntimeError, TypeError, ValueError) as error:  # an operation may have no derivative of this kind
            if isinstance(error, InputError):
                raise
        if self._forward == "untried":
            # torch has some more such derivatives, which take a second to load.
            self._forward = "loaded"
            with warnings.catch_warnings(), forward_ad.dual_level():
                warnings.simplefilter("ignore", DeprecationWarning)
                forward_ad.make_dual(torch.zeros(1), torch.zeros(1))
            return self.in_forward_mode(batch, along)
        self._forward = "fails"
        return None

    def _in_forward_mode(self, batch: Batch, along: Sequence[Tensor]) -> Terms | None:
        problem = self.problem
        with torch.enable_grad(), forward_ad.dual_level():
            along, size = problem.scaling.sized(along)
            pairs = zip(problem.theta.leaves, along, strict=True)
            theta = [torch._make_dual(leaf.detach(), x.contiguous(), level=0) for leaf, x in pairs]
            losses = problem.losses(batch, theta, problem.v.leaves)
            values = forward_ad.unpack_dual(losses.values)
            if values.primal.requires_grad:
                return None
            if losses.weights is None:
                return [None] * len(problem.v.leaves)
            weights = forward_ad.unpack_dual(losses.weights)
            if weights.tangent is not None and bool(weights.tangent.ne(0).any()):
                return None
            tangent = torch.zeros_like(values.primal) if values.tangent is None else values.tangent
            products = tangent.detach().to(torch.promote_types(tangent.dtype, torch.float32))
            return self.pulled(weights.primal, products if size is None else products * size)

    def from_scores(self, found: TappedPass, along: Sequence[Tensor]) -> Tensor | None:
        """<s_i, x> for every sample, (B,), from the layers of a seeded pass; None if they are not the whole
        gradient.
        """
        samples = found.losses.values.shape[0]
        if not self.recorder.verification.suffices or found.seeds is None:
            return None
        if not all(call.fits_samples(samples) for call in found.calls) and found.products is None:
            return None
        leaves = zip(found.leaf_calls, found.scores[found.of_leaves], strict=True)
        if not all(call.fits(score, samples) for call, score in leaves):
            return None
        products = found.products or Products(found, dict(zip(self.problem.theta.names, along, strict=True)))
        of_norms = range(len(found.edges))[found.of_norms]
        for i, score in enumerate(found.scores):  # those that were not used where they arrived
            if score is not None and i not in of_norms:
                products.take(i, score)
        coarse = products.coarse or self.problem.scaling.coarse
        return None if coarse else products.total / found.seeds

    def seeded(self, losses: Losses) -> tuple[Losses, Tensor | None]:
        """Seeds w_i / B of a backward pass that shows the gradient of every sample, if v only weighs samples.

        A weight of 0 would hide the gradient of its sample, which must be able to come back. So a weight that is
        nothing beside the largest is replaced by one that is almost nothing; in the losses returned it is 0.
        """
        if losses.weights is None or not losses.per_sample or not self.holds(losses):
            return losses, None
        weights = losses.weights.detach()
        sizes = weights.abs()
        least = (FAINT * torch.linalg.vector_norm(weights, torch.inf)).clamp_min(FAINTEST)
        faint = sizes < least
        share: float | Tensor = 1 / max(1, weights.shape[0])
        if weights.dtype not in (torch.float32, torch.float64):  # which a number of the host would not be rounded to
            share = torch.ones_like(least) / weights.shape[0]
        seeds = torch.where(faint, least, weights) * share
        return replace(losses, weights=weights.masked_fill(faint, 0.0)), seeds

    def pulled(self, weights: Tensor, products: Tensor) -> Terms:
        """(1/B) sum_i (dw_i/dv) <s_i, x>, one tensor for each leaf of v."""
        leaves = self.problem.v.leaves
        if not weights.requires_grad:
            return [None] * len(leaves)
        along = products.to(weights.dtype) / weights.shape[0]
        return list(torch.autograd.grad(weights, leaves, along, allow_unused=True, retain_graph=True))

    def index_of(self, weights: Tensor) -> Tensor | None:
        """The index by which weights were taken from a v that is one vector; None if they were computed otherwise."""
        leaves, node = self.problem.v.leaves, cast(Any, weights.grad_fn)
        if len(leaves) > 1 or type(node).__name__ != "IndexBackward0" or leaves[0].ndim != 1:
            return None
        end: Any = node.next_functions[0][0]
        indices = node._saved_indices
        plain = end is not None and getattr(end, "variable", None) is leaves[0] and len(indices) == 1
        found: Tensor | None = indices[0] if plain else None
        return found if found is not None and found.ndim == 1 and found.dtype == torch.int64 else None

    def ridge(self, theta: Sequence[Tensor], along: Sequence[Tensor]) -> Terms:
        """sum( (dl2/dv) 2 theta x ), one tensor for each leaf of v."""
        leaves = self.problem.v.leaves
        if not callable(self.problem.l2):
            return [None] * len(leaves)
        with torch.enable_grad():
            coefficients = self.problem.ridge_coefficients()
            pairs = [
                (c, (2 * t * x).sum_to_size(c.shape).to(c.dtype))
                for c, t, x in zip(coefficients, theta, along, strict=True)
                if isinstance(c, Tensor) and c.requires_grad
            ]
            if not pairs:
                return [None] * len(leaves)
            return list(torch.autograd.grad([c for c, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True))

    def filled(self, terms: Terms) -> list[Tensor]:
        """Zeros for a leaf of v that takes no part."""
        return [torch.zeros_like(p) if t is None else t for t, p in zip(terms, self.problem.v.leaves, strict=True)]


class CrossTap(Tap):
    """An inner step whose pass also gives the cross derivative along a vector, with or without a record.

    Attributes:
        terms: the mean over the samples of the batch, without the ridge, after the step; None: it needs the graph.
        source: where the numbers <s_i, x> came from.
    """

    def __init__(
        self, weighing: Weighing, along: Sequence[Tensor] | None, recording: bool, joined: bool = False
    ) -> None:
        self.weighing = weighing
        self.along = along
        self.recording = recording
        self.joined = (
            joined  # whether derivatives of weights that v is indexed by are taken together with those of other steps
        )
        self.terms: Terms | None = None
        self.source: Source = "graph"
        self.pending: tuple[Tensor, Tensor, tape.Overlap] | None = None  # weights and products, if they are taken later
        self._before: list[Tensor] = []  # states of the generators
        self._seen: TappedPass | None = None
        self._weights: Tensor | None = None

    @override
    def passed(self, problem: Bilevel, batch: Batch) -> Pass:
        """The pass of the recorder; where samples influence each other, and nothing is recorded, a plain one."""
        assert self.along is not None
        self._seen = self._watched(batch, gradient=True, along=self.along)
        found: Pass | None = self._seen
        if found is None:
            _draw_from(self._before, problem.theta.device)
            found = super().passed(problem, batch)
        self.multiply(problem, batch, self.along, deferred=tape.tape() is not None)
        return found

    def look(self, problem: Bilevel, batch: Batch, along: Sequence[Tensor] | None = None) -> None:
        """The pass for the cross derivative alone; none where layers were seen not to suffice.

        Given the vector, nothing is held of the scores.
        """
        self._before = _generators(problem.theta.device)
        if self.weighing.recorder.verification.suffices:
            self._seen = self._watched(batch, gradient=False, along=along)

    def multiply(self, problem: Bilevel, batch: Batch, along: Sequence[Tensor], deferred: bool = False) -> None:
        """The cross derivative along a vector, from the scores of the pass, or else from one in forward mode.

        deferred: the derivatives of the weights may be taken later, together with others.
        """
        weighing, found, self.terms, self.pending = self.weighing, self._seen, None, None
        if found is not None and self._weights is not None:
            read = [call.input for call in found.calls]
            with tape.overlapped(*read, *found.scores, found.seeds, found.losses.values) as work:
                products = weighing.from_scores(found, along)
            if products is not None and (deferred or (self.joined and weighing.index_of(self._weights) is not None)):
                self.pending = (self._weights, products, work)
                self.source = "scores"
                return
            work.join()
            self.terms = None if products is None else weighing.pulled(self._weights, products)
        elif found is not None and weighing.holds(found.losses):
            self.terms = [None] * len(problem.v.leaves)
        self.source = "scores"
        if self.terms is None:
            self.terms = self._replayed(problem, batch, along)
            self.source = "graph" if self.terms is None else "forward"

    def _watched(self, batch: Batch, gradient: bool, along: Sequence[Tensor] | None) -> TappedPass | None:
        """A pass of the recorder; None if that is impossible."""
        recorder, taps = self.weighing.recorder, self.weighing.recorder.taps
        self._before = _generators(self.weighing.problem.theta.device)
        if not (self.recording or self.weighing.independent):
            return None

        def seeded(losses: Losses) -> tuple[Losses, Tensor | None]:
            self._weights = losses.weights
            return self.weighing.seeded(losses)

        layers, taps.layers = taps.layers, True  # a record of the whole batch does without them
        try:
            return recorder.watched(batch, seeded, gradient, along, self.recording)
        except InputError:
            if self.recording:
                raise
            self.weighing.independent = False
            return None
        finally:
            taps.layers = layers

    def _replayed(self, problem: Bilevel, batch: Batch, along: Sequence[Tensor]) -> Terms | None:
        """From the same pass in forward mode, with the same dropout."""
        device = problem.theta.device
        after = _generators(device)
        _draw_from(self._before, device)
        try:
            with problem.guarded():
                return self.weighing.in_forward_mode(batch, along)
        finally:
            _draw_from(after, device)

    @override
    def agree(self, reduction: Reduction) -> None:
        self.weighing.recorder.agree(reduction)

    @override
    def record(
        self, batch: Batch, found: Pass, gradient: Sequence[Tensor], reduction: Reduction | None = None
    ) -> InnerRecord | None:
        return self.weighing.recorder.record(batch, found, gradient, reduction) if self.recording else None


def _generators(device: torch.device) -> list[Tensor]:
    """The states of the generators; captured steps draw nothing."""
    return [] if tape.repeatable() and tape.tape() is not None else states(device)


def _draw_from(found: list[Tensor], device: torch.device) -> None:
    if found:
        set_states(found, device)
