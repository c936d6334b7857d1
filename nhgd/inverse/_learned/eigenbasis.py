"""Eigendecompositions of Kronecker factors, and solving with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from nhgd import _tape as tape
from nhgd.errors import NonFiniteError
from nhgd.inverse._learned import concurrent
from nhgd.inverse._learned.kronecker_state import KroneckerState
from nhgd.inverse._learned.statistics import check_invertible
from nhgd.record import Pool

Solve: TypeAlias = Callable[[Tensor], Tensor]
TOGETHER = 512  # rows of the largest factors that are decomposed in one call
NEGLIGIBLE = 0.1  # of the added diagonal: smaller eigenvalues may count as 0, within a budget


class Basis(NamedTuple):
    """Eigenvectors, in columns, and eigenvalues of the two factors of one layer, for each of its G groups."""

    input_vectors: Tensor  # (G, in, in)
    input_values: Tensor  # (G, in)
    score_vectors: Tensor  # (G, out, out)
    score_values: Tensor  # (G, out)

    def rotate(self, matrix: Tensor) -> Tensor:
        """A gradient of the layer, (G, out, in), in the eigenbasis."""
        return self.score_vectors.mT @ matrix @ self.input_vectors

    def back(self, matrix: Tensor) -> Tensor:
        """The way back from the eigenbasis."""
        return self.score_vectors @ matrix @ self.input_vectors.mT

    def factors(self) -> tuple[Tensor, Tensor]:
        """A and G, as they were decomposed."""
        q_a, q_g = self.input_vectors, self.score_vectors
        return q_a * self.input_values[:, None] @ q_a.mT, q_g * self.score_values[:, None] @ q_g.mT

    def products(self) -> Tensor:
        """The eigenvalues g_i a_j of A (x) G, (G, out, in)."""
        return self.score_values[:, :, None] * self.input_values[:, None, :]

    def solver(self, owner: str, layer: str, values: Tensor, extra: float) -> Solve:
        """b -> (F + extra I)^{-1} b for matrices b, (G, out, in), where F has these eigenvalues, (G, out, in), in
        this basis.
        """
        shifted = values + tape.on_device(extra)
        if not extra > 0:
            check_invertible(owner, layer, shifted)
        return lambda b: self.back(self.rotate(b) / shifted)

    def rescaled(self, a: Tensor, g: Tensor) -> Basis:
        """Eigenvalues rescaled to the present size of the factors: directions stay valid longer than the scale."""

        def matched(values: Tensor, factor: Tensor) -> Tensor:
            had = values.sum(1, keepdim=True)
            return values * torch.where(had > 0, factor.diagonal(dim1=1, dim2=2).sum(1, keepdim=True) / had, 1.0)

        return self._replace(input_values=matched(self.input_values, a), score_values=matched(self.score_values, g))

    def is_within_digits(self, extra: float) -> bool:
        """Whether `dominant_solver` keeps two digits of every component: in the largest, b / extra cancels."""
        top = self.input_values.amax(1) * self.score_values.amax(1)
        return bool((top * torch.finfo(top.dtype).eps < 1e-2 * extra).all())

    def dominant_solver(self, extra: float) -> Solve:
        """b -> (A (x) G + extra I)^{-1} b, (G, out, in), where eigenvalues g_i a_j far below `extra` count as 0.

            x = b / extra + sum over blocks of  Q_G [ (Q_G^T b Q_A) * (1 / (g a^T + extra) - 1 / extra) ] Q_A^T

        The pairs of eigenvectors whose g_i a_j is more than a tenth of `extra` fill a staircase: the largest a_j need
        most of the g_i, and the others few. Blocks that cover it have far fewer pairs than there are. No component of x
        is too long by more than a tenth, and those that are left out count for little: of the whole, the error is about
        a hundredth.
        """
        out, into = self.score_values.shape[1], self.input_values.shape[1]
        falling = self.input_values.flip(1)
        lowest = NEGLIGIBLE * extra / falling  # of the g_i that matter for each a_j; of groups, the largest count
        rows = (out - torch.searchsorted(self.score_values.contiguous(), lowest, right=True)).amax(0).tolist()
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for start, stop, count in staircase(rows, out):
            kept = slice(into - stop, into - start)
            values = self.score_values[:, out - count :, None] * self.input_values[:, None, kept]
            change = 1 / (values + extra) - 1 / extra
            parts.append((self.score_vectors[..., out - count :], self.input_vectors[..., kept], change))

        def solve(b: Tensor) -> Tensor:
            x = b / extra
            for q_g, q_a, change in parts:
                if scores_first(out, into, *change.shape[1:]):
                    x += q_g @ ((((q_g.mT @ b) @ q_a) * change) @ q_a.mT)
                else:
                    x += (q_g @ ((q_g.mT @ (b @ q_a)) * change)) @ q_a.mT
            return x

        return solve


def staircase(rows: Sequence[int], out: int, most: int = 4) -> list[tuple[int, int, int]]:
    """Blocks of columns (start, stop, rows) that cover a staircase, `rows` for each column, none of them rising.

    At most so many, between powers of two, such that products of a matrix of `out` rows with all of them cost the
    least.

    >>> staircase([8, 8, 1, 1, 1, 1, 1, 0], out=8)
    [(0, 2, 8), (2, 7, 1)]
    """
    into = len(rows)
    end = sum(count > 0 for count in rows)
    edges = sorted({0, end, *(2**i for i in range(into.bit_length()) if 2**i < end)})
    # best[e]: the least cost of covering all columns before edge e, and its blocks, by how many there are
    best: list[tuple[float, list[tuple[int, int, int]]]] = [(float("inf"), []) for _ in edges]
    best[0] = (0.0, [])
    found = best[-1]
    for _ in range(most):
        reached = list(best)
        for i, start in enumerate(edges):
            for j in range(i + 1, len(edges)):
                count, columns = rows[start], edges[j] - start
                left, right = count * into * (out + columns), columns * out * (into + count)
                cost = best[i][0] + min(left, right)
                if cost < reached[j][0]:
                    reached[j] = (cost, [*best[i][1], (start, edges[j], count)])
        best = reached
        found = min(found, best[-1], key=lambda pair: pair[0])
    return found[1]


def scores_first(out: int, into: int, rows: int, columns: int) -> bool:
    """Whether it is cheaper to rotate the rows of a block first."""
    return rows * into * (out + columns) <= columns * out * (into + rows)


@torch.no_grad()
def decomposed(state: KroneckerState, layer: str) -> Basis:
    """The eigendecompositions of a layer's current factors."""
    return _basis(state, layer, *(eigenvalues(layer, factor) for factor in state.blocks_of(layer)))


def _basis(
    state: KroneckerState, layer: str, of_inputs: tuple[Tensor, Tensor], of_scores: tuple[Tensor, Tensor]
) -> Basis:
    (a, q_a), (g, q_g) = of_inputs, of_scores
    (q_a, q_g), (a, g) = state.paired(layer, q_a, q_g), state.paired(layer, a, g)
    return Basis(q_a, a.clamp_min(0), q_g, g.clamp_min(0))  # below zero is rounding


def decompositions(state: KroneckerState, layers: Iterable[str], pool: Pool | None) -> dict[str, Basis]:
    """`decomposed` for several layers. A pool divides the factors, by the cube of their size."""
    names = list(layers)
    if pool is None:
        return _together(state, names)
    named = [(layer, factor) for layer in names for factor in state.factors(layer)]
    for layer, factor in named:
        check_finite(layer, factor)  # here, where all of the pool see it

    def packed(i: int) -> Tensor:
        values, vectors = eigenvalues(*named[i])
        return torch.cat([values.clamp_min(0)[:, None], vectors], dim=1)  # (G, 1 + n, n)

    likes = [factor.new_empty(len(factor), 1 + factor.shape[1], factor.shape[2]) for _, factor in named]
    costs = [len(factor) * float(factor.shape[1]) ** 3 for _, factor in named]
    found = [(t[:, 1:].contiguous(), t[:, 0].contiguous()) for t in pool.map(likes, costs, packed)]
    return {name: Basis(*found[2 * i], *found[2 * i + 1]) for i, name in enumerate(names)}


def _together(state: KroneckerState, layers: Sequence[str]) -> dict[str, Basis]:
    """`decomposed` for several layers: a factor that they share once, and small ones of one shape in one call."""
    return begun(state, layers)()


@torch.no_grad()
def begun(state: KroneckerState, layers: Sequence[str]) -> Callable[[], dict[str, Basis]]:
    """The same as a function that waits for the decompositions which run on streams of their own, if any do."""
    shared: dict[int, int] = {}  # of factors, by the tensor that the state holds
    factors: list[tuple[str, Tensor]] = []
    places: list[tuple[int, int]] = []
    for layer in layers:
        a, g = state.blocks_of(layer)
        if id(state.inputs[layer]) not in shared:
            shared[id(state.inputs[layer])] = len(factors)
            factors.append((layer, a))
        places.append((shared[id(state.inputs[layer])], len(factors)))
        factors.append((layer, g))
    beside = None
    if concurrent.pays([factor for _, factor in factors]):
        beside = concurrent.begun_beside(factors, eigenvalues)

    @torch.no_grad()
    def finished() -> dict[str, Basis]:
        if beside is None:
            found = _decomposed_by_shape(factors)
        else:
            found = [(values.clamp_min(0), vectors) for values, vectors in beside()]
        bases = {}
        for layer, (i, j) in zip(layers, places, strict=True):
            (a, q_a), (g, q_g) = found[i], found[j]
            (q_a, q_g), (a, g) = state.paired(layer, q_a, q_g), state.paired(layer, a, g)
            bases[layer] = Basis(q_a, a, q_g, g)
        return bases

    return finished


def _decomposed_by_shape(factors: Sequence[tuple[str, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Eigenvalues and eigenvectors of named factors, (G, n, n)."""
    alike: dict[tuple[int, torch.dtype, torch.device], list[int]] = {}
    for i, (_, factor) in enumerate(factors):
        n = factor.shape[1]
        alike.setdefault((n if n <= TOGETHER else -1 - i, factor.dtype, factor.device), []).append(i)
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for members in alike.values():
        found |= zip(members, _eigenvalues_of([factors[i] for i in members]), strict=True)
    return [found[i] for i in range(len(factors))]


def _eigenvalues_of(factors: Sequence[tuple[str, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Eigenvalues, none below 0, which is rounding, and eigenvectors of factors of one size, (G, n, n)."""
    if len(factors) == 1:
        values, vectors = eigenvalues(*factors[0])
        return [(values.clamp_min(0), vectors)]
    whole = torch.cat([factor for _, factor in factors])
    if not bool(torch.isfinite(whole).all()):
        for name, factor in factors:
            check_finite(name, factor)
    sizes = [len(factor) for _, factor in factors]
    values, vectors = eigenvalues(factors[0][0], whole)
    pairs = zip(values.clamp_min(0).split(sizes), vectors.split(sizes), strict=True)
    return [(own.clone(), q.clone()) for own, q in pairs]  # in memory of their own: they are replaced one by one


@torch.no_grad()
def refreshed(state: KroneckerState, small: int) -> dict[str, dict[str, Tensor]]:
    """The bases of a state, with those of factors of at most this many rows recomputed."""
    factors = {layer: dict(zip(("input", "score"), state.factors(layer), strict=True)) for layer in state.bases}

    def renewed() -> dict[str, dict[str, Tensor]]:
        found: dict[str, dict[str, Tensor]] = {}
        for layer, sides in factors.items():
            new = found[layer] = {}
            for side, factor in sides.items():
                if factor.shape[1] <= small:
                    values, new[f"{side}_vectors"] = eigenvalues(layer, factor)
                    new[f"{side}_values"] = values.clamp_min(0)
        return found

    if all(factor.shape[1] > small for sides in factors.values() for factor in sides.values()):
        return state.bases
    found = tape.eager(renewed)
    return {layer: kept | found[layer] for layer, kept in state.bases.items()}


def block_solver(owner: str, name: str, block: Tensor, extra: Tensor) -> Solve:
    """b -> (F + diag(extra))^{-1} b for a parameter outside the layers, F dense, (n, n), or diagonal, (n,)."""
    lowest = extra.min()
    if block.ndim == 1:
        entries = block + extra
        if not (tape.tape() is not None or lowest > 0):
            check_invertible(owner, name, entries)
        return lambda b: b / entries
    values, vectors = tape.eager(lambda: eigenvalues(name, block + torch.diag(extra)))
    if not (tape.tape() is not None or lowest > 0):
        check_invertible(owner, name, values)
    values = values.clamp_min(lowest)  # below it is rounding
    return lambda b: vectors @ ((vectors.T @ b) / values)


def check_finite(name: str, matrix: Tensor) -> None:
    """Refuse to decompose what holds nan or inf."""
    if not bool(torch.isfinite(matrix).all()):
        raise NonFiniteError(f"The statistics of {name!r} hold nan or inf, so an inner step did. Lower its step size.")


def eigenvalues(name: str, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of symmetric statistics."""
    check_finite(name, matrix)
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except RuntimeError:
        # A GPU's solver can fail on many equal eigenvalues, such as those of constant pixels.
        values, vectors = (t.to(matrix) for t in torch.linalg.eigh(matrix.double().cpu()))
    return values, vectors.contiguous()  # column by column as LAPACK leaves them, they could not be saved
