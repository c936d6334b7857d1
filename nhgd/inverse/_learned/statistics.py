"""Running statistics of the Fisher matrix: the conventions of all inverses that keep them."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from nhgd.errors import InputError
from nhgd.inverse._learned.damping import Damping, check_damping
from nhgd.record import BATCH_OBJECTIVE

M = TypeVar("M", float, Tensor)  # a tensor in a captured step


def check_statistics(owner: str, damping: Damping, beta: float | None, dtype: torch.dtype | None) -> None:
    """Refuse settings that no running statistic can work with."""
    check_damping(owner, damping)
    if beta is not None and not 0 <= beta < 1:
        raise InputError(
            f"{owner}: beta must be at least 0 and below 1, got {beta}. Use beta=None for a plain average over everything"
            " observed."
        )
    if dtype not in (None, torch.float32, torch.float64):
        raise InputError(f"{owner}: dtype must be torch.float32 or torch.float64, got {dtype}.")


def statistics_note(batch_objective: bool) -> dict[str, str]:
    """The note of a solve if some statistics are of the batch objective."""
    return {"statistics": BATCH_OBJECTIVE} if batch_objective else {}


def step_of_mean(mass: M, beta: float | None, samples: int) -> tuple[M, M]:
    """How far a running mean moves towards the next batch, and the mass it then has.

    With beta None every sample counts the same. Otherwise every batch does, and batches fade by beta: moving by
    (1 - beta) / (1 - beta^n) at the n-th batch is the moving average with its bias corrected. It is exact after one.

    >>> rate, mass = step_of_mean(0.0, 0.5, samples=8)
    >>> rate, round(step_of_mean(mass, 0.5, samples=8)[0], 3)
    (1.0, 0.667)
    """
    gain, kept = (float(samples), mass) if beta is None else (1 - beta, beta * mass)
    if isinstance(mass, Tensor):  # one divided by a tensor is rounded twice
        return torch.full_like(mass, gain) / (kept + gain), kept + gain
    return gain / (kept + gain), kept + gain


def merge(means: dict[str, Tensor], batch: dict[str, Tensor], rate: float | Tensor) -> dict[str, Tensor]:
    """Running means moved towards a batch, as new tensors. A value missing from one of the two counts as zero.

    Names that share one tensor, of the means as of the batch, go on sharing one.
    """
    both = [n for n in means if n in batch]
    if not isinstance(rate, Tensor):
        means = _tied(means, batch, both)
    pairs: dict[tuple[int, int], str] = {}
    leader = {n: pairs.setdefault((id(means[n]), id(batch[n])), n) for n in both}
    chosen = list(pairs.values())
    # One call for all of them: on a GPU the launches of many small ones take longer than the work.
    if isinstance(rate, Tensor):
        moved = [means[n].lerp(batch[n], rate.to(means[n].dtype)) for n in chosen]
    else:
        moved = list(torch._foreach_lerp([means[n] for n in chosen], [batch[n] for n in chosen], rate)) if both else []
    lerped = dict(zip(chosen, moved, strict=True))
    known: dict[int, Tensor] = {}

    def times(value: Tensor, factor: float | Tensor) -> Tensor:
        return known.setdefault(id(value), value * factor) if id(value) not in known else known[id(value)]

    found = {n: lerped[leader[n]] if n in leader else times(mean, 1 - rate) for n, mean in means.items()}
    known.clear()
    return found | {n: times(value, rate) for n, value in batch.items() if n not in means}


def _tied(means: dict[str, Tensor], batch: dict[str, Tensor], both: list[str]) -> dict[str, Tensor]:
    """The means, with one tensor for equal ones of names that share theirs in the batch, as after a resume."""
    first: dict[int, str] = {}
    found = means
    for n in both:
        one = first.setdefault(id(batch[n]), n)
        if found[one] is not found[n] and torch.equal(found[one], found[n]):
            found = found | {n: found[one]}
    return found


def check_invertible(owner: str, name: str, diagonal: Tensor) -> None:
    """Stop before dividing by eigenvalues, or diagonal entries, that are zero up to rounding."""
    low, high = (float(d) for d in diagonal.aminmax()) if diagonal.numel() else (1.0, 1.0)
    if not low > diagonal.shape[-1] * torch.finfo(diagonal.dtype).eps * high:
        raise InputError(
            f"{owner}: the Fisher matrix of {name!r} is singular (smallest entry {low:.2g}, largest {high:.2g}) and nothing"
            " is added to it. Set damping, give the problem an l2, or observe samples whose weights are not all 0."
        )


def second_moments(inputs: Tensor, scores: Tensor, limit: int = 2**24) -> Tensor:
    """sum_ki s_ki^2 of a layer, (G, out, in), where s_ki = sum_t scores[k, i, t] outer inputs[i, t].

    No gradient of a sample is formed where there is one place only; with more, as many samples at a time as fit into
    `limit` numbers.

    Args:
        inputs: (B, T, G, in).
        scores: (K, B, T, G, out).
    """
    samples, places, groups, columns = inputs.shape
    out = scores.shape[-1]
    if places == 1:
        squares = scores.square().sum(0)[:, 0]  # (B, G, out)
        return torch.einsum("bgo,bgi->goi", squares, inputs[:, 0].square())
    total = inputs.new_zeros(groups, out, columns)
    chunk = max(1, limit // (groups * out * columns))
    for column in scores:
        for some in range(0, samples, chunk):
            s, a = column[some : some + chunk], inputs[some : some + chunk]
            total += torch.einsum("btgo,btgi->bgoi", s, a).square_().sum(0)
    return total
