"""How a record is made: the inner step watched while it computes its gradient.

This is the only place where modules have hooks. They live for one inner step: one forward hook notes the input of every Linear
and Conv2d whose weight belongs to theta, and the place in the autograd graph where its output was made, so that the
same backward pass that gives the gradient also gives the score of every sample at every layer. Noting the place in the
graph instead of the output tensor keeps in-place activations harmless. Under DistributedDataParallel `Reducer` makes that
backward pass, and the gradient that comes out of it is that of all workers.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from nhgd.data.batch import Batch, common_length
from nhgd.errors import InputError
from nhgd.likelihood import resolve
from nhgd.one_sample import OneSampleGradients
from nhgd.point import OracleCalls
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
from nhgd.reducer import Reducer
from nhgd.team import Shard, Team

Scores: TypeAlias = "Sequence[Tensor | None]"


@dataclass
class _Call:
    module: nn.Module
    weight: str
    bias: str | None
    input: Tensor
    edge: GradientEdge
    output_shape: torch.Size


class Recorder:
    """Computes inner gradients and, with them, the record that an inverse needs.

    Args:
        problem: what is solved.
        kind: "batch", "raw", "sample" or "layer": which record; None for none.
        fisher: "empirical", "exact" or "sampled": of which Fisher matrix. The last two need `Losses.outputs` and a
            likelihood, and are not defined for "batch" and "raw".

    The first batch in which a layer appears is used to verify, once, that samples do not influence each other and that
    the layer's scores account for the whole gradient of its weight (a weight used elsewhere too is moved to the other
    parameters).
    """

    def __init__(
        self,
        problem: Bilevel,
        kind: RecordKind | None = None,
        fisher: FisherKind = "empirical",
        calls: OracleCalls | None = None,
    ) -> None:
        self.problem = problem
        self.kind = kind
        self.fisher = fisher
        self.likelihood = None
        if kind is not None and fisher != "empirical":
            if kind in ("batch", "raw"):
                raise InputError(f"The {fisher} Fisher matrix needs per-sample records, not the gradient of a batch.")
            self.likelihood = resolve(problem.likelihood, f"fisher='{fisher}'")
        self.calls = OracleCalls() if calls is None else calls
        self._names = {id(leaf): name for name, leaf in zip(problem.theta.names, problem.theta.leaves, strict=True)}
        self._shapes = {n: leaf.shape for n, leaf in zip(problem.theta.names, problem.theta.leaves, strict=True)}
        self._verified: set[str] = set()  # weights whose layers were looked at once
        self._unaccounted: set[str] = set()
        self._likely = False  # whether the likelihood was compared with the losses
        self._others = OneSampleGradients(problem)

    def step(self, batch: Batch | Shard) -> InnerStep:
        """The inner gradient on a batch, at the problem's current theta and v, with its record.

        On a worker's part of a batch the loss and the gradient are those of the whole batch, and the record that of the part.
        """
        problem, theta = self.problem, self.problem.theta
        part = batch if isinstance(batch, Shard) else None
        batch = batch if part is None else part.batch
        if self._tapping:
            self._refuse_batchnorm()
        reducer = theta.reducer if part is not None else None
        with torch.enable_grad():
            if part is not None and reducer is not None and reducer.serves(part.team):
                losses, calls, value, data, scores = self._reduced(part, reducer)
                unseen = self._unseen(calls)
                if unseen:
                    # The gradient is that of the whole batch by now, and the wrapper's graph is not for other passes.
                    with problem.guarded(seed=0):
                        self._passed(batch)
            else:
                losses, calls, value, data, scores, unseen = self._passed(batch)
                if part is not None:
                    if reducer is not None:
                        unused = [name for name, g in zip(theta.names, data, strict=True) if g is None]
                        reducer.consider(part.team, unused)
                        if reducer.serves(part.team):
                            self._follow_first(part.team, reducer)
                    value, data = self._summed(part, value, data, calls)
            samples = losses.values.numel() if losses.per_sample else (common_length(batch) or 1)
            if part is not None:
                samples = part.total
                if unseen:
                    self._unaccounted = part.team.union(self._unaccounted, theta.names)
            seeds = self._seeds(losses)
            columns = [scores]
            if seeds is not None and losses.outputs is not None and calls:
                edges = [call.edge for call in calls]
                columns = [
                    torch.autograd.grad(losses.outputs, edges, seed, allow_unused=True, retain_graph=True)
                    for seed in seeds
                ]
        self.calls.inner_gradients += 1
        self.calls.samples += samples
        with torch.no_grad():
            gradient = [
                (torch.zeros_like(leaf) if g is None else g)
                if isinstance(c, float) and c == 0
                else _plus(g, 2 * c * leaf)
                for g, c, leaf in zip(data, problem.ridge_coefficients(), theta.leaves, strict=True)
            ]
            record = self._record(batch, losses, calls, data, columns, gradient, seeds, part)
        return InnerStep(gradient, value + problem.ridge().detach(), record)

    @property
    def _tapping(self) -> bool:
        return self.kind in ("layer", "sample")

    def _unseen(self, calls: list[_Call]) -> bool:
        """Whether some layer was not looked at before."""
        return self._tapping and not self._verified.issuperset(call.weight for call in calls)

    def _forward(self, batch: Batch) -> tuple[Losses, list[_Call]]:
        """The losses of a batch, and the layers they went through."""
        problem, tapping = self.problem, self._tapping
        v: Sequence[Tensor] | None = [leaf.detach() for leaf in problem.v.leaves]
        if problem.v.root is not None:
            v = problem.v.leaves if tapping else None
        with self._tapped(tapping) as calls:
            # Given the leaves, a compiled module is seen uncompiled: it would not know of the hook.
            losses = problem.losses(batch, problem.theta.leaves if tapping else None, v)
        if self.kind is not None and not losses.per_sample:
            raise InputError(
                "Recording curvature needs per-sample losses, but inner() returned a scalar. Return losses of shape (B,)."
            )
        return losses, calls

    def _passed(self, batch: Batch) -> tuple[Losses, list[_Call], Tensor, list[Tensor | None], Scores, bool]:
        """One forward and one backward pass over a batch: losses, layers, loss, gradient and scores.

        Layers that were not seen before are looked at, and the last answer says that there were some.
        """
        leaves = self.problem.theta.leaves
        losses, calls = self._forward(batch)
        value = losses.mean()
        unseen = self._unseen(calls)
        again = unseen or self.likelihood is not None
        wrt: Any = (*leaves, *(call.edge for call in calls))
        found = torch.autograd.grad(value, wrt, allow_unused=True, retain_graph=again or None)
        data, scores = list(found[: len(leaves)]), found[len(leaves) :]
        if unseen:
            self._check_independent(losses, calls)
            self._unaccounted |= self._find_unaccounted(self._layers(losses, calls, [scores]), calls, data, value)
            self._verified |= {call.weight for call in calls}
        return losses, calls, value.detach(), data, scores, unseen

    def _reduced(
        self, part: Shard, reducer: Reducer
    ) -> tuple[Losses, list[_Call], Tensor, list[Tensor | None], Scores]:
        """The same, by DistributedDataParallel: the loss and the gradient are those of the whole batch."""
        team, buffers = part.team, self.problem.theta.named_buffers
        factor = part.share * team.size  # the wrapper takes the mean over workers, whose parts may differ in size
        kept: list[tuple[Losses, list[_Call], Tensor, bool]] = []

        def loss() -> Tensor:
            before = [(id(buffer), buffer._version) for buffer in buffers().values()]
            losses, calls = self._forward(part.batch)
            value = losses.mean()
            moved = before != [(id(buffer), buffer._version) for buffer in buffers().values()]
            kept.append((losses, calls, value.detach(), moved))
            return value * factor

        with reducer.company(team):
            whole = reducer.forward(loss)
            losses, calls, value, moved = kept.pop()
            hear = team.summing([self._told(part, value, calls, moved)])  # on its way during the backward pass
            edges = [call.edge for call in calls]
            data, found = reducer.backward(whole, edges, retain_graph=self.likelihood is not None)
        team.bytes_sent += sum(g.numel() * g.element_size() for g in data if g is not None)
        scores = [s if s is None or factor == 1 else s / factor for s in found]
        told = hear()[0]
        if float(told[3]) > 0:
            self._follow_first(team, reducer)
        return losses, calls, self._heard(part, told, value), data, scores

    def _follow_first(self, team: Team, reducer: Reducer) -> None:
        """Take the first worker's buffers now. The wrapper does so before its next forward pass; some look at them sooner."""
        if reducer.follows_first:
            team.begin_alike(self.problem.theta.named_buffers().values())

    def _told(self, part: Shard, value: Tensor, calls: list[_Call], moved: bool = False) -> Tensor:
        """What workers tell each other of an inner step, to be summed: the loss, a mark of the layers, moved buffers."""
        mark = float(zlib.crc32(" ".join(call.weight for call in calls).encode()) % 2**16)
        told = torch.tensor([0.0, mark, mark**2, float(moved)], dtype=torch.float64, device=value.device)
        told[0] = value * part.share
        return told

    def _heard(self, part: Shard, told: Tensor, like: Tensor) -> Tensor:
        """The loss on the whole batch. All workers must have met the same layers, or what they sum would not fit together."""
        if part.team.size * float(told[2]) != float(told[1]) ** 2:
            raise InputError(
                "The workers' parts of a batch went through different layers, so their curvature cannot be summed. Use"
                " fisher_window with records='sample', or one worker."
            )
        return told[0].to(like.dtype)

    def _summed(
        self, part: Shard, value: Tensor, data: Sequence[Tensor | None], calls: list[_Call]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """The loss and its gradient on the whole batch, from those on this worker's part of it."""
        leaves, share = self.problem.theta.leaves, part.share
        given = [torch.zeros_like(p) if g is None else g * share for g, p in zip(data, leaves, strict=True)]
        *summed, told = part.team.sum([*given, self._told(part, value, calls)])
        return self._heard(part, told, value), list(summed)

    def _record(
        self,
        batch: Batch,
        losses: Losses,
        calls: list[_Call],
        data: Sequence[Tensor | None],
        columns: Sequence[Sequence[Tensor | None]],
        gradient: Sequence[Tensor],
        seeds: Tensor | None,
        part: Shard | None,
    ) -> InnerRecord | None:
        theta = self.problem.theta
        if self.kind is None:
            return None
        samples = losses.values.shape[0] if part is None or self.kind in ("layer", "sample") else part.total
        parts = None if part is None else part.parts
        if self.kind == "raw":
            return BatchGradient(None, _kept(theta.flatten(gradient), gradient), samples)
        if self.kind == "batch":
            weight = self._common_weight(losses, part)
            row = theta.flatten(data) * (0.0 if weight == 0 else (samples / weight) ** 0.5)
            return BatchGradient(row, None, samples)
        layers = [
            layer
            for layer in self._layers(losses, calls, columns, seeds is not None)
            if layer.weight not in self._unaccounted
        ]
        covered = {name for layer in layers for name in (layer.weight, layer.bias)}
        others = tuple(name for name in theta.names if name not in covered)
        rows = self._others.rows(batch, losses, others, seeds) if others else None
        weights = None if losses.weights is None else losses.weights.detach()
        if self.kind == "layer":
            return LayerStatistics(tuple(layers), others, rows, weights, samples, parts)
        pieces: dict[str, Tensor] = {}
        for layer in layers:
            pieces[layer.weight], bias = layer.rows()
            if layer.bias is not None and bias is not None:
                pieces[layer.bias] = bias
        if rows is not None:
            sizes = [self._shapes[name].numel() for name in others]
            pieces |= dict(zip(others, rows.split(sizes, dim=1), strict=True))
        ordered = [pieces[name].to(theta.dtype) for name in theta.names]
        return PerSampleGradients(ordered[0] if len(ordered) == 1 else torch.cat(ordered, dim=1), samples, parts)

    @contextmanager
    def _tapped(self, wanted: bool) -> Iterator[list[_Call]]:
        """Note every call of a Linear or Conv2d that holds a parameter of theta, inside this block alone.

        The block is the forward pass and no more: activation checkpointing calls modules again in the backward pass.
        """
        calls: list[_Call] = []
        if not wanted:
            yield calls
            return

        def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            # A subclass may compute something else with the same weight; the accounting check catches that.
            if not isinstance(module, (nn.Linear, nn.Conv2d)):
                return
            name = self._names.get(id(module.weight))
            # Keyword arguments do not reach this hook; what is not noted here counts among the other parameters.
            if name is None or not args or not isinstance(output, Tensor) or not output.requires_grad:
                return
            bias = None if module.bias is None else self._names.get(id(module.bias))
            # On sequences the output is a view of a matrix, and an in-place activation replaces the view's place in the
            # graph, but not the matrix's.
            base = output._base
            source = base if base is not None and base.numel() == output.numel() and output.is_contiguous() else output
            calls.append(_Call(module, name, bias, args[0].detach(), get_gradient_edge(source), output.shape))

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
            self.likelihood.verify(outputs, losses.values)
            self._likely = True
        draw = self.likelihood.sample if self.fisher == "sampled" else self.likelihood.roots
        return draw(outputs, losses.values).detach()

    def _layers(
        self,
        losses: Losses,
        calls: list[_Call],
        columns: Sequence[Sequence[Tensor | None]],
        seeded: bool = False,
    ) -> list[LayerRecord]:
        samples = losses.values.shape[0]
        weights = torch.ones_like(losses.values) if losses.weights is None else losses.weights
        root = weights.detach().sqrt()
        # The backward pass of mean_i( w_i l_i ) gave w_i / B times a score, the one of r_ik . z_i the score itself.
        # The root of a negative weight is nan and stays so: a sample must not vanish without a word.
        scale = root if seeded else torch.where(root == 0, 0.0, samples / root)
        grouped: dict[str, list[tuple[_Call, tuple[Tensor, ...]]]] = {}
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
                scale.to(pairs[0][1][0].dtype),
            )
            for weight, pairs in grouped.items()
        ]

    def _check_independent(self, losses: Losses, calls: list[_Call]) -> None:
        samples = losses.values.shape[0]
        if samples < 2 or not calls:
            return
        # The first sample and the last: a sum that runs along the batch shows in one of them only.
        for row in (0, samples - 1):
            found = torch.autograd.grad(
                losses.values[row], [call.edge for call in calls], retain_graph=True, allow_unused=True
            )
            for call, score in zip(calls, found, strict=True):
                if score is None or call.output_shape[0] != samples:
                    continue
                touched = score.reshape(samples, -1).ne(0).any(1)
                touched[row] = False
                if bool(touched.any()):
                    raise InputError(
                        f"At the layer of {call.weight!r} the loss of one sample depends on the row of another. Per-sample"
                        " curvature needs independent samples in the first dimension (no batch statistics, batch-first"
                        " sequences)."
                    )

    def _find_unaccounted(
        self, layers: list[LayerRecord], calls: list[_Call], data: Sequence[Tensor | None], value: Tensor
    ) -> set[str]:
        """Weights whose gradient is not the sum of their layer's per-sample gradients: they are used elsewhere too.

        The graph shows a use whose gradient happens to be zero now; the numbers show a layer that computes something else.
        """
        by_name = dict(zip(self.problem.theta.names, data, strict=True))
        uses = self._uses(value)
        uses.subtract(name for call in calls for name in (call.weight, call.bias) if name is not None)
        found = set()
        for layer in layers:
            modules = {id(call.module) for call in calls if call.weight == layer.weight}
            if any(uses[name] > 0 for name in (layer.weight, layer.bias) if name is not None) or (
                len(modules) > 1 and isinstance(layer.module, nn.Conv2d)  # they may differ in stride or padding
            ):
                found.add(layer.weight)
                continue
            # What the backward pass gave adds up to the gradient of the batch; layer.scores are scaled for the record.
            plain = replace(layer, scale=torch.ones_like(layer.scale))
            total = torch.einsum("btgo,btgi->goi", plain.scores[0], layer.inputs)
            # At an inner optimum the sum is nothing but rounding, so errors are measured by the size of its terms.
            size = float(torch.einsum("btgo,btgi->goi", plain.scores[0].abs(), layer.inputs.abs()).max())
            pairs = [(layer.weight, total if layer.bias is None else total[..., :-1])]
            if layer.bias is not None:
                pairs.append((layer.bias, total[..., -1]))
            for name, computed in pairs:
                true = by_name[name]
                true = torch.zeros_like(computed) if true is None else true.reshape(computed.shape)
                if not torch.allclose(computed, true, rtol=1e-2, atol=1e-3 * size + 1e-12):
                    found.add(layer.weight)
        return found

    def _uses(self, value: Tensor) -> Counter[str]:
        """How often each parameter enters the graph of a value."""
        found: Counter[str] = Counter()
        waiting: list[Any] = [value.grad_fn]
        seen = set()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            for following, _ in node.next_functions:
                name = self._names.get(id(getattr(following, "variable", None)))
                if name is not None:
                    found[name] += 1
                else:
                    waiting.append(following)
        return found

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
