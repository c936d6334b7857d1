"""Curvature learnt from a training loop of the user's own.

with nhgd.observing(problem, inverse="kfac") as curvature:
    for batch in data:
        loss = curvature.inner(batch)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    found = curvature.hypergradient(outer_batch)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.autograd.graph import GradientEdge
from torch.utils.hooks import RemovableHandle

from nhgd._recording.accounting import Call, LayerCall
from nhgd._recording.normalisation import NormCall
from nhgd._recording.recorder import Recorder
from nhgd._scaling import Scaling, all_finite
from nhgd._surroundings import library_settings
from nhgd._validation import check_seed, validated_but
from nhgd.data.batch import Batch, first_bad, move
from nhgd.data.loader import one_batch
from nhgd.errors import InputError
from nhgd.hypergradients.base import Hypergradient
from nhgd.hypergradients.implicit import implicit, measured
from nhgd.inverse import AbstractInverse
from nhgd.inverse import resolve as resolve_inverse
from nhgd.inverse.capabilities import begun, couples, needs_record
from nhgd.losses import Losses
from nhgd.objective import NO_TAP, Objective, OracleCalls
from nhgd.oracle import Oracle
from nhgd.problem import Bilevel
from nhgd.record import InnerRecord

PASSES = 8  # calls of a model whose layers are kept, with their graphs, for the user's own loss
ASSUMED = "the mean over samples of weight one"  # of a loss of the user's own


@validated_but("inverse")
def observing(
    problem: Bilevel, inverse: str | AbstractInverse = "kfac", seed: int = 0, scaler: GradScaler | None = None
) -> Observer:
    """An inverse that learns from a training loop of the user's own, inside a `with` block.

    Args:
        problem: a `Bilevel`; its theta is what the loop trains, by any optimiser. All of theta must require a gradient.
        inverse: a name or an object, for example `nhgd.inverse.KFAC(damping=1e-3)`. One that learns nothing, such as
            "cg", is solved by products at the point of the hypergradient.
        seed: what dropout is drawn from in the hypergradient; a loop draws its own.
        scaler: the `torch.amp.GradScaler` of the loop, if it has one:
            `scaler.scale(curvature.inner(batch)).backward()`. Curvature and hypergradients are unscaled, and losses
            that overflow are not learnt from.

    >>> theta, v = torch.zeros(2, requires_grad=True), torch.tensor(0.0)
    >>> problem = Bilevel(
    ...     inner=lambda theta, v, x: (x @ theta - v - 1).square(),
    ...     outer=lambda theta, v, x: theta.sum(),
    ...     theta=theta, v=v, l2=0.1)
    >>> optimizer = torch.optim.SGD([theta], lr=0.1)
    >>> with observing(problem, inverse="fisher_dense") as curvature:
    ...     for _ in range(3):
    ...         optimizer.zero_grad()
    ...         curvature.inner(torch.eye(2)).backward()
    ...         optimizer.step()
    ...     found = curvature.hypergradient(torch.eye(2))
    >>> curvature.steps, found.grad.shape
    (3, torch.Size([]))
    """
    check_seed(seed)
    return Observer(problem, resolve_inverse(inverse), seed, scaler)


class Observer:
    """Curvature learnt from a training loop, and its hypergradients; made by `observing`.

    A user's own loss, computed by theta's layers inside the block and differentiated by `backward()`, is observed too,
    unless `inner` or `observe` is used: it is taken for the mean over samples of weight one, which
    `stats.notes["assumed"]` says. It is seen through layers only, so all of theta must belong to Linear and Conv2d
    layers; else use `inner` or `observe`.

    Every `inner` or `observe` counts once its loss was differentiated: several of them before a step of the optimiser,
    as in gradient accumulation, are several batches at one theta, and a factor on a loss is none on its curvature.

    Attributes:
        steps: how many losses were differentiated.
        calls: how often each derivative was asked for.
        state: of the inverse.
    """

    def __init__(self, problem: Bilevel, inverse: AbstractInverse, seed: int, scaler: GradScaler | None = None) -> None:
        problem.refuse_inference()
        problem.scaling = Scaling(scaler, problem.theta.device, grows=False)
        if problem.theta.shards is not None:
            raise InputError(
                "observing does not support a theta divided by fully_shard, whose parameters Bilevel gathers, so that a loop"
                " of your own would train others. Use nhgd.Solver with a team, or DistributedDataParallel."
            )
        self.problem = problem
        self.inverse = inverse
        self.seed = seed
        self.steps = 0
        self.calls = OracleCalls()
        self._learner = inverse.learner
        self.state: Any = None if self._learner is None else self._learner.init(problem.theta)
        self._begun = False
        self._last: Batch = None
        self._own_loss = False  # whether a loss of the user's own was observed
        self._hooks: list[RemovableHandle] = []
        self._depth = 0
        self._working = False  # whether derivatives are taken here, and not by the user's loop
        self._asked = False  # whether losses come by `inner` or `observe`
        self._scores: list[tuple[LayerCall | NormCall, Tensor]] = []  # of the backward pass that is under way
        self._refusal: str | None = None  # why a backward pass could not be learnt from
        self._passes: deque[list[Call | NormCall]] = deque(maxlen=PASSES)
        self._recorder: Recorder | None = None
        if self._learner is not None:
            learner = self._learner
            self._recorder = Recorder(problem, learner.records, learner.fisher, couples=couples(learner))

    def __enter__(self) -> Observer:
        if self._recorder is not None and self._recorder.taps.layers:
            register = nn.modules.module.register_module_forward_pre_hook
            self._hooks = [
                register(self._enter),
                nn.modules.module.register_module_forward_hook(self._leave, always_call=True),
            ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._passes.clear()

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Inside, passes are the observer's own, and none of them is observed."""
        before, self._working = self._working, True
        try:
            yield
        finally:
            self._working = before

    def inner(self, batch: Batch) -> Tensor:
        """The problem's inner objective on a batch, ridge included, to be differentiated in theta by `backward()`.

        Where gradients are off, it is the value alone.
        """
        batch = move(one_batch(batch, "batch"), self.problem.theta.device)
        if not torch.is_grad_enabled():
            with library_settings(), self._at_work():
                return (self.problem.losses(batch).mean() + self.problem.ridge()).detach()
        bad = first_bad(batch) if self.steps == 0 else None
        if bad:
            raise InputError(f"The inner batch contains nan or inf: {bad}. Remove or impute such samples first.")
        self._begin()
        self._asked = True
        self.problem.scaling.refresh()
        with self._at_work():
            found = Objective(self.problem, batch).step(self._recorder_due() or NO_TAP, self.calls)
        self._passes.clear()
        self._last = batch
        return self._loss(found.value, found.gradient, found.record)

    def observe(self, losses: Tensor | Losses) -> Tensor:
        """The mean of losses (B,) of the user's own, to be differentiated in theta by `backward()`; no ridge is
        added to it.

        They must have been computed from theta inside the block, one for each sample of a batch. Their mean is taken
        for the inner objective without its ridge, with weights of one unless `Losses` says otherwise.
        """
        self._asked = True
        with self._at_work():
            return self._observed(Losses(losses) if isinstance(losses, Tensor) else losses)

    def _observed(self, given: Losses) -> Tensor:
        self._begin()
        self.problem.scaling.refresh()
        calls = [call for noted in self._passes for call in noted]
        self._passes.clear()
        self._own_loss = True
        if not given.per_sample or not given.values.requires_grad:
            what = "a scalar" if not given.per_sample else "losses without a graph"
            raise InputError(
                f"observe() takes one loss for each sample, shape (B,), as computed from theta inside the block; it got {what}."
                " Use reduction='none'."
            )
        theta = self.problem.theta
        record: InnerRecord | None = None
        recorder = self._recorder_due()
        if recorder is None:
            value, passes = given.mean(), 1
            found = self.problem.scaling.grad(value, theta.leaves, retain_graph=True, materialize_grads=True)
            gradient = list(found)
        else:
            with library_settings():
                seen = recorder.passed_already(given, calls)
                gradient = [
                    torch.zeros_like(p) if g is None else g for g, p in zip(seen.data, theta.leaves, strict=True)
                ]
                with torch.no_grad():
                    record = recorder.record(None, seen, gradient)
            value, passes = seen.value, seen.passes
        self.calls.inner_gradients += passes
        self.calls.samples += passes * len(given.values)
        return self._loss(value.detach(), gradient, record)

    def hypergradient(self, outer_batch: Batch, inner_batch: Batch = None) -> Hypergradient:
        """The hypergradient at the current theta and v, which stay as they are.

        Args:
            outer_batch: where the outer loss is taken.
            inner_batch: where the cross derivative, and the products of an inverse that needs some, are taken; default:
                the batch of the last `inner`.
        """
        problem, device = self.problem, self.problem.theta.device
        inner = self._last if inner_batch is None else move(one_batch(inner_batch, "inner_batch"), device)
        if inner is None:
            raise InputError(
                "There is no inner batch yet to take derivatives on. Call inner(batch) first, or give inner_batch."
            )
        outer = move(one_batch(outer_batch, "outer_batch"), device)
        if self._refusal is not None:
            raise InputError(self._refusal)
        if self._recorder is not None and self.steps == 0:
            raise InputError(
                f"{self.inverse.name} has learnt nothing yet. First call inner(batch), and backward() on its result."
            )
        with library_settings(), self._at_work():
            at = Oracle(problem, [inner], outer, self.seed, self.calls)
            found = measured(at, self.inverse, implicit(at, self.inverse, self.state))
        self._begun = False  # what comes next is the inner loop of another outer step
        self._passes.clear()
        found.check(problem, self.inverse.name)
        if not self._own_loss:
            return found
        return replace(found, stats=replace(found.stats, notes=found.stats.notes | {"assumed": ASSUMED}))

    def _recorder_due(self) -> Recorder | None:
        """The recorder of this step, if the inverse takes its record."""
        due = self._learner is not None and needs_record(self._learner, self.steps)
        return self._recorder if due else None

    def _begin(self) -> None:
        """Begin the inner loop of an outer step, at its first loss."""
        if not self._begun:
            self._begun = True
            if self._learner is not None:
                self.state = begun(self._learner, self.state)

    def _loss(self, value: Tensor, gradient: Sequence[Tensor], record: InnerRecord | None) -> Tensor:
        """A loss whose gradient is known, and that is observed once it was asked for it."""
        own = self.problem.theta.attached()
        made: Tensor = _Loss.apply(self, value, tuple(gradient), record, *own)  # type: ignore[no-untyped-call]  # torch's own
        return made

    def _differentiated(self, record: InnerRecord | None) -> None:
        """After backward(): learn from what was recorded of the loss."""
        self.steps += 1
        if record is not None and self._learner is not None:
            self.state = self._learner.observe(self.state, record)

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self._depth == 0:
            self._passes.append([])
        self._depth += 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth = max(self._depth - 1, 0)
        if self._recorder is None or self._working:
            return
        call = self._recorder.taps.call(module, args, output)
        if call is None or not self._passes:
            return
        self._passes[-1].append(call)
        if not self._asked and call.edge is not None:
            self._await_score(call, call.edge)

    def _await_score(self, call: Call | NormCall, edge: GradientEdge) -> None:
        """Note the score of a layer's output when a backward pass of the user's own comes by."""
        place = edge.output_nr
        # Without its places in the graph, which would hold the graph that holds this function.
        noted = call.without_places()

        def note(scores: Sequence[Tensor | None]) -> None:
            score = scores[place]
            if self._working or self._asked or score is None or not self._hooks:
                return
            if not self._scores:
                engine: Any = torch.autograd.Variable._execution_engine  # as DDP does
                engine.queue_callback(self._end_of_backward)
            self._scores.append((noted, score.detach()))

        edge.node.register_prehook(note)

    def _end_of_backward(self) -> None:
        """Learn from the layers that a backward pass of the user's own went through."""
        scaling = self.problem.scaling
        scaling.refresh()  # before the step that this backward pass is for: as the loss was scaled
        seen, self._scores = [(call, scaling.unscaled(score)) for call, score in self._scores], []
        if scaling.active and not all_finite(score for _, score in seen):
            return  # the scaler will skip the step as well
        self._begin()
        self._own_loss = True
        self.calls.inner_gradients += 1
        self.calls.samples += next((call for call, _ in seen if isinstance(call, LayerCall)), seen[0][0]).input.shape[0]
        recorder, record = self._recorder_due(), None
        if recorder is not None:
            try:
                with torch.no_grad():
                    record = recorder.of_layers(seen)
            except (
                InputError
            ) as error:  # raised when the curvature is requested: a backward pass must not fail because of it
                self._refusal = str(error)
                return
        self._differentiated(record)


class _Loss(torch.autograd.Function):
    """A value whose gradient in theta is known already."""

    @staticmethod
    def forward(
        ctx: Any,
        observer: Observer,
        value: Tensor,
        gradient: tuple[Tensor, ...],
        record: InnerRecord | None,
        *theta: Tensor,
    ) -> Tensor:
        """The value."""
        ctx.observer, ctx.gradient, ctx.record, ctx.counted = observer, gradient, record, False
        return value.clone()

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient, times the gradient that arrives."""
        if torch.is_grad_enabled():
            raise InputError(
                "An observed loss cannot be differentiated twice. Call backward() without create_graph=True, or take the loss"
                " from problem.objective(batch)."
            )
        if not ctx.counted:
            ctx.counted = True
            ctx.observer._differentiated(ctx.record)
            ctx.record = None
        return (None, None, None, None, *(g * factor.to(g) for g in ctx.gradient))
