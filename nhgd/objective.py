"""The inner objective on one batch: its value, its derivatives, and the gradient that an inner step takes.

    mean_i( w_i l_i ) + sum( l2 * theta^2 )

An `Objective` has its own seed, so that the same object repeats the same dropout, at any point. It keeps no graph:
theta and v may move between two calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from nhgd import _tape as tape
from nhgd._randomness import set_states, states
from nhgd._surroundings import library_settings
from nhgd._turned import turned
from nhgd.data.batch import Batch, common_length
from nhgd.data.padding import Padded
from nhgd.errors import InputError
from nhgd.losses import Losses
from nhgd.problem import Bilevel
from nhgd.record import InnerRecord, InnerStep, Reduction
from nhgd.stop import gradient_equivalents


@dataclass
class OracleCalls:
    """How often each derivative was taken; one call is one batch.

    One gradient is one backward pass over a batch, with or without a forward pass. So an inner step counts once for its
    gradient, and once for each root of the exact or the sampled Fisher matrix. Rows of parameters that
    the scores of no module show count once, or once for each root, if they come from a separate pass; once for each
    sample if their dropout must be that of the inner step. A cross derivative from the scores of an inner step is one
    product with each layer where a gradient has three: three of them count as one in `cross`, and as nothing else. One
    that needs a pass, backward or in forward mode, counts as a gradient too. One-time checks of a model do not count.
    `samples` are those of all inner gradients.
    """

    inner_gradients: int = 0
    outer_gradients: int = 0
    hvps: int = 0
    cross: int = 0
    samples: int = 0

    @property
    def gradients(self) -> int:
        """First derivatives of either level."""
        return self.inner_gradients + self.outer_gradients

    @property
    def equivalents(self) -> float:
        """All of them in gradients of one batch, see `nhgd.stop.gradient_equivalents`."""
        return gradient_equivalents(self.as_dict())

    def as_dict(self) -> dict[str, int]:
        """All counters by name, with their total of first derivatives."""
        return {"gradients": self.gradients} | {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass
class Pass:
    """A forward and a backward pass over a batch.

    Attributes:
        losses: with their graph, as far as it was kept.
        value: the mean loss, without the ridge.
        data: its gradient, one tensor a leaf; None where a leaf is not used.
        passes: backward passes over the batch.
        layers: the layers that were met.
        news: whether something was found that later records must note_weights.
    """

    losses: Losses
    value: Tensor
    data: list[Tensor | None]
    passes: int = 1
    layers: Sequence[str] = ()
    news: bool = False


class Tap:
    """What an inner step yields besides its gradient: here, nothing. A `Recorder` makes a record."""

    def passed(self, problem: Bilevel, batch: Batch) -> Pass:
        """The losses of a batch and their gradient, as an inner step takes them: buffers follow, compiled modules
        run.
        """
        v = None if problem.v.root is not None else [leaf.detach() for leaf in problem.v.leaves]

        def once() -> Pass:
            losses = problem.losses(batch, None, v)
            problem.note_weights(losses)
            value = losses.mean()
            found = problem.scaling.grad_once(value, problem.theta.leaves, allow_unused=True)
            return Pass(losses, value.detach(), list(found))

        return repeated(problem, once)

    def agree(self, reduction: Reduction) -> None:
        """Adopt what other workers found."""

    def record(
        self, batch: Batch, found: Pass, gradient: Sequence[Tensor], reduction: Reduction | None = None
    ) -> InnerRecord | None:
        """The record of a pass, given the gradient of the whole batch. May raise `found.passes`."""
        return None


NO_TAP = Tap()
Passed = TypeVar("Passed", bound=Pass)


def repeated(
    problem: Bilevel, once: Callable[[], Passed], made: Callable[[Passed], Iterable[Tensor | None]] | None = None
) -> Passed:
    """The pass of an inner step, taken again with a lower scale where its gradient, or what else it `made`, overflowed.

    Buffers follow the pass that is used alone, and its dropout is that of the first.
    """
    scaling, device = problem.scaling, problem.theta.device
    if not scaling.active:
        return once()
    drawn = states(device)
    buffers = [*problem.theta.buffers(), *problem.v.buffers()]

    def again() -> None:
        set_states(drawn, device)
        for buffer, copy in buffers:
            buffer.copy_(copy)

    def tensors(found: Passed) -> list[Tensor | None]:
        if not bool(torch.isfinite(found.value)):
            return []  # not for the scale
        return [*found.data, *(() if made is None else made(found))]

    found = scaling.taken(once, tensors, again)
    if scaling.grows:
        scaling.note(False)
    return found


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """A context in which a gradient is differentiated, with a clear error if an operation has no second derivative."""
    try:
        yield
    except NotImplementedError as error:
        raise InputError(
            f"torch cannot differentiate the inner loss twice ({str(error).splitlines()[0].rstrip('.')}). Replace that"
            " operation (nn.EmbeddingBag by nn.Embedding and a mean, for example), or use a method of first derivatives alone:"
            " f2sa or bome."
        ) from error


class Objective:
    """The inner objective on one batch, ridge included.

    Args:
        problem: its theta and v are used at their current values.
        batch: the samples.
        seed: what dropout is drawn from; the same in every answer. None: an inner step draws from the generators as
            they stand, and everything else from 0.

    Attributes:
        samples: of the batch; None until its losses show them.
        share: the factor of a mean over the samples here in the mean over the batch.
        reduction: attached to records, if a subclass evaluates only some samples of a batch. What it finds
            is then a term of a sum, and `summed` gives the answer.

    >>> x, y = torch.ones(8, 2), torch.ones(8)
    >>> problem = Bilevel(
    ...     inner=lambda theta, v, batch: (batch[0] @ theta - batch[1]) ** 2,
    ...     outer=lambda theta, v, batch: theta.sum(),
    ...     theta=torch.zeros(2), v=torch.zeros(()), l2=1.0)
    >>> objective = Objective(problem, (x, y))
    >>> objective.value(), objective.gradient()
    (1.0, tensor([-2., -2.]))
    >>> objective.hvp(torch.tensor([1.0, -1.0]))
    tensor([ 2., -2.])
    """

    share: float = 1.0
    reduction: Reduction | None = None

    def __init__(self, problem: Bilevel, batch: Batch, seed: int | None = None) -> None:
        self.problem = problem
        self.batch = batch
        self.seed = seed
        self.samples = self.total(common_length(batch))  # what a batch does not show is known when its losses are

    def total(self, samples: int | None) -> int | None:
        """The samples of the batch, from those here."""
        return self.batch.samples if isinstance(self.batch, Padded) else samples

    def summed(self, terms: Sequence[Tensor], in_v: Sequence[Tensor] = ()) -> list[Tensor]:
        """Answers on the batch, from the terms found here. Few entries of those in v may differ from zero."""
        return [*terms, *in_v]

    def anywhere(self, flag: bool) -> bool:
        """Whether it holds for some samples of the batch, from whether it holds here."""
        return flag

    @contextmanager
    def drawing(self, live: bool = False, twice: bool = True) -> Iterator[None]:
        """The context of one pass, with dropout from the seed. `live`: buffers are updated. `twice`: the pass may be
        differentiated twice.
        """
        with library_settings(), self.problem.guarded(self.seed or 0, live, twice):
            yield

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """The random numbers of an inner step: from the run's generators, or from the seed."""
        seed = self.seed
        if seed is not None and tape.tape() is None:
            torch.manual_seed(seed)
        elif seed is not None:  # the device draws nothing, but the host draws its next numbers from there
            tape.effect(partial(_seed_host, seed))
        yield

    def losses(self, theta: Sequence[Tensor] | None = None) -> Losses:
        """The losses of the samples here, at the current theta or at another, one tensor a leaf."""
        losses = self.problem.losses(self.batch, theta)
        self.problem.note_weights(losses)
        self.samples = self.total(losses.samples(self.batch))
        return losses

    def term(self, theta: Sequence[Tensor] | None = None) -> Tensor:
        """The objective, or the term of it that is found here, with its graph, at the current theta or at another."""
        return self.losses(theta).mean() + self.problem.ridge(theta)

    def graph(self, calls: OracleCalls | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The term, and its gradient in theta with its graph, one tensor a leaf."""
        with torch.enable_grad():
            term = self.term()
            with twice_differentiable():
                gradient = self.problem.scaling.grad(
                    term, self.problem.theta.leaves, create_graph=True, materialize_grads=True
                )
        self.count(calls)
        return term.detach(), gradient

    def pull_back(
        self,
        graph: Sequence[Tensor],
        along: Sequence[Tensor],
        wrt: Sequence[Tensor],
        retain: bool = False,
        several: bool = False,
    ) -> Sequence[Tensor | None]:
        """d(gradient . vector)/d(wrt), the vector, or `several` stacked ones, given one part a leaf."""
        pairs = [(g, a) for g, a in zip(graph, along, strict=True) if g.requires_grad]
        if not pairs:
            return [None] * len(wrt)
        given, size = self.problem.scaling.sized([a for _, a in pairs])
        with twice_differentiable():
            found = self.problem.scaling.grad(
                [g for g, _ in pairs], wrt, given, retain_graph=retain, allow_unused=True, is_grads_batched=several
            )
        return found if size is None else [None if f is None else f * size for f in found]

    def count(self, calls: OracleCalls | None, passes: int = 1) -> None:
        """Gradients on this batch, once its losses are known."""
        if calls is not None:
            calls.inner_gradients += passes
            calls.samples += (self.samples or 1) * passes
            if isinstance(self.batch, Padded):
                self.batch.passes += passes

    def step(self, tap: Tap = NO_TAP, calls: OracleCalls | None = None) -> InnerStep:
        """The gradient of an inner step, with the result of a tap: buffers are updated, and the user's hooks run.

        The value and the gradient are those of the batch, and the record that of the samples here.
        """
        problem, theta = self.problem, self.problem.theta
        with library_settings(), self.stepping():
            with tape.overlapped() as beside:
                ridge = problem.ridge_value()
            with torch.enable_grad():
                found = self.passed(tap)
            with torch.no_grad():
                gradient = _with_ridge(found.data, problem.ridge_coefficients(), theta.leaves)
                record = tap.record(self.batch, found, gradient, self.reduction)
        self.samples = self.total(found.losses.samples(self.batch))
        self.count(calls, found.passes)
        beside.join()  # theta is about to move
        return InnerStep(gradient, found.value + ridge, record)

    def passed(self, tap: Tap) -> Pass:
        """The pass of an inner step, with the value and gradient of the batch."""
        return tap.passed(self.problem, self.batch)

    def value(self) -> float:
        """The objective alone: no derivative and no count."""
        return float(self.loss())

    @torch.no_grad()
    def loss(self) -> Tensor:
        """The same as a tensor without dimensions, which stays on its device."""
        with self.drawing(twice=False):
            return self.summed([self.term()])[0]

    def gradient(self, calls: OracleCalls | None = None) -> Tensor:
        """Its gradient in theta, (D,)."""
        with self.drawing(twice=False), torch.enable_grad():
            found = self.problem.scaling.grad(self.term(), self.problem.theta.leaves, allow_unused=True)
        self.count(calls)
        return self.summed([self.problem.theta.flatten(found)])[0]

    def hvp(self, vector: Tensor, calls: OracleCalls | None = None) -> Tensor:
        """Its Hessian in theta times a vector (D,)."""
        theta = self.problem.theta
        return self.summed([theta.flatten(self._product(vector, theta.leaves, calls))])[0]

    def cross(self, vector: Tensor, calls: OracleCalls | None = None) -> list[Tensor]:
        """Its cross derivative, transposed, times a vector (D,): one tensor for each leaf of v."""
        v = self.problem.v
        found = self._product(vector, v.leaves, calls)
        return self.summed([], [torch.zeros_like(p) if f is None else f for f, p in zip(found, v.leaves, strict=True)])

    def _product(self, vector: Tensor, wrt: Sequence[Tensor], calls: OracleCalls | None) -> Sequence[Tensor | None]:
        with self.drawing():
            return self.pull_back(self.graph(calls)[1], self.problem.theta.unflatten(vector), wrt)

    def fisher(self, vector: Tensor) -> Tensor:
        """The term of the empirical Fisher matrix times a vector (D,), without the ridge: (1/B) J^T W J x.

        J holds the per-sample gradients; J x comes from differentiating J^T c in c, so no (B, D) array is formed.
        """
        theta = self.problem.theta
        with self.drawing(), torch.enable_grad():
            losses = self._per_sample()
            scores = self._push_forward(losses.values, vector)  # (B,)
            weights = 1.0 if losses.weights is None else losses.weights.detach()
            found = self.problem.scaling.grad(
                losses.values, theta.leaves, weights * scores / len(scores), allow_unused=True
            )
        return theta.flatten(found)

    def ggn(self, vector: Tensor) -> Tensor:
        """The term of the generalised Gauss-Newton matrix times a vector (D,), without the ridge.

        (1/B) sum_i w_i J_i^T (d2 l_i / d z_i^2) J_i x, with z the model's outputs and the curvature in z taken from the
        loss itself. It never has negative curvature when the loss is convex in z.
        """
        theta = self.problem.theta
        with self.drawing(), torch.enable_grad():
            losses = self._per_sample()
            outputs = losses.outputs_for("The GGN")
            pushed = self._push_forward(outputs, vector)  # J x, shaped like z
            slope = losses.slope("The GGN")
            bent = (
                torch.autograd.grad(slope, outputs, pushed, retain_graph=True)[0] if slope.requires_grad else 0 * pushed
            )
            if losses.weights is not None:
                bent = bent * losses.weights.detach().reshape(-1, *[1] * (bent.ndim - 1))
            found = self.problem.scaling.grad(outputs, theta.leaves, bent / len(losses.values), allow_unused=True)
        return theta.flatten(found)

    def _per_sample(self) -> Losses:
        losses = self.losses()
        if not losses.per_sample:
            raise InputError(
                "The Fisher matrix needs per-sample losses, but inner() returned a scalar. Return losses of shape (B,)."
            )
        return losses

    def _push_forward(self, outputs: Tensor, vector: Tensor) -> Tensor:
        """J x for J = d outputs / d theta, by differentiating J^T c in c."""
        theta = self.problem.theta
        probe = torch.zeros_like(outputs, requires_grad=True)
        pulled = torch.autograd.grad(outputs, theta.leaves, probe, create_graph=True, materialize_grads=True)
        pairs = [(p, x) for p, x in zip(pulled, theta.unflatten(vector), strict=True) if p.requires_grad]
        return torch.autograd.grad([p for p, _ in pairs], probe, [x for _, x in pairs], retain_graph=True)[0]


class OuterObjective:
    """The outer loss on one batch, with a seed of its own. As of `Objective`, an answer is the `summed` terms found
    here.
    """

    def __init__(self, problem: Bilevel, batch: Batch, seed: int = 0) -> None:
        self.problem = problem
        self.batch = batch
        self.seed = seed

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """The setting of one pass, which is differentiated once at most."""
        device, samples = self.problem.theta.device, common_length(self.batch)
        with library_settings(), self.problem.guarded(self.seed, twice=False), turned(device, samples):
            yield

    def term(self, theta: Sequence[Tensor] | None = None) -> Tensor:
        """The loss, or the term of it that is found here, with its graph, at the current theta or at another."""
        return self.problem.outer_value(self.batch, theta)

    def summed(self, terms: Sequence[Tensor], in_v: Sequence[Tensor] = ()) -> list[Tensor]:
        """Answers on the batch, from the terms found here. Few entries of those in v may differ from zero."""
        return [*terms, *in_v]


def _seed_host(seed: float) -> None:
    torch.default_generator.manual_seed(int(tape.now(seed)))


def _with_ridge(
    data: Sequence[Tensor | None], coefficients: Sequence[Tensor | float], leaves: Sequence[Tensor]
) -> list[Tensor]:
    """The gradient including that of the ridge, one tensor for each leaf."""
    first, given = coefficients[0], [g for g in data if g is not None]
    if not isinstance(first, float) or first == 0 or any(c is not first for c in coefficients):
        first = 0.0
    if first > 0 and len(given) == len(leaves) and leaves[0].device.type == "cuda":
        # One call for all of them: on a GPU the launches of many small ones take longer than the work.
        return list(torch._foreach_add(given, list(leaves), alpha=2 * first))
    return [
        (torch.zeros_like(leaf) if g is None else g) if isinstance(c, float) and c == 0 else _plus(g, 2 * c * leaf)
        for g, c, leaf in zip(data, coefficients, leaves, strict=True)
    ]


def _plus(gradient: Tensor | None, ridge: Tensor) -> Tensor:
    return ridge if gradient is None else gradient + ridge
