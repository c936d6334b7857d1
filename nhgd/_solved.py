"""theta as a function of v: the implicit formula behind torch's own `backward`.

theta = nhgd.solved(problem, inner_batch)
loss(theta, v).backward()        v.grad += grad_v f - (d2_{theta,v} l)^T H^{-1} grad_theta f
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from nhgd._surroundings import library_settings
from nhgd._validation import check_seed, validated_but
from nhgd.data.batch import Batch, first_bad
from nhgd.data.loader import inner_batches
from nhgd.errors import InputError
from nhgd.hypergradients.implicit import implicit
from nhgd.inverse import AbstractInverse
from nhgd.inverse import resolve as resolve_inverse
from nhgd.inverse._learned.learning import learn
from nhgd.oracle import Oracle, OuterGradient
from nhgd.problem import Bilevel
from nhgd.variable import Like, Variable


@validated_but("inverse")
def solved(
    problem: Bilevel,
    inner_batch: Batch,
    inverse: str | AbstractInverse = "cg",
    inner_data: Iterable[Batch] | None = None,
    seed: int = 0,
) -> Like:
    """The current theta, taken as the solution of the inner problem, with its derivative in v.

    A loss of theta and v, of any kind, may be differentiated by `backward()` or `torch.autograd.grad`; v's own tensors
    get the hypergradient. One backward pass through theta is one linear solve. theta and v must not move before it.

    Args:
        problem: a `Bilevel`, with theta at, or near, an inner optimum. All of v's tensors must require a gradient.
        inner_batch: where the inner objective and its derivatives are taken.
        inverse: a name or an object, for example `nhgd.inverse.CG(steps=100)`.
        inner_data: batches that online inverses learn from and products run over, in place of inner_batch.
        seed: what dropout of the inner objective is drawn from.

    Returns:
        A copy of theta: a Tensor for a Tensor, a dict by parameter name for a dict or a module, as
        `torch.func.functional_call` takes it.

    >>> v = torch.tensor(1.0, requires_grad=True)
    >>> problem = Bilevel(  # theta*(v) = v
    ...     inner=lambda theta, v, x: (theta - v).square().expand(len(x)),
    ...     outer=lambda theta, v, x: theta.sum(),
    ...     theta=torch.tensor(1.0), v=v)
    >>> theta = solved(problem, torch.zeros(4))
    >>> ((theta - 3) ** 2 + v).backward()
    >>> v.grad
    tensor(-3.)
    """
    check_seed(seed)
    problem.refuse_inference()
    batches = inner_batches(inner_batch, inner_data, problem.theta.device)
    bad = first_bad(batches[0])
    if bad:
        raise InputError(f"The inner batch contains nan or inf: {bad}. Remove or impute such samples first.")
    solution = _Solution(problem, batches, resolve_inverse(inverse), seed)
    tensors: Sequence[Tensor] = _Theta.apply(solution, *problem.v.attached())  # type: ignore[no-untyped-call]  # torch's own
    return problem.theta.like(tensors) if isinstance(problem.theta.given, Tensor) else _named(problem.theta, tensors)


class _Solution:
    """The point of a solution, with the curvature learnt there."""

    def __init__(self, problem: Bilevel, batches: list[Batch], inverse: AbstractInverse, seed: int) -> None:
        self.problem = problem
        self.batches = batches
        self.inverse = inverse
        self.seed = seed
        self.place = [leaf.detach().clone() for leaf in (*problem.theta.leaves, *problem.v.leaves)]
        self._learned: tuple[Oracle, Any] | None = None

    def pull_back(self, in_theta: Sequence[Tensor]) -> list[Tensor]:
        """-(d2_{theta,v} l)^T H^{-1} u, one tensor a leaf of v, for u given one tensor a leaf of theta."""
        problem = self.problem
        self._check_place()
        with library_settings():
            if self._learned is None:
                state = learn(self.inverse, problem, self.batches, self.seed)
                self._learned = Oracle(problem, self.batches, None, self.seed), state
            at, state = self._learned
            u = problem.theta.flatten(in_theta)
            nothing = [torch.zeros_like(leaf) for leaf in problem.v.leaves]
            found = implicit(at, self.inverse, state, outer=OuterGradient(u.new_zeros(()), u, nothing))
        found.check(problem, self.inverse.name)
        return found.leaves

    def _check_place(self) -> None:
        """Refuse a backward pass after theta or v has moved."""
        problem = self.problem
        names = [*(f"theta[{n!r}]" for n in problem.theta.names), *(f"v[{n!r}]" for n in problem.v.names)]
        leaves = (*problem.theta.leaves, *problem.v.leaves)
        for name, leaf, kept in zip(names, leaves, self.place, strict=True):
            if not torch.equal(leaf, kept):
                raise InputError(
                    f"{name} has moved since nhgd.solved was called, so the derivative of that solution is no longer"
                    " available. Call backward() before a step of either optimiser, and nhgd.solved again after it."
                )


class _Theta(torch.autograd.Function):
    """theta with the derivative in v of the inner solution."""

    @staticmethod
    def forward(ctx: Any, solution: _Solution, *v: Tensor) -> tuple[Tensor, ...]:
        """A copy of theta."""
        ctx.solution = solution
        return tuple(leaf.detach().clone() for leaf in solution.problem.theta.leaves)

    @staticmethod
    def backward(ctx: Any, *in_theta: Tensor) -> tuple[Tensor | None, ...]:
        """One linear solve and one cross product."""
        if torch.is_grad_enabled():
            raise InputError(
                "The derivative of nhgd.solved cannot be differentiated again: that would need third derivatives of"
                " the inner loss. Call backward() or autograd.grad() without create_graph=True."
            )
        return (None, *ctx.solution.pull_back(in_theta))


def _named(theta: Variable, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """theta by name; of a dict with its frozen entries, of a module without, because it has them."""
    frozen = theta.frozen() if theta.root is None else {}
    return frozen | dict(zip(theta.names, tensors, strict=True))
