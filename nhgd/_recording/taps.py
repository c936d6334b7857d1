"""The layers an inner step goes through: hooks on the forward pass, scores from the backward pass, and records of both.

This is the only place where modules have hooks. They live for one forward pass: one hook notes the input of every
Linear and Conv2d whose weight belongs to theta, and the place in the autograd graph where its output was made, so that
the same backward pass that gives the gradient also gives the score of every sample at every layer. Noting the place in
the graph instead of the output tensor keeps in-place activations harmless.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from nhgd import _tape as tape
from nhgd._kernels import uncompiled
from nhgd._randomness import state_bytes
from nhgd._recording.accounting import (
    Call,
    LayerCall,
    Scores,
    as_saved,
    held,
    outside_layers,
    shared_inputs,
    walked,
)
from nhgd._recording.leaf_call import LeafCall
from nhgd._recording.normalisation import NormCall, normalises_by_batch
from nhgd.data.batch import Batch
from nhgd.errors import InputError
from nhgd.losses import Losses
from nhgd.objective import Pass
from nhgd.problem import Bilevel
from nhgd.record import Convolution, LayerRecord

if TYPE_CHECKING:
    from nhgd._recording.streaming import LayerParts, Products

_PLAIN = nn.Linear(1, 1, device="meta")  # stands for a layer where `F.linear` was called on its own


@dataclass
class _Entered:
    """A module that is under way.

    Attributes:
        seen: whether hooks see its input.
        places: of attention, how many places a sequence has, and how many samples there are.
    """

    module: nn.Module
    seen: bool
    places: torch.Size | None = None


@dataclass
class TappedPass(Pass):
    """A pass over a batch, with its layers.

    Attributes:
        calls: of layers.
        batch_objective: whether a BatchNorm normalised by the batch, so that all scores are of the batch objective.
        norms: calls of such modules.
        after_norms: the position of the first call behind the last of them, from where on samples are apart.
        normalised: parameters whose gradient is that of such modules alone.
        leaf_calls: of other modules, whose scores give the rows of their parameters.
        form: of the graph.
        outside_layers: parameters that layers do not account for.
        native: of these, the ones whose rows come from the scores of this pass.
        drawn: whether random numbers were drawn, so that the rows of all parameters must be of the same pass.
        own: the gradient with constant weights; None if it is the gradient itself.
        scores: of the objective with constant weights, one for each call, then for each of the norms, and of the leaf
            calls.
        seeds: the factors of the losses in the backward pass, if they are not the weights over B.
        products: of the scores with a vector, if they were taken where the scores arrived.
        parts: of the layers, likewise.
        due: whether its layers are still to be verified.
    """

    calls: list[Call] = field(default_factory=list)
    batch_objective: bool = False
    norms: list[NormCall] = field(default_factory=list)
    after_norms: int = 0
    normalised: set[str] = field(default_factory=set)
    leaf_calls: list[LeafCall] = field(default_factory=list)
    native: set[str] = field(default_factory=set)
    form: int = 0
    outside_layers: set[str] = field(default_factory=set)
    drawn: bool = False
    own: list[Tensor | None] | None = None
    scores: Scores = ()
    seeds: Tensor | None = None
    products: Products | None = None
    parts: LayerParts | None = None
    due: bool = False

    def arrived(self) -> list[Tensor | None]:
        """What the backward pass gave besides the gradient."""
        products = [] if self.products is None else [self.products.total]
        return [*self.scores, *products, *(() if self.parts is None else self.parts.tensors())]

    @property
    def edges(self) -> list[Any]:
        """The edges of the graph at the outputs of layers and norms."""
        places = *self.calls, *self.norms, *self.leaf_calls
        return [place.edge for place in places]  # type: ignore[attr-defined]  # all of them have one

    @property
    def is_plain(self) -> bool:
        """Whether all modules that were called compute what their classes do."""
        return all(call.is_plain for call in self.calls) and all(call.is_known for call in self.leaf_calls)

    @property
    def of_norms(self) -> slice:
        """Where the scores of norms lie."""
        return slice(len(self.calls), len(self.calls) + len(self.norms))

    @property
    def of_leaves(self) -> slice:
        """Where the scores of leaf calls lie."""
        return slice(len(self.calls) + len(self.norms), None)


class Taps:
    """Watches forward passes of a problem's inner function.

    Args:
        problem: whose theta the layers hold.
        layers: whether calls of layers are noted.
        outputs: whether the graph of `Losses.outputs` counts as well as that of the losses.
        draws: whether it is noted that random numbers were drawn.
        norms: whether calls of BatchNorm modules that normalise by the batch are noted, and so allowed.
    """

    def __init__(self, problem: Bilevel, layers: bool, outputs: bool, draws: bool, norms: bool = False) -> None:
        self.problem = problem
        self.layers = layers
        self.outputs = outputs
        self.draws = draws
        self.norms = norms
        theta = problem.theta
        self.names = {id(leaf): name for name, leaf in zip(theta.names, theta.leaves, strict=True)}
        self.shapes = {name: leaf.shape for name, leaf in zip(theta.names, theta.leaves, strict=True)}

    def forward(self, batch: Batch, in_v: bool = False) -> TappedPass:
        """The losses of a batch, its layers and their graph. `in_v`: the graph reaches v."""
        problem, theta = self.problem, self.problem.theta
        v: Sequence[Tensor] | None = [leaf if in_v else leaf.detach() for leaf in problem.v.leaves]
        if problem.v.root is not None:
            v = problem.v.leaves if self.layers else None
        # Captured steps draw nothing, which their rehearsal makes sure of.
        before = state_bytes(theta.device) if self.draws and tape.tape() is None else None
        with self.noting() as noted:
            # Given the leaves, a compiled module is seen uncompiled: it would not know of the hook.
            losses = problem.losses(batch, theta.leaves if self.layers else None, v)
        if not losses.per_sample:
            raise InputError(
                "Recording curvature needs per-sample losses, but inner() returned a scalar. Return losses of shape (B,)."
            )
        return self.seen(losses, noted, drawn=before is not None and before != state_bytes(theta.device))

    def seen(self, losses: Losses, noted: Sequence[Call | NormCall | LeafCall], drawn: bool) -> TappedPass:
        """The same for given losses and the calls that led to them, in order."""
        calls = [call for call in noted if isinstance(call, Call)]
        norms = [call for call in noted if isinstance(call, NormCall) and call.edge is not None]
        found = TappedPass(losses, losses.values.new_zeros(()), [], calls=calls, norms=norms, drawn=drawn)
        ordered = [call for call in noted if not isinstance(call, LeafCall)]
        positions = [i for i, call in enumerate(ordered) if isinstance(call, NormCall)]
        if positions:
            found.batch_objective = True
            found.after_norms = positions[-1] + 1 - len(positions)
        if self.layers:
            roots = (losses.values, losses.outputs if self.outputs else None)
            samples = losses.values.shape[0]
            given = [call for call in noted if isinstance(call, LeafCall)]
            uses, found.form, parents = walked(roots, calls, self.names, given)
            found.outside_layers = outside_layers(calls, uses)
            found.layers = [call.weight for call in calls]
            met = [call if call.gives_rows(samples) else call.met_at(parents) for call in given]
            found.leaf_calls = [call for call in met if call is not None and not found.batch_objective]
            if not found.batch_objective:  # otherwise rows are of each loss in its batch
                found.native = self._native(calls, given, met, uses, samples)
            found.outside_layers |= {name for call in given for name in call.names.values()}
            inside = Counter(name for norm in norms if norm.gives_rows(samples) for name in norm.names)
            found.normalised = {name for name, count in inside.items() if uses[name] <= count}
            found.normalised -= {name for call in calls for name in (call.weight, call.bias) if name is not None}
        return found

    @staticmethod
    def _native(
        calls: Sequence[Call],
        given: Sequence[LeafCall],
        met: Sequence[LeafCall | None],
        uses: Counter[str],
        samples: int,
    ) -> set[str]:
        """Parameters outside of layers whose rows are the sum of those of all calls that use them."""
        plain = {name for call in calls if call.is_plain for name in (call.weight, call.bias) if name is not None}
        plain -= {name for call in calls if not call.is_plain for name in (call.weight, call.bias)}
        inside = Counter(name for call in given if not call.is_known for name in call.names.values())
        known = {name for call in given for name in call.names.values()} | plain
        unmet = {name for call, at in zip(given, met, strict=True) if at is None for name in call.names.values()}
        apart = {
            name
            for call in calls
            if call.input.shape[:1] != (samples,) or call.output_shape[:1] != (samples,)
            for name in (call.weight, call.bias)
        }
        # Of a module whose code is unknown, the rows are compared with the gradient.
        return {name for name in known - unmet - apart if not uses[name] or inside[name]}

    def uses_theta(self, tensor: Tensor) -> bool:
        """Whether a tensor's graph ends at theta."""
        return bool(walked((tensor,), (), self.names).uses)

    @contextmanager
    def noting(self) -> Iterator[list[Call | NormCall | LeafCall]]:
        """Note every call of a Linear or Conv2d that holds a parameter of theta, of a BatchNorm, and of other modules
        with parameters of their own, inside this block alone; as well as `F.linear` on a parameter, as attention uses
        it.

        The block is the forward pass and no more: activation checkpointing calls modules again in the backward pass.
        """
        calls: list[Call | NormCall | LeafCall] = []
        if not self.layers:
            yield calls
            return
        inside: list[_Entered] = []  # modules that are under way

        def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
            inside.append(_Entered(module, bool(args)))

        def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if inside:
                inside.pop()
            call: Call | NormCall | LeafCall | None = self.call(module, args, output)
            if call is None and torch.is_grad_enabled():
                call = LeafCall.of(module, args, output, self.names)
            if call is not None:
                calls.append(call)

        def linear(given: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            output = plain(given, weight, bias)
            top = inside[-1] if inside else _Entered(_PLAIN, False)
            call = self._of_function(given, weight, bias, output, top)
            # A Linear that is called with its input is noted as a module.
            noted = top.seen and isinstance(top.module, nn.Linear) and held(top.module, "weight") is weight
            if call is not None and not noted:
                calls.append(call)
            return output

        # The hook is global because theta may be a dict that the user feeds to functional_call on a module of his own.
        register = nn.modules.module
        handles = [
            register.register_module_forward_pre_hook(enter),
            register.register_module_forward_hook(note),
        ]
        plain = F.linear
        try:
            with uncompiled():
                F.linear = linear  # type: ignore[assignment]  # as attention looks it up at each call
                yield calls
        finally:
            F.linear = plain
            for handle in handles:
                handle.remove()

    def _of_function(
        self, given: Tensor, weight: Tensor, bias: Tensor | None, output: Any, inside: _Entered
    ) -> Call | None:
        """A call of `F.linear` on a parameter of theta, outside of the module that holds it as a layer."""
        # Attention has the places of a sequence first; its queries come before keys and values.
        swapped = isinstance(inside.module, nn.MultiheadAttention)
        if swapped and given.ndim == 3 and inside.places is None:
            inside.places = given.shape[:2]
        name = self.names.get(id(weight))
        if name is None or not isinstance(output, Tensor) or not output.requires_grad or given.ndim < 2:
            return None
        own = None if bias is None else self.names.get(id(bias))
        if own is None and bias is not None and bias.requires_grad:
            return None  # a part of a parameter, which the walk has to reach
        source = get_gradient_edge(given) if given.requires_grad else None
        data, shape = given.detach(), output.shape
        if swapped:
            first = given.shape[:2] if given.ndim == 3 else inside.places
            if first is None or first.numel() * given.shape[-1] != given.numel():
                return None
            data = data.reshape(*first, -1).transpose(0, 1)
            shape = torch.Size((first[1], first[0], output.shape[-1]))
        return Call(_PLAIN, name, own, data, shape, source, get_gradient_edge(_made(output)), swapped=swapped)

    def call(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Call | NormCall | None:
        """A call of a Linear or Conv2d that holds a parameter of theta, or of a BatchNorm; None for other modules."""
        if self.norms and normalises_by_batch(module) and args and torch.is_grad_enabled():
            weight, bias = (self.names.get(id(held(module, name))) for name in ("weight", "bias"))
            edge = get_gradient_edge(output) if output.requires_grad else None
            return NormCall(module, weight, bias, args[0].detach(), edge)
        if not isinstance(module, (nn.Linear, nn.Conv2d)):
            return None
        name = self.names.get(id(held(module, "weight")))
        # Keyword arguments do not reach the hook; layers called with them count among the other parameters.
        if name is None or not args or not isinstance(output, Tensor) or not output.requires_grad:
            return None
        given = args[0]
        bias = self.names.get(id(held(module, "bias")))
        source = get_gradient_edge(given) if given.requires_grad else None
        made = _made(output)
        call = Call(module, name, bias, given, output.shape, source, get_gradient_edge(made))
        call.input = as_saved(given, made) if call.is_plain else given.detach()
        return call

    def layer_records(self, calls: Sequence[LayerCall], columns: Sequence[Scores], scale: Tensor) -> list[LayerRecord]:
        """Calls and their scores, one column for each root, by layer; `scale`, (B,), is that of `scale_of`."""
        samples = len(scale)
        grouped: dict[str, list[tuple[Tensor, LayerCall, tuple[Tensor, ...]]]] = {}
        first = shared_inputs(calls)
        for position, call in enumerate(calls):
            if call.output_shape[0] != samples or len(call.output_shape) < 2 or call.input.shape[0] != samples:
                raise InputError(
                    f"The layer of {call.weight!r} saw an input of shape {tuple(call.input.shape)} in a batch of {samples}"
                    " samples. Per-sample curvature needs the samples in the first dimension of every layer's input."
                )
            scores = [column[position] for column in columns]
            found = tuple(
                call.input.new_zeros(call.output_shape) if s is None else call.placed(s.detach()) for s in scores
            )
            grouped.setdefault(call.weight, []).append((calls[first[position]].input, call, found))
        return [
            LayerRecord(
                weight,
                own[0][1].bias,
                Convolution.of(own[0][1].module),
                tuple(given for given, _, _ in own),
                tuple(scores for _, _, scores in own),
                scale.to(torch.promote_types(own[0][2][0].dtype, torch.float32)),
            )
            for weight, own in grouped.items()
        ]

    def rows_of_layers(
        self, found: TappedPass, columns: Sequence[Scores], scale: Tensor, wanted: set[str]
    ) -> Iterator[tuple[str, Tensor]]:
        """Rows of the wanted parameters as weights and biases of layers, (K B, n), from each call of them."""
        for i, call in enumerate(found.calls):
            if wanted.isdisjoint({call.weight, call.bias}):
                continue
            (layer,) = self.layer_records([call], [[column[i]] for column in columns], scale)
            of_weight, of_bias = layer.rows()
            if layer.weight in wanted:
                yield layer.weight, of_weight
            if layer.bias is not None and layer.bias in wanted and of_bias is not None:
                yield layer.bias, of_bias


def _made(output: Tensor) -> Tensor:
    """The tensor that an operation made.

    On sequences the output of a layer is a view of a matrix, and an in-place activation replaces the view's place in
    the graph, but not the matrix's.
    """
    base = output._base
    return base if base is not None and base.numel() == output.numel() and output.is_contiguous() else output


def scale_of(losses: Losses, seeded: bool = False, batch_objective: bool = False) -> Tensor:
    """What turns the scores of a backward pass into sqrt(w_i) times a score, (B,).

    Args:
        seeded: the scores are those of a likelihood's roots.
        batch_objective: the roots of the weights are in the scores already.
    """
    samples = losses.values.shape[0]
    if batch_objective or losses.weights is None:
        return torch.full_like(losses.values, 1 if seeded else samples)
    root = losses.weights.detach().sqrt()
    # The backward pass of mean_i( w_i l_i ) gave w_i / B times a score, the one of r_ik . z_i the score itself.
    # The root of a negative weight is nan and stays so: a sample must not vanish without a word.
    return root if seeded else torch.where(root == 0, 0.0, samples / root)
