"""How a record is made: the inner step watched while it computes its gradient.

This is the only place where modules have hooks. They live for one inner step: one forward hook notes the input of every Linear
and Conv2d whose weight belongs to theta, and the place in the autograd graph where its output was made, so that the
same backward pass that gives the gradient also gives the score of every sample at every layer. Noting the place in the
graph instead of the output tensor keeps in-place activations harmless.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from nhgd._autocast import set_aside
from nhgd._randomness import standing, unmoved
from nhgd._recording.accounting import Call, Scores, check_independent, elsewhere, fits, held, walked
from nhgd._recording.per_sample import OneSampleGradients
from nhgd.data.batch import Batch
from nhgd.data_parallel import Shard
from nhgd.errors import InputError
from nhgd.likelihood import resolve
from nhgd.oracle import OracleCalls
from nhgd.problem import Bilevel, Losses, uncompiled
from nhgd.record import (
    BatchGradient,
    FisherKind,
    InnerRecord,
    InnerStep,
    LayerRecord,
    LayerStatistics,
    PerSampleGradients,
    RecordKind,
)

FORMS = 16  # of the graph that are looked at as soon as they appear; later ones now and then


@dataclass
class _Pass:
    """A forward pass over a batch, and what backward passes gave."""

    losses: Losses
    calls: list[Call]
    form: int = 0  # of the graph
    elsewhere: set[str] = field(default_factory=set)  # parameters that layers do not account for
    news: bool = False  # whether something was found that records must heed from now on
    drawn: bool = False  # whether random numbers were drawn, and the rows of all parameters must be of the same
    passes: int = 1  # backward passes over the batch
    value: Tensor = field(default_factory=lambda: torch.zeros(()))  # of the objective without the ridge
    data: list[Tensor | None] = field(default_factory=list)  # its gradient
    own: list[Tensor | None] = field(default_factory=list)  # the same with the weights held constant
    scores: Scores = ()

    @property
    def edges(self) -> list[Any]:
        """Where the outputs of the layers were made."""
        return [call.edge for call in self.calls]


class Recorder:
    """Computes inner gradients and, with them, the record that an inverse needs.

    Args:
        problem: what is solved.
        kind: "batch", "raw", "sample" or "layer": which record; None for none.
        fisher: "empirical", "exact" or "sampled": of which Fisher matrix. The last two need `Losses.outputs` and a
            likelihood, and are not defined for "batch" and "raw".
        calls: what counts the passes.
        couples: whether products of the rows of different layers matter. Then all rows are of the same pass, with the
            same dropout; otherwise those of parameters outside Linear and Conv2d may be of a pass of their own.

    Rows are sqrt(w_i) s_i with s_i the gradient of l_i alone: weights that depend on theta are held constant in them, and in
    the gradient of the inner step they are not.

    At each record the graph says which parameters the layers account for; the others, and a weight that is used elsewhere
    too, get rows of their own. When the graph has a form that was not seen before, it is verified, at a theta nearby where
    nothing is zero by accident, that samples do not influence each other and that the layers' scores do add up to the
    gradient. Nothing of that draws from the run's random numbers.
    """

    def __init__(
        self,
        problem: Bilevel,
        kind: RecordKind | None = None,
        fisher: FisherKind = "empirical",
        calls: OracleCalls | None = None,
        couples: bool = True,
    ) -> None:
        self.problem = problem
        self.kind = kind
        self.fisher = fisher
        self.couples = couples or kind == "sample"
        self.likelihood = None
        if kind is not None and fisher != "empirical":
            if kind in ("batch", "raw"):
                raise InputError(f"The {fisher} Fisher matrix needs per-sample records, not the gradient of a batch.")
            self.likelihood = resolve(problem.likelihood, f"fisher='{fisher}'")
        self.calls = OracleCalls() if calls is None else calls
        self._names = {id(leaf): name for name, leaf in zip(problem.theta.names, problem.theta.leaves, strict=True)}
        self._shapes = {n: leaf.shape for n, leaf in zip(problem.theta.names, problem.theta.leaves, strict=True)}
        self._forms: dict[int, set[str]] = {}  # of graphs that were verified, with the layers that told nothing there
        self._records = 0
        self._unaccounted: set[str] = set()  # parameters that were met outside their layers
        self._given: dict[str, str | None] = {}  # weights, with biases, that records held as layers
        self._likely = False  # whether the likelihood was compared with the losses
        self._others = OneSampleGradients(problem)

    def memory(self) -> dict[str, Any]:
        """What was found out about the model that later records depend on, as plain values."""
        others = self._others
        return {
            "unaccounted": sorted(self._unaccounted),
            "layers": dict(self._given),
            "slow": others.slow,
            "noisy": others.noisy,
        }

    def recall(self, memory: Mapping[str, Any]) -> None:
        """Go on as the recorder that had this memory."""
        self._unaccounted, self._given = set(memory["unaccounted"]), dict(memory["layers"])
        self._others.slow, self._others.noisy = bool(memory["slow"]), bool(memory["noisy"])

    def step(self, batch: Batch | Shard) -> InnerStep:
        """The inner gradient on a batch, at the problem's current theta and v, with its record.

        On a worker's part of a batch the loss and the gradient are those of the whole batch, and the record that of the part.
        """
        with set_aside():
            return self._step(batch)

    def _step(self, batch: Batch | Shard) -> InnerStep:
        problem, theta = self.problem, self.problem.theta
        part = batch if isinstance(batch, Shard) else None
        batch = batch if part is None else part.batch
        if self._tapping:
            self._records += 1
            self._refuse_batchnorm()
        with torch.enable_grad():
            found = self._passed(batch)
            if part is not None:
                self._sum(part, found)
            losses, calls = found.losses, found.calls
            samples = losses.samples(batch) if part is None else part.total
            seeds = self._seeds(losses)
            columns = [found.scores]
            if seeds is not None and losses.outputs is not None and calls:
                columns = [
                    torch.autograd.grad(losses.outputs, found.edges, seed, allow_unused=True, retain_graph=True)
                    for seed in seeds
                ]
                found.passes += len(seeds)
        with torch.no_grad():
            gradient = [
                (torch.zeros_like(leaf) if g is None else g)
                if isinstance(c, float) and c == 0
                else _plus(g, 2 * c * leaf)
                for g, c, leaf in zip(found.data, problem.ridge_coefficients(), theta.leaves, strict=True)
            ]
            record = self._record(batch, found, columns, gradient, seeds, part)
        self.calls.inner_gradients += found.passes
        self.calls.samples += samples * found.passes
        return InnerStep(gradient, found.value + problem.ridge().detach(), record)

    @property
    def _tapping(self) -> bool:
        return self.kind in ("layer", "sample")

    @property
    def _now_and_then(self) -> bool:
        return self._records & (self._records - 1) == 0

    def _unseen(self, found: _Pass) -> bool:
        """Whether the layers are to be verified: in a graph of a new form, or of one that left something open."""
        if not found.calls:
            return False
        if found.form not in self._forms:
            return len(self._forms) < FORMS or self._now_and_then
        return bool(self._forms[found.form]) and self._now_and_then

    def _forward(self, batch: Batch) -> _Pass:
        """The losses of a batch, the layers they went through, and what their graph tells of both."""
        problem, tapping = self.problem, self._tapping
        theta = problem.theta
        v: Sequence[Tensor] | None = [leaf.detach() for leaf in problem.v.leaves]
        if problem.v.root is not None:
            v = problem.v.leaves if tapping else None
        before = standing(theta.device) if tapping and self.couples else None
        with self._tapped(tapping) as calls:
            # Given the leaves, a compiled module is seen uncompiled: it would not know of the hook.
            losses = problem.losses(batch, theta.leaves if tapping else None, v)
        if self.kind is not None and not losses.per_sample:
            raise InputError(
                "Recording curvature needs per-sample losses, but inner() returned a scalar. Return losses of shape (B,)."
            )
        found = _Pass(losses, calls, drawn=before is not None and before != standing(theta.device))
        if tapping:
            roots = (losses.values, None if self.likelihood is None else losses.outputs)
            uses, found.form = walked(roots, calls, self._names)
            found.elsewhere = elsewhere(calls, uses)
        return found

    def _constant(self, losses: Losses) -> Tensor | None:
        """The objective with its weights held constant, where they depend on theta and a record is to be made."""
        weights = losses.weights
        if self.kind in (None, "raw") or weights is None or not weights.requires_grad:
            return None
        if not walked((weights,), (), self._names).uses:
            return None
        return replace(losses, weights=weights.detach()).mean()

    def _again(self, found: _Pass) -> bool:
        """Whether the graph is needed after the gradient: for the roots of a likelihood, or for rows of this very pass."""
        if self.likelihood is not None or not (self._tapping and self.couples):
            return self.likelihood is not None
        others, open_to_doubt = self._others, found.elsewhere | self._unaccounted
        plain = {name for call in found.calls if call.is_plain for name in (call.weight, call.bias)} - open_to_doubt
        covered = plain.issuperset(self.problem.theta.names) and not self._unseen(found)
        return not covered and (found.drawn or others.noisy or not others.compared)

    def _passed(self, batch: Batch) -> _Pass:
        """One forward and one backward pass over a batch, and a look at layers that are new."""
        leaves = self.problem.theta.leaves
        found = self._forward(batch)
        self.problem.heed(found.losses)
        value, again = found.losses.mean(), self._again(found)
        constant = self._constant(found.losses)
        if constant is None:
            given = torch.autograd.grad(value, (*leaves, *found.edges), allow_unused=True, retain_graph=again or None)
            found.data = found.own = list(given[: len(leaves)])
            found.scores = given[len(leaves) :]
        else:
            found.data = list(torch.autograd.grad(value, leaves, allow_unused=True, retain_graph=True))
            self._hold_constant(found, constant, again)
        found.value = value.detach()
        own = dict(zip(self.problem.theta.names, found.own, strict=True))
        computing = [
            i for i, call in enumerate(found.calls) if not call.is_plain and call.weight not in found.elsewhere
        ]
        if computing:
            calls, scores = [found.calls[i] for i in computing], [found.scores[i] for i in computing]
            for layer in self._layers(found.losses, calls, [scores]):
                if not fits(layer, own)[0]:
                    found.elsewhere |= {name for name in (layer.weight, layer.bias) if name is not None}
        self._note(found, batch if self._unseen(found) else None)
        return found

    def _hold_constant(self, found: _Pass, constant: Tensor, again: bool) -> None:
        """Scores, and the gradient they are a part of, of the objective with constant weights."""
        leaves = self.problem.theta.leaves
        given: Sequence[Tensor | None] = [None] * (len(leaves) + len(found.calls))
        if constant.requires_grad:
            wrt: Any = (*leaves, *found.edges)
            given = torch.autograd.grad(constant, wrt, allow_unused=True, retain_graph=again or None)
        found.own, found.scores = list(given[: len(leaves)]), given[len(leaves) :]
        found.passes += 1

    def _note(self, found: _Pass, batch: Batch | None) -> None:
        """Remember what layers do not account for; with a batch, verify the layers on it first."""
        if batch is not None:
            found.elsewhere |= self._verified(batch, found.form)
        found.news = not found.elsewhere <= self._unaccounted
        self._unaccounted |= found.elsewhere

    def _verified(self, batch: Batch, form: int) -> set[str]:
        """Verify the layers, nearby if the graph has the same form there; parameters that they do not account for."""
        problem, theta = self.problem, self.problem.theta
        with unmoved(theta.device), problem.guarded(seed=0), torch.enable_grad():
            with theta.nearby():
                try:
                    found: _Pass | None = self._forward(batch)
                except Exception:  # the user's function may not know such a place
                    found = None
                if found is not None and found.form == form and bool(torch.isfinite(found.losses.values).all()):
                    return self._verify(found, form)
            return self._verify(self._forward(batch), form)

    def _verify(self, found: _Pass, form: int) -> set[str]:
        """Refuse samples that influence each other; parameters whose gradient is not what their layer's scores add up to."""
        leaves = self.problem.theta.leaves
        losses = replace(found.losses, weights=None)
        given = torch.autograd.grad(losses.mean(), (*leaves, *found.edges), allow_unused=True, retain_graph=True)
        own, scores = dict(zip(self.problem.theta.names, given, strict=False)), given[len(leaves) :]
        seen = check_independent(losses.values, found.calls, scores)
        wrong: set[str] = set()
        for layer in self._layers(losses, found.calls, [scores]):
            if layer.weight in found.elsewhere:
                continue  # and its calls may not even fit together
            good, telling = fits(layer, own)
            if not good:
                wrong |= {name for name in (layer.weight, layer.bias) if name is not None}
            if not telling:
                seen.discard(layer.weight)
        self._forms[form] = {call.weight for call in found.calls} - seen
        return wrong

    def _told(self, part: Shard, found: _Pass) -> Tensor:
        """Scalars of this worker to be summed with the others': the loss, a mark of the layers, news."""
        mark = float(zlib.crc32(" ".join(call.weight for call in found.calls).encode()) % 2**16)
        told = torch.tensor([0.0, mark, mark**2, float(found.news)], dtype=torch.float64, device=found.value.device)
        told[0] = found.value * part.share
        return told

    def _hear(self, part: Shard, told: Tensor, found: _Pass) -> None:
        """The loss on the whole batch. All workers must have met the same layers, or what they sum would not fit together."""
        if part.team.size * float(told[2]) != float(told[1]) ** 2:
            raise InputError(
                "The workers' parts of a batch went through different layers, so their curvature cannot be summed. Use"
                " fisher_window with records='sample', or one worker."
            )
        if float(told[3]) > 0:
            self._unaccounted = part.team.union(self._unaccounted, self.problem.theta.names)
        found.value = told[0].to(found.value.dtype)

    def _sum(self, part: Shard, found: _Pass) -> None:
        """The loss and its gradient on the whole batch, from those on this worker's part of it."""
        leaves, share = self.problem.theta.leaves, part.share
        given = [torch.zeros_like(p) if g is None else g * share for g, p in zip(found.data, leaves, strict=True)]
        if found.own is not found.data:
            self._sum_own(part, found)
        *summed, told = part.team.sum([*given, self._told(part, found)])
        self._hear(part, told, found)
        found.own = list(summed) if found.own is found.data else found.own
        found.data = list(summed)

    def _sum_own(self, part: Shard, found: _Pass) -> None:
        """The gradient with constant weights on the whole batch, where a record is made of it."""
        if self.kind == "batch":
            pairs = zip(found.own, self.problem.theta.leaves, strict=True)
            found.own = list(part.team.sum([torch.zeros_like(p) if g is None else g * part.share for g, p in pairs]))

    def _record(
        self,
        batch: Batch,
        found: _Pass,
        columns: Sequence[Sequence[Tensor | None]],
        gradient: Sequence[Tensor],
        seeds: Tensor | None,
        part: Shard | None,
    ) -> InnerRecord | None:
        theta, losses = self.problem.theta, found.losses
        if self.kind is None:
            return None
        samples = losses.values.shape[0] if part is None or self.kind in ("layer", "sample") else part.total
        parts = None if part is None else part.parts
        if self.kind == "raw":
            return BatchGradient(None, _kept(theta.flatten(gradient), gradient), samples)
        if self.kind == "batch":
            weight = self._common_weight(losses, part)
            row = theta.flatten(found.own) * (0.0 if weight == 0 else (samples / weight) ** 0.5)
            return BatchGradient(row, None, samples)
        layers = [
            layer
            for layer in self._layers(losses, found.calls, columns, seeds is not None)
            if layer.weight not in self._unaccounted and layer.bias not in self._unaccounted
        ]
        covered = {name for layer in layers for name in (layer.weight, layer.bias)}
        others = tuple(name for name in theta.names if name not in covered)
        rows = self._other_rows(batch, found, others, seeds) if others else None
        weights = None if losses.weights is None else losses.weights.detach()
        if self.kind == "layer":
            self._check_settled(layers)
            return LayerStatistics(tuple(layers), others, rows, weights, samples, parts)
        pieces: dict[str, Tensor] = {}
        for layer in layers:
            pieces[layer.weight], bias = layer.rows()
            if layer.bias is not None and bias is not None:
                pieces[layer.bias] = bias
        if rows is not None:
            sizes = [self._shapes[name].numel() for name in others]
            pieces |= dict(zip(others, rows.split(sizes, dim=1), strict=True))
        ordered = [pieces[name].to(torch.promote_types(theta.dtype, torch.float32)) for name in theta.names]
        return PerSampleGradients(ordered[0] if len(ordered) == 1 else torch.cat(ordered, dim=1), samples, parts)

    def _other_rows(self, batch: Batch, found: _Pass, names: tuple[str, ...], seeds: Tensor | None) -> Tensor:
        """Rows of parameters that no layer accounts for."""
        losses, columns = found.losses, 1 if seeds is None else len(seeds)
        if not (self.couples and found.drawn):
            self._others.look(batch)
            if not (self.couples and self._others.noisy):
                found.passes += columns
                return self._others.rows(batch, losses, names, seeds)
        found.passes += columns * losses.values.shape[0]
        return self._others.from_graph(losses, names, seeds)

    def _check_settled(self, layers: Sequence[LayerRecord]) -> None:
        """Refuse a weight that records held as a layer and that is used outside its layer now: they do not fit together."""
        for weight, bias in self._given.items():
            if weight in self._unaccounted or bias in self._unaccounted:
                raise InputError(
                    f"{weight!r} is used outside its layer in this batch, and it was not in those before, whose curvature was"
                    " kept layer by layer. Use FisherWindow(records='sample') or fisher_dense, which take any model, or an"
                    " inverse of Hessian products, such as cg."
                )
        self._given |= {layer.weight: layer.bias for layer in layers}

    @contextmanager
    def _tapped(self, wanted: bool) -> Iterator[list[Call]]:
        """Note every call of a Linear or Conv2d that holds a parameter of theta, inside this block alone.

        The block is the forward pass and no more: activation checkpointing calls modules again in the backward pass.
        """
        calls: list[Call] = []
        if not wanted:
            yield calls
            return

        def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if not isinstance(module, (nn.Linear, nn.Conv2d)):
                return
            name = self._names.get(id(held(module, "weight")))
            # Keyword arguments do not reach this hook; what is not noted here counts among the other parameters.
            if name is None or not args or not isinstance(output, Tensor) or not output.requires_grad:
                return
            given = args[0]
            bias = self._names.get(id(held(module, "bias")))
            # On sequences the output is a view of a matrix, and an in-place activation replaces the view's place in the
            # graph, but not the matrix's.
            base = output._base
            made = base if base is not None and base.numel() == output.numel() and output.is_contiguous() else output
            source = get_gradient_edge(given) if given.requires_grad else None
            calls.append(Call(module, name, bias, given.detach(), source, get_gradient_edge(made), output.shape))

        # The hook is global because theta may be a dict that the user feeds to functional_call on a module of his own.
        handle = nn.modules.module.register_module_forward_hook(note)
        try:
            with uncompiled():
                yield calls
        finally:
            handle.remove()

    def _seeds(self, losses: Losses) -> Tensor | None:
        """The roots of the likelihood in output space, (K, B, ...), or None for the empirical Fisher matrix."""
        if self.likelihood is None:
            return None
        outputs = losses.outputs_for(f"fisher='{self.fisher}'")
        if not self._likely:
            with unmoved(self.problem.theta.device):
                self.likelihood.verify(outputs, losses.values)
            self._likely = True
        draw = self.likelihood.sample if self.fisher == "sampled" else self.likelihood.roots
        return draw(outputs, losses.values).detach().to(outputs.dtype)

    def _layers(
        self,
        losses: Losses,
        calls: list[Call],
        columns: Sequence[Sequence[Tensor | None]],
        seeded: bool = False,
    ) -> list[LayerRecord]:
        samples = losses.values.shape[0]
        weights = torch.ones_like(losses.values) if losses.weights is None else losses.weights
        root = weights.detach().sqrt()
        # The backward pass of mean_i( w_i l_i ) gave w_i / B times a score, the one of r_ik . z_i the score itself.
        # The root of a negative weight is nan and stays so: a sample must not vanish without a word.
        scale = root if seeded else torch.where(root == 0, 0.0, samples / root)
        grouped: dict[str, list[tuple[Call, tuple[Tensor, ...]]]] = {}
        for position, call in enumerate(calls):
            if call.output_shape[0] != samples or len(call.output_shape) < 2 or call.input.shape[0] != samples:
                raise InputError(
                    f"The layer of {call.weight!r} saw an input of shape {tuple(call.input.shape)} in a batch of {samples}"
                    " samples. Per-sample curvature needs the samples in the first dimension of every layer's input."
                )
            scores = [column[position] for column in columns]
            found = tuple(
                call.input.new_zeros(call.output_shape) if s is None else s.detach().reshape(call.output_shape)
                for s in scores
            )
            grouped.setdefault(call.weight, []).append((call, found))
        return [
            LayerRecord(
                weight,
                pairs[0][0].bias,
                self._shapes[weight],
                pairs[0][0].module,
                tuple(call.input for call, _ in pairs),
                tuple(scores for _, scores in pairs),
                scale.to(torch.promote_types(pairs[0][1][0].dtype, torch.float32)),
            )
            for weight, pairs in grouped.items()
        ]

    def _common_weight(self, losses: Losses, part: Shard | None) -> float:
        if losses.weights is None:
            return 1.0
        low, high = float(losses.weights.min()), float(losses.weights.max())
        if part is not None:
            ends = part.team.gather([torch.tensor([[low, high]], dtype=torch.float64)], [1] * part.team.size)[0]
            low, high = float(ends.min()), float(ends.max())
        if low < 0:
            raise InputError(f"A weight is {low:.3g}. Weights must be at least 0.")
        if high - low > 1e-6 * max(abs(high), 1e-12):
            raise InputError(
                f"The weights of a batch differ (from {low:.3g} to {high:.3g}), and the gradient of the batch alone would"
                " give their squares. Use per-sample records (records='sample'), or an inverse such as kfac."
            )
        return high

    def _refuse_batchnorm(self) -> None:
        for root in (self.problem.theta.root, self.problem.v.root):
            for name, module in root.named_modules() if root is not None else ():
                if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
                    raise InputError(
                        f"Per-sample curvature is not defined with BatchNorm in training mode ({name!r}), where samples"
                        " influence each other. Call model.eval() on it, or use GroupNorm or LayerNorm."
                    )


def _kept(flat: Tensor, gradient: Sequence[Tensor]) -> Tensor:
    """A flat gradient in memory of its own: an optimiser may use the one it is given as scratch."""
    return flat.clone() if len(gradient) == 1 else flat


def _plus(gradient: Tensor | None, ridge: Tensor) -> Tensor:
    return ridge if gradient is None else gradient + ridge
