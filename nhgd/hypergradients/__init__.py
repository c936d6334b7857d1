"""Every way to get grad Phi, one file each, and `hypergradient`, the one call that uses them."""

from __future__ import annotations

from collections.abc import Iterable

from torch.amp.grad_scaler import GradScaler

from nhgd import _threads as threads
from nhgd._cost import largest
from nhgd._registry import Registry
from nhgd._surroundings import library_settings
from nhgd._validation import check_seed, validated_but
from nhgd.data.batch import Batch, common_length, move
from nhgd.data.loader import inner_batches, one_batch
from nhgd.errors import InputError
from nhgd.hypergradients.base import AbstractHypergradient, Hypergradient
from nhgd.hypergradients.implicit import Implicit, implicit
from nhgd.hypergradients.unrolled import Unrolled
from nhgd.inverse import AbstractInverse
from nhgd.inverse import resolve as resolve_inverse
from nhgd.problem import Bilevel

ESTIMATORS = Registry("estimator", AbstractHypergradient, list(vars().values()))


def resolve(estimator: str | AbstractHypergradient) -> AbstractHypergradient:
    """An estimator from its name, with default settings, or from itself."""
    if isinstance(estimator, AbstractHypergradient):
        return estimator
    return ESTIMATORS.make(estimator)


@validated_but("estimator", "inverse")
def hypergradient(
    problem: Bilevel,
    inner_batch: Batch,
    outer_batch: Batch,
    inverse: str | AbstractInverse | None = None,
    estimator: str | AbstractHypergradient = "implicit",
    inner_data: Iterable[Batch] | None = None,
    seed: int = 0,
    scaler: GradScaler | None = None,
) -> Hypergradient:
    """The hypergradient at the problem's current theta and v, which stay as they are.

    Args:
        problem: a `Bilevel`.
        inner_batch: where the inner objective and its derivatives are taken.
        outer_batch: where the outer loss is taken.
        inverse: a name or an object, for example `nhgd.inverse.CG(steps=100)`; None: "cg" where the estimator needs
            one.
        estimator: "implicit", "unrolled", or an object.
        inner_data: batches that online inverses learn from and products run over, in place of inner_batch.
        seed: what dropout is drawn from.
        scaler: a `torch.amp.GradScaler`, where the functions run under float16 autocast.

    >>> import torch
    >>> problem = Bilevel(  # theta*(v) = v, so Phi(v) = (v - 3)^2
    ...     inner=lambda theta, v, x: (theta - v).square().expand(len(x)),
    ...     outer=lambda theta, v, x: (theta - 3).square(),
    ...     theta=torch.tensor(1.0), v=torch.tensor(1.0))
    >>> hypergradient(problem, torch.zeros(4), torch.zeros(4)).grad
    tensor(-4.)
    """
    check_seed(seed)
    chosen = resolve(estimator)
    if inverse is not None and not chosen.inverts:
        raise InputError(
            f"The estimator {chosen.name} applies no inverse, so inverse={inverse!r} would be ignored. Omit it, or use"
            " estimator='implicit'."
        )
    device = problem.theta.device
    batches = inner_batches(inner_batch, inner_data, device)
    outer_batch = move(one_batch(outer_batch, "outer_batch"), device)
    found = resolve_inverse("cg" if inverse is None else inverse)
    work = largest(found if chosen.inverts else None, problem.theta, common_length(batches[0]) or 1)
    with library_settings(), problem.scaled(scaler):
        with threads.measuring(device) as measured:
            problem.validate(batches[0], outer_batch, chosen.learnt_rate)
        with threads.limited(threads.suited(max(measured.flops, work), device)):
            made = chosen.estimate(problem, batches, outer_batch, found, seed)
    made.check(problem, found.name if chosen.inverts else chosen.name)
    return made


__all__ = [
    "ESTIMATORS",
    "AbstractHypergradient",
    "Hypergradient",
    "Implicit",
    "Unrolled",
    "hypergradient",
    "implicit",
    "resolve",
]
