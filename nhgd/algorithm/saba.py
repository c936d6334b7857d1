"""SABA: SOBA with the memory of SAGA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from typing_extensions import override

from nhgd.algorithm.base import AbstractAlgorithm
from nhgd.algorithm.soba import adjoint_rate, check_rate
from nhgd.data.batch import Batch, move, sizes
from nhgd.data.loader import Data
from nhgd.data.stream import BatchStream
from nhgd.errors import InputError
from nhgd.loop.loop import Loop, StepInfo
from nhgd.oracle import Oracle
from nhgd.schedule import Schedule


@dataclass
class GradientTable:
    """What each batch of a fixed partition said when it was last asked.

    Attributes:
        order: the samples in the order that the partition cuts into batches, (n,); empty where the user gave the
            batches.
        shares: the part of all samples that each batch holds, b numbers.
        rows: one row for each batch, (b, N).
        mean: their mean, weighted by the shares, (N,).
        updates: rows replaced so far.
    """

    order: Tensor
    shares: list[float]
    rows: Tensor
    mean: Tensor
    updates: int = 0

    def improve(self, index: int, row: Tensor) -> Tensor:
        """The direction of SAGA from a new row of one batch, which then takes the old one's place."""
        share = self.shares[index]
        weight = share * len(self.rows)  # 1 where all batches have the same size
        # In this order a table of one row gives back the new row, exactly.
        direction = weight * row + (self.mean - weight * self.rows[index])
        self.updates += 1
        self.mean = self.mean + share * (row - self.rows[index])
        self.rows[index] = row
        if self.updates % len(self.rows) == 0:
            self.mean = self.rows.new_tensor(self.shares) @ self.rows  # once a pass: rounding does not pile up
        return direction


@dataclass
class SABAState:
    """The adjoint x, (D,), and a table for each level, filled at the first step."""

    adjoint: Tensor
    inner: GradientTable | None = None
    outer: GradientTable | None = None


@final
@dataclass(frozen=True)
class SABA(AbstractAlgorithm):
    """SOBA with variance reduction: a table remembers what every batch said last.

    The inner and the outer data are each cut into batches once, and stay so. For the five quantities

        inner batch i:  grad_theta l_i,  H_i x,  (d2_{theta,v} l_i)^T x     outer batch j:  grad_theta f_j,  grad_v f_j

    a table holds the last value of each batch. With i and j drawn uniformly and independently, every quantity phi
    becomes

        phi_i(theta, x, v) - table_i + mean of the table,      and then  table_i <- phi_i(theta, x, v)

    and theta, x and v take SOBA's three steps along these, all at once. The tables are filled at the first step by one
    pass over all data, which is counted. Constant step sizes converge. One outer step is one such iteration:
    `inner_steps` is not used.

    Memory: b (2 D + P) + c (D + P) numbers, for b inner and c outer batches, D inner and P outer parameters. With one
    weight for each of n samples that is b n numbers for the cross products alone: use few, large batches.

    Args:
        adjoint_lr: the step size of x, a number or a schedule. None: that of theta.

    >>> SABA().name
    'saba'

    References: M. Dagréou, P. Ablin, S. Vaiter, T. Moreau, A framework for bilevel optimization that enables stochastic
    and global variance reduction algorithms, 2022, algorithm 1 with the directions of SABA.
    Deviations: 1. rows of the table are batches instead of samples; batches of different size count by their size. 2. x
    has the opposite sign, as in `SOBA`.
    """

    name: ClassVar[str] = "saba"
    adjoint_lr: float | Schedule | None = None

    def __post_init__(self) -> None:
        check_rate(self.adjoint_lr)

    @override
    def init(self, loop: Loop) -> SABAState:
        """The adjoint starts at zero. Data whose batches cannot be requested again are refused."""
        for stream in (loop.inner, loop.outer):
            if not isinstance(stream.source, (Data, list, tuple)):
                raise InputError(
                    "SABA stores a gradient for every batch, so it must be able to request each batch again, but"
                    f" {stream.name} is a {type(stream.source).__name__}. Pass {stream.name}=nhgd.Data(x, y,"
                    " batch=1024) or a list of batches."
                )
        return SABAState(torch.zeros_like(loop.problem.theta.flat()))

    @override
    def step(self, loop: Loop, state: SABAState) -> tuple[SABAState, StepInfo]:
        theta, v = loop.problem.theta, loop.problem.v
        d, x = theta.numel, state.adjoint
        inner, outer = state.inner, state.outer
        if inner is None or outer is None:
            inner = _filled(loop.inner, lambda batch: _inner_row(loop.oracle([batch], None), x)[1], loop.problem.sizes)
            outer = _filled(
                loop.outer, lambda batch: _outer_row(loop.oracle([None], batch))[1]
            )  # no inner batch is read
        i, j = int(torch.randint(len(inner.rows), ())), int(torch.randint(len(outer.rows), ()))
        batch = _batch(loop.inner, inner.order, i)
        loop.recent.append(batch)
        at = loop.oracle([batch], _batch(loop.outer, outer.order, j))
        loss, inner_row = _inner_row(at, x)
        value, outer_row = _outer_row(at)
        gradient, product, cross = inner.improve(i, inner_row).split([d, d, v.numel])
        in_theta, in_v = outer.improve(j, outer_row).split([d, v.numel])
        adjoint = x - adjoint_rate(loop, self.adjoint_lr) * (product - in_theta).to(x.dtype)
        loop.move_theta(theta.unflatten(gradient))
        norm = loop.move_v(v.unflatten(in_v - cross))
        return SABAState(adjoint, inner, outer), StepInfo(float(value), float(loss), norm)


def _inner_row(at: Oracle, x: Tensor) -> tuple[Tensor, Tensor]:
    """The inner loss, and its gradient, Hessian product and cross product as one row, (2 D + P,)."""
    value, gradient = at.live_gradient()
    product, cross = at.products(x)
    return value, torch.cat([at.problem.theta.flatten(gradient), product, at.problem.v.flatten(cross)])


def _outer_row(at: Oracle) -> tuple[Tensor, Tensor]:
    """The outer loss, and its two gradients as one row, (D + P,)."""
    found = at.outer()
    return found.value, torch.cat([found.theta, at.problem.v.flatten(found.v)])


def _filled(
    stream: BatchStream, row: Callable[[Batch], Tensor], count: Callable[[list[Batch]], list[int]] | None = None
) -> GradientTable:
    """Split the data into fixed batches, and evaluate each once. `count` gives the size of each batch."""
    source = stream.source
    if isinstance(source, Data):
        order = torch.randperm(source.samples) if source.shuffle else torch.arange(source.samples)
        counts = [min(source.batch, source.samples - start) for start in range(0, source.samples, source.batch)]
    else:
        assert isinstance(source, (list, tuple))
        order = torch.arange(0)
        batches = [move(batch, stream.device) for batch in source]
        counts = sizes(batches, stream.name) if count is None else count(batches)
    shares = [n / sum(counts) for n in counts]
    rows = torch.stack([row(_batch(stream, order, index)) for index in range(len(counts))])
    return GradientTable(order, shares, rows, rows.new_tensor(shares) @ rows)


def _batch(stream: BatchStream, order: Tensor, index: int) -> Batch:
    """One batch of the fixed partition, on the device of theta."""
    source = stream.source
    if isinstance(source, Data):
        return move(source.take(order[index * source.batch : (index + 1) * source.batch]), stream.device)
    assert isinstance(source, (list, tuple))
    return move(source[index], stream.device)
