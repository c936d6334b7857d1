"""Solving with the curvature of many layers at once: a GPU waits for the calls of each layer longer than it works on
them.

Layers of one shape, or blocks of split ones, are stacked, and their numbers are read from the device in one transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nhgd import _tape as tape
from nhgd._beside import beside
from nhgd.inverse._learned import eigenbasis
from nhgd.inverse._learned.eigenbasis import Basis, Solve, eigenvalues, scores_first, staircase
from nhgd.inverse._learned.kronecker_state import KroneckerState

SHARES = (1 / 256, 1 / 64, 1 / 16, 1 / 4)  # of all pairs of eigenvectors: blocks that need about as many are stacked
DIGITS = 100  # roundings of the largest number of a block that its added diagonal must exceed


def pays(device: torch.device) -> bool:
    """Whether calls take longer than what they do."""
    return device.type == "cuda"


class Stack(NamedTuple):
    """Layers of one shape, and b -> x for their gradients, (N, out, in), one layer after the other."""

    layers: list[str]
    solve: Solve


class _Pairs(NamedTuple):
    """Eigenvalues of N blocks, (N, in) and (N, out), what is added to their products, and how many pairs matter."""

    bases: list[tuple[Basis, int]]
    of_inputs: Tensor
    of_scores: Tensor
    extra: Tensor  # (N, 1, 1)
    counts: Tensor  # (N, in + 1): rows for each column of falling eigenvalues, and whether digits suffice


@torch.no_grad()
def stacked(state: KroneckerState, extras: Mapping[str, float], at_rest: bool = False) -> list[Stack]:
    """What `Basis.rescaled` and then `dominant_solver` make of each layer, or `solver` where digits do not suffice.

    Args:
        extras: what is added to the diagonal, above 0, for each layer that has a basis.
        at_rest: whether the state is as it was at the mark of `nhgd._beside`.
    """
    shapes: dict[tuple[int, ...], list[str]] = {}
    for layer in extras:
        kept = state.bases[layer]
        shapes.setdefault((kept["score_values"].shape[1], kept["input_values"].shape[1]), []).append(layer)
    with beside(at_rest) as used:
        groups = [(layers, _pairs(state, layers, extras)) for layers in shapes.values()]
        read = torch.cat([pairs.counts.flatten() for _, pairs in groups]).cpu()
        used += [t for _, pairs in groups for t in (pairs.of_inputs, pairs.of_scores, pairs.extra)]
    counts = read.split([pairs.counts.numel() for _, pairs in groups])
    return [
        Stack(layers, _solver(pairs, found.reshape(pairs.counts.shape)))
        for (layers, pairs), found in zip(groups, counts, strict=True)
    ]


def _pairs(state: KroneckerState, layers: Sequence[str], extras: Mapping[str, float]) -> _Pairs:
    bases = [Basis(**state.bases[layer]) for layer in layers]
    traces = zip(*(state.traces(layer) for layer in layers), strict=True)
    given = ([b.input_values for b in bases], [b.score_values for b in bases])
    a, g = (_matched(torch.cat(values), torch.cat(found)) for values, found in zip(given, traces, strict=True))
    blocks = [(basis, i) for basis in bases for i in range(len(basis.input_values))]
    each = [extras[layer] for layer, basis in zip(layers, bases, strict=True) for _ in range(len(basis.input_values))]
    extra = torch.tensor(each, dtype=a.dtype, device=a.device)[:, None]
    enough = (a.amax(1) * g.amax(1) * torch.finfo(a.dtype).eps)[:, None] < 1e-2 * extra
    rows = g.shape[1] - torch.searchsorted(g, eigenbasis.NEGLIGIBLE * extra / a.flip(1), right=True)
    return _Pairs(blocks, a, g, extra[..., None], torch.cat([rows, enough], dim=1).int())


def _matched(values: Tensor, sizes: Tensor) -> Tensor:
    had = values.sum(1)
    return values * torch.where(had > 0, sizes / had, 1.0)[:, None]


def _solver(pairs: _Pairs, counts: Tensor) -> Solve:
    out, into = pairs.of_scores.shape[1], pairs.of_inputs.shape[1]
    rows, enough = counts[:, :-1], counts[:, -1].bool()
    kinds = torch.bucketize(rows.sum(1) / (out * into), torch.tensor(SHARES)).masked_fill(~enough, -1)
    members = {kind: (kinds == kind).nonzero()[:, 0] for kind in sorted(set(kinds.tolist()))}
    blocks = {
        kind: [(0, into, out)] if kind < 0 else staircase(rows[chosen].amax(0).tolist(), out)
        for kind, chosen in members.items()
    }

    def solve(b: Tensor) -> Tensor:
        x = b / pairs.extra
        for kind, chosen in members.items():
            at = chosen.to(b.device, non_blocking=True)  # the host goes on
            own = b if len(members) == 1 else b[at]
            bases = [pairs.bases[i] for i in chosen.tolist()]
            extra = pairs.extra[at]
            found: Tensor | None = None
            for start, stop, count in blocks[kind]:
                kept = slice(into - stop, into - start)
                q_g = torch.stack([basis.score_vectors[i][:, out - count :] for basis, i in bases])
                q_a = torch.stack([basis.input_vectors[i][:, kept] for basis, i in bases])
                values = pairs.of_scores[at, out - count :, None] * pairs.of_inputs[at, None, kept] + extra
                change = 1 / values if kind < 0 else 1 / values - 1 / extra
                if scores_first(out, into, count, stop - start):
                    part = q_g @ ((((q_g.mT @ own) @ q_a) * change) @ q_a.mT)
                else:
                    part = (q_g @ ((q_g.mT @ (own @ q_a)) * change)) @ q_a.mT
                found = part if found is None else found.add_(part)
            if kind < 0 and found is not None:
                x[at] = found
            elif found is not None:
                x[at] = found.add_(x[at])
        return x

    return solve


@torch.no_grad()
def block_solvers(blocks: Mapping[str, Tensor], extra: float) -> Callable[[list[Tensor]], list[Tensor]]:
    """b -> (F + extra I)^{-1} b for all parameters outside of layers at once, F dense, (n, n), or diagonal, (n,), and
    `extra` above 0.
    """
    added, names = tape.on_device(extra), list(blocks)
    sizes: dict[int, list[int]] = {}
    for i, name in enumerate(names):
        if blocks[name].ndim == 2:
            sizes.setdefault(len(blocks[name]), []).append(i)
    alone = [i for i, name in enumerate(names) if blocks[name].ndim == 1]
    entries = [blocks[names[i]] for i in alone]
    if alone and isinstance(added, Tensor):
        entries = [entry + added.to(entry.dtype) for entry in entries]
    elif alone:
        entries = list(torch._foreach_add(entries, added))
    stacks = [torch.stack([blocks[names[i]] for i in places]) for places in sizes.values()]
    inverses = tape.eager(lambda: _inverses(stacks, added)) if stacks else []

    def solve(given: list[Tensor]) -> list[Tensor]:
        found = list(given)
        if alone:
            for i, t in zip(alone, torch._foreach_div([given[i] for i in alone], entries), strict=True):
                found[i] = t
        for places, inverse in zip(sizes.values(), inverses, strict=True):
            solved = inverse @ torch.stack([given[i] for i in places])[..., None]
            for i, t in zip(places, solved[..., 0], strict=True):
                found[i] = t
        return found

    return solve


def _inverses(stacks: list[Tensor], extra: Tensor | float) -> list[Tensor]:
    """Of symmetric matrices, (m, n, n), with a number added to their diagonals: by Cholesky factors where digits
    suffice.
    """
    added = float(extra)
    lower, sound = list[Tensor](), list[Tensor]()
    for stack in stacks:
        damped = stack.clone()
        diagonal = damped.diagonal(dim1=1, dim2=2)
        least = DIGITS * torch.finfo(damped.dtype).eps * diagonal.amax(1)
        diagonal.add_(added)
        factor, info = torch.linalg.cholesky_ex(damped)
        lower.append(factor)
        sound.append(((info == 0) & (least <= added)).all())
    good = torch.stack(sound).tolist()
    found = list[Tensor]()
    for stack, factor, enough in zip(stacks, lower, good, strict=True):
        if enough:
            found.append(torch.cholesky_inverse(factor))
            continue
        values, vectors = eigenvalues("the parameters outside of layers", stack)
        found.append((vectors / (values.clamp_min(0) + added)[:, None]) @ vectors.mT)  # below zero is rounding
    return found
